"""Runs contestants against each other: every round measures each case by all of them, one after the other."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import TYPE_CHECKING, Self

from kvpipe.bench.contestants import reason
from kvpipe.bench.processes import ContestantError
from kvpipe.bench.results import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpipe.bench.contest import Contestant, Field, Startable
    from kvpipe.bench.measure import Case
    from kvpipe.bench.progress import Progress


class Contest:
    """Contestants and the cases of one kind; a context manager that ends their processes.

    Attributes:
        entries: Samples, in the order of the cases, then of the contestants.
        skipped: Who does not take part (any more), and why.
        versions: Of the peers that do.
    """

    def __init__(self, contestants: Sequence[Contestant], cases: Sequence[Case], progress: Progress) -> None:
        self._progress = progress
        self._fields: dict[Startable, Field] = {}
        self.entries = [Entry(case, one) for case in cases for one in contestants if one.can(case)]
        self.skipped: dict[str, str] = {}
        self.versions: set[str] = set()

    @property
    def num_processes(self) -> int:
        """How many processes with a buffer of their own take part."""
        programs = {entry.contestant.program for entry in self.entries}
        return sum(len(getattr(program, "roles", ())) for program in programs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as closing:
            for opened in self._fields.values():
                closing.callback(opened.close)

    def start(self, words: Mapping[str, object]) -> None:
        """Starts all processes; `words` is what each is given.

        Raises:
            ContestantError: kvpipe itself failed, here and below. Others are left out, with the reason.
        """
        for entry in list(self.entries):
            self._attempt(entry, partial(self._open, entry, words))

    def _open(self, entry: Entry, words: Mapping[str, object]) -> None:
        program = entry.contestant.program
        if program not in self._fields:
            self._progress.line(f"starting {_name(entry)}")
            self._fields[program] = program.open(words)
        opened = self._fields[program]
        entry.transport = opened.transport
        self.versions |= {opened.version} - {""}

    def run(self, rounds: int) -> None:
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
        took_s = self._field(entry).check(entry.case, entry.contestant.options)
        entry.count = entry.case.fitting_count(took_s)

    def _sample(self, entry: Entry, number: int) -> None:
        entry.samples.append(self._field(entry).sample(entry.case, entry.contestant.options, number, entry.count))

    def _field(self, entry: Entry) -> Field:
        return self._fields[entry.contestant.program]

    def _attempt(self, entry: Entry, step: Callable[[], None]) -> None:
        """Does a step of a contestant that is still in; one that fails is out, with all that share its processes."""
        if entry not in self.entries:
            return
        one = entry.contestant
        try:
            step()
        except ContestantError as error:
            if one.is_ours:
                message = f"{_name(entry)}: {error}"
                raise ContestantError(message) from error
            for other in self.entries:
                if other.contestant.program == one.program:
                    self.skipped[_name(other)] = reason(other.contestant, error)
            self.entries = [other for other in self.entries if other.contestant.program != one.program]


def _name(entry: Entry) -> str:
    return f"{entry.contestant.name} {entry.contestant.road}".rstrip()
