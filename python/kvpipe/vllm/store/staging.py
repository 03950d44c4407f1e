"""Memory for chunks on their way: a bounded pool of slots of one size."""

from __future__ import annotations

import mmap
from collections import deque

import numpy as np

from kvpipe.exceptions import ConfigError

_CACHE_LINE_BYTES = 64


def page_aligned(num_bytes: int) -> np.ndarray:
    """Returns memory that begins at a page, `[num_bytes]`, uint8.

    The kernel copies between processes up to twice as fast where both ends have the same offset within 32 bytes
    (docs/benchmarks.md). Torch's memory begins at a cache line, NumPy's 16 bytes behind one.
    """
    memory: np.ndarray = np.empty(num_bytes + mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    return memory[first : first + num_bytes]


class StagingPool:
    """Slots of staging memory. `acquire` never waits for one. Any thread may release one.

    Each slot begins at a cache line.

    Args:
        capacity_bytes: Memory of all slots.
        slot_bytes: Memory of one.
        has_pages: True if all pages are touched now. The first use of a page costs more than a copy into it. Otherwise
            pages are touched as slots are used: those of a pool that was never full cost nothing.

    Raises:
        ConfigError: There is no space for one slot.
    """

    def __init__(self, capacity_bytes: int, slot_bytes: int, *, has_pages: bool = False) -> None:
        self.num_slots = capacity_bytes // slot_bytes
        if self.num_slots < 1:
            message = (
                f"staging_bytes={capacity_bytes}: a chunk of this model has {slot_bytes} bytes; write a larger "
                "staging_bytes, or a smaller chunk_size"
            )
            raise ConfigError(message)
        stride = -(-slot_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        memory = page_aligned(self.num_slots * stride).reshape(self.num_slots, stride)
        if has_pages:
            memory.fill(0)
        # The slot that was released last has its pages, and is in a cache.
        self._free = deque(memory[index, :slot_bytes] for index in range(self.num_slots))

    def acquire(self) -> np.ndarray | None:
        """Returns a slot, `[slot_bytes]`, uint8; `None` if all are in use."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def release(self, slot: np.ndarray) -> None:
        """Makes a slot free again."""
        self._free.appendleft(slot)
