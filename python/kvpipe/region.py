"""Regions: registered memory cut into blocks, of this process and of peers."""

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
        num_blocks: Number of blocks; ids go from 0 to one less.
        block_bytes: Bytes of a block.
        device: Where its memory is: `cpu`, or `cuda:0` and so on, as its owner counts.
        is_writable: Whether its owner takes blocks into it, see `Peer.write_blocks`.
    """

    num_blocks: int
    block_bytes: int
    device: str = "cpu"
    is_writable: bool = False


class Region(Closing):
    """Registered memory of this process, made by `Agent.register`. A context manager: its end closes the region.

    Attributes:
        name: Under which peers know it.
        num_blocks: Number of blocks.
        block_bytes: Bytes of a block.
        stride: Bytes from the start of a block to the start of the next.
        device: Where the memory is: `cpu`, or `cuda:0` and so on.
        is_writable: Whether blocks that peers write are taken into it.
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
        """What the blocks' stream has to do now; `None` for blocks of the host."""
        return None if self._gpu is None else _cuda.record(self._gpu)

    def close(self, timeout: float | None = 10) -> None:
        """Takes the memory back. Closing twice is fine, as is closing after the agent.

        Transfers that have not begun fail, here and at peers; those that have begun are waited for. Peers say when
        they read nothing of it any more. The name can be given again.

        Args:
            timeout: Seconds to wait for that.

        Raises:
            TransferTimeoutError: Somebody may still be reading. The region is closed all the same; its memory stays
                registered and alive until that peer has answered or is lost. After its agent was closed: reads have not
                ended, see `Agent.close`.
        """
        try:
            closing = self._agent.close_region(self._native, timeout)
        except ClosedError:
            return  # with its agent, or registered before fork(): the parent's to close
        Work(closing, lambda _: None).wait()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._native.is_closed

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        access = "writable" if self.is_writable else "read-only for peers"
        return (
            f"<Region {self.name!r} {self.num_blocks} x {self.block_bytes} bytes on {self.device}, {access}, {state}>"
        )


def writable_bytes(memory: Any) -> Any:
    """The bytes of a tensor, or of another object that `Agent.register` takes, in place.

    Raises:
        ConfigError: Not contiguous, or no memory at all.
        TransportUnavailableError: On a device that this version cannot register.
    """
    if any(hasattr(memory, name) for name in ("dtype", "__dlpack__", "__cuda_array_interface__")):
        return describe(memory, must_be_in_place=True).data
    try:
        return memoryview(memory).cast("B")
    except TypeError as error:
        message = f"cannot register {type(memory).__name__}: expected a tensor or a contiguous buffer ({error})"
        raise ConfigError(message) from error
