"""The values of a run: their bytes follow from key and record, so that any other bytes are seen."""

from __future__ import annotations

import hashlib

# Small ones travel in the messages of the store, large ones in several parts.
SIZES = (0, 100, 20_000, 300_000, 1_500_000)
# All clients share them, so that they meet.
NUM_KEYS = 16
# Of some values.
TTL_S = 2.0


def key_of(number: int) -> bytes:
    """Returns a name."""
    return b"chaos/%d" % number


def content_of(key: bytes, record: bytes) -> bytes:
    """Returns the bytes of the value that was put with this record, which no other value has."""
    shake = hashlib.shake_128(key + b"\0" + record)
    return shake.digest(SIZES[hashlib.sha256(record).digest()[0] % len(SIZES)])
