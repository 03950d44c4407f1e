"""Runs subjects against each other: every round measures each case by all of them, one after the other."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import TYPE_CHECKING, Self

from kvpipe.bench.processes import SubjectError
from kvpipe.bench.results import Entry
from kvpipe.bench.subjects import reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpipe.bench.measure import Case
    from kvpipe.bench.progress import Progress
    from kvpipe.bench.runner import Runner, Startable, Subject


class Run:
    """Subjects and the cases of one kind; a context manager that ends their processes.

    Attributes:
        entries: Samples, in the order of the cases, then of the subjects.
        skipped: Who does not take part (any more), and why.
        versions: Of the peers that do.
    """

    def __init__(self, subjects: Sequence[Subject], cases: Sequence[Case], progress: Progress) -> None:
        self._progress = progress
        self._runners: dict[Startable, Runner] = {}
        self.entries = [Entry(case, one) for case in cases for one in subjects if one.can(case)]
        self.skipped: dict[str, str] = {}
        self.versions: set[str] = set()

    @property
    def num_processes(self) -> int:
        """How many processes with a buffer of their own take part."""
        programs = {entry.subject.program for entry in self.entries}
        return sum(len(getattr(program, "roles", ())) for program in programs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as closing:
            for opened in self._runners.values():
                closing.callback(opened.close)

    def start(self, words: Mapping[str, object]) -> None:
        """Starts all processes; `words` is what each is given.

        Raises:
            SubjectError: kvpipe itself failed, here and below. Others are left out, with the reason.
        """
        for entry in list(self.entries):
            self._attempt(entry, partial(self._open, entry, words))

    def _open(self, entry: Entry, words: Mapping[str, object]) -> None:
        program = entry.subject.program
        if program not in self._runners:
            self._progress.line(f"starting {_name(entry)}")
            self._runners[program] = program.open(words)
        opened = self._runners[program]
        entry.transport = opened.transport
        self.versions |= {opened.version} - {""}

    def measure(self, rounds: int) -> None:
        """Checks what each moves, then measures."""
        self._progress.expect((rounds + 1) * len(self.entries))
        self._progress.line("checking what each moves")
        for entry in list(self.entries):
            self._attempt(entry, partial(self._check, entry))
            self._progress.step(f"check, {entry.case.label}, {_name(entry)}")
        for number in range(1, rounds + 1):
            self._progress.line(f"round {number} of {rounds}")
            for entry in self._order(number):
                self._attempt(entry, partial(self._sample, entry, number))
                self._progress.step(f"round {number}, {entry.case.label}, {_name(entry)}")
        self._progress.end()

    def _order(self, number: int) -> list[Entry]:
        """Another one for each round, the same in each run: nobody always follows the same one."""
        return random.Random(number).sample(self.entries, len(self.entries))  # noqa: S311 - no secret

    def _check(self, entry: Entry) -> None:
        took_s = self._runner(entry).check(entry.case, entry.subject.options)
        entry.count = entry.case.fitting_count(took_s)

    def _sample(self, entry: Entry, number: int) -> None:
        entry.samples.append(self._runner(entry).sample(entry.case, entry.subject.options, number, entry.count))

    def _runner(self, entry: Entry) -> Runner:
        return self._runners[entry.subject.program]

    def _attempt(self, entry: Entry, step: Callable[[], None]) -> None:
        """Does a step of a subject that is still in; one that fails is out, with all that share its processes."""
        if entry not in self.entries:
            return
        one = entry.subject
        try:
            step()
        except SubjectError as error:
            if one.is_ours:
                message = f"{_name(entry)}: {error}"
                raise SubjectError(message) from error
            for other in self.entries:
                if other.subject.program == one.program:
                    self.skipped[_name(other)] = reason(other.subject, error)
            self.entries = [other for other in self.entries if other.subject.program != one.program]


def _name(entry: Entry) -> str:
    return f"{entry.subject.name} {entry.subject.data_path}".rstrip()
