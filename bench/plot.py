"""Plots: what they share, and that of transports and stores, a line for each subject over the sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.measure import UNITS, size_text
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.results import Row, Summary

_WIDTH, _HEIGHT = 8.0, 4.4  # inches of one panel
_THINGS = {
    "tensors": "a tensor",
    "latency": "a tensor",
    "blocks": "a block",
    "insert": "an entry",
    "wake": "an entry",
    "put": "a value",
    "get": "a value",
    "exists": "a key",
    "first ask": "the prompt's KV",
    "second ask": "the prompt's KV",
}
_TIMES = {
    "latency": "half a round trip",
    "wake": "until the waiting consumer has its entry",
    "exists": "one question",
    "first ask": "time to the first token",
    "second ask": "time to the first token",
}
_MARKERS = "osD^vPX*<>"
# The strong colours of tab20, then the pale ones
_SHADES = (*range(0, 20, 2), *range(1, 20, 2))


def require() -> None:
    """Fails before the measurement if there can be no plot.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    matplotlib()


def matplotlib() -> Any:
    """Imports matplotlib on demand.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
        from matplotlib import figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed; pip install 'kvpipe[bench]'"
        raise ConfigError(message) from error
    return mpl, figure


def drawing(width: float, height: float) -> Any:
    """Returns an empty figure of this size in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return matplotlib()[1].Figure(figsize=(width, height), layout="constrained")


def spread(axis: Any, places: Sequence[float], summaries: Sequence[Summary], **style: Any) -> None:
    """Draws a line through the medians, with the 10th to 90th percentile shaded."""
    (line,) = axis.plot(places, [summary.median for summary in summaries], markersize=5, **style)
    lows, highs = [summary.p10 for summary in summaries], [summary.p90 for summary in summaries]
    axis.fill_between(places, lows, highs, color=line.get_color(), alpha=0.12, linewidth=0)


def legend_beside(axis: Any) -> None:
    """Puts the legend beside the panel, so that no line is hidden."""
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def write(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draws the rows of transports and stores: panels for each kind and layout, a column for each data path.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    mpl, _ = matplotlib()
    data_paths = list(dict.fromkeys(row["data_path"] for row in rows if row["data_path"])) or [""]
    panels = list(dict.fromkeys((row["kind"], row["layout"]) for row in rows))
    drawn = drawing(_WIDTH * len(data_paths), _HEIGHT * len(panels))
    grid = drawn.subplots(len(panels), len(data_paths), squeeze=False)
    for axes, panel in zip(grid, panels, strict=True):
        names = dict.fromkeys(row["subject"] for row in rows if row["kind"] == panel[0])
        styles = {name: (mpl.colormaps["tab20"](_SHADES[i % 20]), _MARKERS[i % 10]) for i, name in enumerate(names)}
        for axis, data_path in zip(axes, data_paths, strict=True):
            here = [
                row for row in rows if (row["kind"], row["layout"]) == panel and row["data_path"] in (data_path, "")
            ]
            _draw(axis, panel[0], here, styles)
            over = data_path if any(row["data_path"] for row in here) else ""
            axis.set_title(", ".join(filter(None, [*panel, over])), fontsize=11)
    save(drawn, path, title)


def save(drawn: Any, path: Path, title: str = "") -> None:
    """Writes a figure with a title as SVG if the file is called so, else as PNG.

    Raises:
        ConfigError: The file cannot be written.
    """
    drawn.suptitle(title, fontsize=9, color="dimgray")
    try:
        drawn.savefig(path, format="svg" if path.suffix == ".svg" else "png", dpi=130)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise ConfigError(message) from error


def _draw(axis: Any, kind: str, rows: Sequence[Row], styles: Mapping[str, tuple[Any, str]]) -> None:
    for name, (color, marker) in styles.items():
        points = sorted((row for row in rows if row["subject"] == name), key=lambda row: int(row["bytes"]))
        width, order = (2.6, 3) if name.startswith("kvpipe") else (1.3, 2)
        style = {"color": color, "marker": marker, "linewidth": width, "zorder": order, "label": name}
        if points:
            spread(axis, [row["bytes"] for row in points], [row["value"] for row in points], **style)
    ticks = sorted({row["bytes"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [size_text(tick) for tick in ticks], rotation=30, ha="right", fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel(f"bytes of {_THINGS[kind]}")
    axis.set_ylabel(", ".join(filter(None, [_TIMES.get(kind), UNITS[kind]])))
    if kind == "latency":
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    legend_beside(axis)
