"""A LookupBuffer between processes: time from the start of an insert to the end of a waiting `drop_select`."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

import kvpipe

from .side import Idle, Setup, Words, expect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task

_TIMEOUT_S = 30.0
_PREFIX = (1, 2, 3)
# By then a consumer that has its entry sleeps in its next drop_select
_PAUSE_S = 0.005


class Consumer(Idle):
    """Waits for each entry, and measures; processes of one machine share the monotonic clock."""

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects to the server."""
        self._buffer = kvpipe.LookupBuffer.connect(words["address"], timeout=_TIMEOUT_S)
        return {"transport": self._buffer.stats().transport}

    def clear(self, task: Task) -> None:
        """Forgets received entries."""
        del task
        self._numbers: list[int] = []

    def run(self, task: Task) -> Words:
        """Consumes one entry after the other."""
        return {"us": statistics.median(self._wake_us() for _ in range(task.count))}

    def _wake_us(self) -> float:
        tokens, _, key, _, _ = self._buffer.drop_select(None, None, timeout=_TIMEOUT_S)
        arrived_ns = time.monotonic_ns()
        if key is None:
            message = f"no entry within {_TIMEOUT_S:.0f} s"
            raise TimeoutError(message)
        self._numbers.append(int(tokens[-1]))
        return (arrived_ns - int(key[0])) / 1e3

    def verify(self, task: Task) -> None:
        """Raises unless each entry arrived once, in order."""
        expect(self._numbers, list(range(task.count)), "entries")


class Producer(Idle):
    """Inserts the entries."""

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects to the server."""
        self._buffer = kvpipe.LookupBuffer.connect(words["address"], timeout=_TIMEOUT_S)
        return {}

    def run(self, task: Task) -> Words:
        """Inserts one entry after the other, each with the current time."""
        for number in range(task.count):
            time.sleep(_PAUSE_S)
            tokens = np.array([*_PREFIX, number])
            self._buffer.insert(tokens, None, np.array([time.monotonic_ns()]), None, None)
        return {}


class Server(Idle):
    """Serves the buffer."""

    def __init__(self, setup: Setup) -> None:
        self._buffer = kvpipe.LookupBuffer()
        self._buffer.serve(f"{setup.host}:0")

    def hello(self) -> Words:
        """Returns the buffer's address."""
        return {"address": self._buffer.address}


class ServingProducer(Server, Producer):
    """Inserts into the buffer that it serves."""

    def meet(self, words: Mapping[str, str]) -> Words:
        """Does nothing: the consumer connects."""
        del words
        return {}


ROLES = {"consumer": Consumer, "producer": Producer, "server": Server, "serving_producer": ServingProducer}
