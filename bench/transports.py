"""Rows and tables of the benchmarks of transports and stores, and their comparison with an older run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bench.measure import UNITS, Case
from bench.report import cell, number, ratio_text, table
from bench.results import Row, median_ratio, summarize, summarize_known
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.builds import Interval
    from bench.results import Findings, Summary
    from bench.runner import Entry

# Facts that must match for a comparison
_SAME = ("system", "cpu", "num_cpus", "ucx", "ucx_settings", "working_set_bytes", "is_pinned")


def labels_of(case: Case, subject: str, data_path: str) -> dict[str, Any]:
    """Labels of a row."""
    return {
        "kind": case.kind,
        "bytes": case.num_bytes,
        "num_blocks": case.num_blocks,
        "layout": case.layout,
        "subject": subject,
        "data_path": data_path,
        "unit": case.unit,
    }


def row_of(
    labels: Mapping[str, Any],
    *,
    transport: str,
    value: Summary,
    cpu_s_per_gib: Summary | None,
    ratio: float | None,
    baseline: str | None,
) -> Row:
    """A row.

    Args:
        labels: As `labels_of` returns them.
        transport: What carried the bytes, if the subject reports it.
        value: In the unit of the case.
        cpu_s_per_gib: Seconds of CPU of both sides for each GiB; `None` where it cannot be told.
        ratio: Of the value to the baseline's.
        baseline: Name of the baseline.
    """
    figures = {"value": value, "cpu_s_per_gib": cpu_s_per_gib, "ratio": ratio, "baseline": baseline}
    return Row({**labels, "transport": transport}, figures)


def rows_of(entries: Sequence[Entry], baselines: Sequence[str]) -> list[Row]:
    """Rows in the order of the cases. Each has a ratio to the first of `baselines` that ran its case and data path."""
    return [_row_of(entry, _baseline(entry, entries, baselines)) for entry in entries]


def _row_of(entry: Entry, base: Entry | None) -> Row:
    return row_of(
        labels_of(entry.case, entry.subject.name, entry.subject.data_path),
        transport=entry.transport,
        value=summarize(entry.values),
        cpu_s_per_gib=summarize_known(sample.cpu_s_per_gib for sample in entry.samples),
        ratio=median_ratio(entry.values, base.values) if base else None,
        baseline=base.subject.name if base else None,
    )


def _baseline(entry: Entry, entries: Sequence[Entry], baselines: Sequence[str]) -> Entry | None:
    beside = [other for other in entries if other.case == entry.case]
    fitting = [other for other in beside if other.subject.data_path in (entry.subject.data_path, "")]
    by_name: Mapping[str, Entry] = {other.subject.name: other for other in reversed(fitting)}
    return next((by_name[name] for name in baselines if name in by_name), None)


# --- tables -----------------------------------------------------------------------------------------------------


def tables(found: Findings) -> list[str]:
    """A table for each kind of case, then the costs of checksums, and the other build."""
    kinds = dict.fromkeys(row["kind"] for row in found.rows)
    shown = [_table_of(kind, [row for row in found.rows if row["kind"] == kind]) for kind in kinds]
    if bounds := found.details.get("bounds"):
        shown.append(_bounds(bounds))
    if differences := found.details.get("differences"):
        shown.append(_differences(differences))
    return shown


def _table_of(kind: str, rows: Sequence[Row]) -> str:
    header = [kind, "subject", "data path", UNITS[kind], "ratio", "to", "CPU s/GiB"]
    lines = [
        [
            label,
            row["subject"],
            _data_path(row),
            cell(row["value"]),
            ratio_text(row["ratio"]),
            row["baseline"] or "",
            cell(row["cpu_s_per_gib"]),
        ]
        for label, row in _labelled(rows)
    ]
    shown = [i for i in range(len(header)) if any(line[i] for line in lines)]
    return table([header[i] for i in shown], [[line[i] for i in shown] for line in lines])


def _labelled(rows: Sequence[Row], *, has_kind: bool = False) -> list[tuple[str, Row]]:
    """Rows with the labels of their cases, which are empty where the row before has the same case."""
    names = [f"{row['kind']} {_case_of(row).label}" if has_kind else _case_of(row).label for row in rows]
    return [("" if name == before else name, row) for name, before, row in zip(names, ["", *names], rows, strict=False)]


def _case_of(row: Row | Mapping[str, Any]) -> Case:
    return Case(row["kind"], row["bytes"], row["num_blocks"], row["layout"])


def _data_path(row: Row) -> str:
    is_shown = row["transport"] not in ("", row["data_path"])
    return f"{row['data_path']} ({row['transport']})".strip() if is_shown else str(row["data_path"])


def _bounds(bounds: Sequence[Row]) -> str:
    lines = [
        [
            label,
            row["subject"],
            row["data_path"],
            cell(row["value"]),
            number(row["copy"].median),
            number(row["hash"].median),
            cell(row["serial"]),
            ratio_text(row["ratio"]),
        ]
        for label, row in _labelled(bounds)
    ]
    return table(["checksums", "subject", "data path", "GB/s", "copy", "hash", "serial bound", "ratio"], lines)


def _differences(differences: Sequence[Row]) -> str:
    lines = [
        [label, row["subject"], row["data_path"], _interval(row["speed"]), _interval(row["cpu"])]
        for label, row in _labelled(differences, has_kind=True)
    ]
    return table(["this build / other", "subject", "data path", "speed", "CPU s/GiB"], lines)


def _interval(interval: Interval | None) -> str:
    return f"{interval.median:.3f} ({interval.low:.3f}-{interval.high:.3f})" if interval else ""


# --- an older run -----------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON file of an older run.

    Raises:
        ConfigError: The file cannot be read, or has another form.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        for row in found["rows"]:
            float(row["value"]["median"])
            _key(row)
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
    lines = [_compared(row, before.get(_key(row))) for row in new.rows]
    header = ["case", "subject", "data path", "unit", "old", "new", "new/old", "CPU new/old"]
    warnings = [
        f"{key} differs: {old['machine'].get(key)!r} then, {new.facts.get(key)!r} now"
        for key in _SAME
        if old["machine"].get(key) != new.facts.get(key)
    ]
    return "\n".join([*warnings, table(header, lines)])


def _key(row: Row | Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("kind", "bytes", "num_blocks", "layout", "subject", "data_path"))


def _compared(new: Row, old: Mapping[str, Any] | None) -> list[str]:
    now = new["value"].median
    line = [f"{new['kind']} {_case_of(new).label}", new["subject"], new["data_path"], new["unit"]]
    if old is None:
        return [*line, "", number(now), "", ""]
    cpu, old_cpu = new["cpu_s_per_gib"], old["cpu_s_per_gib"]
    cpus = f"{cpu.median / old_cpu['median']:.2f}" if cpu and old_cpu and old_cpu["median"] else ""
    then = old["value"]["median"]
    return [*line, number(then), number(now), f"{now / then:.2f}", cpus]
