"""Tables, JSON and plot of the benchmark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bench.plot import matplotlib, save
from bench.report import cell, describe, table
from bench.scale.results import HELD, OPERATIONS, RATES, UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from typing import Any

    from bench.scale.results import Findings, Row

_NOTES = """\
Beside so many peers and so many handoffs under way (peers x loads). Median of the rounds, with the 10th and 90th
percentile in brackets. us: CPU of the measured reactor's thread alone, of each round's operations the lower quartile.
round: a command that changes nothing. message: a notification of a peer. load: from the request to its last verified
  block, of 2 blocks in 4 regions, each from another peer. load_same_peer: all from one, whose state stays in the caches
  of the CPU. cancel: of a load with half of its blocks. connect, loss: of a peer.
producer, consumer: CPU of the two control ports for one handoff at the rate offered: watched, opened, finished,
  acknowledged. p50, p90, p99: from when a handoff is offered until its producer may free the blocks, seen every 0.1 ms.
growth: to the first point, the median of the ratios of the rounds.
idle: CPU for each second without operations. descriptors, threads: of the measured agent. awaited: descriptors that
  100 operations take while asyncio waits for them."""
_PANELS_A_ROW, _WIDTH, _HEIGHT = 3, 3.4, 2.8


def text(found: Findings) -> str:
    """The findings as text."""
    parts = [
        _table(found.rows, OPERATIONS, lambda row: cell(row.value), "us"),
        _table(found.rows, OPERATIONS, lambda row: f"{row.growth:.2f}", "growth"),
        _table(found.rows, RATES, lambda row: cell(row.value), "control"),
        _table(found.rows, HELD, lambda row: cell(row.value), "held"),
    ]
    return "\n\n".join([describe(found.facts), *parts, _NOTES])


def _table(rows: Sequence[Row], costs: Iterable[str], shown: Any, title: str) -> str:
    found = {(row.point, row.cost): row for row in rows}
    points = dict.fromkeys(row.point for row in rows)
    header = [title, *(f"{cost}, {UNITS[cost]}" if UNITS[cost] and cost not in OPERATIONS else cost for cost in costs)]
    lines = [[point.label, *(shown(found[point, cost]) for cost in costs)] for point in points]
    return table(header, lines)


def as_json(found: Findings) -> str:
    """The findings as JSON."""
    return json.dumps(found.as_json(), indent=2) + "\n"


def draw(path: Path, found: Findings) -> None:
    """Draws each operation's cost over the number of loads into a PNG file: a line for each number of peers.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    _, figure = matplotlib()
    num_rows = -(-len(OPERATIONS) // _PANELS_A_ROW)
    drawing = figure.Figure(figsize=(_WIDTH * _PANELS_A_ROW, _HEIGHT * num_rows), layout="constrained")
    panels = drawing.subplots(num_rows, _PANELS_A_ROW, squeeze=False).flat
    for axis, cost in zip(panels, OPERATIONS, strict=False):
        _draw_cost(axis, cost, [row for row in found.rows if row.cost == cost])
    drawing.suptitle("{cpu}, {num_cpus} CPUs".format_map(found.facts), fontsize=9, color="dimgray")
    save(drawing, path)


def _draw_cost(axis: Any, cost: str, rows: Sequence[Row]) -> None:
    for num_peers in dict.fromkeys(row.point.num_peers for row in rows):
        line = [row for row in rows if row.point.num_peers == num_peers]
        numbers = [row.point.num_loads for row in line]
        axis.plot(numbers, [row.value.median for row in line], "o-", markersize=4, label=f"{num_peers} peers")
        axis.fill_between(numbers, [row.value.p10 for row in line], [row.value.p90 for row in line], alpha=0.15)
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_title(cost, fontsize=9)
    axis.set_xlabel("loads under way", fontsize=8)
    axis.set_ylabel("us of CPU", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
