"""Names of a value's keys in the database.

All keys of a value share its hash tag, `{key}`, so that a cluster keeps them on one server.
"""

from __future__ import annotations

from dataclasses import dataclass

_ESCAPES = {b"%": b"%25", b"}": b"%7D"}
_GLOB = b"\\*?[]^-"


@dataclass(frozen=True)
class ValueKeys:
    """Keys of one value.

    Attributes:
        manifest: Hash: `e` epoch, `n` bytes, `p` size and checksum of each part, `c` number of parts, `r` record; while
            a lease exists `l` its end in milliseconds and `t` its token.
        reservation: The epoch of the reservation under way.
        pins: Sorted set: a token of each caller that has the value open, and its end in milliseconds.
        parts: Beginning of the parts' keys, which go on with epoch and number. No key itself.
        channel: Channel whose messages wake the callers that wait for the value.
    """

    manifest: bytes
    reservation: bytes
    pins: bytes
    parts: bytes
    channel: bytes

    def part(self, epoch: bytes, number: int) -> bytes:
        """Returns the key of a part."""
        return b"%b:%b:%d" % (self.parts, epoch, number)


class KeySpace:
    """Makes the keys of a store."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def of(self, key: bytes) -> ValueKeys:
        """Returns the keys of a value."""
        tag = b"{%b}" % _escaped(key)
        names = (b"%b:%b:%b" % (self._prefix, kind, tag) for kind in (b"v", b"r", b"o", b"d", b"w"))
        return ValueKeys(*names)

    def manifest(self, key: bytes) -> bytes:
        """Returns the key of a value's manifest."""
        return b"%b:v:{%b}" % (self._prefix, _escaped(key))

    def pattern(self, key_prefix: bytes) -> bytes:
        """Returns a pattern for the manifests of all values whose keys begin so."""
        begin = b"%b:v:{%b" % (self._prefix, _escaped(key_prefix))
        return b"".join(b"\\%c" % byte if byte in _GLOB else b"%c" % byte for byte in begin) + b"*"

    def key_of(self, manifest: bytes) -> bytes:
        """Returns the key of the value that a manifest belongs to."""
        escaped = manifest[len(self._prefix) + 4 : -1]
        for plain, escape in reversed(_ESCAPES.items()):
            escaped = escaped.replace(escape, plain)
        return escaped


def _escaped(key: bytes) -> bytes:
    """Without a brace that would end the hash tag early."""
    for plain, escape in _ESCAPES.items():
        key = key.replace(plain, escape)
    return key
