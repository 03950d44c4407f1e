"""Tables and JSON of the benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.queue.results import UNITS
from bench.report import cell, describe, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.queue.results import Findings

_NOTES = """\
Median of the rounds, with the 10th and 90th percentile in brackets; difference: of the two in the same round.
request: median time of an answer that is not streamed, one request at a time. token: median time from D's write of a
  chunk to the client's read, {num_streams} streams with a token every {gap_ms} ms.
rate: with {at_once} requests at a time.
CPU: of all that dispatches, for a request at that rate: the proxy, or front end, workers and broker, as below it."""


def text(found: Findings, load: Mapping[str, int]) -> str:
    """The findings as text."""
    rows = [
        [f"{row.name}, {UNITS[row.name]}", cell(row.direct), cell(row.broker), cell(row.difference)]
        for row in found.rows
    ]
    cpu = [[name, cell(summary)] for name, summary in found.cpu_us.items()]
    tables = [table(["", "direct", "broker", "difference"], rows), table(["CPU, us", "a request"], cpu)]
    return "\n\n".join([describe(found.facts), *tables, _NOTES.format_map(load)])
