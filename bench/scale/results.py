"""The figures of the benchmark, and their growth from the least of its points. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.measure import Summary, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.scale.point import Point

_AGENT = dict.fromkeys(("round", "message", "load", "load_same_peer", "cancel", "connect", "loss"), "us")
_PORTS = dict.fromkeys(("producer", "consumer"), "us")
# What is measured, by its unit; the costs are CPU of the measured reactor
OPERATIONS = {**_AGENT, **_PORTS}
RATES = {"achieved": "handoffs/s", "p50": "ms", "p90": "ms", "p99": "ms"}
HELD = {"idle": "us/s", "descriptors": "", "threads": "", "awaited": ""}
UNITS = {**OPERATIONS, **RATES, **HELD}


@dataclass(frozen=True)
class Row:
    """One figure of one point.

    Attributes:
        cost: What was measured, a key of `UNITS`.
        point: Beside what.
        value: Of the rounds.
        growth: For an operation: to the first point, the median of the ratios of the rounds.
    """

    cost: str
    point: Point
    value: Summary
    growth: float | None

    def as_json(self) -> dict[str, Any]:
        """The row with plain types."""
        return {
            "cost": self.cost,
            "unit": UNITS[self.cost],
            "peers": self.point.num_peers,
            "loads": self.point.num_loads,
            "value": asdict(self.value),
            "growth": self.growth,
        }


@dataclass(frozen=True)
class Findings:
    """Everything that a run measured."""

    facts: Mapping[str, Any]
    rows: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        """The findings with plain types."""
        return {"machine": dict(self.facts), "rows": [row.as_json() for row in self.rows]}


def rows_of(samples: Mapping[Point, Sequence[Mapping[str, float]]]) -> list[Row]:
    """Rows of the samples of each point, one a round. The first point is what others are compared with."""
    least = next(iter(samples.values()))
    return [
        Row(cost, point, summarize([one[cost] for one in rounds]), _growth(cost, rounds, least))
        for cost in UNITS
        for point, rounds in samples.items()
    ]


def _growth(cost: str, rounds: Sequence[Mapping[str, float]], least: Sequence[Mapping[str, float]]) -> float | None:
    if cost not in OPERATIONS:
        return None
    return median(one[cost] / first[cost] for one, first in zip(rounds, least, strict=True))
