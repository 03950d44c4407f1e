"""Where the time of one read goes: `python -m bench.bench_read`, on a GPU with `--device cuda:0`.

Two processes hand blocks over with a trace, one load at a time. Each load is divided into messages between the
processes, work of the host's threads, and the device or kernel that moves the bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from bench import machine, measure, plot, subjects, trace
from bench.measure import Case, parse_blocks
from bench.programs.handoff_blocks import round_and_blocks
from bench.report import cell, markdown
from bench.results import summarize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.trace import Event

# Steps of a load in their order, and who is at work. Messages of the producer announce blocks, and at the end say
# whether they were still lent.
STEPS = {
    "announced": "wire",
    "turn": "host",
    "posted": "host",
    "moved": "device",
    "reported": "host",
    "compared": "host",
    "granted": "wire",
}
# Steps of a read. Where several reads of a load overlap, the first of these counts.
OF_A_READ = ("compared", "posted", "reported", "moved", "turn")
LAYOUTS = ("contiguous", "scattered")
# Of loads, by the label of their case and their integrity: the microseconds of each step.
Loads = dict[tuple[str, str], list[dict[str, float]]]
_COLORS = {"wire": "tab:orange", "host": "tab:blue", "device": "tab:green"}
_HATCHES = ("", "//", "..", "", "xx", "\\\\", "--")


def steps_us(life: Sequence[Event]) -> dict[str, float]:
    """Microseconds of each step of a load, which add up to all of it; none if the trace lacks its beginning or end."""
    at_s = {event.name: event.began_s for event in life if event.name in ("load", "loaded")}
    spans = [event for event in life if event.name in OF_A_READ]
    if len(at_s) != 2 or not spans:  # noqa: PLR2004 - both
        return {}
    last_s = max(span.ended_s for span in spans)
    found = dict.fromkeys(STEPS, 0.0)
    times = sorted({*at_s.values(), *(span.began_s for span in spans), *(span.ended_s for span in spans)})
    for began_s, ended_s in pairwise(times):
        running = {span.name for span in spans if span.began_s <= began_s and span.ended_s >= ended_s}
        between = "granted" if began_s >= last_s else "announced"
        found[next((name for name in OF_A_READ if name in running), between)] += 1e6 * (ended_s - began_s)
    return found


def measured(cases: Sequence[Case], integrity: str, options: argparse.Namespace, total: int) -> Loads:
    """Runs rounds of loads of all cases, the first of which is verified and not counted."""
    sizes = ",".join(str(size) for size in dict.fromkeys(case.num_bytes for case in cases))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        setup = (("device", options.device), ("sizes", sizes), ("integrity", integrity), ("trace", str(file)))
        group = subjects.ours("handoff_blocks", setup).open({"total": total})
        try:
            for case in cases:
                group.check(case, ())
                for number in range(1, options.rounds + 1):
                    group.sample(case, (), number, case.count)
        finally:
            group.close()
        lives = trace.by_handoff(trace.read(file))
    labels = {(case.num_bytes, case.num_blocks, case.layout == LAYOUTS[1]): case.label for case in cases}
    found: Loads = defaultdict(list)
    for handoff, life in lives.items():
        number, blocks = round_and_blocks(handoff)
        if number > 0 and (load := steps_us(life)):
            found[labels[blocks], integrity].append(load)
    return found


def table(found: Loads) -> str:
    """Microseconds of each step, a row for each case."""
    rows = []
    for (label, integrity), loads in found.items():
        sums = [sum(load.values()) for load in loads]
        cells = [cell(summarize([load[name] for load in loads])) for name in STEPS]
        rows.append([label, integrity, *cells, cell(summarize(sums)), str(len(loads))])
    steps = [f"{name} ({place})" for name, place in STEPS.items()]
    return markdown(["blocks", "integrity", *steps, "all", "loads"], rows)


def draw(path: Path, found: Loads, title: str) -> None:
    """Draws the median of each step behind that of the step before, a bar for each case."""
    drawn = plot.drawing(11, 1.2 + 0.6 * len(found))
    axis = drawn.subplots()
    for row, loads in enumerate(found.values()):
        left = 0.0
        for (name, place), hatch in zip(STEPS.items(), _HATCHES, strict=True):
            width = summarize([load[name] for load in loads]).median
            label = f"{name} ({place})" if row == 0 else None
            axis.barh(row, width, left=left, color=_COLORS[place], hatch=hatch, edgecolor="white", label=label)
            left += width
    axis.set_yticks(range(len(found)), [f"{label}\n{integrity}" for label, integrity in found], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("µs since D began to load")
    plot.legend_beside(axis)
    plot.save(drawn, path, title)


def main() -> None:
    """Prints a table, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="of both processes' blocks, such as cuda:0; default cpu")
    parser.add_argument("--blocks", default="4Kx8192,64Kx1024", help="default 4Kx8192,64Kx1024")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")
    options = parser.parse_args()
    if options.device != "cpu":
        subjects.require_gpu(options.device)
    if options.plot:
        plot.require()
    shapes = parse_blocks(options.blocks)
    cases = [Case("blocks", size, number, layout) for size, number in shapes for layout in LAYOUTS]
    total = measure.working_set_bytes(machine.cache_bytes() or 0, cases)
    facts = machine.machine()
    found: Loads = {}
    for integrity in ("validate", "checksum"):
        found |= measured(cases, integrity, options, total)
    title = f"one read of a handoff, {options.device}, medians; {facts['cpu']}"
    print(f"µs, medians (p10-p90); load average {facts['load_average']} before, {machine.load_average()} after\n")
    print(table(found))
    if options.plot:
        draw(options.plot, found, title)
    if options.json:
        rows = [
            {"blocks": label, "integrity": integrity, "loads_us": loads} for (label, integrity), loads in found.items()
        ]
        options.json.write_text(json.dumps({**facts, "device": options.device, "reads": rows}, indent=1))


if __name__ == "__main__":
    main()
