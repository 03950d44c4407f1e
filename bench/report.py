"""Text and JSON of findings."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from bench.measure import size_text
from bench.results import Row
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.results import Findings, Summary

_DIGITS = 3


def number(value: float) -> str:
    """A value with three significant digits."""
    decimals = _DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, decimals)}f}"


def cell(summary: Summary | None) -> str:
    """`median (p10-p90)`, each with three significant digits; empty where the figure is unknown."""
    return f"{number(summary.median)} ({number(summary.p10)}-{number(summary.p90)})" if summary else ""


def ratio_text(value: float | None) -> str:
    """A ratio with two decimals; empty where it is unknown."""
    return "" if value is None else f"{value:.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text."""
    return str(tabulate(rows, header, "simple", disable_numparse=True))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown whose columns are also even in a terminal."""
    return str(tabulate(rows, header, "github", disable_numparse=True))


def describe(facts: Mapping[str, Any]) -> str:
    """Facts, one a line, without empty ones."""
    shown = {key: size_text(value) if key.endswith("_bytes") else value for key, value in facts.items() if value}
    return "\n".join(f"{key}: {value}" for key, value in shown.items())


def text(found: Findings, tables: Sequence[str], notes: str = "") -> str:
    """Facts, tables, reasons for what was left out, and notes."""
    skipped = "\n".join(f"skipped: {name}: {reason}" for name, reason in found.skipped.items())
    return "\n\n".join(filter(None, [describe(found.facts), *tables, skipped, notes]))


def show(text: str, found: Findings, file: Path | None) -> None:
    """Prints the text, and writes the findings to a JSON file, if there is to be one.

    Raises:
        ConfigError: It cannot be written.
    """
    sys.stdout.write(f"{text}\n")
    if file:
        write(file, as_json(found))


def as_json(found: Findings) -> str:
    """The findings as JSON."""
    return json.dumps(found.as_json(), indent=2, default=_plain) + "\n"


def _plain(value: Any) -> dict[str, Any]:
    return {**value.labels, **value.figures} if isinstance(value, Row) else asdict(value)


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
