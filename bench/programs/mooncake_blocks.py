"""Mooncake's transfer engine over TCP: batches of blocks, written or read by the active process."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mooncake.engine import TransferEngine

from .blocks import OneSided
from .request import LOCAL, REMOTE
from .side import Setup, Words, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task

# Mooncake 0.3.13 refuses batches of 8,192
_BATCH_CAP = 2048
_DISTRIBUTION = "mooncake-transfer-engine-non-cuda"


class _Node(OneSided):
    """The base of both roles: an engine with one registered buffer."""

    def __init__(self, setup: Setup) -> None:
        os.environ.setdefault("GLOG_minloglevel", "2")
        super().__init__(setup)
        self._host = setup.host
        self.engine = TransferEngine()
        _check(self.engine.initialize(setup.host, "P2PHANDSHAKE", "tcp", ""), "initialize")
        _check(self.engine.register_memory(self.buffer.ctypes.data, setup.total), "register_memory")

    def hello(self) -> Words:
        """Returns the session's name and the buffer's address."""
        session = f"{self._host}:{self.engine.get_rpc_port()}"
        return {
            "session": session,
            "address": self.buffer.ctypes.data,
            "version": f"mooncake-{version(_DISTRIBUTION)}",
        }

    def meet(self, words: Mapping[str, str]) -> Words:
        """Stores the other's words; the engine connects on demand."""
        self.session, self.remote_address = words["session"], int(words["address"])
        return {"transport": "tcp"}


class Passive(_Node):
    """The passive side."""


class Active(_Node):
    """Reads or writes."""

    is_active = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        is_read = setup.options["op"] == "READ"
        self._batch = self.engine.batch_transfer_sync_read if is_read else self.engine.batch_transfer_sync_write

    def run(self, task: Task) -> Words:
        """Runs one batch after the other."""
        total, size = len(self.buffer), task.num_bytes
        local, remote = task.transfers(total, LOCAL), task.transfers(total, REMOTE)
        batches = [
            (
                _addresses(self.buffer.ctypes.data, size, local[i][at:end]),
                _addresses(self.remote_address, size, remote[i][at:end]),
            )
            for i in task.chosen(total)
            for at, end in _parts(task.num_blocks)
        ]

        def all_batches() -> None:
            for ours, theirs in batches:
                _check(self._batch(self.session, ours, theirs, [size] * len(ours)), "the transfer")

        return seconds(all_batches)


def _parts(num_blocks: int) -> list[tuple[int, int]]:
    return [(at, at + _BATCH_CAP) for at in range(0, num_blocks, _BATCH_CAP)]


def _addresses(start: int, size: int, ids: Any) -> list[int]:
    return [start + int(i) * size for i in ids]


def _check(status: int, what: str) -> None:
    if status != 0:
        message = f"{what} ended with {status}"
        raise ValueError(message)


ROLES = {"active": Active, "passive": Passive}
