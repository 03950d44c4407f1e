"""Draws one handoff from its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.plot import drawing, save
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.trace import Event

_SPANS = {"computed": "tab:blue", "announced": "tab:orange", "arrived": "tab:green"}
_LABELS = {"computed": "P computes", "announced": "P hashes and announces", "arrived": "D reads and verifies"}
_BAR = 0.8 / len(_SPANS)
# Where both sides write an event, the first one counts: P opens before D receives that.
_MARKS = {"opened": ":", "admitted": "--", "sampled": "-", "loaded": "-.", "first step": (0, (1, 1))}
# Range of the second panel around the first token, in ms.
_BEFORE_MS, _AFTER_MS = 60.0, 10.0


def draw(path: Path, life: Sequence[Event], title: str) -> None:
    """Draws a PNG file: a row for each layer, bars for computing, announcing and reading, lines for other events.

    The upper panel shows the whole handoff, the lower one the time around P's first token.

    Raises:
        ConfigError: matplotlib is not installed, the file cannot be written, or no layer was computed.
    """
    zeros_s = [event.began_s for event in life if event.name == "computed"]
    if not zeros_s:
        message = "the trace has no layer of that handoff"
        raise ConfigError(message)
    marks = _marks(life, min(zeros_s))
    drawn = drawing(12, 8)
    for axis in drawn.subplots(2):
        _fill(axis, life, min(zeros_s), marks)
    whole, near = drawn.axes
    whole.set_title(title, fontsize=10)
    whole.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    if "sampled" in marks:
        near.set_xlim(marks["sampled"] - _BEFORE_MS, max(marks.values()) + _AFTER_MS)
    near.set_xlabel("ms from the beginning of the first layer")
    save(drawn, path)


def _fill(axis: Any, life: Sequence[Event], zero_s: float, marks: Mapping[str, float]) -> None:
    for row, (name, color) in enumerate(_SPANS.items()):
        _bars(axis, [event for event in life if event.name == name], row * _BAR, zero_s, color)
    for name, at_ms in marks.items():
        axis.axvline(at_ms, color="black", linewidth=0.9, linestyle=_MARKS[name], label=f"{name}: {at_ms:.1f} ms")
    axis.set_ylim(max(event.facts["layer"] for event in life if event.name in _SPANS) + 1, -0.2)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel("layer")


def _bars(axis: Any, events: Sequence[Event], below: float, zero_s: float, color: str) -> None:
    axis.barh(
        [event.facts["layer"] + below for event in events],
        [1e3 * (event.ended_s - event.began_s) for event in events],
        left=[1e3 * (event.began_s - zero_s) for event in events],
        height=[_BAR + event.facts.get("layers", 1) - 1 for event in events],
        align="edge",
        color=color,
        edgecolor=color,
        label=_LABELS[events[0].name] if events else None,
    )


def _marks(life: Sequence[Event], zero_s: float) -> dict[str, float]:
    firsts: dict[str, float] = {}
    for event in life:
        firsts.setdefault(event.name, 1e3 * (event.began_s - zero_s))
    return {name: firsts[name] for name in _MARKS if name in firsts}
