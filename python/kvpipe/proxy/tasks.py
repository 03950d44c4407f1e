"""Tasks with an owner that waits for all of them before it ends."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvpipe.exceptions import KVPipeError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class OwnedTasks:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task; its error is logged, unless it is a `KVPipeError`."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._end)
        return task

    def adopt_current(self) -> None:
        """Own the calling task, which another owner has started."""
        task = asyncio.current_task()
        if task is not None:
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait for all tasks, and for tasks that they start; cancel the rest at the timeout."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self._running and (left_s := deadline_s - loop.time()) > 0:
            await asyncio.wait(self._running, timeout=left_s)
        for task in self._running:
            task.cancel()

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, KVPipeError):
            logger.error("task.failed name=%s", task.get_name(), exc_info=error)
