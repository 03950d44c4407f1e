"""The life of one handoff as a picture, from the trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpipe.bench.plot import matplotlib, save
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvpipe.bench.trace import Event

_SPANS = {"computed": "tab:blue", "announced": "tab:orange", "arrived": "tab:green"}
_LABELS = {"computed": "P computes", "announced": "P sums and announces", "arrived": "D reads and compares"}
_BAR = 0.8 / len(_SPANS)
# What both sides say is told of the first one: P opens before D hears of it.
_MARKS = ("opened", "admitted", "sampled", "loaded", "first step")


def draw(path: Path, life: Sequence[Event], title: str) -> None:
    """Draws into a PNG file: a row for each layer, bars for what is computed, announced and read, marks for the rest.

    Raises:
        ConfigError: matplotlib is not installed, the file cannot be written, or no layer was computed.
    """
    _, figure = matplotlib()
    layers = [event.facts["layer"] for event in life if event.name in _SPANS]
    if not layers:
        message = "the trace has no layer of that handoff"
        raise ConfigError(message)
    zero_s = min(event.began_s for event in life if event.name == "computed")
    drawing = figure.Figure(figsize=(11, 2.4 + 0.28 * max(layers)), layout="constrained")
    axis = drawing.subplots()
    for row, (name, color) in enumerate(_SPANS.items()):
        _bars(axis, [event for event in life if event.name == name], row * _BAR, zero_s, color)
    _marks(axis, life, zero_s)
    axis.set_ylim(max(layers) + 1, -0.2)
    axis.set_ylabel("layer")
    axis.set_xlabel("ms from the first layer's beginning")
    axis.set_title(title, fontsize=10, pad=52)
    axis.legend(fontsize=8, frameon=False, loc="lower left")
    save(drawing, path)


def _bars(axis: Any, events: Sequence[Event], below: float, zero_s: float, color: str) -> None:
    axis.barh(
        [event.facts["layer"] + below + _BAR / 2 for event in events],
        [1e3 * (event.ended_s - event.began_s) for event in events],
        left=[1e3 * (event.began_s - zero_s) for event in events],
        height=[_BAR + event.facts.get("layers", 1) - 1 for event in events],
        color=color,
        label=_LABELS[events[0].name] if events else None,
    )


def _marks(axis: Any, life: Sequence[Event], zero_s: float) -> None:
    firsts: dict[str, float] = {}
    for event in life:
        firsts.setdefault(event.name, event.began_s)
    for name in _MARKS:
        if name in firsts:
            at_ms = 1e3 * (firsts[name] - zero_s)
            axis.axvline(at_ms, color="dimgray", linewidth=0.8, linestyle=":")
            axis.annotate(
                f"{name} {at_ms:.1f}",
                (at_ms, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                rotation=40,
                fontsize=7,
            )
