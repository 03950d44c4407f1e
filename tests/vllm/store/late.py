"""A device that is late: what its worker copies, it copies some time after the hook has returned."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import TransportUnavailableError
from kvpipe.vllm.store import scheduler, worker
from kvpipe.vllm.store.held_blocks import HeldBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """The order of a device whose events a test completes; or a clock does, after the time that a function returns.

    Attributes:
        events: Those that are not completed.
        error: Reason for which no event can be recorded; empty if one can.
    """

    is_async = True

    def __init__(self, delay_s: Callable[[], float] | None = None) -> None:
        self._delay_s = delay_s
        self.events: list[LateEvent] = []
        self.error = ""

    def record(self) -> LateEvent:
        if self.error:
            raise TransportUnavailableError(self.error)
        event = LateEvent()
        if self._delay_s is None:
            self.events.append(event)
        else:
            threading.Timer(self._delay_s(), event.complete).start()
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
