"""memcpy within one process: what a transfer can hope for at best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import pattern
from .side import Setup, Words, seconds
from .tensors import Room

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task


class Copy:
    """Copies into memory that is there, or into fresh memory."""

    def __init__(self, setup: Setup) -> None:
        self._source = pattern(setup.total)
        self._room = Room(setup.total)

    def hello(self) -> Words:
        """There is nobody to tell."""
        return {}

    def meet(self, words: Mapping[str, str]) -> Words:
        """There is nobody to meet."""
        del words
        return {}

    def clear(self, task: Task) -> None:
        """Forgets what was copied."""
        del task
        self._room.clear()

    def run(self, task: Task) -> Words:
        """Copies one tensor after the other."""
        return seconds(lambda: self._copy(task))

    def _copy(self, task: Task) -> None:
        is_fresh, size, room = task.options["into"] == "fresh", task.num_bytes, self._room
        for at in task.offsets(len(self._source)):
            if is_fresh:
                copied = self._source[at : at + size].copy()
                if task.is_checked:
                    room.fresh = copied
                del copied
            else:
                room.data[at : at + size] = self._source[at : at + size]

    def verify(self, task: Task) -> None:
        """Whether the copies are the same."""
        self._room.verify(task)


ROLES = {"copy": Copy}
