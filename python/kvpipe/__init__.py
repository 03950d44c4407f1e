"""kvpipe: moves KV caches between LLM serving instances."""

import sys
import typing

from kvpipe import _kvpipe, _log, config, exceptions  # noqa: F401 - _log: its exit handler is registered first
from kvpipe.agent import Agent, AgentStats
from kvpipe.exceptions import (
    AuthenticationError,
    CapacityError,
    ClosedError,
    ConfigError,
    ConnectError,
    CorruptDataError,
    EndOfPipeError,
    IncompatiblePeerError,
    KVPipeError,
    PeerLostError,
    ProtocolError,
    TransferTimeoutError,
    TransportUnavailableError,
)
from kvpipe.lookup_buffer import LookupBuffer, LookupBufferStats
from kvpipe.peer import Peer, PeerStats, Plan
from kvpipe.pipe import Pipe, PipeStats
from kvpipe.region import Region, RegionInfo
from kvpipe.work import Work

__version__ = _kvpipe.__version__

__all__ = [
    "Agent",
    "AgentStats",
    "AuthenticationError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "CorruptDataError",
    "EndOfPipeError",
    "IncompatiblePeerError",
    "KVPipeError",
    "LookupBuffer",
    "LookupBufferStats",
    "Peer",
    "PeerLostError",
    "PeerStats",
    "Pipe",
    "PipeStats",
    "Plan",
    "ProtocolError",
    "Region",
    "RegionInfo",
    "TransferTimeoutError",
    "TransportUnavailableError",
    "Work",
    "__version__",
    "exceptions",
    "info",
]


def info() -> dict[str, typing.Any]:
    """Describes this installation.

    Returns:
        `kvpipe` and `python` versions; `ucx` version, `ucx_path` and `ucx_has_cuda`, all None without a usable UCX;
        `rdma_devices`, true if there are any. Only RDMA and CUDA devices need UCX.
    """
    try:
        ucx = _kvpipe.ucx_info(config.ucx_wheel_dir())
    except TransportUnavailableError:
        ucx = {"version": None, "path": None, "has_cuda": None}
    return {
        "kvpipe": __version__,
        "python": sys.version.partition(" ")[0],
        "ucx": ucx["version"],
        "ucx_path": ucx["path"] and str(ucx["path"]),
        "ucx_has_cuda": ucx["has_cuda"],
        "rdma_devices": _kvpipe.has_rdma_devices(),
    }
