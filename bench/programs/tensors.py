"""The receive buffer of tensors, the same in every program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .request import memory, pattern
from .side import Idle, Setup, expect

if TYPE_CHECKING:
    from .request import Task


class ReceiveBuffer:
    """Existing memory for tensors, which arrive at the offsets that they were sent from.

    Attributes:
        data: The bytes.
        fresh: The last tensor that arrived in fresh memory; `verify` compares it instead.
    """

    def __init__(self, total: int) -> None:
        self.data = memory(total)
        self.fresh: Any = None

    def clear(self) -> None:
        """Clears the memory."""
        self.data[:] = 0
        self.fresh = None

    def verify(self, task: Task) -> None:
        """Raises unless the tensors of the run have arrived."""
        total, size = len(self.data), task.num_bytes
        sent = pattern(total)
        offsets = task.offsets(total)
        if self.fresh is not None:
            expect(self.fresh, sent[offsets[-1] : offsets[-1] + size], "tensors")
            return
        for at in offsets:
            expect(self.data[at : at + size], sent[at : at + size], "tensors")


class Receiving(Idle):
    """A role that receives tensors."""

    def __init__(self, setup: Setup) -> None:
        self._buffer = ReceiveBuffer(setup.total)

    def clear(self, task: Task) -> None:
        """Clears the buffer."""
        del task
        self._buffer.clear()

    def verify(self, task: Task) -> None:
        """Raises unless all tensors have arrived."""
        if task.kind != "latency":
            self._buffer.verify(task)
