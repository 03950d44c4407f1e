"""kvpipe's Pipe: tensors in one direction, with and without checksums; latency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvpipe

from .request import memory, pattern
from .side import INTEGRITY, MODES, Idle, Setup, Words, half_round_trip_us, keep_in_flight, seconds
from .tensors import ReceiveBuffer, Receiving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .request import Task

_TIMEOUT_S = 60.0


def _busy_poll_us(setup: Setup) -> int | None:
    text = setup.options.get("busy_poll_us")
    return int(text) if text else None


class Active(Idle):
    """Sends, and receives a message when everything has been received."""

    def __init__(self, setup: Setup) -> None:
        self._source = pattern(setup.total)
        self._busy_poll_us = _busy_poll_us(setup)
        self._back = kvpipe.Pipe.listen(f"{setup.host}:0", busy_poll_us=self._busy_poll_us)

    def hello(self) -> Words:
        """Returns the address of the pipe back."""
        return {"address": self._back.address}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects the pipes to the passive process."""
        self._there = {
            name: kvpipe.Pipe.connect(
                words[name], timeout=_TIMEOUT_S, integrity=INTEGRITY[name], busy_poll_us=self._busy_poll_us
            )
            for name in MODES
        }
        return {"transport": self._there["checked"].transport}

    def run(self, task: Task) -> Words:
        """Sends, or sends and receives."""
        if task.kind == "latency":
            return self._latency(task)
        self._back.recv_tensor(
            timeout=_TIMEOUT_S
        )  # the passive process is ready; the clock of the bare loop starts here too
        return seconds(lambda: self._send(task))

    def _send(self, task: Task) -> None:
        size = task.num_bytes
        offsets = task.offsets(len(self._source))
        there = self._there[task.options["way"]]
        begun = (there.isend_tensor(self._source[at : at + size]) for at in offsets)
        keep_in_flight(int(task.options["in_flight"]), begun)
        self._back.recv_tensor(timeout=_TIMEOUT_S)

    def _latency(self, task: Task) -> Words:
        ping = self._source[: task.num_bytes]
        pong = memory(task.num_bytes)
        there = self._there[task.options["way"]]

        def once() -> None:
            there.send_tensor(ping, timeout=_TIMEOUT_S)
            self._back.recv_tensor(out=pong, timeout=_TIMEOUT_S)

        return half_round_trip_us(task.count, once)


class Passive(Receiving):
    """Receives into existing or fresh memory."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._busy_poll_us = _busy_poll_us(setup)
        self._there = {name: kvpipe.Pipe.listen(f"{setup.host}:0", busy_poll_us=self._busy_poll_us) for name in MODES}

    def hello(self) -> Words:
        """Returns the addresses of the pipes."""
        return {name: pipe.address for name, pipe in self._there.items()}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects the pipe back."""
        self._back = kvpipe.Pipe.connect(words["address"], timeout=_TIMEOUT_S, busy_poll_us=self._busy_poll_us)
        return {}

    def run(self, task: Task) -> Words:
        """Receives, or receives and sends back."""
        if task.kind == "latency":
            self._echo(task)
        else:
            self._back.send_tensor(None, timeout=_TIMEOUT_S)
            keep_in_flight(int(task.options["in_flight"]), self._received(task))
            self._back.send_tensor(None, timeout=_TIMEOUT_S)
        return {}

    def _echo(self, task: Task) -> None:
        buffer, there = self._buffer.data[: task.num_bytes], self._there[task.options["way"]]
        for _ in range(task.count):
            self._back.send_tensor(there.recv_tensor(out=buffer, timeout=_TIMEOUT_S), timeout=_TIMEOUT_S)

    def _received(self, task: Task) -> Iterator[Any]:
        is_fresh = task.options["into"] == "fresh"
        size, buffer, there = task.num_bytes, self._buffer, self._there[task.options["way"]]
        for at in task.offsets(len(buffer.data)):
            work = there.irecv_tensor(out=None if is_fresh else buffer.data[at : at + size])
            yield _Kept(work, buffer) if is_fresh and task.is_checked else work


class _Kept:
    """A receive whose tensor `verify` compares."""

    def __init__(self, work: kvpipe.Work[Any], buffer: ReceiveBuffer) -> None:
        self._work, self._buffer = work, buffer

    def wait(self) -> None:
        self._buffer.fresh = self._work.wait(_TIMEOUT_S)


ROLES = {"active": Active, "passive": Passive}
