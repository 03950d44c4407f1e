"""Slims a shared object of CUDA: device code that one GPU cannot use becomes zeros.

Offsets and sizes stay, so nothing else of the file changes, and the zeros vanish when the file is compressed. The
layout of `.nv_fatbin` is NVIDIA's and not documented; an entry that is not as expected is an error.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = 0xBA55ED50
_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_ARCHITECTURE_AT = 28
_PTX, _ELF = 1, 2
_KINDS = {1, 2, 4, 8, 16, 32, 64}


class Entry(NamedTuple):
    """Device code for one architecture: PTX or machine code."""

    kind: int
    architecture: int
    payload_at: int
    payload_bytes: int


def slim(data: bytearray, architecture: int) -> int:
    """Zeroes in place what a GPU of this architecture, such as 90, does not load; returns the number of bytes."""
    zeroed = 0
    for name, start, num_bytes in _sections(data):
        if name != ".nv_fatbin":
            continue
        for entries in _containers(data, start, start + num_bytes):
            kept = _loaded(entries, architecture)
            for entry in entries:
                if entry not in kept:
                    data[entry.payload_at : entry.payload_at + entry.payload_bytes] = bytes(entry.payload_bytes)
                    zeroed += entry.payload_bytes
    return zeroed


def _loaded(entries: list[Entry], architecture: int) -> list[Entry]:
    """The machine code of the nearest architecture of this generation, else the PTX it can be compiled from."""
    generation = architecture // 10 * 10
    usable = [each for each in entries if each.kind == _ELF and generation <= each.architecture <= architecture]
    if usable:
        nearest = max(each.architecture for each in usable)
        return [each for each in usable if each.architecture == nearest]
    return [each for each in entries if each.kind == _PTX and each.architecture <= architecture]


def _sections(data: bytearray) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of an ELF file of 64 bits."""
    (table_at,) = struct.unpack_from("<Q", data, 0x28)
    row_bytes, num_rows, names_row = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, table_at + row * row_bytes) for row in range(num_rows)]
    names_at = rows[names_row][4]
    for row in rows:
        start = names_at + row[0]
        yield data[start : data.index(b"\0", start)].decode(), row[4], row[5]


def _containers(data: bytearray, at: int, end: int) -> Iterator[list[Entry]]:
    """The entries of each container of the section."""
    while at < end - _HEADER.size:
        magic, _, header_bytes, content_bytes = _HEADER.unpack_from(data, at)
        if magic != _MAGIC:
            at += 8
            continue
        stop = at + header_bytes + content_bytes
        yield list(_entries(data, at + header_bytes, stop))
        at = stop + -stop % 8


def _entries(data: bytearray, at: int, stop: int) -> Iterator[Entry]:
    while at < stop:
        kind, _, header_bytes, payload_bytes = _ENTRY.unpack_from(data, at)
        if header_bytes == 0 or kind not in _KINDS:
            raise ValueError(f"device code at {at:#x}: kind {kind} with a header of {header_bytes} bytes is unknown")
        (architecture,) = struct.unpack_from("<I", data, at + _ARCHITECTURE_AT)
        yield Entry(kind, architecture, at + header_bytes, payload_bytes)
        at += header_bytes + payload_bytes
