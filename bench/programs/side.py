"""One process of a program: prints a hello, then answers requests."""

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
# With and without checksums
INTEGRITY = {"checked": "checksum", "unchecked": "none"}
MODES = tuple(INTEGRITY)


@dataclass(frozen=True)
class Setup:
    """Settings of a process.

    Attributes:
        total: Bytes of its buffer.
        host: Address to listen on.
        options: Words of its program.
    """

    total: int
    host: str
    options: Mapping[str, str]


class Side(Protocol):
    """One role of a program."""

    def hello(self) -> Words:
        """Words for the other process."""

    def meet(self, words: Mapping[str, str]) -> Words:
        """Processes the other's hello; the processes are connected when both have answered."""

    def clear(self, task: Task) -> None:
        """Resets the buffers."""

    def run(self, task: Task) -> Words:
        """Runs a task. The active side answers `seconds`, or `us` for latency."""

    def verify(self, task: Task) -> None:
        """Raises unless all bytes of the run have arrived."""


class Idle:
    """A role without words, buffers and actions; subclasses override what they need."""

    def __init__(self, setup: Setup) -> None:
        """Ignores its setup."""

    def hello(self) -> Words:
        """Returns no words."""
        return {}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Does nothing."""
        del words
        return {}

    def clear(self, task: Task) -> None:
        """Does nothing."""

    def run(self, task: Task) -> Words:
        """Does nothing: the role's own threads do the work."""
        del task
        return {}

    def verify(self, task: Task) -> None:
        """Does nothing."""


def main(arguments: Sequence[str]) -> int:
    """Runs the program that the arguments name."""
    out = _reserve_stdout()
    try:
        name, role, *words = arguments
        _, options = request.parse(" ".join(["setup", *words]))
        setup = Setup(int(options["total"]), options.get("host", "127.0.0.1"), options)
        side: Side = importlib.import_module(f".{name}", __package__).ROLES[role](setup)
        _print(out, request.compose("hello", side.hello()))
        for line in sys.stdin:
            _print(out, _answer(side, line))
    except Exception as error:  # noqa: BLE001 - any error of a library becomes one line
        _print(out, _error(error))
        return 1
    return 0


def _reserve_stdout() -> TextIO:
    """Reserves stdout for answers: output of libraries goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _print(out: TextIO, line: str) -> None:
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
    """Measures the work, as an answer."""
    started = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - started}


def median_us(count: int, once: Callable[[], object]) -> Words:
    """Measures the median of `count` calls, as an answer."""
    return {"us": statistics.median(_samples_s(count, once)) * 1e6}


def half_round_trip_us(count: int, once: Callable[[], object]) -> Words:
    """Measures half of the median of `count` round trips, as an answer."""
    return half_median_us(_samples_s(count, once))


def _samples_s(count: int, once: Callable[[], object]) -> list[float]:
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        once()
        samples.append(time.perf_counter() - started)
    return samples


def half_median_us(samples: Sequence[float]) -> Words:
    """Returns half of the median of times in seconds, as an answer."""
    return {"us": statistics.median(samples) / 2 * 1e6}


def keep_in_flight(limit: int, begun: Iterable[Any]) -> None:
    """Begins works, and waits for the oldest one while `limit` are pending."""
    under_way: deque[Any] = deque()
    for work in begun:
        under_way.append(work)
        if len(under_way) >= limit:
            under_way.popleft().wait()
    while under_way:
        under_way.popleft().wait()


def expect(found: Any, expected: Any, what: str) -> None:
    """Raises unless the bytes are equal."""
    if not np.array_equal(found, expected):
        message = f"{what} did not arrive as they were sent"
        raise ValueError(message)
