"""What clients of all stores have in common: the values, and how answers are verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import memory, pattern
from .side import Idle, Setup, Words, expect, median_us

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import Task


class ValuesClient(Idle):
    """Puts, gets and asks; a subclass says how. Values are as many as fit into the buffer, so that no cache holds them.

    Args:
        setup: Its options are the subclass's own.
    """

    def __init__(self, setup: Setup) -> None:
        self._options = setup.options
        self._source = pattern(setup.total)
        self._out = memory(len(self._source))
        self._found: Sequence[bool] = ()

    def _all_offsets(self, task: Task) -> range:
        return range(0, len(self._source) // task.num_bytes * task.num_bytes, task.num_bytes)

    def _run_exists(self, task: Task) -> Words:
        def once() -> None:
            self._found = self._exist(task)

        return median_us(task.count, once)

    def verify(self, task: Task) -> None:
        """Raises unless the values are those that were put, and the answers right: every other key has a value."""
        if task.kind == "exists":
            expect(self._found, [index % 2 == 0 for index in range(task.num_blocks)], "answers")
            return
        for at in task.offsets(len(self._source)):
            if task.kind == "put":
                self._get(task, at)
            expect(self._out[at : at + task.num_bytes], self._source[at : at + task.num_bytes], "values")

    def _get(self, task: Task, at: int) -> None:
        """Reads the value of an offset to there."""
        raise NotImplementedError

    def _exist(self, task: Task) -> Sequence[bool]:
        """Returns for each key of a task whether it has a value."""
        raise NotImplementedError
