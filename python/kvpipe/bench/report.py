"""What a benchmark says: the machine it ran on, its table, its JSON, and how far it is."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpipe._info import info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from kvpipe.bench.measure import Summary

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_BAR_WIDTH = 30
_DIGITS = 3


def machine() -> dict[str, Any]:
    """Facts without which a figure says nothing."""
    facts = info()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "cache_bytes": cache_bytes(),
        "load_average": load_average(),
        "kvpipe": facts["kvpipe"],
        "python": facts["python"],
        "ucx": facts["ucx"],
        "UCX_TLS": os.environ.get("UCX_TLS", ""),
    }


def load_average() -> float:
    """Processes that wanted to run, over the last minute."""
    return round(os.getloadavg()[0], 2)


def cache_bytes(caches: Path = _CACHES) -> int | None:
    """The largest cache of the first CPU; `None` when the system does not tell."""
    sizes = [_kib(path.read_text()) for path in caches.glob("index*/size")]
    return max(sizes, default=None)


def _kib(text: str) -> int:
    return int(text.strip().removesuffix("K")) << 10


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")


def describe(facts: Mapping[str, Any]) -> str:
    """Facts, one a line, those that are empty left out."""
    shown = {key: size_text(value) if key.endswith("_bytes") else value for key, value in facts.items() if value}
    return "\n".join(f"{key}: {value}" for key, value in shown.items())


def size_text(num_bytes: int) -> str:
    """`65536` as `64 KiB`."""
    value, units = num_bytes, ["B", "KiB", "MiB", "GiB"]
    while value >= 1 << 10 and value % (1 << 10) == 0 and len(units) > 1:
        value >>= 10
        units.pop(0)
    return f"{value} {units[0]}"


def cell(summary: Summary) -> str:
    """`median (p10-p90)`, each with three digits that say something."""
    return f"{_number(summary.median)} ({_number(summary.p10)}-{_number(summary.p90)})"


def _number(value: float) -> str:
    decimals = _DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, decimals)}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, all aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def write_json(path: Path, facts: Mapping[str, Any], results: Sequence[tuple[int, Mapping[str, Summary]]]) -> None:
    """Everything that was printed, for programs."""
    rows = [
        {"bytes": size} | {name: asdict(summary) for name, summary in summaries.items()} for size, summaries in results
    ]
    path.write_text(json.dumps({"machine": dict(facts), "results": rows}, indent=2) + "\n")


class Progress:
    """Tells on stderr how far it is: a bar on a terminal, else a line a round."""

    def __init__(self, num_steps: int, stream: TextIO = sys.stderr) -> None:
        self._num_steps = num_steps
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._done = 0

    def step(self, label: str) -> None:
        """One more step is done; `label` says which."""
        self._done += 1
        if self._is_terminal:
            filled = _BAR_WIDTH * self._done // self._num_steps
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            self._stream.write(f"\r[{bar}] {self._done}/{self._num_steps} {label:<24}")
            self._stream.flush()

    def line(self, text: str) -> None:
        """A line where there is no bar."""
        if not self._is_terminal:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def end(self) -> None:
        """Makes room for what comes after the bar."""
        if self._is_terminal and self._done:
            self._stream.write("\n")
