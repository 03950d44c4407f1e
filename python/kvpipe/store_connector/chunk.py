"""A chunk as a store has it: a header that says whose it is, and the bytes of its blocks, layer by layer."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe.store_connector.keys import FORMAT_VERSION, KEY_BYTES

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"kvpchunk"
# Magic, version, length of the header, length of the content, its checksum, layout, key.
_HEADER = struct.Struct(f"<8sIIQQ16s{KEY_BYTES}s")
# A multiple of a cache line, so that the content stays aligned.
HEADER_BYTES = 128


def seal(memory: np.ndarray, key: bytes, layout: bytes) -> None:
    """Writes the header of a chunk whose content is in memory behind it.

    Args:
        memory: `[HEADER_BYTES + content]`, uint8, contiguous.
        key: The chunk's name.
        layout: Digest of the layout of the content, 16 bytes.
    """
    content = memory[HEADER_BYTES:]
    header = _header(content.nbytes, _checksum(content), key, layout)
    memory[:HEADER_BYTES] = bytearray(header.ljust(HEADER_BYTES, b"\0"))


def fault(memory: np.ndarray, key: bytes, layout: bytes) -> str:
    """Returns why a chunk must not be used: `foreign` or `corrupt`; empty if it is what its name says.

    Args:
        memory: What was read under the name, as for `seal`.
        key: The name.
        layout: Digest of the layout that this engine needs.
    """
    header = memory[:HEADER_BYTES].tobytes()
    content = memory[HEADER_BYTES:]
    checksum = _HEADER.unpack_from(header)[4]
    if header != _header(content.nbytes, checksum, key, layout).ljust(HEADER_BYTES, b"\0"):
        return "foreign"
    return "" if _checksum(content) == checksum else "corrupt"


def _header(num_bytes: int, checksum: int, key: bytes, layout: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, num_bytes, checksum, layout, key)


def _checksum(content: np.ndarray) -> int:
    return _kvpipe.checksums(content, [0], content.nbytes)[0]
