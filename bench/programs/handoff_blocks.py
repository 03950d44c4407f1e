"""Handoffs: the active process loads what the passive one announced, as decode loads what prefill did."""

from __future__ import annotations

import importlib
import struct
import time
from typing import TYPE_CHECKING, Any

import kvpipe
from kvpipe import _kvpipe
from kvpipe._transport import transport

from .blocks import verify_blocks
from .request import LOCAL, REMOTE, memory, pattern
from .side import Idle, Setup, Words, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task

_TIMEOUT_S = 60.0
# Of handoffs: round, number, bytes of a block, number and order of the blocks.
_ID = struct.Struct("<4I")
# A worker looks once a step of milliseconds. One that looked all the time would take a core from the transport.
_POLL_INTERVAL_S = 50e-6


def handoff_of(task: Task, number: int) -> bytes:
    """Returns the id of a transfer's handoff: no other has it, in this run or another."""
    return _ID.pack(task.round, number, task.num_bytes, task.num_blocks * 2 + task.is_scattered)


def round_and_blocks(handoff: str) -> tuple[int, tuple[int, int, bool]]:
    """Returns the round of an id in hexadecimal digits; size, number and order of its blocks."""
    of_round, _, num_bytes, shape = _ID.unpack(bytes.fromhex(handoff))
    return of_round, (num_bytes, shape // 2, bool(shape % 2))


class _Node(Idle):
    """The base of both roles: one agent a block size, because both sides of a handoff have the same regions."""

    def __init__(self, setup: Setup, data: Any) -> None:
        self._on_host, self.region, self.agent = data, {}, {}
        self.memory = described = data
        device = setup.options.get("device", "cpu")
        if device != "cpu":
            torch: Any = importlib.import_module("torch")
            self._torch, self.memory = torch, torch.from_numpy(data).to(device)
            described = _kvpipe.CudaMemory(self.memory.data_ptr(), len(data), self.memory.device.index, self.memory)
        for size in map(int, setup.options["sizes"].split(",")):
            agent = _kvpipe.Agent(f"{setup.host}:0", b"", transport(), integrity=setup.options["integrity"])
            if file := setup.options.get("trace"):
                agent.trace_to(_kvpipe.Trace(file, type(self).__name__.lower()))
            registered = agent.register("kv", described, size, size)
            registered.wait(_TIMEOUT_S)
            self.agent[size], self.region[size] = agent, registered.result()

    @property
    def is_on_gpu(self) -> bool:
        """True if the blocks are in a torch tensor on a GPU."""
        return self.memory is not self._on_host


class Passive(_Node):
    """The producer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, pattern(setup.total))
        self._granted: list[tuple[_kvpipe.Agent, bytes]] = []

    def hello(self) -> Words:
        """Returns the address and incarnation of each agent."""
        return {f"agent{size}": f"{agent.address}/{agent.incarnation.hex()}" for size, agent in self.agent.items()}

    def run(self, task: Task) -> Words:
        """Ends the handoffs of the run before, announces those of this one, and reports it."""
        agent, total = self.agent[task.num_bytes], len(self.memory)
        source = task.transfers(total, REMOTE)
        chosen = task.chosen(total)
        for granting, handoff in self._granted:
            granting.end(handoff, "the run is over")
        parts = [(handoff_of(task, i), 0, source[chosen[i]].tolist()) for i in range(len(chosen))]
        self._granted = [(agent, handoff) for handoff, _, _ in parts]
        agent.mark_ready(_kvpipe.ReadyBlocks(parts), [self.region[task.num_bytes]])
        for peer in agent.peers():
            agent.notify(peer, b"ready").wait(_TIMEOUT_S)
        return {}


class Active(_Node):
    """The consumer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, memory(setup.total))

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects."""
        self._producers = {}
        for size, agent in self.agent.items():
            address, incarnation = words[f"agent{size}"].split("/")
            connected = agent.connect(address)
            connected.wait(_TIMEOUT_S)
            self._producers[size] = (address, bytes.fromhex(incarnation))
        return {"transport": connected.result().transport}

    def clear(self, task: Task) -> None:
        """Clears the destination."""
        del task
        self.memory[:] = 0
        if self.is_on_gpu:
            self._torch.cuda.synchronize()

    def run(self, task: Task) -> Words:
        """Runs one load after the other, and looks for the end of each, because a worker role has no blocking wait."""
        agent, regions, total = self.agent[task.num_bytes], [self.region[task.num_bytes]], len(self.memory)
        local, chosen = task.transfers(total, LOCAL), task.chosen(total)
        loads = [(handoff_of(task, i), local[chosen[i]].tolist()) for i in range(len(chosen))]
        agent.notifications(_TIMEOUT_S)

        def all_loads() -> None:
            for handoff, block_ids in loads:
                parts = [(regions, 0, block_ids)]
                agent.load(handoff, *self._producers[task.num_bytes], parts, is_committed=True)
                _wait_for(agent, handoff)

        return seconds(all_loads)

    def verify(self, task: Task) -> None:
        """Raises unless every block is at its destination."""
        verify_blocks(self.memory.cpu().numpy() if self.is_on_gpu else self.memory, task)


def _wait_for(agent: _kvpipe.Agent, handoff: bytes) -> None:
    while True:
        for event in agent.drain():
            if event["event"] == "load_failed":
                raise kvpipe.KVPipeError(event["reason"])
            if event["event"] == "load_completed" and event["handoff"] == handoff:
                return
        time.sleep(_POLL_INTERVAL_S)


ROLES = {"active": Active, "passive": Passive}
