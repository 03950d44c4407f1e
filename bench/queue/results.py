"""The figures of the benchmark, and their tables. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench.chaos import Counts
from bench.report import cell, table
from bench.report import text as text_of
from bench.results import Findings, Row, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What is measured of either dispatch, by its unit.
UNITS = {"request": "ms", "token": "us", "rate": "requests/s", "CPU": "us"}
PARTS = ("direct proxy", "front", "workers", "broker")
_NOTES = """\
Median of the rounds, with the 10th and 90th percentile in brackets; difference: of the two in the same round.
request: median time of an answer that is not streamed, one request at a time. token: median time from D's write of a
  chunk to the client's read, {num_streams} streams with a token every {gap_ms} ms.
rate: with {at_once} requests at a time.
CPU: of all that dispatches, for a request at that rate: the proxy, or front end, workers and broker, as below it."""


@dataclass(frozen=True)
class Sample:
    """One round of one dispatch.

    Attributes:
        figures: By the names of `UNITS`.
        cpu_us: CPU of each process of `PARTS` for a request, at full load.
    """

    figures: Mapping[str, float]
    cpu_us: Mapping[str, float]


def findings_of(facts: Mapping[str, Any], direct: Sequence[Sample], broker: Sequence[Sample]) -> Findings:
    """Summarizes the rounds, of which both have the same number.

    A row has the figures of `direct` dispatch, of dispatch through the `broker`, and their `difference` in a round. The
    details have the CPU of each process of `PARTS` for a request that it takes part in.
    """
    rows = []
    for name, unit in UNITS.items():
        ours, theirs = ([sample.figures[name] for sample in samples] for samples in (broker, direct))
        differences = [one - other for one, other in zip(ours, theirs, strict=True)]
        values = {"direct": theirs, "broker": ours, "difference": differences}
        rows.append(Row({"name": name, "unit": unit}, {key: summarize(each) for key, each in values.items()}))
    cpu_us = {
        name: summarize([sample.cpu_us[name] for sample in samples])
        for samples in (direct, broker)
        for name in PARTS
        if name in samples[0].cpu_us
    }
    return Findings(facts, rows, details={"cpu_us": cpu_us})


def text(found: Findings, load: Mapping[str, int]) -> str:
    """The findings as text."""
    ways = ("direct", "broker", "difference")
    rows = [[f"{row['name']}, {row['unit']}", *(cell(row[way]) for way in ways)] for row in found.rows]
    cpu = [[name, cell(summary)] for name, summary in found.details["cpu_us"].items()]
    return text_of(found, [table(["", *ways], rows), table(["CPU, us", "a request"], cpu)], _NOTES.format_map(load))


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
