"""ZeroMQ: a pair of sockets with frames that are not copied; the receiver gets memory of ZeroMQ."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from .request import pattern
from .side import Idle, Setup, Words, half_round_trip_us, seconds
from .tensors import Receiving

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task


class Passive(Receiving):
    """Binds and receives."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._socket = zmq.Context().socket(zmq.PAIR)
        is_ipc = setup.options["endpoint"] == "ipc"
        # @: a socket without a file
        self._socket.bind(f"ipc://@kvpipe-bench-{uuid.uuid4().hex}" if is_ipc else f"tcp://{setup.host}:*")

    def hello(self) -> Words:
        """Returns the endpoint."""
        return {"endpoint": self._socket.getsockopt_string(zmq.LAST_ENDPOINT), "version": f"pyzmq-{zmq.__version__}"}

    def run(self, task: Task) -> Words:
        """Receives, or receives and sends back."""
        for _ in range(task.count):
            frame = self._socket.recv(copy=False)
            if task.kind == "latency":
                self._socket.send(frame, copy=False)
        if task.kind == "tensors":
            self._buffer.fresh = np.frombuffer(frame, np.uint8)
            self._socket.send(b"done")
        return {}


class Active(Idle):
    """Connects and sends."""

    def __init__(self, setup: Setup) -> None:
        self._source = pattern(setup.total)
        self._transport = setup.options["endpoint"]
        self._socket = zmq.Context().socket(zmq.PAIR)
        self._socket.set_hwm(4)  # as many as the other programs keep pending

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects."""
        self._socket.connect(words["endpoint"])
        return {"transport": self._transport}

    def run(self, task: Task) -> Words:
        """Sends, or sends and receives."""
        if task.kind == "latency":
            return half_round_trip_us(task.count, lambda: self._ping(self._source[: task.num_bytes]))
        return seconds(lambda: self._send(task))

    def _send(self, task: Task) -> None:
        for at in task.offsets(len(self._source)):
            self._socket.send(self._source[at : at + task.num_bytes], copy=False)
        self._socket.recv()

    def _ping(self, ping: Any) -> None:
        self._socket.send(ping, copy=False)
        self._socket.recv(copy=False)


ROLES = {"active": Active, "passive": Passive}
