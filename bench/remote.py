"""Both ends of a benchmark between two hosts: `kvpipe bench serve` runs the passive process, and forwards requests.

Two Pipes carry requests and answers, and authenticate the hosts to each other.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.machine import available_bytes
from bench.processes import ANSWER_WITHIN_S, Process, Side, SubjectError, parse_answer
from bench.programs.request import compose, parse
from bench.runner import Group, Pairs, Program
from kvpipe.exceptions import ConfigError, EndOfPipeError, KVPipeError, PeerLostError
from kvpipe.pipe import Pipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.runner import Runner

# Programs that a client may start
_PROGRAMS = ("pipe_tensors", "agent_blocks")


def _send(pipe: Pipe, line: str) -> None:
    pipe.send_tensor(np.frombuffer(line.encode(), np.uint8), timeout=ANSWER_WITHIN_S)


def _text(received: Any) -> str:
    return bytes(received).decode(errors="replace")


def _secret(token: str | None) -> Pairs:
    """Passes the token as a variable, because other users can see arguments."""
    return (("KVPIPE_TOKEN", token),) if token else ()


def split_address(address: str) -> tuple[str, int]:
    """Splits an address into host and port.

    Raises:
        ConfigError: The address is not `host:port`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        message = f"address {address!r}: expected host:port"
        raise ConfigError(message)
    return host, int(port)


def _host_towards(address: str) -> str:
    """Returns this host's address on the route to another host. Sends nothing."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own: str = probe.getsockname()[0]
    except OSError as error:
        message = f"there is no way to {host}: {error}"
        raise ConfigError(message) from error
    return f"[{own}]" if family == socket.AF_INET6 else own


class RemoteSide:
    """The passive process behind `kvpipe bench serve`."""

    def __init__(self, address: str, token: str | None, words: Mapping[str, object]) -> None:
        self._back = Pipe.listen(f"{_host_towards(address)}:0", token)
        try:
            self._there = Pipe.connect(address, token)
            _send(self._there, compose("open", {**words, "back": self._back.address}))
        except BaseException:
            self._back.close()
            raise

    def ask(self, line: str) -> None:
        """Sends a request."""
        _send(self._there, line)

    def answer(self) -> dict[str, str]:
        """Waits for the answer to the oldest request."""
        try:
            return parse_answer(_text(self._back.recv_tensor(timeout=ANSWER_WITHIN_S)))
        except (EndOfPipeError, PeerLostError, TimeoutError) as error:
            message = f"the other host: {error}"
            raise SubjectError(message) from error

    def cpu_s(self) -> float:
        """Seconds of CPU that the remote process has used so far."""
        self.ask("cpu")
        return float(self.answer()["cpu_s"])

    def close(self) -> None:
        """Disconnects; the server then ends the remote process."""
        with contextlib.suppress(KVPipeError):
            self._there.close()
        self._back.close()


@dataclass(frozen=True)
class RemoteProgram:
    """A program whose passive process runs on another host.

    Attributes:
        local: Program of the active process on this host.
        address: Address of `kvpipe bench serve`.
        token: Shared secret of both hosts.
    """

    local: Program
    address: str
    token: str | None = field(repr=False)

    def open(self, words: Mapping[str, object]) -> Runner:
        """Starts both processes and connects them."""
        setup: Pairs = self.local.setup
        passive = RemoteSide(self.address, self.token, {**words, **dict(setup), "program": self.local.name})
        sides: list[Side] = [passive]
        try:
            local = replace(self.local, env=(*self.local.env, *_secret(self.token)))
            sides.insert(0, local.start("active", {**words, "host": _host_towards(self.address)}))
            return Group(sides)
        except BaseException:
            for side in sides:
                side.close()
            raise


def serve(address: str, token: str | None) -> None:
    """Serves one client after the other, until interrupted.

    Raises:
        ConfigError: The address cannot be bound.
    """
    while True:
        with contextlib.closing(Pipe.listen(address, token)) as asked:
            if asked.address != address:
                address = str(asked.address)
            sys.stdout.write(f"listening on {address}\n")
            sys.stdout.flush()
            try:
                _serve_client(asked, split_address(address)[0], token)
            except (EndOfPipeError, PeerLostError):
                sys.stdout.write("the client has disconnected\n")
            except KVPipeError as error:
                sys.stdout.write(f"the client was refused: {error}\n")


def _serve_client(asked: Pipe, host: str, token: str | None) -> None:
    verb, words = parse(_text(asked.recv_tensor()))
    if verb != "open" or words.get("program") not in _PROGRAMS:
        message = f"asks for {verb} program={words.get('program')}: expected one of {', '.join(_PROGRAMS)}"
        raise ConfigError(message)
    needed, there = int(words["total"]), available_bytes()
    if there is not None and needed > there:
        message = f"asks for a buffer of {needed} bytes; {there} are available"
        raise ConfigError(message)
    sys.stdout.write(f"{asked.peer}: {words['program']}\n")
    with (
        contextlib.closing(Pipe.connect(words.pop("back"), token)) as back,
        contextlib.closing(_start(words, host, token)) as process,
    ):
        _relay(asked, back, process)


def _start(words: dict[str, str], host: str, token: str | None) -> Process:
    command = (sys.executable, "-m", "bench.programs", words.pop("program"))
    return Program("", command, env=_secret(token)).start("passive", {**words, "host": host})


def _relay(asked: Pipe, back: Pipe, process: Process) -> None:
    """Forwards requests until the client disconnects; the process's hello comes first."""
    try:
        _send(back, process.line())
        while True:
            line = _text(asked.recv_tensor())
            if line == "cpu":
                _send(back, f"ok cpu_s={process.cpu_s()}")
                continue
            process.ask(line)
            _send(back, process.line())
    except SubjectError as error:
        _send(back, f"error {error}")
