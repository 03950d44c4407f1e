"""kvpipe: moves KV caches between LLM serving instances."""

from kvpipe import exceptions
from kvpipe._info import info
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

__version__ = "0.1.0"

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
