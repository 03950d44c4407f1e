"""Tables, JSON and plot of the benchmark."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.handoff.samples import PHASES, Row, Sample, Spread
from bench.plot import matplotlib, save
from bench.report import describe, number, table

if TYPE_CHECKING:
    from pathlib import Path

_NOTES = """\
first, second: ms from the client's request to the first and second token, median (largest); ratio: to the undivided
  instance, which has the machine to itself. kvpipe's first token is P's, sent early; NIXL's is D's.
hand-over: ms from P's scheduler learning its first token to the beginning of D's first forward pass with the KV, median
  (largest, largest/median); of it, medians: until D's scheduler has the request (asked), its worker begins to load
  (admitted), all KV has arrived (moved; kvpipe: verified), the forward pass (resumed). last block: until it arrived.
  Times of kvpipe are from its trace (KVPIPE_TRACE), those of NIXL from a subclass in the same hooks of vLLM.
D's CPU: per cent of one CPU, from the request to 200 ms before P's first token, all processes of D.
Prefill alone, to that: in each round, a prompt with a handoff over one without, on the same instance; the median.
CPU s/GiB: CPU of all processes of P and D for a request, less the undivided instance's, for each GiB of KV.
While a group is measured all others are stopped (SIGSTOP), because an idle worker with NIXL spins. A group has 0.5 s
after SIGCONT. A short request and 1.2 s precede each measured request, because vLLM's readers spin for a second.
NIXL runs without a proxy."""


@dataclass(frozen=True)
class Findings:
    """All results.

    Attributes:
        facts: Facts that the figures depend on.
        skipped: Groups that were left out, each with the reason.
        rows: Figures by subject and length.
        samples: The requests behind them.
        prefill_s: Seconds of prompts computed by prefill alone, by group.
        plain_s: The same without a handoff.
        prefill_tokens: Length of these prompts.
        idle: Share of a CPU in per cent, by idle worker.
    """

    facts: dict[str, Any]
    skipped: dict[str, str]
    rows: list[Row]
    samples: list[Sample]
    prefill_s: dict[str, list[float]]
    plain_s: dict[str, list[float]]
    prefill_tokens: int
    idle: dict[str, float]


def text(found: Findings) -> str:
    """The findings as text."""
    lengths = dict.fromkeys(row.num_tokens for row in found.rows)
    parts = [describe(found.facts), *(_table([row for row in found.rows if row.num_tokens == it]) for it in lengths)]
    if found.prefill_s:
        parts.append(_prefill(found))
    parts.append(_idle(found.idle))
    parts += [f"skipped: {name}: {reason}" for name, reason in found.skipped.items()]
    return "\n\n".join([*parts, _NOTES])


def _table(rows: list[Row]) -> str:
    header = [f"{rows[0].num_tokens} tokens", "first", "ratio", "second", "hand-over", *PHASES, "last block"]
    lines = [
        [
            row.subject,
            _spread(row.first_ms),
            f"{row.ratio:.2f}" if row.ratio else "",
            _spread(row.second_ms),
            _handover(row.exposed_ms),
            *([number(ms) for ms in row.phases_ms] or [""] * len(PHASES)),
            _spread(row.last_block_ms),
            _spread(row.decode_share),
            number(row.cpu_s_per_gib) if row.cpu_s_per_gib is not None else "",
            f"{row.num_full} of {row.num_handoffs}" if row.num_handoffs else "",
        ]
        for row in rows
    ]
    return table([*header, "D's CPU", "CPU s/GiB", "full"], lines)


def _spread(figures: Spread | None) -> str:
    return f"{number(figures.median)} ({number(figures.largest)})" if figures else ""


def _handover(figures: Spread | None) -> str:
    if figures is None:
        return ""
    ratio = figures.largest / figures.median if figures.median else 1.0
    return f"{number(figures.median)} ({number(figures.largest)}, {ratio:.1f}x)"


def _prefill(found: Findings) -> str:
    base = found.prefill_s.get("undivided")
    lines = []
    for name, seconds in found.prefill_s.items():
        change = median(seconds) / median(base) if base else None
        plain = found.plain_s.get(name)
        own = median(with_it / without for with_it, without in zip(seconds, plain, strict=True)) if plain else None
        lines.append([name, _ms(seconds), _per_cent(change), _ms(plain) if plain else "", _per_cent(own)])
    header = [f"prefill of {found.prefill_tokens} tokens alone", "ms, median (largest)", "to undivided"]
    return table([*header, "without a handoff", "to that"], lines)


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.0f} ({1e3 * max(seconds):.0f})"


def _per_cent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _idle(idle: dict[str, float]) -> str:
    return table(["idle worker", "% of a CPU"], [[name, f"{share:.2f}"] for name, share in idle.items()])


def as_json(found: Findings) -> str:
    """The findings as JSON."""
    return json.dumps(asdict(found), indent=2) + "\n"


def draw(path: Path, found: Findings) -> None:
    """Draws hand-over by phase and time to first token into a PNG file: a row for each length.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    _, figure = matplotlib()
    lengths = list(dict.fromkeys(row.num_tokens for row in found.rows))
    drawing = figure.Figure(figsize=(12, 3.2 * len(lengths)), layout="constrained")
    for (left, right), num_tokens in zip(drawing.subplots(len(lengths), 2, squeeze=False), lengths, strict=True):
        here = [row for row in found.rows if row.num_tokens == num_tokens]
        _draw_first(left, here, num_tokens)
        _draw_phases(right, [row for row in here if row.phases_ms])
    drawing.suptitle("{cpu}, {num_cpus} CPUs, {dtype}".format_map(found.facts), fontsize=9, color="dimgray")
    save(drawing, path)


def _draw_first(axis: Any, rows: list[Row], num_tokens: int) -> None:
    names = [row.subject for row in rows]
    axis.barh(names, [row.first_ms.median for row in rows], color="tab:blue")
    axis.plot([row.first_ms.largest for row in rows], names, "k|", markersize=9)
    axis.invert_yaxis()
    axis.set_xlabel(f"{num_tokens} tokens: ms to the first token, median; | largest")


def _draw_phases(axis: Any, rows: list[Row]) -> None:
    names, left = [row.subject for row in rows], [0.0] * len(rows)
    for index, phase in enumerate(PHASES):
        widths = [row.phases_ms[index] for row in rows]
        axis.barh(names, widths, left=left, label=phase)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("hand-over after P's first token, ms, medians of its phases")
    axis.legend(fontsize=8, frameon=False)
