"""Findings of a benchmark: rows of figures, each with its spread. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Summary:
    """Summary of samples.

    Attributes:
        median: Median.
        p10: 10th percentile.
        p90: 90th percentile.
        largest: Largest sample.
        num_samples: Number of samples.
    """

    median: float
    p10: float
    p90: float
    largest: float
    num_samples: int


def summarize(samples: Sequence[float]) -> Summary:
    """Returns median, 10th and 90th percentile, with linear interpolation, and the largest sample.

    Raises:
        ConfigError: There are no samples.
    """
    if not samples:
        message = "no samples: nothing was measured"
        raise ConfigError(message)
    if len(samples) == 1:
        [only] = samples
        return Summary(only, only, only, only, 1)
    tenths = quantiles(samples, n=10, method="inclusive")
    return Summary(tenths[4], tenths[0], tenths[8], max(samples), len(samples))


def summarize_known(samples: Iterable[float | None]) -> Summary | None:
    """Summarizes the samples that are known; `None` if there are none."""
    known = [sample for sample in samples if sample is not None]
    return summarize(known) if known else None


def median_ratio(values: Iterable[float], others: Iterable[float]) -> float:
    """The median of the ratios of the rounds, which varies less than the ratio of the medians."""
    return median(value / other for value, other in zip(values, others, strict=True))


@dataclass(frozen=True)
class Row:
    """One line of a table, and one object in the JSON file: `row[name]` is a label or a figure.

    Attributes:
        labels: What was measured.
        figures: Summaries of the rounds, and numbers; `None` where one is unknown.
    """

    labels: Mapping[str, Any]
    figures: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.labels[name] if name in self.labels else self.figures[name]

    def __contains__(self, name: str) -> bool:
        return name in self.labels or name in self.figures


@dataclass(frozen=True)
class Findings:
    """Everything that a run measured.

    Attributes:
        facts: About the machine and the run.
        rows: Figures.
        skipped: Subjects that were left out, each with the reason.
        details: What else the JSON file has, by name.
    """

    facts: Mapping[str, Any]
    rows: Sequence[Row]
    skipped: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {"machine": self.facts, "skipped": self.skipped, "rows": self.rows, **self.details}
