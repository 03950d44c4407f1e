"""Databases that keep KV for later use by other instances: the protocol `KVStore`, and its implementations."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpipe.store.base import (
    LEASE_S,
    MAX_KEY_BYTES,
    MAX_RECORD_BYTES,
    RESERVATION_S,
    KVStore,
    Lease,
    Match,
    Reservation,
    StoreStats,
    Value,
    ValueInfo,
)
from kvpipe.store.urls import open_store

if TYPE_CHECKING:
    from kvpipe.store.local import LocalStore
    from kvpipe.store.remote import RemoteStore
    from kvpipe.store.server import StoreServer
    from kvpipe.store.valkey import ValkeyStore

__all__ = [
    "LEASE_S",
    "MAX_KEY_BYTES",
    "MAX_RECORD_BYTES",
    "RESERVATION_S",
    "KVStore",
    "Lease",
    "LocalStore",
    "Match",
    "RemoteStore",
    "Reservation",
    "StoreServer",
    "StoreStats",
    "ValkeyStore",
    "Value",
    "ValueInfo",
    "open_store",
]

# Imported when they are asked for: each needs something of its own.
_MODULES = {
    "LocalStore": "kvpipe.store.local",
    "RemoteStore": "kvpipe.store.remote",
    "StoreServer": "kvpipe.store.server",
    "ValkeyStore": "kvpipe.store.valkey",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(_MODULES[name]), name)
