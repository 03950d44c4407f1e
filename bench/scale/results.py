"""The figures of the benchmark, their growth from the least of its points, their tables and their plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.plot import drawing, save, spread
from bench.report import cell, ratio_text, table
from bench.report import text as text_of
from bench.results import Row, median_ratio, summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from bench.results import Findings
    from bench.scale.point import Point

_AGENT = dict.fromkeys(("round", "message", "load", "load_same_peer", "cancel", "connect", "loss"), "us")
_PORTS = dict.fromkeys(("producer", "consumer"), "us")
# What is measured, by its unit; the costs are CPU of the measured reactor
OPERATIONS = {**_AGENT, **_PORTS}
RATES = {"achieved": "handoffs/s", "p50": "ms", "p90": "ms", "p99": "ms"}
HELD = {"idle": "us/s", "descriptors": "", "threads": "", "awaited": ""}
UNITS = {**OPERATIONS, **RATES, **HELD}
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


def rows_of(samples: Mapping[Point, Sequence[Mapping[str, float]]]) -> list[Row]:
    """Rows of the samples of each point, one a round: their `value`, and for an operation its `growth`.

    The first point is what others are compared with: the growth is the median of the ratios of the rounds.
    """
    least = next(iter(samples.values()))
    return [
        Row(
            {"cost": cost, "unit": UNITS[cost], "peers": point.num_peers, "loads": point.num_loads},
            {"value": summarize([one[cost] for one in rounds]), "growth": _growth(cost, rounds, least)},
        )
        for cost in UNITS
        for point, rounds in samples.items()
    ]


def _growth(cost: str, rounds: Sequence[Mapping[str, float]], least: Sequence[Mapping[str, float]]) -> float | None:
    if cost not in OPERATIONS:
        return None
    return median_ratio([one[cost] for one in rounds], [first[cost] for first in least])


def text(found: Findings) -> str:
    """The findings as text."""
    tables = [
        _table(found.rows, OPERATIONS, lambda row: cell(row["value"]), "us"),
        _table(found.rows, OPERATIONS, lambda row: ratio_text(row["growth"]), "growth"),
        _table(found.rows, RATES, lambda row: cell(row["value"]), "control"),
        _table(found.rows, HELD, lambda row: cell(row["value"]), "held"),
    ]
    return text_of(found, tables, _NOTES)


def _table(rows: Sequence[Row], costs: Iterable[str], shown: Callable[[Row], str], title: str) -> str:
    found = {(row["peers"], row["loads"], row["cost"]): row for row in rows}
    points = dict.fromkeys((row["peers"], row["loads"]) for row in rows)
    header = [title, *(f"{cost}, {UNITS[cost]}" if UNITS[cost] and cost not in OPERATIONS else cost for cost in costs)]
    lines = [[f"{peers} x {loads}", *(shown(found[peers, loads, cost]) for cost in costs)] for peers, loads in points]
    return table(header, lines)


def draw(path: Path, found: Findings) -> None:
    """Draws each operation's cost over the number of loads into a PNG file: a line for each number of peers.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    num_rows = -(-len(OPERATIONS) // _PANELS_A_ROW)
    drawn = drawing(_WIDTH * _PANELS_A_ROW, _HEIGHT * num_rows)
    panels = drawn.subplots(num_rows, _PANELS_A_ROW, squeeze=False).flat
    for axis, cost in zip(panels, OPERATIONS, strict=False):
        _draw_cost(axis, cost, [row for row in found.rows if row["cost"] == cost])
    save(drawn, path, "{cpu}, {num_cpus} CPUs".format_map(found.facts))


def _draw_cost(axis: Any, cost: str, rows: Sequence[Row]) -> None:
    for num_peers in dict.fromkeys(row["peers"] for row in rows):
        line = [row for row in rows if row["peers"] == num_peers]
        places, costs = [row["loads"] for row in line], [row["value"] for row in line]
        spread(axis, places, costs, marker="o", label=f"{num_peers} peers")
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_title(cost, fontsize=9)
    axis.set_xlabel("loads under way", fontsize=8)
    axis.set_ylabel("us of CPU", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
