"""Memory for chunks on their way: a bounded pool of slots of one size."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvpipe.exceptions import ConfigError


class StagingPool:
    """Slots that are taken and given back; nobody waits for one. Any thread may give one back.

    Pages are used as slots are: those of a pool that was never full cost nothing.

    Args:
        capacity_bytes: Memory of all slots.
        slot_bytes: Memory of one.

    Raises:
        ConfigError: There is no space for one slot.
    """

    def __init__(self, capacity_bytes: int, slot_bytes: int) -> None:
        self.num_slots = capacity_bytes // slot_bytes
        if self.num_slots < 1:
            message = (
                f"staging_bytes={capacity_bytes}: a chunk of this model has {slot_bytes} bytes; write a larger "
                "staging_bytes, or a smaller chunk_size"
            )
            raise ConfigError(message)
        memory: np.ndarray = np.empty((self.num_slots, slot_bytes), np.uint8)
        # The slot that was given back last has its pages, and is in a cache.
        self._free = deque(memory[index] for index in range(self.num_slots))

    def take(self) -> np.ndarray | None:
        """Returns a slot, `[slot_bytes]`, uint8; `None` if all are in use."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, slot: np.ndarray) -> None:
        """Makes a slot free again."""
        self._free.appendleft(slot)
