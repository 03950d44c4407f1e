"""For tests of programs that use kvpipe: pipes and agents of one process, without UCX.

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
    """Pipes and agents that are made in this block move their bytes in the memory of this process.

    Everything above UCX is the real thing: sessions over loopback, tokens, order, timeouts, threads, errors. What is
    made in the block stays as it is after its end. Both ends have to be made in such a block, in this process:
    connecting to an end that uses UCX or lives in another process is a `ConnectError`. `transport` is `"memory"`.

    The block holds for all threads of the process, so tests that run side by side need processes of their own.

    Args:
        data_path: How bytes reach their destination: `get`, as over CMA and RDMA, lets the destination read the source;
            `messages`, as over TCP, lets the source stream.

    Raises:
        ConfigError: There is no such data path.
    """
    with override_transport(_kvpipe.Transport.memory(data_path)):
        yield
