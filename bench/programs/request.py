"""Requests as words, and the layout of a task's bytes. `bare_loop` in `rust/ucx/examples` has the same rules."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CACHE_LINE_BYTES = 64
LOCAL, REMOTE = 1, 2


def parse(line: str) -> tuple[str, dict[str, str]]:
    """Parses a verb and its `key=value` words."""
    verb, *words = line.split() or [""]
    return verb, dict(word.split("=", 1) for word in words)


def compose(verb: str, words: Mapping[str, object]) -> str:
    """Formats a line for `parse`."""
    return " ".join([verb, *(f"{key}={value}" for key, value in words.items())])


@dataclass(frozen=True)
class Task:
    """The work of one run.

    Attributes:
        kind: `tensors` (active to passive), `blocks` (one-sided) or `latency` (there and back).
        num_bytes: Bytes of a tensor or block.
        num_blocks: Blocks of one transfer.
        is_scattered: Whether the blocks are in random order at both sides, or contiguous.
        count: Tensors, transfers or round trips of the run.
        round: Number of earlier runs: a run continues in the buffers where the last one ended.
        options: Other words for the program.
    """

    kind: str
    num_bytes: int
    num_blocks: int
    is_scattered: bool
    count: int
    round: int
    options: Mapping[str, str]

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Task:
        """Parses the task of a request."""
        return cls(
            words["kind"],
            int(words["bytes"]),
            int(words["blocks"]),
            words["layout"] == "scattered",
            int(words["count"]),
            int(words["round"]),
            words,
        )

    @property
    def is_checked(self) -> bool:
        """True if `verify` follows, so that the last fresh tensor is kept."""
        return self.round == 0

    def offsets(self, total: int) -> list[int]:
        """Returns the offset of each tensor of the run in a buffer of `total` bytes."""
        stride = max(self.num_bytes, _CACHE_LINE_BYTES)  # so that small tensors leave the cache too
        places, first = total // stride, self.round * self.count
        return [i % places * stride for i in range(first, first + self.count)]

    def chosen(self, total: int) -> list[int]:
        """Returns the indices of this run's `transfers`."""
        num_transfers = total // (self.num_bytes * self.num_blocks)
        first = self.round * self.count
        return [i % num_transfers for i in range(first, first + self.count)]

    def transfers(self, total: int, side: int) -> Sequence[Any]:
        """Returns block ids `[num_blocks]` of all transfers that fit into `total` bytes, `LOCAL` or `REMOTE`."""
        return _transfers(total // self.num_bytes, self.num_blocks, side if self.is_scattered else 0)


@lru_cache(maxsize=32)
def _transfers(places: int, num_blocks: int, seed: int) -> Sequence[Any]:
    ids = np.random.default_rng(seed).permutation(places) if seed else np.arange(places)
    num_transfers = places // num_blocks
    return list(ids[: num_transfers * num_blocks].reshape(num_transfers, num_blocks))


def memory(num_bytes: int) -> Any:
    """Returns ones that begin at a page, so that all subjects copy from and to the same place within a cache line.

    The kernel copies between processes at half the speed where the two ends lie differently (docs/benchmarks.md).
    NumPy's own memory begins 16 or 48 bytes behind a cache line, torch's at one.
    """
    whole: Any = np.ones(num_bytes + mmap.PAGESIZE, np.uint8)
    first = -whole.ctypes.data % mmap.PAGESIZE
    return whole[first : first + num_bytes]


def pattern(total: int) -> Any:
    """Returns bytes that differ between positions, in `memory`."""
    words = memory(total + -total % 8).view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:total]
