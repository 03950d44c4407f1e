"""What kvpipe is and what it found on this machine."""

from __future__ import annotations

import sys
from typing import Any

from kvpipe import _kvpipe
from kvpipe.config import ucx_wheel_dir


def info() -> dict[str, Any]:
    """Facts about this installation.

    Returns:
        `kvpipe` and `python` versions; `ucx` version, `ucx_path`, `ucx_has_cuda`, `rdma_devices`.

    Raises:
        TransportUnavailableError: There is no usable UCX.
    """
    from kvpipe import __version__  # noqa: PLC0415 - this module is imported there

    ucx = _kvpipe.ucx_info(ucx_wheel_dir())
    return {
        "kvpipe": __version__,
        "python": sys.version.partition(" ")[0],
        "ucx": ucx["version"],
        "ucx_path": str(ucx["path"]),
        "ucx_has_cuda": ucx["has_cuda"],
        "rdma_devices": ucx["has_rdma_devices"],
    }
