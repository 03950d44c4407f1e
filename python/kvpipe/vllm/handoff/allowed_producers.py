"""Hosts that a consumer connects to: the parameters of a request name them, and a client may have written those."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from kvpipe.exceptions import ConfigError


class AllowedProducers:
    """The hosts of `allowed_producers`.

    Args:
        text: Names, addresses and networks, separated by commas; empty: any host.

    Raises:
        ConfigError: A part is no network, such as `10.0.0.0/99`, or there is no part.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        parts = [part.strip().casefold() for part in text.split(",") if part.strip()]
        if text.strip() and not parts:
            message = f"allowed_producers={text!r}: expected hosts; leave it empty to allow any"
            raise ConfigError(message)
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: set[str] = set()
        for part in parts:
            if _address(part.partition("/")[0]) is None and "/" not in part:
                self._names.add(part)
                continue
            try:
                self._networks.append(ip_network(part, strict=False))
            except ValueError as error:
                message = f"allowed_producers={text!r}: {part!r} is no network: {error}"
                raise ConfigError(message) from error

    def check(self, host: str) -> None:
        """Accepts a host.

        Raises:
            ConfigError: It is not among them. A name is compared as it is written, and not resolved.
        """
        if not self._networks and not self._names:
            return
        address = _address(host)
        is_allowed = (
            host.casefold() in self._names if address is None else any(address in each for each in self._networks)
        )
        if not is_allowed:
            message = f"remote_host={host!r} is not among allowed_producers={self._text!r}"
            raise ConfigError(message)

    def hosts(self) -> tuple[list[str], list[tuple[str, int]]]:
        """Returns the names, and address and prefix length of each network; none of either: any host."""
        networks = [(str(network.network_address), network.prefixlen) for network in self._networks]
        return sorted(self._names), networks


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
