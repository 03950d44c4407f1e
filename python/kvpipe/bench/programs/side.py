"""One process of a program: says hello, then answers requests."""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from . import request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TextIO

    from .request import Task

Words = dict[str, object]
# With checksums, and without
WAYS = ("checked", "unchecked")


@dataclass(frozen=True)
class Setup:
    """How a process is to be made.

    Attributes:
        total: Bytes of its buffer.
        host: Where it listens.
        options: Words that only its program knows.
    """

    total: int
    host: str
    options: Mapping[str, str]


class Side(Protocol):
    """One role of a program."""

    def hello(self) -> Words:
        """What the other process needs to know."""

    def meet(self, words: Mapping[str, str]) -> Words:
        """Takes the other's hello; both have met when both have answered."""

    def clear(self, task: Task) -> None:
        """Forgets what arrived before."""

    def run(self, task: Task) -> Words:
        """Does its part. The active side answers `seconds`, for latency `us`."""

    def verify(self, task: Task) -> None:
        """Raises unless all of the run's bytes have arrived."""


class Idle:
    """A role that knows nothing the others need, and where nothing arrives; the others override what they do."""

    def __init__(self, setup: Setup) -> None:
        """Takes no notice of its setup."""

    def hello(self) -> Words:
        """Nobody needs to know anything."""
        return {}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Whoever connects does so by himself."""
        del words
        return {}

    def clear(self, task: Task) -> None:
        """Nothing arrives here."""

    def run(self, task: Task) -> Words:
        """Threads of its own do what there is to do."""
        del task
        return {}

    def verify(self, task: Task) -> None:
        """Nothing arrives here."""


def main(arguments: Sequence[str]) -> int:
    """Runs the program that the arguments name."""
    out = _take_stdout()
    try:
        name, role, *words = arguments
        _, options = request.parse(" ".join(["setup", *words]))
        setup = Setup(int(options["total"]), options.get("host", "127.0.0.1"), options)
        side: Side = importlib.import_module(f".{name}", __package__).ROLES[role](setup)
        _say(out, request.compose("hello", side.hello()))
        for line in sys.stdin:
            _say(out, _answer(side, line))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is told in one line
        _say(out, _error(error))
        return 1
    return 0


def _take_stdout() -> TextIO:
    """Answers alone go to stdout: what libraries print there goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, line: str) -> None:
    out.write(f"{line}\n")
    out.flush()


def _answer(side: Side, line: str) -> str:
    verb, words = request.parse(line)
    try:
        if verb == "meet":
            return request.compose("ok", side.meet(words))
        answer = getattr(side, verb)(request.Task.of(words))
    except Exception as error:  # noqa: BLE001 - as above
        return _error(error)
    return request.compose("ok", answer or {})


def _error(error: Exception) -> str:
    return f"error {type(error).__name__}: {' '.join(str(error).split())}"


def seconds(work: Callable[[], object]) -> Words:
    """How long the work took, as an answer."""
    started = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - started}


def half_round_trip_us(count: int, once: Callable[[], object]) -> Words:
    """Half of the median of `count` round trips, as an answer."""
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        once()
        samples.append(time.perf_counter() - started)
    return half_median_us(samples)


def half_median_us(samples: Sequence[float]) -> Words:
    """Half of the median of times in seconds, as an answer."""
    return {"us": statistics.median(samples) / 2 * 1e6}


def keep_in_flight(limit: int, begun: Iterable[Any]) -> None:
    """Takes what was begun, waiting for the oldest when there are more than `limit` under way."""
    under_way: deque[Any] = deque()
    for work in begun:
        under_way.append(work)
        if len(under_way) >= limit:
            under_way.popleft().wait()
    while under_way:
        under_way.popleft().wait()


def expect(found: Any, expected: Any, what: str) -> None:
    """Raises unless the bytes are the same."""
    if not np.array_equal(found, expected):
        message = f"{what} did not arrive as they were sent"
        raise ValueError(message)
