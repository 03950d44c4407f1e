"""kvpipe: moves KV caches between LLM serving instances."""

from kvpipe import exceptions
from kvpipe._info import info
from kvpipe.agent import Agent, Peer, Region, RegionInfo
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
from kvpipe.pipe import Pipe, PipeStats
from kvpipe.work import Work

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AuthenticationError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "CorruptDataError",
    "EndOfPipeError",
    "IncompatiblePeerError",
    "KVPipeError",
    "Peer",
    "PeerLostError",
    "Pipe",
    "PipeStats",
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
