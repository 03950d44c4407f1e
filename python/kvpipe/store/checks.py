"""Checks of arguments that all stores share."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError
from kvpipe.store.base import MAX_KEY_BYTES, MAX_RECORD_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer


def check_address(url: str, scheme: str) -> str:
    """Returns the `host:port` of a URL that is nothing but this scheme and an address.

    Raises:
        ConfigError: It is none.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme == scheme and parts.hostname and parts.port
    except ValueError:
        is_address = False
    if not is_address or parts.path.strip("/") or parts.query or "@" in parts.netloc:
        message = f"store URL {redact(url)!r}: expected {scheme}://host:port"
        raise ConfigError(message)
    return parts.netloc


def check_key(key: bytes) -> bytes:
    """Returns a key that any store can hold.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(key, bytes):
        message = f"key is {type(key).__name__}: expected bytes"
        raise ConfigError(message)
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        message = f"key of {len(key)} bytes: expected 1 to {MAX_KEY_BYTES}"
        raise ConfigError(message)
    return key


def check_record(record: bytes) -> bytes:
    """Returns a record that any store can hold.

    Raises:
        ConfigError: It is none.
    """
    if len(record) > MAX_RECORD_BYTES:
        message = f"record of {len(record)} bytes: at most {MAX_RECORD_BYTES}"
        raise ConfigError(message)
    return bytes(record)


def check_size(num_bytes: int, capacity_bytes: int | None = None) -> int:
    """Returns the size of a value that a store of this capacity can hold.

    Raises:
        ConfigError: It is none, or larger than the store.
    """
    if not isinstance(num_bytes, int) or num_bytes < 0:
        message = f"num_bytes={num_bytes!r}: expected a number of bytes, 0 or more"
        raise ConfigError(message)
    if capacity_bytes is not None and num_bytes > capacity_bytes:
        message = f"a value of {num_bytes} bytes can never be stored: the store's capacity is {capacity_bytes} bytes"
        raise ConfigError(message)
    return num_bytes


def check_out(out: Buffer, num_bytes: int) -> memoryview:
    """Returns the bytes of a destination for a value.

    Raises:
        ConfigError: It has another size, or is read-only or not contiguous.
    """
    view = memoryview(out)
    if view.readonly or not view.c_contiguous or view.nbytes != num_bytes:
        kind = "read-only" if view.readonly else "writable"
        message = f"a destination of {view.nbytes} bytes, {kind}: expected {num_bytes} contiguous, writable bytes"
        raise ConfigError(message)
    return view.cast("B")
