"""The checksum of kvpipe within one process: how fast it hashes tensors that no cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe import _kvpipe

from .request import pattern
from .side import Idle, Setup, Words, seconds

if TYPE_CHECKING:
    from .request import Task


class Alone(Idle):
    """Hashes one tensor after the other, in one call."""

    def __init__(self, setup: Setup) -> None:
        # Others walk through two buffers: what is read next was last read as long ago as theirs
        self._source = pattern(2 * setup.total)
        self._sums: list[int] = []

    def clear(self, task: Task) -> None:
        """Forgets what was hashed."""
        del task
        self._sums = []

    def run(self, task: Task) -> Words:
        """Walks through the source."""
        starts = task.offsets(len(self._source))
        return seconds(lambda: self._hash(starts, task.num_bytes))

    def _hash(self, starts: list[int], num_bytes: int) -> None:
        self._sums = _kvpipe.checksums(self._source, starts, num_bytes)

    def verify(self, task: Task) -> None:
        """Whether these are the sums of copies of the tensors, hashed one by one."""
        parts = (self._source[at : at + task.num_bytes].tobytes() for at in task.offsets(len(self._source)))
        if self._sums != [_kvpipe.checksums(part, [0], task.num_bytes)[0] for part in parts]:
            message = "the checksums are not those of the tensors"
            raise ValueError(message)


ROLES = {"alone": Alone}
