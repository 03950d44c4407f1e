"""Blocks on a GPU: kvpipe's Agent reads those of another process; torch gathers and scatters those of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import kvpipe

from .blocks import verify_blocks
from .request import LOCAL, REMOTE, pattern
from .side import Idle, Setup, Words, keep_in_flight, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .request import Task

_TIMEOUT_S = 60.0
# Without a GPU nothing computes checksums.
_INTEGRITY = "none"


def _filled(setup: Setup) -> Any:
    return torch.from_numpy(pattern(setup.total)).to(setup.options["device"])


def _empty(setup: Setup) -> Any:
    return torch.zeros(setup.total, dtype=torch.uint8, device=setup.options["device"])


def _sizes(setup: Setup) -> list[int]:
    return [int(size) for size in setup.options["sizes"].split(",")]


class Passive(Idle):
    """The source of the blocks."""

    def __init__(self, setup: Setup) -> None:
        self._agent = kvpipe.Agent(f"{setup.host}:0", integrity=_INTEGRITY)
        self._source = _filled(setup)
        for size in _sizes(setup):
            self._agent.register(self._source, f"kv-{size}", size)

    def hello(self) -> Words:
        """Returns the agent's address."""
        return {"address": self._agent.address}


class Receiving(Idle):
    """A role whose memory receives the blocks."""

    def __init__(self, setup: Setup) -> None:
        self.received = _empty(setup)

    def clear(self, task: Task) -> None:
        """Clears the memory."""
        del task
        self.received.zero_()
        torch.cuda.synchronize()

    def verify(self, task: Task) -> None:
        """Raises unless every block is at its destination."""
        verify_blocks(self.received.cpu().numpy(), task)


class Active(Receiving):
    """Reads the blocks."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._agent = kvpipe.Agent(f"{setup.host}:0", integrity=_INTEGRITY)
        self._regions = {
            size: self._agent.register(self.received, f"kv-{size}", size, writable=True) for size in _sizes(setup)
        }

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects."""
        self._peer = self._agent.connect(words["address"], timeout=_TIMEOUT_S)
        return {"transport": self._peer.transport}

    def run(self, task: Task) -> Words:
        """Runs the transfers, several at a time."""
        region, name = self._regions[task.num_bytes], f"kv-{task.num_bytes}"
        ids, in_flight = _ids(task, len(self.received)), int(task.options["in_flight"])
        begun = (self._peer.read_blocks(region, to, name, source) for to, source in ids)
        return seconds(lambda: keep_in_flight(in_flight, begun))


class Gather(Receiving):
    """Torch on its own: gathers the blocks into new memory, and scatters them from there, by two kernels."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._source = _filled(setup)

    def run(self, task: Task) -> Words:
        """Runs the transfers, and waits for the last one only."""
        source, received = (_rows(tensor, task.num_bytes) for tensor in (self._source, self.received))
        total, device = len(self.received), received.device
        ids = [[torch.as_tensor(some, device=device) for some in pair] for pair in _ids(task, total)]
        torch.cuda.synchronize()

        def copy_all() -> None:
            for to, source_ids in ids:
                received.index_copy_(0, to, source.index_select(0, source_ids))
            torch.cuda.synchronize()

        return seconds(copy_all)


def _ids(task: Task, total: int) -> list[tuple[Any, Any]]:
    """Destination and source ids of each transfer of the run, as arrays: lists take kvpipe longer than the copy."""
    local, remote = task.transfers(total, LOCAL), task.transfers(total, REMOTE)
    return [(local[i], remote[i]) for i in task.chosen(total)]


def _rows(tensor: Any, size: int) -> Any:
    """The blocks of a tensor as rows of 8-byte words, which torch moves faster than bytes."""
    places = len(tensor) // size
    return tensor[: places * size].view(torch.int64).view(places, -1)


ROLES: dict[str, Callable[[Setup], Idle]] = {"active": Active, "passive": Passive, "gather": Gather}
