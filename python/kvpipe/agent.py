"""Agent: blocks of registered memory, read from other processes."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Self

from kvpipe import _kvpipe
from kvpipe._tensor import describe
from kvpipe._transport import transport
from kvpipe.config import resolve_token
from kvpipe.exceptions import ConfigError
from kvpipe.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

# As in rust/core/src/region.rs: peers would refuse more.
_NAME_CAP = 256


@dataclass(frozen=True)
class RegionInfo:
    """A peer's region.

    Attributes:
        num_blocks: Number of blocks; ids go from 0 to one less.
        block_bytes: Bytes of a block.
    """

    num_blocks: int
    block_bytes: int


@dataclass(frozen=True)
class Region:
    """Registered memory of this process, cut into blocks.

    Attributes:
        name: Under which peers know it.
        num_blocks: Number of blocks.
        block_bytes: Bytes of a block.
        stride: Bytes from the start of a block to the start of the next.
    """

    name: str
    num_blocks: int
    block_bytes: int
    stride: int


class Peer:
    """A connected agent. A lost peer stays lost; connecting again returns a new one.

    Attributes:
        address: Where it listens.
        transport: What carries its blocks: `cma`, `tcp`, …
        regions: Its regions by name, as of the connection.
    """

    def __init__(self, native: _kvpipe.Agent, info: tuple[int, str, bytes, str, dict[str, tuple[int, int]]]) -> None:
        self._native = native
        self._id, self.address, _, self.transport, regions = info
        self.regions = {name: RegionInfo(*region) for name, region in regions.items()}

    def read_blocks(
        self,
        region: Region,
        local_ids: Iterable[int],
        remote_region: str,
        remote_ids: Iterable[int],
        *,
        timeout: float | None = None,
    ) -> Work[int]:
        """Begins to read blocks of this peer into blocks of a region of ours.

        Args:
            region: The destination.
            local_ids: Destination block ids, each at most once.
            remote_region: Name of the source.
            remote_ids: Source block ids, one for each destination.
            timeout: Seconds until it must be done; then the peer is closed.

        Returns:
            A work whose result is the number of bytes.

        Raises:
            ConfigError: (from the work) ids out of range, repeated or of different number, block sizes that differ.
            PeerLostError: (from the work) the peer is gone.
        """
        local, remote = _ids(local_ids), _ids(remote_ids)
        native = self._native.read_blocks(self._id, region.name, local, remote_region, remote, timeout)
        return Work(native, int)

    def __repr__(self) -> str:
        return f"<Peer {self.address} transport={self.transport}, {len(self.regions)} regions>"


class Agent:
    """One end of block transfers. A context manager; any thread may call.

    Args:
        listen: `host:port` where peers connect; loopback by default.
        token: The shared secret; by default `KVPIPE_TOKEN`. Needed for addresses other than loopback.

    Raises:
        ConfigError: The address cannot be bound.
        TransportUnavailableError: There is no usable UCX.
    """

    def __init__(self, listen: str = "127.0.0.1:0", token: str | None = None) -> None:
        self._native = _kvpipe.Agent(listen, resolve_token(token), transport())

    @property
    def address(self) -> str:
        """Where peers connect, as `host:port`."""
        return self._native.address or ""

    def register(self, memory: Any, name: str, block_bytes: int, stride: int | None = None) -> Region:
        """Registers memory as blocks that peers may read; it stays registered until the agent is closed.

        Args:
            memory: A contiguous torch tensor on the CPU, numpy array, or other writable buffer. It is kept alive.
            name: Under which peers know it.
            block_bytes: Bytes of a block.
            stride: Bytes from the start of a block to the start of the next; by default `block_bytes`.

        Raises:
            ConfigError: The name is taken or too long, or the memory holds no block of this size.
        """
        if not 0 < len(name.encode()) <= _NAME_CAP:
            message = f"name={name!r}: expected 1 to {_NAME_CAP} bytes"
            raise ConfigError(message)
        stride = block_bytes if stride is None else stride
        if block_bytes <= 0 or stride < block_bytes:
            message = f"block_bytes={block_bytes} with stride={stride}: expected 1 or more, and stride not smaller"
            raise ConfigError(message)
        data = _writable_bytes(memory)
        Work(self._native.register(name, data, block_bytes, stride), int).wait()
        num_blocks = (len(data) - block_bytes) // stride + 1
        return Region(name, num_blocks, block_bytes, stride)

    def connect(self, address: str, timeout: float | None = 10) -> Peer:
        """Connects to an agent, or returns the connection there is.

        Raises:
            ConfigError: The address is no `host:port`.
            ConnectError: Nobody answers there.
            AuthenticationError: It has another token.
            TransferTimeoutError: It did not complete the handshake in time.
        """
        info = Work(self._native.connect(address), tuple).wait(timeout)
        return Peer(self._native, info)

    def close(self) -> None:
        """Ends all sessions; what is under way ends with an error. Closing twice is fine."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Agent {self.address}>"


def _writable_bytes(memory: Any) -> Any:
    """The bytes of a tensor, or of another object that speaks the buffer protocol, in place."""
    if hasattr(memory, "dtype"):
        return describe(memory, must_be_in_place=True).data
    try:
        return memoryview(memory).cast("B")
    except TypeError as error:
        message = f"cannot register {type(memory).__name__}: expected a tensor or a contiguous buffer ({error})"
        raise ConfigError(message) from error


def _ids(ids: Iterable[int]) -> list[int]:
    try:
        out = [index(i) for i in ids]
    except TypeError as error:
        message = f"block ids: {error}"
        raise ConfigError(message) from error
    bad = next((i for i in out if not 0 <= i < 1 << 32), None)
    if bad is not None:
        message = f"block id {bad} is out of range: ids start at 0"
        raise ConfigError(message)
    return out
