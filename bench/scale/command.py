"""`kvpipe bench scale`: arguments and output."""

from __future__ import annotations

import random
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from bench import machine
from bench.options import refuse, require_at_least, require_folders
from bench.plot import require
from bench.processes import Process, SubjectError
from bench.progress import Progress
from bench.report import show
from bench.results import Findings
from bench.scale import results
from bench.scale.point import Point

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SUMMARY = "CPU of a round, a message, a load, a cancel and a connect beside many peers and loads; handoffs/s of control"
_LEAST_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--peers", default="1,16,256", metavar="LIST", help="numbers of peers; default 1,16,256")
    add("--loads", default="10,100,1000", metavar="LIST", help="numbers of handoffs under way; default 10,100,1000")
    add("--rate", type=int, default=10_000, metavar="N", help="handoffs/s offered to the control plane; default 10000")
    add("--rounds", type=int, default=_LEAST_ROUNDS, metavar="N", help="at least 5, default 5")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark.

    Raises:
        ConfigError: An argument is wrong.
        SubjectError: kvpipe could not be measured.
    """
    points = _points(args)
    if args.plot:
        require()
    facts = {**machine.machine(), "rounds": args.rounds, "handoffs_per_s": args.rate}
    rows = results.rows_of(_measure(points, args))
    found = Findings({**facts, "load_average_after": machine.load_average()}, rows)
    show(results.text(found), found, args.json)
    if args.plot:
        results.draw(args.plot, found)
    return 0


def _points(args: argparse.Namespace) -> list[Point]:
    peers, loads = (_numbers(name, getattr(args, name)) for name in ("peers", "loads"))
    require_at_least(_LEAST_ROUNDS, rounds=args.rounds)
    require_at_least(1, rate=args.rate)
    require_folders(args.json, args.plot)
    return [Point(num_peers, num_loads) for num_peers in peers for num_loads in loads]


def _numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        refuse(f"--{name}", text, "expected numbers over 0, separated by commas")
    return sorted({int(part) for part in parts})


def _measure(points: Sequence[Point], args: argparse.Namespace) -> dict[Point, list[dict[str, float]]]:
    """Samples of each point, one a round; each round has an order of its own."""
    samples: dict[Point, list[dict[str, float]]] = {point: [] for point in points}
    progress = Progress()
    progress.expect(args.rounds * len(points))
    for number in range(1, args.rounds + 1):
        progress.line(f"round {number} of {args.rounds}")
        for point in random.Random(number).sample(points, len(points)):  # noqa: S311 - no secret
            samples[point].append(_sample(point, args.rate))
            progress.step(f"round {number}, {point.label}")
    progress.end()
    return samples


def _sample(point: Point, handoffs_per_s: int) -> dict[str, float]:
    numbers = map(str, (point.num_peers, point.num_loads, handoffs_per_s))
    with closing(Process([sys.executable, "-m", "bench.scale", *numbers], {})) as process:
        try:
            answer = process.answer()
        except SubjectError as error:
            message = f"{point.label}: {error}"
            raise SubjectError(message) from error
    return {cost: float(value) for cost, value in answer.items()}
