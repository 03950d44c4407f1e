"""Tables and JSON of a benchmark, and its comparison with an older one."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from bench.measure import UNITS, size_text
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.bounds import Bound
    from bench.builds import Difference, Interval
    from bench.measure import Summary
    from bench.results import Findings, Row

_DIGITS = 3
# Facts that must match for a comparison
_SAME = ("system", "cpu", "num_cpus", "ucx", "ucx_settings", "working_set_bytes", "is_pinned")


def describe(facts: Mapping[str, Any]) -> str:
    """Facts, one a line, without empty ones."""
    shown = {key: size_text(value) if key.endswith("_bytes") else value for key, value in facts.items() if value}
    return "\n".join(f"{key}: {value}" for key, value in shown.items())


def write(path: Path, text: str) -> None:
    """Writes what the user asked for.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        path.write_text(text)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise ConfigError(message) from error


def tables(rows: Sequence[Row]) -> str:
    """A table for each kind of case."""
    kinds = dict.fromkeys(row.case.kind for row in rows)
    return "\n\n".join(_table_of(kind, [row for row in rows if row.case.kind == kind]) for kind in kinds)


def _table_of(kind: str, rows: Sequence[Row]) -> str:
    header = [kind, "subject", "data path", UNITS[kind], "ratio", "to", "CPU s/GiB"]
    lines, last = [], ""
    for row in rows:
        is_shown = row.transport not in ("", row.data_path)
        data_path = f"{row.data_path} ({row.transport})".strip() if is_shown else row.data_path
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        cpu = cell(row.cpu_s_per_gib) if row.cpu_s_per_gib else ""
        label = "" if row.case.label == last else row.case.label
        last = row.case.label
        lines.append([label, row.subject, data_path, cell(row.value), ratio, row.baseline or "", cpu])
    shown = [i for i in range(len(header)) if any(line[i] for line in lines)]
    return table([header[i] for i in shown], [[line[i] for i in shown] for line in lines])


def cell(summary: Summary) -> str:
    """`median (p10-p90)`, each with three significant digits."""
    return f"{number(summary.median)} ({number(summary.p10)}-{number(summary.p90)})"


def number(value: float) -> str:
    """A value with three significant digits."""
    decimals = _DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, decimals)}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with columns of minimal width."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def text(found: Findings) -> str:
    """The findings as text."""
    parts = [describe(found.facts), tables(found.rows)]
    if found.bounds:
        parts.append(_bounds(found.bounds))
    if found.differences:
        parts.append(_differences(found.differences))
    if found.skipped:
        parts.append("\n".join(f"skipped: {name}: {reason}" for name, reason in found.skipped.items()))
    return "\n\n".join(parts)


def _bounds(bounds: Sequence[Bound]) -> str:
    header = ["checksums", "subject", "data path", "GB/s", "copy", "hash", "serial bound", "ratio"]
    lines, last = [], ""
    for bound in bounds:
        label = "" if bound.case.label == last else bound.case.label
        last = bound.case.label
        parts = [cell(bound.value), number(bound.copy.median), number(bound.hash.median), cell(bound.serial)]
        lines.append([label, bound.subject, bound.data_path, *parts, f"{bound.ratio:.2f}"])
    return table(header, lines)


def _differences(differences: Sequence[Difference]) -> str:
    header = ["this build / other", "subject", "data path", "speed", "CPU s/GiB"]
    lines, last = [], ""
    for difference in differences:
        label = f"{difference.case.kind} {difference.case.label}"
        cpu = _interval(difference.cpu) if difference.cpu else ""
        shown = "" if label == last else label
        last = label
        lines.append([shown, difference.subject, difference.data_path, _interval(difference.speed), cpu])
    return table(header, lines)


def _interval(interval: Interval) -> str:
    return f"{interval.median:.3f} ({interval.low:.3f}-{interval.high:.3f})"


def as_json(found: Findings) -> str:
    """The findings as JSON."""
    return json.dumps(found.as_json(), indent=2) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """Reads the output of `as_json`.

    Raises:
        ConfigError: The file cannot be read, or has another form.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        list(map(_key, found["rows"]))
        dict(found["machine"])
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(message) from error
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} holds no figures of `kvpipe bench --json` ({type(error).__name__}: {error})"
        raise ConfigError(message) from error
    return found


def comparison(old: Mapping[str, Any], new: Findings) -> str:
    """The ratio of each figure to the older one, below a list of facts that differ."""
    before = {_key(row): row for row in old["rows"]}
    lines = [_compared(row.as_json(), before.get(_key(row.as_json()))) for row in new.rows]
    header = ["case", "subject", "data path", "unit", "old", "new", "new/old", "CPU new/old"]
    warnings = [
        f"{key} differs: {old['machine'].get(key)!r} then, {new.facts.get(key)!r} now"
        for key in _SAME
        if old["machine"].get(key) != new.facts.get(key)
    ]
    return "\n".join([*warnings, table(header, lines)])


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("kind", "bytes", "num_blocks", "layout", "subject", "data_path")
    row["value"]["median"]  # raises if the row has another form
    return tuple(row[name] for name in names)


def _compared(new: Mapping[str, Any], old: Mapping[str, Any] | None) -> list[str]:
    shape = f" x {new['num_blocks']} {new['layout']}" if new["kind"] == "blocks" else ""
    label = f"{new['kind']} {size_text(new['bytes'])}{shape}"
    now = new["value"]["median"]
    line = [label, new["subject"], new["data_path"], new["unit"]]
    if old is None:
        return [*line, "", number(now), "", ""]
    then = old["value"]["median"]
    cpus = [row["cpu_s_per_gib"] for row in (new, old)]
    cpu = f"{cpus[0]['median'] / cpus[1]['median']:.2f}" if all(cpus) and cpus[1]["median"] else ""
    return [*line, number(then), number(now), f"{now / then:.2f}", cpu]
