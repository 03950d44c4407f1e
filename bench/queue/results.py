"""The figures of the benchmark. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench.chaos import Counts
from bench.measure import Summary, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What is measured of either dispatch, by its unit.
UNITS = {"request": "ms", "token": "us", "rate": "requests/s", "CPU": "us"}
PARTS = ("direct proxy", "front", "workers", "broker")


@dataclass(frozen=True)
class Sample:
    """One round of one dispatch.

    Attributes:
        figures: By the names of `UNITS`.
        cpu_us: CPU of each process of `PARTS` for a request, at full load.
    """

    figures: Mapping[str, float]
    cpu_us: Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: A key of `UNITS`.
        direct: Of the proxy that dispatches directly.
        broker: Of dispatch through the broker.
        difference: Of the two in the same round.
    """

    name: str
    direct: Summary
    broker: Summary
    difference: Summary


@dataclass(frozen=True)
class Findings:
    """Everything that a run measured.

    Attributes:
        facts: About the machine and the run.
        rows: Figures.
        cpu_us: CPU of each process of `PARTS` for a request that it takes part in.
    """

    facts: Mapping[str, Any]
    rows: Sequence[Row]
    cpu_us: Mapping[str, Summary]

    def as_json(self) -> dict[str, Any]:
        """The findings with plain types."""
        return {
            "machine": dict(self.facts),
            "rows": [asdict(row) | {"unit": UNITS[row.name]} for row in self.rows],
            "cpu_us": {name: asdict(summary) for name, summary in self.cpu_us.items()},
        }


def findings_of(facts: Mapping[str, Any], direct: Sequence[Sample], broker: Sequence[Sample]) -> Findings:
    """Summarizes the rounds, of which both have the same number."""
    rows = []
    for name in UNITS:
        ours, theirs = ([sample.figures[name] for sample in samples] for samples in (broker, direct))
        differences = [one - other for one, other in zip(ours, theirs, strict=True)]
        rows.append(Row(name, summarize(theirs), summarize(ours), summarize(differences)))
    cpu_us = {
        name: summarize([sample.cpu_us[name] for sample in samples])
        for samples in (direct, broker)
        for name in PARTS
        if name in samples[0].cpu_us
    }
    return Findings(facts, rows, cpu_us)


@dataclass
class Survival(Counts):
    """What became of requests while processes were killed.

    Attributes:
        answered: Requests whose answer was complete, and the right one.
        lost: Requests whose answer never came, or not all of it.
        answered_twice: Requests of which a client got a part twice.
        too_large: Requests that are larger than the broker's messages, which got 413.
        front_end_killed: Requests whose front end was killed, which broke their connections; the client asked again.
        refused: Answers 503, after which the client asked again.
        front_kills: Front ends that were killed.
        worker_kills: Workers that were killed.
        broker_kills: How often the broker was killed.
        decoded: Answers that D's completed, those for nobody included.
        queues_left: Queues of front ends and workers that are still there after both have ended.
        messages_left: Messages that are in any queue then.
        kv_left: Handoffs that P's still have.
    """

    VIOLATIONS: ClassVar[Sequence[str]] = ("lost", "answered_twice", "queues_left", "messages_left", "kv_left")

    answered: int = 0
    lost: int = 0
    answered_twice: int = 0
    too_large: int = 0
    front_end_killed: int = 0
    refused: int = 0
    front_kills: int = 0
    worker_kills: int = 0
    broker_kills: int = 0
    decoded: int = 0
    queues_left: int = 0
    messages_left: int = 0
    kv_left: int = 0
