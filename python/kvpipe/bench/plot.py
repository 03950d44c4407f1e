"""The plot of a benchmark: one line for each contestant over the sizes, with the 10th to 90th percentile shaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpipe.bench.measure import size_text
from kvpipe.bench.results import UNITS
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvpipe.bench.results import Row

_WIDTH, _HEIGHT = 7.0, 4.6  # inches of one panel
_MARKERS = "osD^vPX*<>"


def require() -> None:
    """Says at once, not after minutes of measuring, that there can be no plot.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
        from matplotlib import figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed; pip install 'kvpipe[bench]'"
        raise ConfigError(message) from error
    return mpl, figure


def write(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draws a panel for each kind, layout and road into a PNG file.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    _, figure = _matplotlib()
    panels = _panels(rows)
    drawing = figure.Figure(figsize=(_WIDTH * len(panels), _HEIGHT), layout="constrained")
    axes = drawing.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, members) in zip(axes, panels.items(), strict=True):
        _draw(axis, name, members)
    drawing.suptitle(title, fontsize=9, color="dimgray")
    try:
        drawing.savefig(path, format="png", dpi=130)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise ConfigError(message) from error


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by panel; those without a road belong to all roads of their kind."""
    roads = list(dict.fromkeys(row.road for row in rows if row.road)) or [""]
    panels: dict[str, list[Row]] = {}
    for row in rows:
        for road in [row.road] if row.road else roads:
            words = [row.case.kind, row.case.layout, f"{road} road" if road else ""]
            panels.setdefault(", ".join(filter(None, words)), []).append(row)
    return panels


def _draw(axis: Any, name: str, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row.contestant for row in rows))
    for i, contestant in enumerate(names):
        points = sorted((row for row in rows if row.contestant == contestant), key=lambda row: row.case.num_bytes)
        sizes = [row.case.num_bytes for row in points]
        is_ours = contestant.startswith("kvpipe")
        (line,) = axis.plot(
            sizes,
            [row.value.median for row in points],
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=5,
            linewidth=2.4 if is_ours else 1.3,
            zorder=3 if is_ours else 2,
            label=contestant,
        )
        lows, highs = ([getattr(row.value, edge) for row in points] for edge in ("p10", "p90"))
        axis.fill_between(sizes, lows, highs, color=line.get_color(), alpha=0.12, linewidth=0)
    axis.set_title(name, fontsize=11)
    axis.set_xscale("log", base=2)
    ticks = sorted({row.case.num_bytes for row in rows})
    axis.set_xticks(ticks, [size_text(tick) for tick in ticks], rotation=30, ha="right", fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("bytes of a block" if rows[0].case.kind == "blocks" else "bytes of a tensor")
    unit = UNITS[rows[0].case.kind]
    axis.set_ylabel("half a round trip, us" if unit == "us" else unit)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)
