"""Runs subjects side by side: every round measures each case with all subjects, one after the other."""

from __future__ import annotations

import contextlib
import math
import random
from functools import partial
from typing import TYPE_CHECKING, Self

from bench.processes import SubjectError
from bench.runner import Entry
from bench.subjects import reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.measure import Case
    from bench.progress import Progress
    from bench.runner import Runner, Startable, Subject


class Run:
    """A run of subjects over the cases of one kind; a context manager that ends their processes.

    Attributes:
        entries: Samples, in the order of the cases, then of the subjects.
        skipped: Subjects that were left out, each with the reason.
        versions: Versions of the libraries that take part.
    """

    def __init__(self, subjects: Sequence[Subject], cases: Sequence[Case], progress: Progress) -> None:
        self._progress = progress
        self._runners: dict[Startable, Runner] = {}
        wanted = [Entry(case, one) for case in cases for one in subjects if one.can(case)]
        self.entries = [entry for entry in wanted if not entry.subject.missing]
        self.skipped = {_name(entry): entry.subject.missing for entry in wanted if entry.subject.missing}
        self.versions: set[str] = set()
        self._words: Mapping[str, object] = {}
        self._num_starts = 0

    @property
    def num_processes(self) -> int:
        """Number of processes that have a buffer."""
        programs = {entry.subject.program for entry in self.entries}
        return sum(len(getattr(program, "roles", ())) for program in programs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        runners, self._runners = self._runners, {}
        with contextlib.ExitStack() as closing:
            for opened in runners.values():
                closing.callback(opened.close)

    def start(self, words: Mapping[str, object]) -> None:
        """Starts all processes with the words of `words`, each time in another order: who is first gets other memory.

        Raises:
            SubjectError: kvpipe itself failed, here and below. Other subjects that fail are left out.
        """
        self._words = words
        self._num_starts += 1
        for entry in self._order(f"start {self._num_starts}"):
            self._attempt(entry, partial(self._open, entry))

    def _open(self, entry: Entry) -> None:
        program = entry.subject.program
        if program not in self._runners:
            self._progress.line(f"starting {_name(entry)}")
            self._runners[program] = program.open(self._words)
        opened = self._runners[program]
        entry.transport = opened.transport
        self.versions |= {opened.version} - {""}

    def measure(self, rounds: int, restart_every: int | None = None) -> None:
        """Verifies what each subject moves, then measures.

        Args:
            rounds: Samples of each entry.
            restart_every: Rounds after which all processes are started anew and verify again; `None`: never.
        """
        every = restart_every or rounds
        num_starts = math.ceil(rounds / every)
        self._progress.expect((rounds + num_starts) * len(self.entries))
        for number in range(1, rounds + 1):
            if (number - 1) % every == 0:
                if number > 1:
                    self._close()
                    self.start(self._words)
                self._verify()
            self._progress.line(f"round {number} of {rounds}")
            for entry in self._order(number):
                self._attempt(entry, partial(self._sample, entry, number))
                self._progress.step(f"round {number}, {entry.case.label}, {_name(entry)}")
        self._progress.end()

    def _verify(self) -> None:
        self._progress.line("verifying what each subject moves")
        for entry in list(self.entries):
            self._attempt(entry, partial(self._check, entry))
            self._progress.step(f"check, {entry.case.label}, {_name(entry)}")

    def _order(self, seed: int | str) -> list[Entry]:
        """A different order for each seed, the same in each run, so that no subject always follows the same one."""
        return random.Random(seed).sample(self.entries, len(self.entries))  # noqa: S311 - no secret

    def _check(self, entry: Entry) -> None:
        took_s = self._runner(entry).check(entry.case, entry.subject.options)
        entry.count = entry.case.fitting_count(took_s)

    def _sample(self, entry: Entry, number: int) -> None:
        entry.samples.append(self._runner(entry).sample(entry.case, entry.subject.options, number, entry.count))

    def _runner(self, entry: Entry) -> Runner:
        return self._runners[entry.subject.program]

    def _attempt(self, entry: Entry, step: Callable[[], None]) -> None:
        """Runs a step of a subject. A failure leaves out the subject, and all that share its processes."""
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
