"""Facts about the machine, which a reader needs to interpret figures."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from bench.checkout import ROOT
from kvpipe import info

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MEMINFO = Path("/proc/meminfo")


def machine() -> dict[str, Any]:
    """Current facts that figures depend on."""
    facts = info()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "cache_bytes": cache_bytes(),
        "load_average": load_average(),
        "kvpipe": facts["kvpipe"],
        "commit": _commit(),
        "python": facts["python"],
        "ucx": facts["ucx"],
        "ucx_settings": " ".join(f"{key}={value}" for key, value in _ucx_settings()),
    }


def load_average() -> float:
    """Load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def cache_bytes(caches: Path = _CACHES) -> int | None:
    """Size of the first CPU's largest cache; `None` if unknown."""
    sizes = [_kib(path.read_text()) for path in caches.glob("index*/size")]
    return max(sizes, default=None)


def available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Memory available without swapping; `None` if unknown."""
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(kib) << 10 for kib in found), None)


def _kib(text: str) -> int:
    return int(text.strip().removesuffix("K")) << 10


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")


def _ucx_settings() -> list[tuple[str, str]]:
    return sorted((key, value) for key, value in os.environ.items() if key.startswith("UCX_"))


def _commit() -> str:
    """Commit of the checkout, with `+` if it has changes; empty without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - as written above
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
