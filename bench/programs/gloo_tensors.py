"""torch.distributed over gloo: tensors by isend and irecv, and latency."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .request import pattern
from .side import Idle, Setup, Words, half_round_trip_us, keep_in_flight, seconds
from .tensors import Receiving

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task


class _Node(Idle):
    """The base of both roles: one of two ranks."""

    rank = 0

    def join(self, file: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=self.rank, world_size=2)


class Passive(_Node, Receiving):
    """Receives."""

    rank = 1

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._tensor = torch.from_numpy(self._buffer.data)
        # The ranks rendezvous by a file that must not exist before
        self._file = f"{tempfile.gettempdir()}/kvpipe-bench-{uuid.uuid4().hex}"

    def hello(self) -> Words:
        """Returns the rendezvous file."""
        return {"file": self._file, "version": f"torch-{torch.__version__}"}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Joins the group."""
        del words
        self.join(self._file)
        return {}

    def clear(self, task: Task) -> None:
        """Clears the buffer."""
        super().clear(task)
        Path(self._file).unlink(missing_ok=True)  # both ranks have joined before

    def run(self, task: Task) -> Words:
        """Receives, or receives and sends back."""
        if task.kind == "latency":
            self._echo(task)
            return {}
        size = task.num_bytes
        begun = (distributed.irecv(self._tensor[at : at + size], 0) for at in task.offsets(len(self._tensor)))
        keep_in_flight(int(task.options["in_flight"]), begun)
        distributed.send(self._tensor[:8], 0)
        return {}

    def _echo(self, task: Task) -> None:
        buffer = self._tensor[: task.num_bytes]
        for _ in range(task.count):
            distributed.recv(buffer, 0)
            distributed.send(buffer, 0)


class Active(_Node):
    """Sends."""

    def __init__(self, setup: Setup) -> None:
        self._tensor: Any = torch.from_numpy(pattern(setup.total))

    def meet(self, words: Mapping[str, str]) -> Words:
        """Joins the group."""
        self.join(words["file"])
        return {"transport": "tcp"}

    def run(self, task: Task) -> Words:
        """Sends, or sends and receives."""
        ping, pong = self._tensor[: task.num_bytes], torch.empty(8, dtype=torch.uint8)
        if task.kind == "latency":
            pong = torch.empty_like(ping)
            return half_round_trip_us(task.count, lambda: (distributed.send(ping, 1), distributed.recv(pong, 1)))
        return seconds(lambda: self._send(task, pong))

    def _send(self, task: Task, done: Any) -> None:
        size = task.num_bytes
        begun = (distributed.isend(self._tensor[at : at + size], 1) for at in task.offsets(len(self._tensor)))
        keep_in_flight(int(task.options["in_flight"]), begun)
        distributed.recv(done, 1)


ROLES = {"active": Active, "passive": Passive}
