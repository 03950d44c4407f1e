"""Peers of an agent: reads, writes and notifications."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """Counters of what this side asked of a peer.

    Attributes:
        bytes_read: Bytes read from it.
        bytes_written: Bytes that it took.
        num_reads: Reads completed.
        num_writes: Writes completed.
        in_flight: Reads and writes that have not ended.
        transport: What carries the blocks: `cma`, `tcp`, …
    """

    bytes_read: int
    bytes_written: int
    num_reads: int
    num_writes: int
    in_flight: int
    transport: str


class Plan:
    """A transfer that was checked, ordered and joined once, to be made many times; see `Peer.prepare`."""

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
    """A connected agent. A lost peer stays lost; connecting again returns a new one.

    Peers of one agent are equal when they are the same connection.

    A transfer of ours between GPU blocks begins when the current stream of the GPU (torch's) has done what it had been
    given at the call, which no caller waits for; what is called later on this agent begins after it. What a peer moves
    out of or into our GPU blocks waits for no stream of ours: tell it of blocks when they are there.
    """

    def __init__(self, agent: _kvpipe.Agent, native: _kvpipe.Peer, queue: DeferredQueue) -> None:
        self._agent = agent
        self._native = native
        self._deferred = queue

    @property
    def address(self) -> str:
        """Where it listens; of a peer that connected to us, where it came from."""
        return self._native.address

    @property
    def transport(self) -> str:
        """What carries its blocks, such as `cma` or `tcp`."""
        return self._native.transport

    @property
    def regions(self) -> dict[str, RegionInfo]:
        """Its regions by name as of now; of a lost peer, the last ones."""
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
        """Begins to read blocks of this peer into blocks of a region of ours.

        Args:
            region: The destination.
            local_ids: Destination block ids, each at most once: a range, an integer array or tensor of one dimension,
                or any iterable of integers. Arrays and ranges are the fast way.
            remote_region: Name of the source.
            remote_ids: Source block ids, one for each destination.
            notify: A tag that the peer's `Agent.notifications` returns once the blocks are here; at most 64 KiB.
                With a tag the transfer begins when the peer has room for it, see `notify`.
            timeout: Seconds until it must be done. If it has begun by then, the peer is closed: nothing else could
                stop it; if it has not, the peer stays usable.

        Returns:
            A work whose result is the number of bytes.

        Raises:
            ConfigError: Ids out of range, repeated or of different number, block sizes that differ, a region that is
                unknown, closed or another agent's, too long a tag. From the work: a region that was closed meanwhile.
            PeerLostError: The peer is gone (also from the work).
            CorruptDataError: (from the work) blocks differ from their checksums; it names the first (over TCP about).
                They changed while they were moved, or on their way. The destination has what came; the peer is usable.
            TransferTimeoutError: (from the work) not done in time.
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
        """Offers blocks of a region of ours to this peer, which takes them into one of its regions.

        The peer checks the offer and moves the bytes itself, so that nothing is written there after it has closed the
        region or the session. Our blocks must not change before the work is done.

        Args:
            region: The source.
            local_ids: Source block ids; as for `read_blocks`.
            remote_region: Name of the destination, which its owner registered with `writable=True`.
            remote_ids: Destination block ids, each at most once, one for each source.
            notify: A tag that the peer's `Agent.notifications` returns once the blocks are there; at most 64 KiB.
            timeout: Seconds until it must be done; as for `read_blocks`.

        Returns:
            A work whose result is the number of bytes, once they are at the peer.

        Raises:
            ConfigError: As for `read_blocks`, or the destination is not writable (also from the work).
            PeerLostError: The peer is gone (also from the work).
            CorruptDataError: (from the work) as for `read_blocks`.
            TransferTimeoutError: (from the work) not done in time.
            ClosedError: The agent was closed.
        """
        return self.prepare(region, local_ids, remote_region, remote_ids).write(notify=notify, timeout=timeout)

    def prepare(self, region: Region, local_ids: Iterable[int], remote_region: str, remote_ids: Iterable[int]) -> Plan:
        """Checks, orders and joins the blocks of a transfer that will be made many times, in either direction.

        Raises:
            ConfigError: As for `read_blocks`; repeated ids are an error only of the direction that writes to them.
            PeerLostError: The peer is gone.
        """
        local, remote = _without_torch(local_ids), _without_torch(remote_ids)
        native = self._agent.prepare(self._native, region._native, local, remote_region, remote)  # noqa: SLF001 - one package
        about = f"of {region.name!r} here and {remote_region!r} at {self.address}"
        return Plan(self._agent, native, region._ready, self._deferred, about)  # noqa: SLF001 - one package

    def notify(self, tag: bytes) -> Work[None]:
        """Sends a tag to this peer, whose `Agent.notifications` returns it, at most 64 KiB.

        Tags of one sender arrive in the order of its calls, those of transfers included, each exactly once. At most
        256 of them, 1 MiB together, wait at the receiver: the next is sent when it has taken some.

        Returns:
            A work that ends when the peer has the tag.

        Raises:
            ConfigError: The tag is too long or not bytes.
            PeerLostError: The peer is gone (also from the work).
            ClosedError: The agent was closed.
        """
        tag = _tag(tag) or b""
        if self._deferred.is_idle:
            return Work(self._agent.notify(self._native, tag), lambda _: None)
        native = self._deferred.post(None, lambda _: self._agent.notify(self._native, tag))
        return Work(native, lambda _: None)

    def stats(self) -> PeerStats:
        """Counters of this peer."""
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
    """A tensor as an array: tensors do not speak the buffer protocol."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(ids, torch.Tensor):
        return ids.detach().cpu().numpy()
    return ids
