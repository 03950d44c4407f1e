"""ucxx's asyncio API: tensors by tag, several pending, and latency."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import ucxx

from .request import memory, pattern
from .side import Idle, Setup, Words, half_median_us, seconds
from .tensors import Receiving

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping

    from .request import Task


class _Node(Idle):
    """The base of both roles: one event loop, which runs during a task."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.loop = asyncio.new_event_loop()
        self.host = setup.host
        self.endpoint: Any = None

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def in_flight(self, task: Task, begun: Iterable[Coroutine[Any, Any, Any]]) -> None:
        """Awaits operations, several at a time."""
        limit, under_way = int(task.options["in_flight"]), []
        for work in begun:
            under_way.append(asyncio.ensure_future(work))
            if len(under_way) >= limit:
                await under_way.pop(0)
        await asyncio.gather(*under_way)


class Passive(_Node, Receiving):
    """Listens and receives."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._accepted = asyncio.Event()
        self._port = self.do(self._listen())

    async def _listen(self) -> int:
        self._listener = ucxx.create_listener(self._accept)
        port: int = self._listener.port
        return port

    async def _accept(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self._accepted.set()

    def hello(self) -> Words:
        """Returns the address."""
        return {"port": self._port, "version": f"ucxx-{version('ucxx-cu12')}"}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Waits for the other."""
        del words
        self.do(self._accepted.wait())
        return {}

    def run(self, task: Task) -> Words:
        """Receives, or receives and sends back."""
        self.do(self._echo(task) if task.kind == "latency" else self._receive(task))
        return {}

    async def _receive(self, task: Task) -> None:
        size, buffer = task.num_bytes, self._buffer.data
        begun = (self.endpoint.recv(buffer[at : at + size]) for at in task.offsets(len(buffer)))
        await self.in_flight(task, begun)
        await self.endpoint.send(buffer[:8])

    async def _echo(self, task: Task) -> None:
        buffer = self._buffer.data[: task.num_bytes]
        for _ in range(task.count):
            await self.endpoint.recv(buffer)
            await self.endpoint.send(buffer)


class Active(_Node):
    """Connects and sends."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._source = pattern(setup.total)

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects."""
        self.do(self._connect(int(words["port"])))
        return {}

    async def _connect(self, port: int) -> None:
        self.endpoint = await ucxx.create_endpoint(self.host, port)

    def run(self, task: Task) -> Words:
        """Sends, or sends and receives."""
        if task.kind == "latency":
            return self._latency(task)
        return seconds(lambda: self.do(self._send(task)))

    async def _send(self, task: Task) -> None:
        size, source = task.num_bytes, self._source
        begun = (self.endpoint.send(source[at : at + size]) for at in task.offsets(len(source)))
        await self.in_flight(task, begun)
        await self.endpoint.recv(np.empty(8, np.uint8))

    def _latency(self, task: Task) -> Words:
        ping = self._source[: task.num_bytes]
        pong = memory(task.num_bytes)
        # one run of the event loop for all of them, because its start costs more than a message
        return self.do(self._pings(task.count, ping, pong))  # type: ignore[no-any-return]

    async def _pings(self, count: int, ping: Any, pong: Any) -> Words:
        samples = []
        for _ in range(count):
            started = time.perf_counter()
            await self.endpoint.send(ping)
            await self.endpoint.recv(pong)
            samples.append(time.perf_counter() - started)
        return half_median_us(samples)


ROLES = {"active": Active, "passive": Passive}
