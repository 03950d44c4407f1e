"""Threads that talk to a store, so that no hook of vLLM's waits for it."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = init_logger("vllm.kvpipe.store")


class TaskThreads:
    """Runs tasks on a fixed number of threads, in the order of their submission.

    Args:
        name: Begins the names of the threads.
        num_threads: Number of threads.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Runs a task later. After `close` it does nothing."""
        if not self._is_closed:
            self._tasks.put(task)

    def close(self, timeout: float) -> bool:
        """Drops the tasks that have not begun, and waits for the others.

        Args:
            timeout: Seconds to wait for them.

        Returns:
            Whether all threads have ended. Those that have not end with the process.
        """
        self._is_closed = True
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        _leave_the_core_of_the_caller()
        while (task := self._tasks.get()) is not None:
            if self._is_closed:
                continue
            try:
                task()
            # A task that raised, or panicked, must not end the thread, and with it all later tasks.
            except BaseException:
                logger.exception("store.task_failed in %s", threading.current_thread().name)


def _leave_the_core_of_the_caller() -> None:
    """Lets this thread run on all cores of the parent process.

    On CPUs vLLM binds a worker's main thread to one core, and threads inherit that. It keeps a core free for connectors
    (0.32, `utils/ompmultiprocessing.py`), which its parent process is not kept from.
    """
    with suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
