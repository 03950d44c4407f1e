"""kvpipe's checksum within one process, over tensors that no cache holds."""

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
        # Twice the size, because other programs walk through two buffers
        self._source = pattern(2 * setup.total)
        self._checksums: list[int] = []

    def clear(self, task: Task) -> None:
        """Forgets the checksums."""
        del task
        self._checksums = []

    def run(self, task: Task) -> Words:
        """Hashes the tensors of the run."""
        starts = task.offsets(len(self._source))
        return seconds(lambda: self._hash(starts, task.num_bytes))

    def _hash(self, starts: list[int], num_bytes: int) -> None:
        self._checksums = _kvpipe.checksums(self._source, starts, num_bytes)

    def verify(self, task: Task) -> None:
        """Raises unless the checksums match those of copies of the tensors, hashed one by one."""
        parts = (self._source[at : at + task.num_bytes].tobytes() for at in task.offsets(len(self._source)))
        if self._checksums != [_kvpipe.checksums(part, [0], task.num_bytes)[0] for part in parts]:
            message = "the checksums are not those of the tensors"
            raise ValueError(message)


ROLES = {"alone": Alone}
