"""kvpipe's Agent: the active process reads blocks of the passive one, with and without checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvpipe

from .blocks import verify_blocks
from .request import LOCAL, REMOTE, memory, pattern
from .side import INTEGRITY, MODES, Idle, Setup, Words, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .request import Task

_TIMEOUT_S = 60.0


def _regions(agent: kvpipe.Agent, data: object, setup: Setup) -> dict[int, kvpipe.Region]:
    """Registers the memory once for each block size, because peers learn regions when they connect."""
    sizes = map(int, setup.options["sizes"].split(","))
    return {size: agent.register(data, _name(size), size) for size in sizes}


def _name(size: int) -> str:
    return f"kv-{size}"


class Passive(Idle):
    """The source of the blocks."""

    def __init__(self, setup: Setup) -> None:
        self._agent = kvpipe.Agent(f"{setup.host}:0")
        self._regions = _regions(self._agent, pattern(setup.total), setup)

    def hello(self) -> Words:
        """Returns the agent's address."""
        return {"address": self._agent.address}


class Active(Idle):
    """Reads the blocks."""

    def __init__(self, setup: Setup) -> None:
        self._buffer = memory(setup.total)
        self._agents = {way: kvpipe.Agent(f"{setup.host}:0", integrity=INTEGRITY[way]) for way in MODES}
        self._regions = {way: _regions(agent, self._buffer, setup) for way, agent in self._agents.items()}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects."""
        address = words["address"]
        self._peers = {way: agent.connect(address, timeout=_TIMEOUT_S) for way, agent in self._agents.items()}
        return {"transport": self._peers["checked"].transport}

    def clear(self, task: Task) -> None:
        """Clears the destination."""
        del task
        self._buffer[:] = 0

    def run(self, task: Task) -> Words:
        """Runs one transfer after the other."""
        reads = self._reads(task)

        def all_reads() -> None:
            for read in reads:
                read().wait(_TIMEOUT_S)

        return seconds(all_reads)

    def _reads(self, task: Task) -> list[Callable[[], kvpipe.Work[int]]]:
        """Prepares a function for each transfer of the run, before the clock starts."""
        way = task.options["way"]
        total, peer, region = len(self._buffer), self._peers[way], self._regions[way][task.num_bytes]
        local, remote = task.transfers(total, LOCAL), task.transfers(total, REMOTE)

        def reader(to: list[int], source: list[int]) -> Callable[[], kvpipe.Work[int]]:
            return lambda: peer.read_blocks(region, to, _name(task.num_bytes), source)

        return [reader(local[i].tolist(), remote[i].tolist()) for i in task.chosen(total)]

    def verify(self, task: Task) -> None:
        """Raises unless every block is at its destination."""
        verify_blocks(self._buffer, task)


ROLES = {"active": Active, "passive": Passive}
