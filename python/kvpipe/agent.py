"""Agent: moves blocks of registered memory between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpipe import _kvpipe
from kvpipe._closing import Closing
from kvpipe._deferred import DeferredQueue
from kvpipe._integrity import resolve_integrity
from kvpipe._transport import transport
from kvpipe.config import resolve_tokens
from kvpipe.exceptions import ConfigError
from kvpipe.peer import Peer
from kvpipe.region import Region, writable_bytes
from kvpipe.work import Work, readable

# As in rust/core/src/transfer/region.rs: peers refuse longer names.
_NAME_CAP = 256

_INTEGRITY = ("auto", "checksum", "none")
_NO_VALIDATE = "a read or write of blocks has no grant that its source could confirm"


@dataclass(frozen=True)
class AgentStats:
    """Counters of this agent's operations with all peers, lost ones included.

    Attributes:
        bytes_read: Bytes read from peers.
        bytes_written: Bytes written to peers.
        num_reads: Reads completed.
        num_writes: Writes completed.
        in_flight: Reads and writes that have not ended.
        num_peers: Connected peers.
        num_regions: Regions that are registered and not closed.
    """

    bytes_read: int
    bytes_written: int
    num_reads: int
    num_writes: int
    in_flight: int
    num_peers: int
    num_regions: int


class Agent(Closing):
    """One end of block transfers. A context manager; any thread may call.

    Args:
        listen: `host:port` where peers connect; loopback by default.
        token: The shared secret; by default `KVPIPE_TOKEN`. Needed for addresses other than loopback.
        integrity: Verification of the blocks that this agent reads and writes. `checksum`: by checksums (CRC-64/NVME)
            that the source computes. A read then takes one more round trip to the peer. Over CMA and RDMA it also
            fails if blocks change during the read. `none`: not at all. `auto` is `checksum`; blocks on a GPU have no
            checksums in either.
        checksum: Deprecated: `True` is `integrity="auto"`, `False` is `integrity="none"`.

    Raises:
        ConfigError: The address cannot be bound, or the integrity is not one of these.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        token: str | None = None,
        *,
        integrity: str | None = None,
        checksum: bool | None = None,
    ) -> None:
        chosen = resolve_integrity(_INTEGRITY, integrity=integrity, checksum=checksum, no_validate=_NO_VALIDATE)
        self._native = _kvpipe.Agent(listen, resolve_tokens(token), transport(), integrity=chosen)
        self._deferred = DeferredQueue()
        self._is_closed = False

    @property
    def address(self) -> str:
        """The address for peers, as `host:port`."""
        return self._native.address or ""

    @property
    def peers(self) -> list[Peer]:
        """The peers that are connected now, whichever side connected."""
        return [Peer(self._native, peer, self._deferred) for peer in self._native.peers()]

    def register(
        self,
        memory: Any,
        name: str,
        block_bytes: int,
        stride: int | None = None,
        *,
        writable: bool = False,
    ) -> Region:
        """Registers memory as blocks that peers may read, until the region or the agent is closed.

        Args:
            memory: A writable, contiguous torch tensor on the CPU or an NVIDIA GPU, a numpy array, or another object
                with DLPack, the buffer protocol or `__cuda_array_interface__`. The agent keeps it alive. Blocks on a
                GPU have no checksums.
            name: Name of the region for peers.
            block_bytes: Bytes of a block.
            stride: Bytes from the start of a block to the start of the next; by default `block_bytes`.
            writable: True if peers may write blocks (`Peer.write_blocks`). By default they may not, because any peer
                with the token could then change the memory at any time.

        Raises:
            ConfigError: The name is in use or too long, or the memory is smaller than a block.
            TransportUnavailableError: UCX cannot reach the memory's device, such as a GPU without CUDA support.
            ClosedError: The agent was closed.
        """
        if not 0 < len(name.encode()) <= _NAME_CAP:
            message = f"name={name!r}: expected 1 to {_NAME_CAP} bytes"
            raise ConfigError(message)
        stride = block_bytes if stride is None else stride
        if block_bytes <= 0 or stride < block_bytes:
            message = f"block_bytes={block_bytes} with stride={stride}: expected 1 or more, and stride not smaller"
            raise ConfigError(message)
        data = writable_bytes(memory)
        gpu = data.device if isinstance(data, _kvpipe.CudaMemory) else None
        registered = self._native.register(name, data, block_bytes, stride, writable)
        return Work(
            registered,
            lambda native: Region(self._native, native, (name, block_bytes, stride, writable), gpu),
        ).wait()

    def connect(self, address: str, timeout: float | None = 10) -> Peer:
        """Connects to an agent, or returns its existing session.

        Raises:
            ConfigError: The address is no `host:port`.
            ConnectError: No agent answers there.
            AuthenticationError: It has another token.
            TransferTimeoutError: It did not complete the handshake in time.
        """
        return self._peer(self._native.connect(address), timeout)

    def metadata(self) -> bytes:
        """Returns this agent's address and incarnation for `add_peer`, to be exchanged by the application.

        The bytes contain no secret and no key.
        """
        return self._native.metadata()

    def add_peer(self, metadata: bytes, timeout: float | None = 10) -> Peer:
        """Connects to the agent that returned this `metadata`, and to no later agent at the same address.

        Raises:
            ConfigError: The bytes are not metadata.
            ConnectError: No agent answers there, or the agent was restarted.
            AuthenticationError: It has another token.
            TransferTimeoutError: It did not complete the handshake in time.
        """
        return self._peer(self._native.add_peer(metadata), timeout)

    def _peer(self, connected: _kvpipe.Work, timeout: float | None) -> Peer:
        return Work(connected, lambda native: Peer(self._native, native, self._deferred)).wait(timeout)

    def notifications(self, timeout: float | None = None) -> list[tuple[Peer, bytes]]:
        """Drains the notifications of peers, and waits for at least one.

        Notifications of one peer arrive in the order of sending, each once, and after the blocks of their transfer are
        visible. A failed transfer sends none.

        Args:
            timeout: Seconds; 0 does not wait, `None` waits without limit.

        Returns:
            `(peer, tag)` pairs; none after the timeout.

        Raises:
            ClosedError: The agent was closed and no notifications are left.
        """
        return [(Peer(self._native, peer, self._deferred), tag) for peer, tag in self._native.notifications(timeout)]

    async def anotifications(self) -> list[tuple[Peer, bytes]]:
        """As `notifications`, in an asyncio loop, without a waiting thread. Cancelling it loses none."""
        while not (drained := self.notifications(0)):
            await readable(self._native.notifications_fileno())
        return drained

    def stats(self) -> AgentStats:
        """Counters of this agent."""
        return AgentStats(*self._native.stats(), len(self._native.peers()), self._native.num_regions)

    def close(self) -> None:
        """Closes all sessions; pending operations end with an error.

        Several threads may call, also repeatedly; each call returns once the agent is closed.

        Raises:
            TransferTimeoutError: UCX has not ended reads into memory of regions, for example from a lost machine. The
                agent is closed nevertheless. It keeps their memory alive, and UCX may still write to it: do not use
                the memory until another `close` of the agent or the region succeeds.
        """
        self._is_closed = True
        self._deferred.close()
        self._native.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return f"<Agent {self.address} closed>"
        stats = self.stats()
        return (
            f"<Agent {self.address} {stats.num_peers} peers, {stats.num_regions} regions, {stats.in_flight} in flight>"
        )
