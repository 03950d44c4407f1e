"""Buffers of blocks, the same in every program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .request import LOCAL, REMOTE, memory, pattern
from .side import Idle, Setup, expect

if TYPE_CHECKING:
    from .request import Task


def verify_blocks(buffer: Any, task: Task, *, swap: bool = False) -> None:
    """Raises unless the blocks of the run are in the buffer.

    Args:
        buffer: The bytes.
        task: The run.
        swap: Whether the buffer is the remote one of the active side.
    """
    total, size = len(buffer), task.num_bytes
    places = total // size
    here, there = (data[: places * size].reshape(-1, size) for data in (buffer, pattern(total)))
    local, remote = task.transfers(total, LOCAL), task.transfers(total, REMOTE)
    if swap:
        local, remote = remote, local
    for i in dict.fromkeys(task.chosen(total)):
        expect(here[local[i]], there[remote[i]], "blocks")


class OneSided(Idle):
    """A role with one buffer. READ fills the active side's buffer from the passive side's, WRITE the reverse.

    The destination starts with ones; the source holds the pattern.
    """

    is_active = False

    def __init__(self, setup: Setup) -> None:
        self._is_filled = self.is_active == (setup.options["op"] == "READ")
        self.buffer = memory(setup.total) if self._is_filled else pattern(setup.total)

    def clear(self, task: Task) -> None:
        """Clears the destination."""
        del task
        if self._is_filled:
            self.buffer[:] = 0

    def verify(self, task: Task) -> None:
        """Raises unless every block is at its destination."""
        if self._is_filled:
            verify_blocks(self.buffer, task, swap=not self.is_active)
