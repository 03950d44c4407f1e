"""The kernel's copy between processes, `process_vm_readv`, and nothing else: a bound for blocks on one host."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from .blocks import OneSided
from .request import LOCAL, REMOTE
from .side import Setup, Words, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .request import Task

# As kvpipe calls it
_CALL_BLOCKS, _CALL_BYTES = 256, 4 << 20
_READ = ctypes.CDLL(None, use_errno=True).process_vm_readv
_READ.restype = ctypes.c_ssize_t
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_ulong
_READ.argtypes = [ctypes.c_int, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER]


class Passive(OneSided):
    """The process that is read."""

    def hello(self) -> Words:
        """Returns the process and its buffer's address."""
        return {"pid": os.getpid(), "address": self.buffer.ctypes.data}


class Active(OneSided):
    """Reads."""

    is_active = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._calls: dict[tuple[object, ...], list[list[tuple[Any, Any]]]] = {}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Learns what to read."""
        self._pid, self._remote = int(words["pid"]), int(words["address"])
        return {"transport": "cma"}

    def run(self, task: Task) -> Words:
        """Reads one transfer after the other, with calls that were prepared before."""
        key = (task.num_bytes, task.num_blocks, task.is_scattered)
        if key not in self._calls:
            self._calls[key] = [list(calls) for calls in self._prepare(task)]
        chosen = [self._calls[key][i] for i in task.chosen(len(self.buffer))]

        def all_transfers() -> None:
            for calls in chosen:
                for to, source in calls:
                    self._read(to, source)

        return seconds(all_transfers)

    def _read(self, to: Any, source: Any) -> None:
        """Calls the kernel once; `to` and `source` are arrays `[num_pieces, 2]` of addresses and lengths."""
        pieces = (to.ctypes.data, len(to), source.ctypes.data, len(source))
        if _READ(self._pid, *pieces, 0) != to[:, 1].sum():
            raise OSError(ctypes.get_errno(), "process_vm_readv")

    def _prepare(self, task: Task) -> Iterator[Iterator[tuple[Any, Any]]]:
        """The calls of each transfer, in the order of the destinations; contiguous blocks are one piece."""
        total, size = len(self.buffer), task.num_bytes
        for to, source in zip(task.transfers(total, LOCAL), task.transfers(total, REMOTE), strict=True):
            num_bytes = size
            order = np.argsort(to)
            pieces = np.stack([to[order], source[order]]).astype(np.uint64) * np.uint64(size)
            if not task.is_scattered:
                num_bytes = min(_CALL_BYTES, size * task.num_blocks)
                pieces = pieces[:, :: num_bytes // size]
            yield self._cut(pieces, num_bytes)

    def _cut(self, pieces: Any, num_bytes: int) -> Iterator[tuple[Any, Any]]:
        num_pieces = min(_CALL_BLOCKS, max(1, _CALL_BYTES // num_bytes))
        for first in range(0, pieces.shape[1], num_pieces):
            bases = (self.buffer.ctypes.data, self._remote)
            starts = [
                offsets[first : first + num_pieces] + np.uint64(base)
                for offsets, base in zip(pieces, bases, strict=True)
            ]
            to, source = (np.stack([start, np.full_like(start, num_bytes)], axis=1) for start in starts)
            yield to, source


ROLES = {"active": Active, "passive": Passive}
