"""A chunk as a store has it: a header that says whose it is, and the bytes of its blocks, layer by layer."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe.vllm.store.keys import FORMAT_VERSION, KEY_BYTES

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
    """Returns the fault of a chunk that must not be used: `foreign` or `corrupt`; empty if its name is right.

    Args:
        memory: The bytes that were read under the name, as for `seal`.
        key: The name.
        layout: Digest of the layout that this engine needs.
    """
    header, content = memory[:HEADER_BYTES], memory[HEADER_BYTES:]
    if not _is_header(header, content.nbytes, key, layout):
        return "foreign"
    return "" if _checksum(content) == _HEADER.unpack_from(header.data)[4] else "corrupt"


def is_whole(header: np.ndarray, num_bytes: int, checksum: int, key: bytes, layout: bytes) -> bool:
    """True if a chunk is what its name says, by the checksum of all of it.

    Args:
        header: `[HEADER_BYTES]`, uint8: the beginning of the chunk.
        num_bytes: Size of the content behind it.
        checksum: Of both.
        key: The name.
        layout: As for `fault`.
    """
    of_content = _HEADER.unpack_from(header.data)[4]
    of_both = _kvpipe.joined_checksum(_checksum(header), of_content, num_bytes)
    return _is_header(header, num_bytes, key, layout) and of_both == checksum


def _is_header(header: np.ndarray, num_bytes: int, key: bytes, layout: bytes) -> bool:
    of_content = _HEADER.unpack_from(header.data)[4]
    return header.tobytes() == _header(num_bytes, of_content, key, layout).ljust(HEADER_BYTES, b"\0")


def _header(num_bytes: int, checksum: int, key: bytes, layout: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, num_bytes, checksum, layout, key)


def _checksum(content: np.ndarray) -> int:
    return _kvpipe.checksums(content, [0], content.nbytes)[0]
