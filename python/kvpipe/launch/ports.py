"""Free TCP ports for processes that are still to start."""

import itertools
import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from kvpipe.exceptions import ConfigError
from kvpipe.launch.spec import LOOPBACK

_LOWEST_PORT = 10_000

# The descriptors of the sockets that hold this process's ports.
_held: dict[int, int] = {}


def free_ports(count: int, num_following: int = 1) -> list[int]:
    """Picks different ports that are free, and holds them for this process until `release_ports` or its end.

    Each is the first of `num_following` free ports. A held port is bound with SO_REUSEADDR and does not listen. Servers
    set that option, and still bind it. No other call of this function, in any process, picks it. The ports lie below
    the range of ephemeral ports, which the kernel assigns to any socket meanwhile.
    """
    end = max(_first_ephemeral_port(), _LOWEST_PORT + 10_000)
    firsts = range(_LOWEST_PORT, end - num_following + 1, num_following)
    candidates = random.sample(firsts, min(len(firsts), 10_000))
    ports = list(itertools.islice((first for first in candidates if _hold(first, num_following)), count))
    if len(ports) < count:
        release_ports(first + following for first in ports for following in range(num_following))
        raise ConfigError(
            f"found {len(ports)} of {count} free ports from {_LOWEST_PORT} on; end programs that listen there"
        )
    return ports


def release_ports(ports: Iterable[int]) -> None:
    """Ends the hold of ports that `free_ports` picked; servers that listen there go on."""
    for port in ports:
        os.close(_held.pop(port))


def _hold(first: int, num_following: int) -> bool:
    for port in range(first, first + num_following):
        descriptor = _bound(port)
        if descriptor is None:
            release_ports(range(first, port))
            return False
        _held[port] = descriptor
    return True


def _bound(port: int) -> int | None:
    """The descriptor of a socket that is bound to `port`; None if the port is in use."""
    with socket.socket() as held:
        try:
            held.bind((LOOPBACK, port))
        except OSError:
            return None
        # Only now: with it, a port that another process holds is bound as well.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held.detach()


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768  # Linux's default
