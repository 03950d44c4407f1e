"""Databases for KV that waits for whoever needs it: the protocol `KVStore`, and its implementations."""

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
from kvpipe.store.local import LocalStore
from kvpipe.store.urls import open_store

__all__ = [
    "LEASE_S",
    "MAX_KEY_BYTES",
    "MAX_RECORD_BYTES",
    "RESERVATION_S",
    "KVStore",
    "Lease",
    "LocalStore",
    "Match",
    "Reservation",
    "StoreStats",
    "Value",
    "ValueInfo",
    "open_store",
]
