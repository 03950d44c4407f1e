"""memcpy within one process: an upper bound for a transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import pattern
from .side import Setup, Words, seconds
from .tensors import Receiving

if TYPE_CHECKING:
    from .request import Task


class Copy(Receiving):
    """Copies into existing or fresh memory."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._source = pattern(setup.total)

    def run(self, task: Task) -> Words:
        """Copies one tensor after the other."""
        return seconds(lambda: self._copy(task))

    def _copy(self, task: Task) -> None:
        is_fresh, size, buffer = task.options["into"] == "fresh", task.num_bytes, self._buffer
        for at in task.offsets(len(self._source)):
            if is_fresh:
                copied = self._source[at : at + size].copy()
                if task.is_checked:
                    buffer.fresh = copied
                del copied
            else:
                buffer.data[at : at + size] = self._source[at : at + size]


ROLES = {"copy": Copy}
