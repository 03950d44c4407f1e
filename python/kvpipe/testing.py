"""For tests of programs that use kvpipe: pipes and agents in one process, without UCX.

::

    from kvpipe import Pipe
    from kvpipe.testing import memory_transport

    with memory_transport(), Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
        sender.isend_tensor(numpy.arange(3))
        receiver.recv_tensor()
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from kvpipe import _kvpipe
from kvpipe._transport import override_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LateDevice", "memory_transport"]


@contextmanager
def memory_transport(data_path: Literal["remote_read", "stream"] = "remote_read") -> Iterator[None]:
    """Pipes and agents made in this block move bytes in the memory of this process.

    Everything above UCX is real: sessions over loopback, tokens, order, timeouts, threads, errors. Objects keep this
    transport after the block. Both ends must be made in such a block and in this process: connecting to an end that
    uses UCX, or to another process, raises `ConnectError`. Their `transport` is `"memory"`.

    The block applies to all threads of the process, so parallel tests need separate processes.

    Args:
        data_path: The data path of all sessions. With `remote_read`, as over CMA and RDMA, the destination reads the
            bytes. With `stream`, as over TCP, the source streams them.

    Raises:
        ConfigError: The data path is unknown.
    """
    with override_transport(_kvpipe.Transport.memory(data_path)):
        yield


class LateDevice:
    """Stands in for a GPU: what is launched runs later, in order, when the test says so.

    It has the interface of the connector's `CudaOrder`, so that a worker role takes it for the order of its device.

    Attributes:
        is_async: True if hooks are called before the device has done their work.
    """

    is_async = True

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object] | _kvpipe.ManualEvent] = deque()

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queues a kernel: a function that writes or reads memory."""
        self._waiting.append(kernel)

    def record(self) -> _kvpipe.ManualEvent:
        """Returns an event that is completed when all that was launched so far has run."""
        event = _kvpipe.ManualEvent()
        self._waiting.append(event)
        return event

    def is_capturing(self) -> bool:
        """True if a graph is being captured: never."""
        return False

    def run(self, count: int | None = None, *, error: str | None = None) -> None:
        """Runs what was launched first: `count` kernels and events, or all.

        Args:
            count: Maximum number of kernels and events; by default all.
            error: With it the kernels do nothing, and events fail with this error.
        """
        left = len(self._waiting) if count is None else min(count, len(self._waiting))
        for _ in range(left):
            first = self._waiting.popleft()
            if isinstance(first, _kvpipe.ManualEvent):
                first.complete(error)
            elif error is None:
                first()
