"""What runs a subject: pairs of processes, or one process that copies."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bench.processes import Process, Side, on_cpu
from bench.programs.request import compose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bench.measure import Case

_GIB = 1 << 30
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sample:
    """The result of one round of a case.

    Attributes:
        value: GB/s (10^9 bytes of payload a second), or microseconds of half a round trip or of a wake-up.
        cpu_s_per_gib: Seconds of CPU of all processes for each GiB of payload; `None` if unknown.
    """

    value: float
    cpu_s_per_gib: float | None


@dataclass(eq=False)
class Entry:
    """The samples of one subject and case: one a round, each of `count` tensors, transfers or round trips."""

    case: Case
    subject: Subject
    transport: str = ""
    count: int = 0
    samples: list[Sample] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """The samples' values."""
        return [sample.value for sample in self.samples]


class Runner(Protocol):
    """An opened program or tool that runs the cases of its subjects."""

    transport: str
    version: str

    def check(self, case: Case, options: Pairs) -> float:
        """Runs the warm-up round, whose bytes are verified; returns its seconds."""

    def sample(self, case: Case, options: Pairs, number: int, count: int) -> Sample:
        """Runs one more round of `count` tensors, transfers or round trips."""

    def close(self) -> None:
        """Ends all processes."""


@dataclass(frozen=True)
class Program:
    """A command that starts the processes of subjects. Subjects with the same program share the processes.

    Attributes:
        name: Name of the program.
        command: Command line, before the role.
        roles: Roles of its processes. The first one measures the time; requests go to the last one first.
        setup: Words for every process besides the size of its buffer.
        env: Variables for every process.
        is_paused: Whether its processes are stopped while others are measured, because some never sleep.
    """

    name: str
    command: tuple[str, ...]
    roles: tuple[str, ...] = ("active", "passive")
    setup: Pairs = ()
    env: Pairs = field(default=(), repr=False)
    is_paused: bool = False

    def start(self, role: str, words: Mapping[str, object]) -> Process:
        """Starts the process of one role, which sends its hello."""
        line = compose(role, {**dict(self.setup), **words}).split()
        return Process([*self.command, *line], dict(self.env))

    def open(self, words: Mapping[str, object]) -> Runner:
        """Starts all processes and connects them; with `is_pinned` each on its own CPU."""
        started: list[Process] = []
        try:
            for place, role in enumerate(self.roles):
                with on_cpu(place if words.get("is_pinned") else None):
                    started.append(self.start(role, words))
            return PausedGroup(started) if self.is_paused else Group(started)
        except BaseException:
            for side in started:
                side.close()
            raise


class Startable(Protocol):
    """Something that can be opened: a program, or a tool that starts anew for each sample."""

    def open(self, words: Mapping[str, object]) -> Runner:
        """Starts it."""


@dataclass(frozen=True)
class Subject:
    """A subject of a benchmark: one line of a table.

    Attributes:
        name: Its name in the table.
        data_path: `default` (what UCX chooses), `tcp`, or empty where no transport is involved.
        program: The program that runs it.
        kinds: Kinds of cases that it supports.
        options: Words of each request.
        is_ours: Whether it is kvpipe, so that its failure fails the benchmark.
        fits: Whether it supports a case of these kinds.
        missing: What it needs and is not installed, with the remedy; empty if it can take part.
    """

    name: str
    data_path: str
    program: Startable
    kinds: frozenset[str]
    options: Pairs = ()
    is_ours: bool = False
    fits: Callable[[Case], bool] = field(default=lambda _: True, compare=False)
    missing: str = ""

    def can(self, case: Case) -> bool:
        """True if it supports a case."""
        return case.kind in self.kinds and self.fits(case)


class Group:
    """Connected processes. The first one measures the time."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides
        hellos = [side.answer() for side in sides]
        for side, own in zip(sides, hellos, strict=True):
            others = (hello.items() for hello in hellos if hello is not own)
            side.ask(compose("meet", dict(itertools.chain.from_iterable(others))))
        met = [side.answer() for side in sides]
        self.transport = next((words["transport"] for words in met if "transport" in words), "")
        self.version = next((words["version"] for words in hellos if "version" in words), "")

    def check(self, case: Case, options: Pairs) -> float:
        """Runs the warm-up round, whose bytes are verified; returns its seconds."""
        self._ask_all("clear", case, options, 0, case.first_count)
        started = time.monotonic()
        self._ask_all("run", case, options, 0, case.first_count)
        took_s = time.monotonic() - started
        self._ask_all("verify", case, options, 0, case.first_count)
        return took_s

    def sample(self, case: Case, options: Pairs, number: int, count: int) -> Sample:
        """Runs one more round."""
        before = self._cpu_s()
        answer = self._ask_all("run", case, options, number, count)
        cpu_s = self._cpu_s() - before
        if case.is_timed:
            return Sample(float(answer["us"]), None)
        num_bytes = case.payload_bytes(count)
        return Sample(num_bytes / float(answer["seconds"]) / 1e9, cpu_s / num_bytes * _GIB)

    def _ask_all(self, verb: str, case: Case, options: Pairs, number: int, count: int) -> dict[str, str]:
        words = {
            "kind": case.kind,
            "bytes": case.num_bytes,
            "blocks": case.num_blocks,
            "layout": case.layout or "none",
            "count": count,
            "round": number,
            **dict(options),
        }
        for side in reversed(self._sides):  # the passive one first, so that it is ready when the other begins
            side.ask(compose(verb, words))
        answers = [side.answer() for side in self._sides]
        return answers[0]

    def _cpu_s(self) -> float:
        return sum(side.cpu_s() for side in self._sides)

    def close(self) -> None:
        """Ends the processes."""
        for side in self._sides:
            side.close()


class PausedGroup(Group):
    """Connected processes that run only while they are measured."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        super().__init__(processes)
        self._signal(signal.SIGSTOP)

    def check(self, case: Case, options: Pairs) -> float:
        """Runs the warm-up round, whose bytes are verified; returns its seconds."""
        with self._running():
            return super().check(case, options)

    def sample(self, case: Case, options: Pairs, number: int, count: int) -> Sample:
        """Runs one more round."""
        with self._running():
            return super().sample(case, options, number, count)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.signal(number)
