"""Loads of an agent: what one costs beside many peers and many loads under way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from dataclasses import dataclass, field
from statistics import quantiles
from typing import TYPE_CHECKING, Self

from bench.scale.point import Point, ReactorThread, num_descriptors, threads, wait
from kvpipe import _kvpipe
from kvpipe.exceptions import KVPipeError
from kvpipe.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_NUM_REGIONS, _BLOCK_BYTES, _BLOCKS_A_LOAD = 4, 512, 2
_LISTEN, _SILENCE_S = "127.0.0.1:0", 3600.0
_OPERATIONS, _CONNECTS, _AWAITED = 100, 15, 100
_IDLE_S, _CONNECTED_WITHIN_S = 1.0, 0.1


@dataclass
class Node:
    """An agent with its regions."""

    agent: _kvpipe.Agent
    regions: list[_kvpipe.Region] = field(default_factory=list)

    @classmethod
    def start(cls, num_blocks: int) -> Self:
        """Starts one whose regions have so many blocks."""
        agent = _kvpipe.Agent(_LISTEN, b"", _kvpipe.Transport.memory("remote_read"), silence=_SILENCE_S)
        node = cls(agent)
        for layer in range(_NUM_REGIONS):
            memory = bytearray(num_blocks * _BLOCK_BYTES)
            registered = agent.register(f"layer {layer}", memory, _BLOCK_BYTES, _BLOCK_BYTES)
            registered.wait()
            node.regions.append(registered.result())
        return node

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.agent.address or ""

    def mark_ready(self, handoff: bytes, first: int, num_blocks: int) -> None:
        """Announces blocks of a handoff in all regions. Any handoff is of the same blocks."""
        ready = _kvpipe.ReadyBlocks([(handoff, first, list(range(first, first + num_blocks)))])
        self.agent.mark_ready(ready, self.regions)


class Loads:
    """An agent with its peers and the loads that are under way, each with half of its blocks."""

    def __init__(self, point: Point) -> None:
        self._numbers = itertools.count()
        self._ended: set[bytes] = set()
        self._point = point
        self._other_threads = threads()
        self._producers = [Node.start(_BLOCKS_A_LOAD) for _ in range(point.num_peers)]
        before = num_descriptors()
        self.thread = ReactorThread.made_by(self._start)
        self._own_descriptors = num_descriptors() - before
        for work in [self._agent.connect(producer.address) for producer in self._producers]:
            wait(work.is_completed)
            work.result()
        # A connection has one descriptor on either side.
        self._own_descriptors += (num_descriptors() - before - self._own_descriptors) // 2
        for _ in range(point.num_loads):
            self._half_loaded()

    def _start(self) -> None:
        # Besides those under way, one load at a time.
        self._node = Node.start(_BLOCKS_A_LOAD * (self._point.num_loads + 1))
        self._agent = self._node.agent

    def _num_threads(self) -> int:
        """Threads since the start, but for the one of each producer. Others may have ended meanwhile."""
        return len(threads() - self._other_threads) - self._point.num_peers

    def costs(self) -> dict[str, float]:
        """Microseconds of the reactor's CPU for each operation, and what the process holds."""
        held = {"descriptors": self._own_descriptors, "threads": self._num_threads()}
        connects = [self._connect_and_lose() for _ in range(_CONNECTS)]
        return {
            "round": self._typical_of(lambda: self._agent.commit(self._handoff())),
            "message": self._message(),
            "load": _typical(self._load(self._handoff()) for _ in range(_OPERATIONS)),
            "load_same_peer": _typical(self._load(self._handoff_of_first()) for _ in range(_OPERATIONS)),
            "cancel": _typical(self._cancel() for _ in range(_OPERATIONS)),
            "connect": _typical(connect for connect, _ in connects),
            "loss": _typical(loss for _, loss in connects),
            "idle": self._idle(),
            **held,
            "awaited": asyncio.run(self._await_many()),
        }

    def _typical_of(self, act: Callable[[], object]) -> float:
        return _typical(self.thread.cost_us(act) for _ in range(_OPERATIONS))

    def _handoff(self) -> bytes:
        return next(self._numbers).to_bytes(16)

    def _handoff_of_first(self) -> bytes:
        """A handoff of the first producer."""
        return next(number for number in self._numbers if number % len(self._producers) == 0).to_bytes(16)

    def _producer(self, handoff: bytes) -> Node:
        return self._producers[int.from_bytes(handoff) % len(self._producers)]

    def _begin(self, handoff: bytes, place: int) -> None:
        producer = self._producer(handoff)
        blocks = [place * _BLOCKS_A_LOAD + number for number in range(_BLOCKS_A_LOAD)]
        parts = [(self._node.regions, 0, blocks)]
        self._agent.load(handoff, producer.address, producer.agent.incarnation, parts, is_committed=True)

    def _half_loaded(self, place: int | None = None) -> bytes:
        """Begins a load and waits until its first block is here."""
        handoff, num_reads = self._handoff(), self._num_reads() + _NUM_REGIONS
        self._begin(handoff, int.from_bytes(handoff) if place is None else place)
        self._producer(handoff).mark_ready(handoff, 0, 1)
        wait(lambda: self._num_reads() >= num_reads)
        return handoff

    def _num_reads(self) -> int:
        return self._agent.stats()[2]

    def _load(self, handoff: bytes) -> float:
        def act() -> None:
            self._producer(handoff).mark_ready(handoff, 0, _BLOCKS_A_LOAD)
            self._begin(handoff, self._point.num_loads)

        return self.thread.cost_us(act, lambda: self._has_ended(handoff, "load_completed"))

    def _cancel(self) -> float:
        handoff = self._half_loaded(self._point.num_loads)
        cost_us = self.thread.cost_us(
            lambda: self._agent.cancel(handoff, "cancelled", is_withdrawn=False),
            lambda: self._has_ended(handoff, "load_failed"),
        )
        self._producer(handoff).agent.end(handoff, "cancelled")
        return cost_us

    def _has_ended(self, handoff: bytes, kind: str) -> bool:
        self._ended |= {event["handoff"] for event in self._agent.drain() if event["event"] == kind}
        return handoff in self._ended

    def _message(self) -> float:
        sender = self._producers[0].agent
        (peer,) = sender.peers()
        cost_us = self._typical_of(lambda: sender.notify(peer, b"x"))
        self._agent.notifications(0)
        return cost_us

    def _connect_and_lose(self) -> tuple[float, float]:
        another = Node.start(1)
        work: _kvpipe.Work | None = None

        def act() -> None:
            nonlocal work
            work = self._agent.connect(another.address)

        connect_us = self.thread.cost_us(act, lambda: work is not None and work.is_completed())
        peer = work.result() if work else None
        loss_us = self.thread.cost_us(another.agent.close, lambda: peer is None or peer.lost is not None)
        return connect_us, loss_us

    def _idle(self) -> float:
        """Microseconds of CPU for each second in which nothing is asked of it: heartbeats."""
        self.thread.settle()
        before = self.thread.cpu_s()
        time.sleep(_IDLE_S)
        return 1e6 * (self.thread.cpu_s() - before) / _IDLE_S

    async def _await_many(self) -> int:
        """Descriptors that operations take while asyncio waits for them, here connects to a peer that is silent."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = "{}:{}".format(*silent.getsockname())
            works = [Work(self._agent.connect(address), lambda native: native) for _ in range(_AWAITED)]
            await asyncio.sleep(_CONNECTED_WITHIN_S)  # the one connection of all of them
            before = num_descriptors()
            waiting = [asyncio.ensure_future(_end(work)) for work in works]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            more = num_descriptors() - before
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return more

    def close(self) -> None:
        """Closes all agents."""
        for node in [self._node, *self._producers]:
            node.agent.close()


def _typical(costs_us: Iterable[float]) -> float:
    """The lower quartile: a thread that is woken on another CPU, or late, takes longer for the same work."""
    return quantiles(costs_us, n=4)[0]


async def _end(work: Work[object]) -> None:
    with contextlib.suppress(KVPipeError):
        await work
