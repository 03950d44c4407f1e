"""Peers of an agent: reads, writes and notifications."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpipe._tensor import as_numpy
from kvpipe.exceptions import ConfigError
from kvpipe.region import RegionInfo
from kvpipe.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpipe import _kvpipe
    from kvpipe._deferred import DeferredQueue
    from kvpipe.region import Region

    Ready = Callable[[], _kvpipe.CudaEvent | None]


@dataclass(frozen=True)
class PeerStats:
    """Counters of this side's operations with a peer.

    Attributes:
        bytes_read: Bytes read from it.
        bytes_written: Bytes written to it.
        num_reads: Reads completed.
        num_writes: Writes completed.
        in_flight: Reads and writes that have not ended.
        transport: Transport by which this side gets blocks: `cma`, `tcp`, …
    """

    bytes_read: int
    bytes_written: int
    num_reads: int
    num_writes: int
    in_flight: int
    transport: str


class Plan:
    """A prepared transfer, checked, ordered and coalesced once, to be repeated; see `Peer.prepare`."""

    def __init__(
        self, agent: _kvpipe.Agent, native: _kvpipe.Plan, ready: Ready, queue: DeferredQueue, about: str
    ) -> None:
        self._agent = agent
        self._native = native
        self._ready = ready
        self._deferred = queue
        self._about = about

    def read(self, *, notify: bytes | None = None, timeout: float | None = None) -> Work[int]:
        """As `Peer.read_blocks`."""
        tag, ready = _tag(notify), self._ready()
        if ready is None and self._deferred.is_idle:
            return Work(self._agent.read(self._native, tag, timeout), int)
        native = self._deferred.post(ready, lambda left: self._agent.read(self._native, tag, left), timeout)
        return Work(native, int)

    def write(self, *, notify: bytes | None = None, timeout: float | None = None) -> Work[int]:
        """As `Peer.write_blocks`."""
        tag, ready = _tag(notify), self._ready()
        if ready is None and self._deferred.is_idle:
            return Work(self._agent.write(self._native, tag, timeout), int)
        native = self._deferred.post(ready, lambda left: self._agent.write(self._native, tag, left), timeout)
        return Work(native, int)

    def __repr__(self) -> str:
        return f"<Plan {self._about}>"


class Peer:
    """A session with a connected agent. A lost peer stays lost; connecting again returns a new one.

    Peers of one agent are equal if they are the same session.

    A transfer of this agent between GPU blocks begins after the work that the GPU's current stream (torch's) had at the
    call; no caller waits for that, and later calls on this agent begin after it. A peer's transfers with GPU blocks of
    this agent wait for no local stream: notify the peer when the blocks are ready.
    """

    def __init__(self, agent: _kvpipe.Agent, native: _kvpipe.Peer, queue: DeferredQueue) -> None:
        self._agent = agent
        self._native = native
        self._deferred = queue

    @property
    def address(self) -> str:
        """Its address; for a peer that connected to this agent, the address it connected from."""
        return self._native.address

    @property
    def transport(self) -> str:
        """Transport of its blocks, such as `cma` or `tcp`."""
        return self._native.transport

    @property
    def transport_reason(self) -> str:
        """The reason that this transport is slower than this host allows, and the remedy; empty if it is not."""
        return self._native.transport_reason

    @property
    def regions(self) -> dict[str, RegionInfo]:
        """Its current regions by name; for a lost peer, the last ones."""
        return {region[0]: RegionInfo(*region[1:]) for region in self._native.regions()}

    def read_blocks(
        self,
        region: Region,
        local_ids: Iterable[int],
        remote_region: str,
        remote_ids: Iterable[int],
        *,
        notify: bytes | None = None,
        timeout: float | None = None,
    ) -> Work[int]:
        """Begins to read blocks of this peer into blocks of a local region.

        Args:
            region: The destination.
            local_ids: Destination block ids, each at most once: a range, an integer array or tensor of one dimension,
                or any iterable of integers. Arrays and ranges are the fastest.
            remote_region: Name of the source.
            remote_ids: Source block ids, one for each destination.
            notify: A tag that the peer's `Agent.notifications` returns once the blocks have been read; at most 64 KiB.
                A transfer with a tag begins when the peer has space for the tag, see `notify`.
            timeout: Seconds. A late transfer fails alone, and the peer stays usable. Reads that have begun cannot be
                taken back: the blocks stay busy until `Work.settled`, and new operations on them are refused.

        Returns:
            A work whose result is the number of bytes.

        Raises:
            ConfigError: Ids are out of range, repeated or different in number; block sizes differ; a region is unknown,
                closed or another agent's; or the tag is too long. From the work: a region was closed meanwhile.
            PeerLostError: The peer was lost (also from the work).
            CorruptDataError: (from the work) blocks do not match their checksums; the message names the first (over TCP
                approximately). They changed during the read, or on the network. The destination holds the received
                bytes; the peer is usable.
            TransferTimeoutError: (from the work) not done in time.
            CapacityError: (from the work) a block is still busy with a transfer that was late.
            ClosedError: The agent was closed.
        """
        return self.prepare(region, local_ids, remote_region, remote_ids).read(notify=notify, timeout=timeout)

    def write_blocks(
        self,
        region: Region,
        local_ids: Iterable[int],
        remote_region: str,
        remote_ids: Iterable[int],
        *,
        notify: bytes | None = None,
        timeout: float | None = None,
    ) -> Work[int]:
        """Begins to write blocks of a local region into blocks of this peer.

        The peer checks the request and moves the bytes itself, so nothing is written after it has closed the region or
        the session. The source blocks must not change before the work is done.

        Args:
            region: The source.
            local_ids: Source block ids; as for `read_blocks`.
            remote_region: Name of the destination, which the peer has registered with `writable=True`.
            remote_ids: Destination block ids, each at most once, one for each source.
            notify: A tag that the peer's `Agent.notifications` returns once the blocks are written; at most 64 KiB.
            timeout: Seconds; as for `read_blocks`.

        Returns:
            A work whose result is the number of written bytes.

        Raises:
            ConfigError: As for `read_blocks`, or the destination is not writable (also from the work).
            PeerLostError: The peer was lost (also from the work).
            CorruptDataError: (from the work) as for `read_blocks`.
            TransferTimeoutError: (from the work) not done in time.
            CapacityError: (from the work) a block is still busy with a transfer that was late.
            ClosedError: The agent was closed.
        """
        return self.prepare(region, local_ids, remote_region, remote_ids).write(notify=notify, timeout=timeout)

    def prepare(self, region: Region, local_ids: Iterable[int], remote_region: str, remote_ids: Iterable[int]) -> Plan:
        """Checks, orders and coalesces the blocks of a transfer that will be repeated, in either direction.

        Raises:
            ConfigError: As for `read_blocks`. Repeated ids are an error only in the direction that writes to them.
            PeerLostError: The peer was lost.
        """
        local, remote = _without_torch(local_ids), _without_torch(remote_ids)
        native = self._agent.prepare(self._native, region._native, local, remote_region, remote)  # noqa: SLF001 - one package
        about = f"of {region.name!r} here and {remote_region!r} at {self.address}"
        return Plan(self._agent, native, region._ready, self._deferred, about)  # noqa: SLF001 - one package

    def notify(self, tag: bytes) -> Work[None]:
        """Sends a tag of at most 64 KiB to this peer, whose `Agent.notifications` returns it.

        Tags of one sender, those of transfers included, arrive in the order of its calls, each exactly once. At most
        256 tags, 1 MiB in total, wait at the receiver. The next one is sent when the receiver has drained some.

        Returns:
            A work that ends when the peer has the tag.

        Raises:
            ConfigError: The tag is too long or not bytes.
            PeerLostError: The peer was lost (also from the work).
            ClosedError: The agent was closed.
        """
        tag = _tag(tag) or b""
        if self._deferred.is_idle:
            return Work(self._agent.notify(self._native, tag), lambda _: None)
        native = self._deferred.post(None, lambda _: self._agent.notify(self._native, tag))
        return Work(native, lambda _: None)

    def stats(self) -> PeerStats:
        """Returns counters of this peer."""
        return PeerStats(*self._native.stats(), self.transport)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Peer):
            return NotImplemented
        return self._agent is other._agent and self._native.session_key == other._native.session_key

    def __hash__(self) -> int:
        return hash((id(self._agent), self._native.session_key))

    def __repr__(self) -> str:
        if (reason := self._native.lost) is not None:
            return f"<Peer {self.address} lost: {reason}>"
        return f"<Peer {self.address} transport={self.transport}, {len(self._native.regions())} regions>"


def _tag(tag: bytes | None) -> bytes | None:
    if tag is None or isinstance(tag, bytes):
        return tag
    if isinstance(tag, (bytearray, memoryview)):
        return bytes(tag)
    message = f"a notification is bytes, not {type(tag).__name__}; encode it first"
    raise ConfigError(message)


def _without_torch(ids: Any) -> Any:
    """Converts a tensor to an array, because tensors lack the buffer protocol."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(ids, torch.Tensor):
        return as_numpy(ids.detach().cpu())
    return ids
