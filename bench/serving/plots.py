"""Pictures of the benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.plot import drawing, legend_beside, matplotlib, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.results import Findings, Row
    from bench.serving.faults import Faults
    from bench.serving.run import Cell, Timeline

_PANELS = {
    "itl_p99_ms": "p99 time between tokens (ITL), ms",
    "ttft_p99_ms": "p99 time to first token (TTFT), ms",
    "goodput": "goodput at the SLO, requests/s",
}
_LEAST_MS = 5.0  # of the axis of gaps
# One colour and marker for a subject in all pictures.
_STYLES = {
    "kvpipe": ("tab:red", "o"),
    "kvpipe-late": ("lightcoral", "v"),
    "kvpipe-queue": ("tab:orange", "P"),
    "single-2048": ("tab:cyan", "p"),
    "undivided-2048": ("tab:blue", "s"),
    "undivided-512": ("tab:green", "D"),
    "undivided-128": ("tab:purple", "^"),
    "nixl": ("tab:gray", "X"),
}


def draw_load(path: Path, found: Findings) -> None:
    """Draws p99 ITL, p99 TTFT and goodput against the rate; each point is the median of the rounds, with their range.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    drawn = drawing(13, 4.2)
    rows = [row for row in found.rows if row["phase"] == "load"]
    for axis, (name, title) in zip(drawn.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        for subject in dict.fromkeys(row["subject"] for row in rows):
            _line(axis, [row for row in rows if row["subject"] == subject and name in row["figures"]], name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("requests/s offered")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        if name == "goodput":
            rates = sorted({row["rate"] for row in rows})
            axis.plot([0, rates[-1]], [0, rates[-1]], color="black", linewidth=0.8, linestyle=":", label="all requests")
            axis.set_ylim(0, 1.05 * rates[-1])
        elif rows:
            _log(axis)
            _limit(axis, found, name)
    if rows:
        legend_beside(drawn.axes[-1])
    save(drawn, path, _title(found))


def _line(axis: Any, rows: Sequence[Row], name: str) -> None:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["rate"])
    color, marker = _STYLES[rows[0]["subject"]]
    rates = [row["rate"] for row in rows]
    width = 2.4 if rows[0]["subject"] == "kvpipe" else 1.4
    axis.plot(
        rates,
        [row["figures"][name] for row in rows],
        color=color,
        marker=marker,
        markersize=5,
        linewidth=width,
        label=rows[0]["subject"],
    )
    known = [[figures[name] for figures in row["rounds"] if name in figures] for row in rows]
    axis.fill_between(rates, list(map(min, known)), list(map(max, known)), color=color, alpha=0.12, linewidth=0)


def _log(axis: Any) -> None:
    """Makes the y axis logarithmic, with plain numbers at its ticks."""
    mpl, _ = matplotlib()
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(mpl.ticker.LogFormatter())
    axis.yaxis.set_minor_formatter(mpl.ticker.LogFormatter(minor_thresholds=(2, 0.5)))


def _limit(axis: Any, found: Findings, name: str) -> None:
    if slo := found.details["slo"]:
        limit = slo.itl_ms if name.startswith("itl") else slo.ttft_ms
        axis.axhline(limit, color="black", linewidth=0.8, linestyle="--", label="SLO")


def draw_timeline(path: Path, found: Findings) -> None:
    """Draws the gap before each token of a running stream while a long prompt arrives: a panel for each subject.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    timelines = found.details["timelines"]
    drawn = drawing(10, 1.7 * len(timelines) + 0.8)
    axes = drawn.subplots(len(timelines), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axis, timeline in zip(axes, timelines, strict=True):
        _gaps(axis, timeline)
    # All panels share this range; one panel's own would cut off the others' bars.
    longest_s = max(later - at for timeline in timelines for at, later in timeline.gaps)
    axes[0].set_ylim(_LEAST_MS, max(2 * _LEAST_MS, 1.5e3 * longest_s))
    axes[0].legend(fontsize=8, frameon=False, loc="upper right")
    axes[-1].set_xlabel("s from when a prompt of 2,048 tokens was sent to the same instance, or pair")
    save(drawn, path, f"ms before each token of a running stream. {_title(found)}")


def _gaps(axis: Any, timeline: Timeline) -> None:
    color, _ = _STYLES[timeline.subject]
    axis.vlines(
        [later for _, later in timeline.gaps], 1, [1e3 * (later - at) for at, later in timeline.gaps], color=color
    )
    axis.axvline(0, color="black", linewidth=0.9, linestyle=":", label="the prompt is sent")
    axis.axvline(timeline.first_s, color="black", linewidth=0.9, linestyle="--", label="its first token")
    _log(axis)
    axis.set_ylabel(timeline.subject, fontsize=8)
    axis.grid(alpha=0.3)


def draw_faults(path: Path, found: Findings, measured: Sequence[Cell]) -> None:
    """Draws when requests were due and how they ended, beside kills and leased blocks.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    faults = found.details["faults"]
    drawn = drawing(10, 6)
    ttft, gap, leased = drawn.subplots(3, 1, sharex=True)
    cells = [cell for cell in measured if cell.phase in ("load", "faults")]
    for cell in cells:
        label, color = ("with faults", "tab:red") if cell.phase == "faults" else ("without", "tab:blue")
        points = [
            (outcome.request.at_s, 1e3 * outcome.ttft_s) for outcome in cell.outcomes if outcome.ttft_s is not None
        ]
        _scatter(ttft, points, color, label)
        longest = [(outcome.request.at_s, 1e3 * max(outcome.gaps_s)) for outcome in cell.outcomes if outcome.gaps_s]
        _scatter(gap, longest, color, label)
    for name, samples in faults.leased.items():
        leased.step([at_s for at_s, _ in samples], [blocks for _, blocks in samples], label=name)
    for axis in (ttft, gap):
        _log(axis)
    for axis in (ttft, gap, leased):
        _shade(axis, faults, max(outcome.end_s for outcome in cells[-1].outcomes))
    for outcome in (outcome for cell in cells for outcome in cell.outcomes if outcome.error):
        ttft.axvline(outcome.request.at_s, color="black", linewidth=0.8, linestyle=":")
    ttft.set_ylabel("TTFT, ms; dotted: failed", fontsize=8)
    gap.set_ylabel("longest gap of a stream, ms", fontsize=8)
    leased.set_ylabel("leased blocks", fontsize=8)
    leased.set_xlabel("s; grey: an instance is down")
    for axis in (ttft, leased):
        legend_beside(axis)
    save(drawn, path, _title(found))


def _scatter(axis: Any, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    axis.scatter([at for at, _ in points], [value for _, value in points], s=14, color=color, label=label)


def _shade(axis: Any, faults: Faults, end_s: float) -> None:
    for fault in faults.faults:
        axis.axvspan(fault.killed_s, fault.back_s or end_s, color="lightgray", alpha=0.6, linewidth=0, zorder=0)


def _title(found: Findings) -> str:
    return "{cpu}, {num_cpus} CPUs, {dtype}, commit {commit}".format_map(found.facts)
