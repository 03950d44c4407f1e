"""Regions: registered memory divided into blocks, of this process and of peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpipe import _cuda
from kvpipe._closing import Closing
from kvpipe._tensor import describe
from kvpipe.exceptions import ClosedError, ConfigError
from kvpipe.work import Work

if TYPE_CHECKING:
    from kvpipe import _kvpipe


@dataclass(frozen=True)
class RegionInfo:
    """A peer's region.

    Attributes:
        num_blocks: Number of blocks; ids start at 0.
        block_bytes: Bytes of a block.
        device: Device of the memory at the peer: `cpu`, or `cuda:0` and so on.
        is_writable: True if this side may write blocks, see `Peer.write_blocks`.
    """

    num_blocks: int
    block_bytes: int
    device: str = "cpu"
    is_writable: bool = False


class Region(Closing):
    """Registered memory of this process, made by `Agent.register`. A context manager that closes the region.

    Attributes:
        name: Name of the region for peers.
        num_blocks: Number of blocks.
        block_bytes: Bytes of a block.
        stride: Bytes from the start of a block to the start of the next.
        device: Device of the memory: `cpu`, or `cuda:0` and so on.
        is_writable: True if peers may write blocks.
    """

    def __init__(
        self,
        agent: _kvpipe.Agent,
        native: _kvpipe.Region,
        info: tuple[str, int, int, bool],
        gpu: int | None = None,
    ) -> None:
        self._agent = agent
        self._native = native
        self.name, self.block_bytes, self.stride, self.is_writable = info
        self.num_blocks = native.num_blocks
        self._gpu = gpu
        self.device = "cpu" if gpu is None else f"cuda:{gpu}"

    def _ready(self) -> _kvpipe.CudaEvent | None:
        """Records the current stream's work so far; `None` for blocks in host memory."""
        return None if self._gpu is None else _cuda.record_pending(self._gpu)

    def close(self, timeout: float | None = 10) -> None:
        """Closes the region, and waits until no peer reads its memory. A second call does nothing.

        Transfers that have not begun fail, here and at peers. The call waits for those that have begun: peers report
        the end of their reads. The name can be used again.

        Args:
            timeout: Seconds to wait for that.

        Raises:
            TransferTimeoutError: A peer may still be reading. The region is closed nevertheless; its memory stays
                registered and alive until that peer has answered or is lost. After its agent was closed: reads have not
                ended, see `Agent.close`.
        """
        try:
            closing = self._agent.close_region(self._native, timeout)
        except ClosedError:
            return  # closed with its agent, or registered before fork(): the parent closes it
        Work(closing, lambda _: None).wait()

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self._native.is_closed

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        access = "writable" if self.is_writable else "read-only for peers"
        return (
            f"<Region {self.name!r} {self.num_blocks} x {self.block_bytes} bytes on {self.device}, {access}, {state}>"
        )


def writable_bytes(memory: Any) -> Any:
    """Returns the bytes of a tensor, or of another object that `Agent.register` accepts, in place.

    Raises:
        ConfigError: The object is not contiguous, or is no memory.
        TransportUnavailableError: Its device cannot be registered.
    """
    if any(hasattr(memory, name) for name in ("dtype", "__dlpack__", "__cuda_array_interface__")):
        return describe(memory, must_be_in_place=True).data
    try:
        return memoryview(memory).cast("B")
    except TypeError as error:
        message = f"cannot register {type(memory).__name__}: expected a tensor or a contiguous buffer ({error})"
        raise ConfigError(message) from error
