"""Keeps vLLM from stepping while all of its requests wait for other engines.

vLLM steps for as long as it has a request, also if that only waits for a handoff, or for the end of its lease. Each
step goes to the workers, which then spin for a second. So after an empty step the engine waits here until it receives
something, or the control plane has an event. docs/internals/connector.md has the lines of vLLM that this depends on.
"""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING

from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvpipe import _kvpipe

# A step that leaves such a request out does so because of what the engine's other requests hold, or its connector says.
_SCHEDULABLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def engine_core() -> EngineCoreProc | None:
    """Returns the engine whose constructor calls this; `None` if there is none, or if its steps must not wait.

    Engines of experts with data parallelism step together.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, EngineCoreProc):
            return None if isinstance(caller, DPEngineCoreProc) else caller
        frame = frame.f_back
    return None


class IdleWait:
    """Waits after empty steps.

    Args:
        core: vLLM's engine. Without it there is no wait.
    """

    def __init__(self, core: EngineCoreProc | None) -> None:
        self._core = core
        # Both are guarded by the mutex of the engine's input queue.
        self._has_events = False
        self._has_ended = False
        # The last idle steps, without another between.
        self._num_idle_steps = 0

    def watch(self, control: _kvpipe.Control) -> None:
        """Ends waits at events of the control plane from now on."""
        if self._core is not None:
            threading.Thread(target=self._watch, args=(self._core, control), name="kvpipe-idle", daemon=True).start()

    def _watch(self, core: EngineCoreProc, control: _kvpipe.Control) -> None:
        while control.wait():
            with core.input_queue.mutex:
                self._has_events = True
                core.input_queue.not_empty.notify()
        # A control plane that is closed ends no wait any more.
        with core.input_queue.mutex:
            self._has_ended = True
            core.input_queue.not_empty.notify()

    def scheduled(self, *, is_idle: bool) -> None:
        """Counts the steps in a row that do nothing."""
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0

    def is_due(self) -> bool:
        """Returns true if the step that ends was idle, and the one before it and those under way are, too.

        The one before has ended in the workers what was begun there, and has told metrics what waits.
        """
        return self._core is not None and self._num_idle_steps >= 2 + len(self._core.batch_queue or ())

    def has_only(self, waiting: AbstractSet[str], connector: KVConnectorBase_V1 | None) -> bool:
        """Returns true if the engine's requests wait only for its input, or for events of the control plane.

        Args:
            waiting: Requests that wait for the control plane.
            connector: This engine's connector, if requests may also wait for blocks, which are leased. If vLLM has
                another one, which has this one beside others, such a request may wait for the others.
        """
        if self._core is None:
            return False
        scheduler = self._core.scheduler
        others = scheduler.requests.keys() - waiting
        if others and scheduler.connector is not connector:
            return False
        return (
            all(scheduler.requests[request_id].status in _SCHEDULABLE for request_id in others)
            and not scheduler.finished_req_ids
            # Connectors beside this one.
            and not scheduler.connector.has_pending_push_work()
            and scheduler.ec_connector is None
        )

    def wait(self) -> None:
        """Waits until the engine receives something, or the control plane has an event."""
        if self._core is None:
            return
        self._num_idle_steps = 0
        received = self._core.input_queue
        with received.not_empty:
            while not (self._has_events or self._has_ended or received.queue):
                received.not_empty.wait()
            self._has_events = False
