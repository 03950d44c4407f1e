"""Implementations of `KVStore` by the URL that names them; one is imported only when its URL is opened."""

from __future__ import annotations

import importlib
import re
from typing import NamedTuple

from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError
from kvpipe.store.base import KVStore

_SCHEMES = {
    "kvpipe": ("kvpipe.store.remote", "RemoteStore"),
    "redis": ("kvpipe.store.valkey", "ValkeyStore"),
    "rediss": ("kvpipe.store.valkey", "ValkeyStore"),
    "valkey": ("kvpipe.store.valkey", "ValkeyStore"),
    "valkeys": ("kvpipe.store.valkey", "ValkeyStore"),
    "local": ("kvpipe.store.local", "LocalStore"),
}
# A class of the user's: what follows the second colon is its own.
_USERS_CLASS = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)(?::(?P<rest>.*))?", re.DOTALL)
_EXPECTED = "expected kvpipe://host:port, redis://… or module:Class"


class StoreUrl(NamedTuple):
    """An implementation, and the URL that its `open` gets."""

    implementation: type[KVStore]
    url: str


def resolve_url(url: str) -> StoreUrl:
    """Imports the implementation that a URL names. Connects to nothing.

    Raises:
        ConfigError: The URL names no implementation, or it cannot be imported, or is no `KVStore`.
    """
    scheme, separator, _ = url.partition("://")
    if separator and scheme in _SCHEMES:
        return StoreUrl(_import(*_SCHEMES[scheme], url), url)
    found = _USERS_CLASS.fullmatch(url)
    if found is None:
        message = f"store URL {redact(url)!r}: {_EXPECTED}"
        raise ConfigError(message)
    return StoreUrl(_import(found["module"], found["name"], url), found["rest"] or "")


def open_store(url: str, token: str | None = None, timeout: float = 10) -> KVStore:
    """Connects to the store that a URL names.

    Args:
        url: `kvpipe://host:port`, `redis://…` or another scheme of Valkey, or `module:Class` for a user's own
            implementation. After another colon follows what the class's `open` gets.
        token: The shared secret of kvpipe's own store; by default `KVPIPE_TOKEN`.
        timeout: Seconds to wait for the store.

    Raises:
        ConfigError: The URL names no implementation, or is malformed.
        ConnectError: The store does not answer in time.
        AuthenticationError: The store refuses the token or password.
    """
    implementation, own_url = resolve_url(url)
    return implementation.open(own_url, token=token, timeout=timeout)


def _import(module: str, name: str, url: str) -> type[KVStore]:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = f"store URL {redact(url)!r}: {module}:{name} cannot be imported: {error}"
        raise ConfigError(message) from error
    if not (isinstance(found, type) and issubclass(found, KVStore)):
        message = f"store URL {redact(url)!r}: {module}:{name} is no subclass of kvpipe.store.KVStore"
        raise ConfigError(message)
    return found
