"""Agent: blocks of registered memory, moved between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpipe import _kvpipe
from kvpipe._closing import Closing
from kvpipe._deferred import DeferredQueue
from kvpipe._transport import transport
from kvpipe.config import resolve_token
from kvpipe.exceptions import ConfigError
from kvpipe.peer import Peer
from kvpipe.region import Region, writable_bytes
from kvpipe.work import Work, readable

# As in rust/core/src/region.rs: peers would refuse more.
_NAME_CAP = 256


@dataclass(frozen=True)
class AgentStats:
    """Counters of what this agent asked of all its peers, those that are lost included.

    Attributes:
        bytes_read: Bytes read from peers.
        bytes_written: Bytes that peers took.
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
        checksum: Whether blocks that this agent reads and writes are compared with checksums that their owner
            computes (CRC-64/NVME). A read then asks the peer, which takes a round trip more. Over CMA and RDMA it
            also fails where blocks change while they are moved.

    Raises:
        ConfigError: The address cannot be bound.
        TransportUnavailableError: There is no usable UCX.
    """

    def __init__(self, listen: str = "127.0.0.1:0", token: str | None = None, *, checksum: bool = True) -> None:
        self._native = _kvpipe.Agent(listen, resolve_token(token), transport(), checksum=checksum)
        self._deferred = DeferredQueue()
        self._is_closed = False

    @property
    def address(self) -> str:
        """Where peers connect, as `host:port`."""
        return self._native.address or ""

    @property
    def peers(self) -> list[Peer]:
        """The peers that are connected now, whichever side began."""
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
            memory: A contiguous torch tensor on the CPU or an NVIDIA GPU, numpy array, or what else speaks DLPack, the
                buffer protocol or `__cuda_array_interface__`, writable. It is kept alive. Blocks on a GPU have no
                checksums.
            name: Under which peers know it.
            block_bytes: Bytes of a block.
            stride: Bytes from the start of a block to the start of the next; by default `block_bytes`.
            writable: Whether peers may have blocks taken into it (`Peer.write_blocks`). Not by default: whoever holds
                the token could then change the memory at any time.

        Raises:
            ConfigError: The name is taken or too long, or the memory holds no block of this size.
            TransportUnavailableError: Memory on a device that cannot be reached, as a GPU where UCX has no CUDA.
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
        """Connects to an agent, or returns the connection there is.

        Raises:
            ConfigError: The address is no `host:port`.
            ConnectError: Nobody answers there.
            AuthenticationError: It has another token.
            TransferTimeoutError: It did not complete the handshake in time.
        """
        return self._peer(self._native.connect(address), timeout)

    def metadata(self) -> bytes:
        """What another agent needs to reach this one, for those who bring their own exchange: see `add_peer`.

        It holds the address and the incarnation; no secret and no key is in it.
        """
        return self._native.metadata()

    def add_peer(self, metadata: bytes, timeout: float | None = 10) -> Peer:
        """Connects to the agent whose `metadata` this is, and to no successor at its address.

        Raises:
            ConfigError: These bytes are no metadata.
            ConnectError: Nobody answers there, or the agent was restarted.
            AuthenticationError: It has another token.
            TransferTimeoutError: It did not complete the handshake in time.
        """
        return self._peer(self._native.add_peer(metadata), timeout)

    def _peer(self, connected: _kvpipe.Work, timeout: float | None) -> Peer:
        return Work(connected, lambda native: Peer(self._native, native, self._deferred)).wait(timeout)

    def notifications(self, timeout: float | None = None) -> list[tuple[Peer, bytes]]:
        """Takes the notifications of peers, and waits for at least one.

        Those of one peer come in the order in which it sent them, each once, and after the blocks of its transfer can
        be seen. A transfer that failed sends none.

        Args:
            timeout: Seconds; 0 takes what is there, `None` waits without end.

        Returns:
            `(peer, tag)` pairs; none when the timeout came first.

        Raises:
            ClosedError: The agent was closed and nothing is left to take.
        """
        return [(Peer(self._native, peer, self._deferred), tag) for peer, tag in self._native.notifications(timeout)]

    async def anotifications(self) -> list[tuple[Peer, bytes]]:
        """As `notifications`, in an asyncio loop: no thread waits. Cancelling it, as a time-out does, loses none."""
        while not (taken := self.notifications(0)):
            await readable(self._native.notifications_fileno())
        return taken

    def stats(self) -> AgentStats:
        """Counters of this agent."""
        return AgentStats(*self._native.stats(), len(self._native.peers()), self._native.num_regions)

    def close(self) -> None:
        """Ends all sessions; what is under way ends with an error.

        Closing twice is fine, also from several threads: each returns once the agent has ended.

        Raises:
            TransferTimeoutError: UCX has not ended reads into memory of regions, as of a machine that is gone. The
                agent is closed all the same. Their memory is kept alive and may still be written to: do not use it
                until closing again, the agent or the region, raises nothing any more.
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
