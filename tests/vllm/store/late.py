"""A device that is late: what its worker copies, it copies some time after the hook has returned."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import TransportUnavailableError
from kvpipe.vllm.store import scheduler, worker
from kvpipe.vllm.store.held_blocks import HeldBlocks

if TYPE_CHECKING:
    import pytest

WAIT_S = 20


class LateEvent:
    """Work of the device, which is completed at some time."""

    def __init__(self) -> None:
        self._is_completed = threading.Event()
        self._error = ""

    def complete(self, error: str = "") -> None:
        self._error = error
        self._is_completed.set()

    def wait(self) -> None:
        assert self._is_completed.wait(WAIT_S)
        if self._error:
            raise TransportUnavailableError(self._error)


class LateOrder:
    """The order of a device whose events a test completes; or, with a maximum, a clock does after a random time."""

    is_async = True

    def __init__(self, max_delay_s: float = 0.0) -> None:
        self._max_delay_s = max_delay_s
        self.events: list[LateEvent] = []

    def record(self) -> LateEvent:
        event = LateEvent()
        if self._max_delay_s:
            threading.Timer(random.uniform(0, self._max_delay_s), event.complete).start()
        else:
            self.events.append(event)
        return event

    def complete(self, error: str = "") -> None:
        """Completes all that was recorded so far."""
        for event in self.events:
            event.complete(error)
        self.events = []


def use(monkeypatch: pytest.MonkeyPatch, order: LateOrder, *, are_held: bool = True) -> None:
    """Has the engines that are made from now on compute on such a device. Without holds vLLM frees blocks at once."""

    def held(num_ranks: int, **_: Any) -> HeldBlocks:
        return HeldBlocks(num_ranks, is_async=are_held)

    monkeypatch.setattr(worker, "order_of", lambda _: order)
    monkeypatch.setattr(scheduler, "HeldBlocks", held)
