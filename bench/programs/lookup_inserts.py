"""A LookupBuffer within one process: inserts, and numpy's copies of the same bytes into new memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

import kvpipe

from .request import pattern
from .side import Idle, Setup, Words, expect

if TYPE_CHECKING:
    from .request import Task

_TOKENS = np.arange(4)
# More than the overhead of an entry.
_BESIDES_BYTES = 4096


class Alone(Idle):
    """Inserts or copies, and frees the result before the next one, outside of the measured time."""

    def __init__(self, setup: Setup) -> None:
        self._source = pattern(setup.total)
        self._buffer = kvpipe.LookupBuffer(setup.total + _BESIDES_BYTES)
        self._last: Any = None

    def clear(self, task: Task) -> None:
        """Frees the last copy."""
        del task
        self._last = None

    def run(self, task: Task) -> Words:
        """Stores the next bytes of the source, one entry after the other."""
        store = {"insert": self._insert, "copy": self._copy}[task.options["by"]]
        took_s = 0.0
        for at in task.offsets(len(self._source)):
            part_s, stored = store(self._source[at : at + task.num_bytes])
            took_s += part_s
            self._last = stored if task.is_checked else None
            del stored
        return {"seconds": took_s}

    def _insert(self, data: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        self._buffer.insert(_TOKENS, None, data, None, None)
        took_s = time.perf_counter() - began
        return took_s, self._buffer.drop_select(_TOKENS, None)[2]

    @staticmethod
    def _copy(data: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        copied = data.copy()
        return time.perf_counter() - began, copied

    def verify(self, task: Task) -> None:
        """Raises unless the last one has the bytes of its source."""
        at = task.offsets(len(self._source))[-1]
        expect(self._last, self._source[at : at + task.num_bytes], "entries")


ROLES = {"alone": Alone}
