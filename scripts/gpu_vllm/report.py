"""The table and the picture of a check; every figure names the commit of the transport."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TABLE, PICTURE = "table.txt", "figures.png"
# P's token to D's first step, of the 1B shape.
REACH_TOKENS, REACH_HANDOVER_MS = 2048, 15.0
# Of each way to answer, in every panel.
_COLOURS = {"undivided": "tab:blue", "just-in-time": "tab:orange", "sequential": "tab:green"}


def write(result: Mapping[str, Any], out: Path) -> list[str]:
    """Writes the table and the picture into a folder; returns the lines of the table."""
    lines = table(result)
    (out / TABLE).write_text("\n".join(lines) + "\n")
    try:
        picture(result).savefig(out / PICTURE, dpi=130)
    except Exception as error:  # noqa: BLE001 - the table has all of it
        lines.append(f"no picture: {type(error).__name__}: {error}")
    return lines


def title(facts: Mapping[str, Any]) -> str:
    """The card, the versions and the commit."""
    names = ("device", "driver", "vllm", "torch", "ucx", "seconds")
    known = [f"{name} {facts[name]}" for name in names if facts.get(name)]
    return ", ".join([f"kvpipe at {facts.get('commit', 'an unknown commit')}", *known])


def table(result: Mapping[str, Any]) -> list[str]:
    """A row for each step, then the figures of the 1B shape, and its reach."""
    lines = [f"{result['date']}: {title(result['facts'])}"]
    for name, step in result["steps"].items():
        lines.append(f"{name:22} {step['outcome']:10} {step['seconds']:6.1f} s  {facts_of(step)}")
        wrongs = [*step.get("wrong", []), *step.get("error", "").splitlines()[-2:]]
        lines += [f"    {wrong}"[:300] for wrong in wrongs if wrong]
    for name, step in result["steps"].items():
        if name.startswith("shape"):
            lines += _figures(name, step)
    return lines


def facts_of(step: Mapping[str, Any]) -> str:
    """How a step's answers and handoffs were."""
    found = [f"start {step['start_s']} s"] if "start_s" in step else []
    if "equal_tokens" in step:
        kind = f"V2 {step['is_v2']}, asynchronous {step['is_asynchronous']}, {step['backend']}"
        found.append(f"{step['equal']} of {step['asked']} as transformers ({kind})")
    for stage in ("one at a time", "continuing", "continuing seeded", "eight at once"):
        row = step.get(stage, {})
        if "equal" in row:
            found.append(f"{stage}: {row['equal']} of {row['asked']} equal, {_counts(row)}")
    for stage in ("decode killed", "prefill killed"):
        if row := step.get(stage):
            counts = [f"{row.get(name, 0)} {name}" for name in ("under way", "right", "wrong", "no answer")]
            counts += [f"{name} {number}" for name, number in row.get("result", {}).items()]
            found += [f"{stage}: {', '.join(counts)}"]
    return "; ".join(found)


def _counts(row: Mapping[str, Any]) -> str:
    keys = ("result", "transport", "first_token")
    counts = [f"{name} {number}" for key in keys for name, number in row.get(key, {}).items()]
    counts += [f"computed {name} of the prompt {number}" for name, number in row.get("computed_tokens", {}).items()]
    return ", ".join(counts)


def _figures(name: str, step: Mapping[str, Any]) -> list[str]:
    """The figures of a shape: medians, with the 90th percentile in brackets."""
    columns = ("first_ms", "second_ms", "between_ms", "handover_ms", "megabytes", "transfer_ms", "gigabytes_per_s")
    lines = []
    for stage in ("one at a time", "eight at once"):
        for row_name, row in step.get(stage, {}).items():
            cells = ", ".join(f"{column} {_cell(row[column])}" for column in columns if row.get(column))
            lines += [f"{name}, {stage}, {row_name}: {cells}"]
    row = step.get("one at a time", {}).get(f"{REACH_TOKENS} just-in-time", {})
    if handover := row.get("handover_ms"):
        verdict = "reached" if handover["median"] <= REACH_HANDOVER_MS else "NOT reached"
        lines.append(
            f"{name}: hand-over of {REACH_TOKENS} tokens {_cell(handover)} ms of {REACH_HANDOVER_MS:g}: {verdict}"
        )
    return lines


def _cell(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['p90']:.2f})"


def picture(result: Mapping[str, Any]) -> Any:
    """Draws first token, latency between tokens and hand-over of the shape beside the undivided instance."""
    from matplotlib import figure  # noqa: PLC0415 - only a machine with figures needs it

    shapes = {
        name: step for name, step in result["steps"].items() if name.startswith("shape") and step.get("one at a time")
    }
    panels = (
        ("first_ms", "time to first token, ms"),
        ("between_ms", "between tokens, ms"),
        ("handover_ms", "hand-over, ms"),
    )
    drawn = figure.Figure(figsize=(4.4 * len(panels), 3.4 * max(1, len(shapes))), layout="constrained")
    axes = drawn.subplots(max(1, len(shapes)), len(panels), squeeze=False)
    for line, (name, step) in zip(axes, shapes.items(), strict=False):
        for axis, (key, label) in zip(line, panels, strict=True):
            _panel(axis, step["one at a time"], key)
            axis.set_ylabel(label)
            axis.set_xlabel(f"tokens of the prompt ({name})")
    drawn.suptitle(title(result["facts"]), fontsize=7)
    return drawn


def _panel(axis: Any, rows: Mapping[str, Any], key: str) -> None:
    names: Sequence[str] = list(dict.fromkeys(name.partition(" ")[2] for name in rows))
    for name in names:
        points = {
            int(row.partition(" ")[0]): found[key]
            for row, found in rows.items()
            if row.endswith(f" {name}") and found.get(key)
        }
        if points:
            medians = [each["median"] for each in points.values()]
            around = [
                [each["median"] - each["p10"] for each in points.values()],
                [each["p90"] - each["median"] for each in points.values()],
            ]
            axis.errorbar(
                list(points), medians, yerr=around, marker="o", capsize=3, label=name, color=_COLOURS.get(name)
            )
            axis.legend(fontsize=7)
    axis.set_ylim(bottom=0)
