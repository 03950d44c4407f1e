"""Tables and plot of the benchmark."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from bench.handoff.samples import PHASES
from bench.plot import drawing, save
from bench.report import number, ratio_text, table
from bench.report import text as text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.results import Findings, Row, Summary

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


def text(found: Findings) -> str:
    """The findings as text."""
    lengths = dict.fromkeys(row["num_tokens"] for row in found.rows)
    tables = [_table([row for row in found.rows if row["num_tokens"] == length]) for length in lengths]
    if found.details["prefill_s"]:
        tables.append(_prefill(found.details))
    idle = [[name, f"{share:.2f}"] for name, share in found.details["idle"].items()]
    return text_of(found, [*tables, table(["idle worker", "% of a CPU"], idle)], _NOTES)


def _table(rows: Sequence[Row]) -> str:
    header = [f"{rows[0]['num_tokens']} tokens", "first", "ratio", "second", "hand-over", *PHASES, "last block"]
    lines = [
        [
            row["subject"],
            _largest(row["first_ms"]),
            ratio_text(row["ratio"]),
            _largest(row["second_ms"]),
            _handover(row["exposed_ms"]),
            *([number(ms) for ms in row["phases_ms"]] or [""] * len(PHASES)),
            _largest(row["last_block_ms"]),
            _largest(row["decode_share"]),
            "" if row["cpu_s_per_gib"] is None else number(row["cpu_s_per_gib"]),
            f"{row['num_full']} of {row['num_handoffs']}" if row["num_handoffs"] else "",
        ]
        for row in rows
    ]
    return table([*header, "D's CPU", "CPU s/GiB", "full"], lines)


def _largest(summary: Summary | None) -> str:
    return f"{number(summary.median)} ({number(summary.largest)})" if summary else ""


def _handover(summary: Summary | None) -> str:
    if summary is None:
        return ""
    times = summary.largest / summary.median if summary.median else 1.0
    return f"{number(summary.median)} ({number(summary.largest)}, {times:.1f}x)"


def _prefill(details: Mapping[str, Any]) -> str:
    base = details["prefill_s"].get("undivided")
    lines = []
    for name, seconds in details["prefill_s"].items():
        change = median(seconds) / median(base) if base else None
        plain = details["plain_s"].get(name)
        own = median(with_it / without for with_it, without in zip(seconds, plain, strict=True)) if plain else None
        lines.append([name, _ms(seconds), _per_cent(change), _ms(plain) if plain else "", _per_cent(own)])
    header = [f"prefill of {details['prefill_tokens']} tokens alone", "ms, median (largest)", "to undivided"]
    return table([*header, "without a handoff", "to that"], lines)


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.0f} ({1e3 * max(seconds):.0f})"


def _per_cent(change: float | None) -> str:
    return "" if change is None else f"{100 * (change - 1):+.1f} %"


def draw(path: Path, found: Findings) -> None:
    """Draws hand-over by phase and time to first token into a PNG file: a row for each length.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    lengths = list(dict.fromkeys(row["num_tokens"] for row in found.rows))
    drawn = drawing(12, 3.2 * len(lengths))
    for (left, right), num_tokens in zip(drawn.subplots(len(lengths), 2, squeeze=False), lengths, strict=True):
        here = [row for row in found.rows if row["num_tokens"] == num_tokens]
        _draw_first(left, here, num_tokens)
        _draw_phases(right, [row for row in here if row["phases_ms"]])
    save(drawn, path, "{cpu}, {num_cpus} CPUs, {dtype}".format_map(found.facts))


def _draw_first(axis: Any, rows: Sequence[Row], num_tokens: int) -> None:
    names = [row["subject"] for row in rows]
    axis.barh(names, [row["first_ms"].median for row in rows], color="tab:blue")
    axis.plot([row["first_ms"].largest for row in rows], names, "k|", markersize=9)
    axis.invert_yaxis()
    axis.set_xlabel(f"{num_tokens} tokens: ms to the first token, median; | largest")


def _draw_phases(axis: Any, rows: Sequence[Row]) -> None:
    names, left = [row["subject"] for row in rows], [0.0] * len(rows)
    for index, phase in enumerate(PHASES):
        widths = [row["phases_ms"][index] for row in rows]
        axis.barh(names, widths, left=left, label=phase)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("hand-over after P's first token, ms, medians of its phases")
    axis.legend(fontsize=8, frameon=False)
