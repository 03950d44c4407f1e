"""NIXL over its UCX backend: READ or WRITE with prepared descriptors, a handle a transfer, posted again each round."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import nixl
import numpy as np

from .blocks import OneSided
from .request import LOCAL, REMOTE
from .side import Setup, Words, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task

_MEMORY = "DRAM"


class _Node(OneSided):
    """The base of both roles: an agent with one registered buffer."""

    name = ""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        # NIXL's progress thread never sleeps and slows transfers, so each side drives NIXL by polling
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent = nixl.nixl_agent(self.name, config)
        self.agent.register_memory([(self.buffer.ctypes.data, setup.total, 0, "")], _MEMORY)

    def hello(self) -> Words:
        """Returns the agent's metadata and the buffer's address."""
        metadata: bytes = self.agent.get_agent_metadata()
        return {"metadata": metadata.hex(), "address": self.buffer.ctypes.data, "version": f"nixl-{version('nixl')}"}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Adds the other agent."""
        self.agent.add_remote_agent(bytes.fromhex(words["metadata"]))
        self.remote_address = int(words["address"])
        return {}


class Passive(_Node):
    """The passive side."""

    name = "passive"

    def run(self, task: Task) -> Words:
        """Polls NIXL until the other side is done: without that no transfer ends, even where the kernel copies."""
        del task
        while not self.agent.get_new_notifs():
            pass
        return {}


class Active(_Node):
    """Reads or writes."""

    name, is_active = "active", True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._op = setup.options["op"]
        self._prepared: dict[tuple[object, ...], list[Any]] = {}

    def run(self, task: Task) -> Words:
        """Runs one transfer after the other, and polls each until its end, because NIXL has no blocking wait."""
        handles = self._handles(task)
        chosen = [handles[i] for i in task.chosen(len(self.buffer))]

        def all_transfers() -> None:
            for handle in chosen:
                self._transfer(handle)

        answer = seconds(all_transfers)
        self.agent.send_notif("passive", b"done")
        return answer

    def _transfer(self, handle: Any) -> None:
        state = self.agent.transfer(handle)
        while state != "DONE":
            if state == "ERR":
                message = "the transfer ended with an error"
                raise ValueError(message)
            state = self.agent.check_xfer_state(handle)

    def _handles(self, task: Task) -> list[Any]:
        key = (task.num_bytes, task.num_blocks, task.is_scattered)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(task)
        return self._prepared[key]

    def _prepare(self, task: Task) -> list[Any]:
        total, size = len(self.buffer), task.num_bytes
        ours = self._descriptors("NIXL_INIT_AGENT", self.buffer.ctypes.data, size)
        theirs = self._descriptors("passive", self.remote_address, size)
        pairs = zip(task.transfers(total, LOCAL), task.transfers(total, REMOTE), strict=True)
        return [self.agent.make_prepped_xfer(self._op, ours, to, theirs, there) for to, there in pairs]

    def _descriptors(self, agent: str, address: int, size: int) -> Any:
        # address, length, device, stride, count: contiguous blocks, which NIXL coalesces
        blocks = np.array([[address, size, 0, size, len(self.buffer) // size]], np.uint64)
        return self.agent.prep_xfer_dlist(agent, blocks, _MEMORY)


ROLES = {"active": Active, "passive": Passive}
