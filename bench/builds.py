"""This build of kvpipe beside another one, in the same rounds. No clock, no input, no output.

Processes of one subject are all of one build; the two builds never talk to each other.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from bench.results import Row
from bench.runner import Program, Subject
from bench.transports import labels_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.runner import Entry

OTHER = " (other build)"
# Where its memory lies makes a process faster or slower for as long as it lives: of two processes of one build one
# hashed its buffer 1.15 times as fast in the median of nine rounds.
ROUNDS_A_START = 3
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A median and its confidence interval of 95 %, from the order of the samples alone."""

    low: float
    median: float
    high: float


def beside(subjects: Iterable[Subject], python: str) -> list[Subject]:
    """The subjects, each that is kvpipe followed by itself as the interpreter of another environment runs it."""
    return [build for one in subjects for build in (one, _other(one, python)) if build]


def _other(one: Subject, python: str) -> Subject | None:
    if not (one.is_ours and isinstance(one.program, Program) and one.program.command[0] == sys.executable):
        return None
    program = replace(one.program, command=(python, *one.program.command[1:]))
    return replace(one, name=f"{one.name}{OTHER}", program=program)


def differences_of(entries: Sequence[Entry]) -> list[Row]:
    """A difference for each subject that both builds ran.

    Its figures are intervals. `speed` is the throughput of this build divided by the other's, round by round; of times,
    the other's by this one's. `cpu` is CPU seconds for each GiB of this build divided by the other's; `None` where they
    cannot be told.
    """
    named = {(entry.case, entry.subject.data_path, entry.subject.name): entry for entry in entries}
    pairs = [
        (entry, other)
        for (case, data_path, name), entry in named.items()
        if (other := named.get((case, data_path, f"{name}{OTHER}")))
    ]
    return [_difference(entry, other) for entry, other in pairs]


def _difference(entry: Entry, other: Entry) -> Row:
    rounds = list(zip(entry.samples, other.samples, strict=True))
    ratios = [ours.value / theirs.value for ours, theirs in rounds]
    cpus = [
        ours.cpu_s_per_gib / theirs.cpu_s_per_gib
        for ours, theirs in rounds
        if ours.cpu_s_per_gib is not None and theirs.cpu_s_per_gib
    ]
    speed = [1 / ratio for ratio in ratios] if entry.case.is_timed else ratios
    return Row(
        labels_of(entry.case, entry.subject.name, entry.subject.data_path),
        {"speed": interval(speed), "cpu": interval(cpus) if cpus else None},
    )


def interval(samples: Sequence[float]) -> Interval:
    """The median, and the narrowest pair of samples around it that holds the true median with 95 %.

    A sample lies below the true median with probability 1/2, so that the rank of each bound follows from the binomial
    distribution. With fewer than six samples the bounds are the smallest and the largest one.
    """
    ordered, num_samples = sorted(samples), len(samples)
    rank, outside = 0, 2 / 2**num_samples
    while outside + 2 * math.comb(num_samples, rank + 1) / 2**num_samples <= 1 - _CONFIDENCE:
        rank += 1
        outside += 2 * math.comb(num_samples, rank) / 2**num_samples
    return Interval(ordered[rank], median(ordered), ordered[-1 - rank])
