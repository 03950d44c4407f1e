"""Addresses of one engine: where its ports are bound, and what it advertises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from kvpipe.exceptions import ConfigError

_LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Addresses of an engine, to listen at and for others to reach. Hosts are names or addresses, IPv6 in brackets.

    Attributes:
        host: Host to bind; may be a wildcard.
        port: Port of the control port; 0 takes a free one.
        advertised_host: Host that other instances get; empty: the bound one.
        advertised_port: Port that they get for the control port; 0: the bound one.
        agent_ports: Ports of the workers' agents, `first-last`; `0` takes a free one.
    """

    host: str
    port: int
    advertised_host: str
    advertised_port: int
    agent_ports: str

    @classmethod
    def parse(cls, *, listen: str, advertise: str, agent_ports: str) -> Addresses:
        """Reads the settings of the same names.

        Raises:
            ConfigError: A value is bad, or `listen` is a wildcard without `advertise`; the message says what to write.
        """
        host, port = _host_and_port("listen", listen)
        if port is None:
            message = f"listen={listen!r}: expected HOST:PORT"
            raise ConfigError(message)
        advertised_host, advertised_port = _host_and_port("advertise", advertise) if advertise else ("", None)
        if _is_wildcard(advertised_host):
            message = f"advertise={advertise!r}: others cannot connect to a wildcard; write the IP or name of this host"
            raise ConfigError(message)
        if _is_wildcard(host) and not advertise:
            message = (
                f"listen={listen!r}: a wildcard cannot be advertised; add the address that other instances reach, "
                'as in "advertise": "10.0.0.1"'
            )
            raise ConfigError(message)
        return cls(
            host=host,
            port=port,
            advertised_host=advertised_host,
            advertised_port=advertised_port or 0,
            agent_ports=_ports(agent_ports),
        )

    def control(self, data_parallel_index: int) -> str:
        """Returns the address for binding the control port of a data-parallel rank: at the port plus the rank.

        Raises:
            ConfigError: That is above 65535.
        """
        return f"{self.host}:{_rank_port('listen', self.port, data_parallel_index)}"

    def advertised_control(self, bound: str, data_parallel_index: int) -> str:
        """Returns the control port of a data-parallel rank for others; `bound` is where it listens.

        Raises:
            ConfigError: The port plus the rank is above 65535.
        """
        if self.advertised_port:
            return f"{self.advertised_host}:{_rank_port('advertise', self.advertised_port, data_parallel_index)}"
        return self.advertised(bound)

    @property
    def agent(self) -> str:
        """Address to bind an agent at: the first of these ports that is free."""
        return f"{self.host}:{self.agent_ports}"

    def advertised(self, bound: str) -> str:
        """Returns a bound address for others."""
        host, _, port = bound.rpartition(":")
        return f"{self.advertised_host or host}:{port}"

    def local(self, bound: str) -> str:
        """Returns a bound address for processes of this host."""
        host, _, port = bound.rpartition(":")
        if not _is_wildcard(host):
            return bound
        return f"{'[::1]' if host.startswith('[') else '127.0.0.1'}:{port}"


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_unspecified
    except ValueError:
        return False


def _host_and_port(key: str, text: str) -> tuple[str, int | None]:
    """Reads `host:port`, `host`, or an IPv6 address without brackets, as `(host, port)`."""
    try:
        address = ip_address(text)
    except ValueError:
        found = re.fullmatch(r"(?P<host>\[[^\[\]]+\]|[^:\[\]]+)(:(?P<port>\d{1,5}))?", text, re.ASCII)
        if found is None or int(found["port"] or 0) > _LAST_PORT:
            message = f"{key}={text!r}: expected HOST:PORT, an IPv6 address in brackets"
            raise ConfigError(message) from None
        return found["host"], None if found["port"] is None else int(found["port"])
    return f"[{address}]" if isinstance(address, IPv6Address) else text, None


def _ports(text: str) -> str:
    """Reads `first-last` or one port; empty: any free one."""
    if not text:
        return "0"
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text, re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last <= _LAST_PORT:
        message = f"agent_ports={text!r}: expected FIRST-LAST, such as 7200-7231, or one port"
        raise ConfigError(message)
    return f"{first}-{last}"


def _rank_port(key: str, port: int, data_parallel_index: int) -> int:
    """The port of a data-parallel rank; 0 stays 0."""
    if port and port + data_parallel_index > _LAST_PORT:
        message = f"{key}: port {port} plus data-parallel rank {data_parallel_index} is above {_LAST_PORT}"
        raise ConfigError(message)
    return port + data_parallel_index if port else 0
