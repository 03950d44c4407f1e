"""For tests of programs that use kvpipe: pipes and agents in one process, without UCX.

::

    from kvpipe import Pipe
    from kvpipe.testing import memory_transport

    with memory_transport(), Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
        sender.isend_tensor(numpy.arange(3))
        receiver.recv_tensor()
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from kvpipe import _kvpipe
from kvpipe._transport import override_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["memory_transport"]


@contextmanager
def memory_transport(data_path: Literal["remote_read", "stream"] = "remote_read") -> Iterator[None]:
    """Pipes and agents made in this block move bytes in the memory of this process.

    Everything above UCX is real: sessions over loopback, tokens, order, timeouts, threads, errors. Objects keep this
    transport after the block. Both ends must be made in such a block and in this process: connecting to an end that
    uses UCX, or to another process, raises `ConnectError`. Their `transport` is `"memory"`.

    The block applies to all threads of the process, so parallel tests need separate processes.

    Args:
        data_path: How bytes reach their destination. With `remote_read`, as over CMA and RDMA, the destination reads
            them. With `stream`, as over TCP, the source streams them.

    Raises:
        ConfigError: The data path is unknown.
    """
    with override_transport(_kvpipe.Transport.memory(data_path)):
        yield
