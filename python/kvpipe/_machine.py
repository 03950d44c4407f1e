"""This process's machine, for peers' operators."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvpipe import _kvpipe

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> dict[str, Any]:
    """Returns what decides the data path of a process on this machine.

    Returns:
        `host`, the kernel's boot id, which processes of one machine share, or empty; `user`, the number of the user;
        `rdma_devices`, true if there are any; `data_path`, the setting `KVPIPE_DATA_PATH`.
    """
    return {
        "host": _boot_id(),
        "user": os.geteuid(),
        "rdma_devices": _kvpipe.has_rdma_devices(),
        "data_path": os.environ.get("KVPIPE_DATA_PATH") or "auto",
    }


def _boot_id() -> str:
    """The kernel's boot id, or empty: no engine ends because a container hides it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
