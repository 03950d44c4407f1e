"""kvpipe's Agent: the active process reads blocks of the passive one, through one agent with checksums, one without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import kvpipe

from .blocks import verify_blocks
from .request import LOCAL, REMOTE, pattern
from .side import WAYS, Idle, Setup, Words, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .request import Task

_TIMEOUT_S = 60.0


def _regions(agent: kvpipe.Agent, data: object, setup: Setup) -> dict[int, kvpipe.Region]:
    """The same memory once for each size of a block: peers learn regions when they connect."""
    sizes = map(int, setup.options["sizes"].split(","))
    return {size: agent.register(data, _name(size), size) for size in sizes}


def _name(size: int) -> str:
    return f"kv-{size}"


class Passive(Idle):
    """Holds the blocks."""

    def __init__(self, setup: Setup) -> None:
        self._agent = kvpipe.Agent(f"{setup.host}:0")
        self._regions = _regions(self._agent, pattern(setup.total), setup)

    def hello(self) -> Words:
        """Where the agent listens."""
        return {"address": self._agent.address}


class Active(Idle):
    """Reads the blocks."""

    def __init__(self, setup: Setup) -> None:
        self._buffer: Any = np.ones(setup.total, np.uint8)
        self._agents = {way: kvpipe.Agent(f"{setup.host}:0", checksum=way == "checked") for way in WAYS}
        self._regions = {way: _regions(agent, self._buffer, setup) for way, agent in self._agents.items()}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects."""
        address = words["address"]
        self._peers = {way: agent.connect(address, timeout=_TIMEOUT_S) for way, agent in self._agents.items()}
        return {"transport": self._peers["checked"].transport}

    def clear(self, task: Task) -> None:
        """Forgets what arrived."""
        del task
        self._buffer[:] = 0

    def run(self, task: Task) -> Words:
        """One transfer after the other."""
        reads = self._reads(task)

        def all_reads() -> None:
            for read in reads:
                read().wait(_TIMEOUT_S)

        return seconds(all_reads)

    def _reads(self, task: Task) -> list[Callable[[], kvpipe.Work[int]]]:
        """What begins each transfer of the run; made before the clock starts."""
        way = task.options["way"]
        total, peer, region = len(self._buffer), self._peers[way], self._regions[way][task.num_bytes]
        local, remote = task.transfers(total, LOCAL), task.transfers(total, REMOTE)

        def reader(to: list[int], source: list[int]) -> Callable[[], kvpipe.Work[int]]:
            return lambda: peer.read_blocks(region, to, _name(task.num_bytes), source)

        return [reader(local[i].tolist(), remote[i].tolist()) for i in task.chosen(total)]

    def verify(self, task: Task) -> None:
        """Whether every block is where it was to be read to."""
        verify_blocks(self._buffer, task)


ROLES = {"active": Active, "passive": Passive}
