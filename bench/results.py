"""Results of a benchmark and their ratios to a baseline. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.measure import Case, Summary, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.bounds import Bound
    from bench.builds import Difference
    from bench.runner import Sample, Subject


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


@dataclass(frozen=True)
class Row:
    """One line of the table, and one object in the JSON file.

    Attributes:
        case: What was measured.
        subject: Its name.
        data_path: `default`, `tcp`, or empty.
        transport: What carried the bytes, if the subject reports it.
        value: GB/s, or microseconds.
        cpu_s_per_gib: Seconds of CPU of both sides for each GiB; `None` where it cannot be told.
        ratio: Of `value` to the baseline's: the median of the ratios of the rounds.
        baseline: The name of that one.
    """

    case: Case
    subject: str
    data_path: str
    transport: str
    value: Summary
    cpu_s_per_gib: Summary | None
    ratio: float | None
    baseline: str | None

    def as_json(self) -> dict[str, Any]:
        """The row with plain types."""
        return {
            "kind": self.case.kind,
            "bytes": self.case.num_bytes,
            "num_blocks": self.case.num_blocks,
            "layout": self.case.layout,
            "subject": self.subject,
            "data_path": self.data_path,
            "transport": self.transport,
            "unit": self.case.unit,
            "value": asdict(self.value),
            "cpu_s_per_gib": asdict(self.cpu_s_per_gib) if self.cpu_s_per_gib else None,
            "ratio": self.ratio,
            "baseline": self.baseline,
        }


@dataclass(frozen=True)
class Findings:
    """Everything that a run measured.

    Attributes:
        facts: About the machine and the run.
        skipped: Subjects that were left out, each with the reason.
        rows: Figures.
        bounds: What checksums cost.
        differences: This build against another one; empty without one.
    """

    facts: Mapping[str, Any]
    skipped: Mapping[str, str]
    rows: Sequence[Row]
    bounds: Sequence[Bound]
    differences: Sequence[Difference] = ()

    def as_json(self) -> dict[str, Any]:
        """The findings with plain types."""
        return {
            "machine": dict(self.facts),
            "skipped": dict(self.skipped),
            "rows": [row.as_json() for row in self.rows],
            "bounds": [bound.as_json() for bound in self.bounds],
            "differences": [difference.as_json() for difference in self.differences],
        }


def rows_of(entries: Sequence[Entry], baselines: Sequence[str]) -> list[Row]:
    """Rows in the order of the cases. Each has a ratio to the first of `baselines` that ran its case and data path."""
    rows = []
    for entry in entries:
        base = _baseline(entry, entries, baselines)
        ratio = _ratio(entry, base) if base else None
        rows.append(
            Row(
                entry.case,
                entry.subject.name,
                entry.subject.data_path,
                entry.transport,
                summarize(entry.values),
                _cpu(entry.samples),
                ratio,
                base.subject.name if base else None,
            )
        )
    return rows


def _baseline(entry: Entry, entries: Sequence[Entry], baselines: Sequence[str]) -> Entry | None:
    beside = [other for other in entries if other.case == entry.case]
    fitting = [other for other in beside if other.subject.data_path in (entry.subject.data_path, "")]
    by_name: Mapping[str, Entry] = {other.subject.name: other for other in reversed(fitting)}
    return next((by_name[name] for name in baselines if name in by_name), None)


def _ratio(entry: Entry, base: Entry) -> float:
    return median(value / other for value, other in zip(entry.values, base.values, strict=True))


def _cpu(samples: Sequence[Sample]) -> Summary | None:
    known = [sample.cpu_s_per_gib for sample in samples if sample.cpu_s_per_gib is not None]
    return summarize(known) if known else None
