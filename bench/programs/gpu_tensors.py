"""kvpipe's Pipe between tensors on a GPU, in one direction, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import kvpipe

from .request import pattern
from .side import Idle, Setup, Words, keep_in_flight, seconds
from .tensors import Receiving

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task

_TIMEOUT_S = 60.0


class Active(Idle):
    """Sends, and receives a message when everything has been received."""

    def __init__(self, setup: Setup) -> None:
        self._source: Any = torch.from_numpy(pattern(setup.total)).to(setup.options["device"])
        self._back = kvpipe.Pipe.listen(f"{setup.host}:0")

    def hello(self) -> Words:
        """Returns the address of the pipe back."""
        return {"address": self._back.address}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects the pipe to the passive process."""
        self._there = kvpipe.Pipe.connect(words["there"], timeout=_TIMEOUT_S)
        return {"transport": self._there.transport}

    def run(self, task: Task) -> Words:
        """Sends."""
        return seconds(lambda: self._send(task))

    def _send(self, task: Task) -> None:
        size = task.num_bytes
        offsets = task.offsets(len(self._source))
        begun = (self._there.isend_tensor(self._source[at : at + size]) for at in offsets)
        keep_in_flight(int(task.options["in_flight"]), begun)
        self._back.recv_tensor(timeout=_TIMEOUT_S)


class Passive(Receiving):
    """Receives into existing memory of the GPU."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._on_gpu: Any = torch.zeros(setup.total, dtype=torch.uint8, device=setup.options["device"])
        self._there = kvpipe.Pipe.listen(f"{setup.host}:0")

    def hello(self) -> Words:
        """Returns the address of the pipe."""
        return {"there": self._there.address}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects the pipe back."""
        self._back = kvpipe.Pipe.connect(words["address"], timeout=_TIMEOUT_S)
        return {}

    def run(self, task: Task) -> Words:
        """Receives."""
        size = task.num_bytes
        offsets = task.offsets(len(self._on_gpu))
        begun = (self._there.irecv_tensor(out=self._on_gpu[at : at + size]) for at in offsets)
        keep_in_flight(int(task.options["in_flight"]), begun)
        self._back.send_tensor(None, timeout=_TIMEOUT_S)
        return {}

    def clear(self, task: Task) -> None:
        """Clears the memory."""
        super().clear(task)
        self._on_gpu.zero_()

    def verify(self, task: Task) -> None:
        """Raises unless all tensors have arrived."""
        self._buffer.data[:] = self._on_gpu.cpu().numpy()
        super().verify(task)


ROLES = {"active": Active, "passive": Passive}
