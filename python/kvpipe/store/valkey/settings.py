"""Settings in the URL of a Valkey or Redis store: `ValkeySettings`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvpipe.exceptions import ConfigError
from kvpipe.store.base import RESERVATION_S

Address = tuple[str, int]

_TLS_OF_SCHEME = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_DEFAULT_PORT = 6379
# It quotes nothing: a part of the password may be anywhere in such a URL.
_UNREADABLE = "the store's URL cannot be read: the login and the parameters of the URL must be percent-encoded"


@dataclass(frozen=True, kw_only=True)
class ValkeySettings:
    """Settings of a store; those with a default are parameters of the URL's query.

    Attributes:
        hosts: Servers, tried in this order at opening, and whenever the last one does not serve, which is then the last
            that is tried. A cluster needs one that answers.
        is_tls: True if connections use TLS.
        username: Of the server's ACL.
        password: Of the user.
        database: Number of the database; 0 in a cluster.
        prefix: Begins all keys in the database. Stores with different prefixes know nothing of each other.
        connections: Connections to each server for the bytes of values.
        part_bytes: Largest part of a value. Values above it are striped over the connections.
        answer_s: Longest wait for an answer, and for each part of a value.
        reservation_s: Seconds after its last call at which a reservation ends.
        pin_s: Seconds after which a value that was open can be taken when its holder has died.
        ca_file: Certificates of the authorities that TLS trusts; by default the system's.
        cert_file: The client's own certificate.
        key_file: Its private key.
    """

    hosts: tuple[Address, ...]
    is_tls: bool
    username: str | None
    password: str | None
    database: int
    prefix: str = "kvpipe"
    connections: int = 4
    part_bytes: int = 4 << 20
    answer_s: float = 10.0
    reservation_s: float = RESERVATION_S
    pin_s: float = 30.0
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @property
    def reservation_ms(self) -> int:
        """Time to live of a reservation and its parts: an eighth longer, because not every call extends it."""
        return round(self.reservation_s * 1125)

    @classmethod
    def from_url(cls, url: str) -> ValkeySettings:
        """Reads `valkey://[[user]:password@]host[:port][,host...][/database][?prefix=...&...]`.

        Raises:
            ConfigError: It is none, or has an unknown parameter.
        """
        try:
            return cls._from_parts(*_split(url))
        except ConfigError:
            # A password that has a `?` ends in the query.
            if "@" not in url.partition("?")[2]:
                raise
            raise ConfigError(_UNREADABLE) from None
        except ValueError:
            raise ConfigError(_UNREADABLE) from None

    @classmethod
    def _from_parts(cls, netloc: str, parts: SplitResult) -> ValkeySettings:
        if "@" in parts.path + parts.fragment:
            raise ConfigError(_UNREADABLE)
        if parts.scheme not in _TLS_OF_SCHEME:
            message = f"scheme {parts.scheme!r}: expected one of {', '.join(_TLS_OF_SCHEME)}"
            raise ConfigError(message)
        login, _, hosts = netloc.rpartition("@")
        username, _, password = login.partition(":")
        settings = cls(
            hosts=tuple(_host(host) for host in hosts.split(",")),
            is_tls=_TLS_OF_SCHEME[parts.scheme],
            username=unquote(username) or None,
            password=unquote(password) or None,
            database=_number("database", parts.path.strip("/") or "0", int, 0),
            **_parameters(parts.query),
        )
        if not settings.prefix or set(settings.prefix) & set("{}"):
            message = f"prefix={settings.prefix!r}: expected characters other than braces, which mark a cluster's slots"
            raise ConfigError(message)
        return settings


def _split(url: str) -> tuple[str, SplitResult]:
    """Takes the part with the hosts out of a URL: Python refuses one that names several hosts and an IPv6 address."""
    scheme, separator, rest = url.partition("://")
    end = next((at for at, letter in enumerate(rest) if letter in "/?#"), len(rest))
    login, at, _ = rest[:end].rpartition("@")
    return rest[:end], urlsplit(scheme + separator + login + at + "host" + rest[end:])


def _parameters(query: str) -> dict[str, Any]:
    known = {field.name: field.default for field in fields(ValkeySettings) if field.kw_only and _has_default(field)}
    parameters: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            message = f"parameter {name!r} of the store's URL: expected one of {', '.join(sorted(known))}"
            raise ConfigError(message)
        default = known[name]
        if isinstance(default, int | float):
            parameters[name] = _number(name, value, type(default), 1 if isinstance(default, int) else 0.001)
        else:
            parameters[name] = value
    return parameters


def _has_default(field: Any) -> bool:
    return field.name not in {"hosts", "is_tls", "username", "password", "database"}


def _number(name: str, text: str, kind: type[Any], least: float) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = None
    # The server's own limit of a value is 512 MiB; a day is longer than any wait.
    if number is None or not least <= number <= 1 << 29:
        message = f"{name}={text!r}: expected a number, {least} or more"
        raise ConfigError(message)
    return number


def _host(text: str) -> Address:
    try:
        parsed = urlsplit(f"//{text}")
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host, port = None, None
    if not host:
        message = f"host {text!r}: expected host or host:port"
        raise ConfigError(message)
    return host, port or _DEFAULT_PORT
