"""`SharedCall`: one call for all threads that want its result at the same time."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

from kvpipe.exceptions import KVPipeError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Runs a function in one thread; threads that ask meanwhile get its result or its error."""

    def __init__(self) -> None:
        self._running: Future[T] | None = None
        # It is not held while the function runs.
        self._lock = Lock()

    def run(self, function: Callable[[], T]) -> T:
        """Runs the function, or waits for the thread that does."""
        while True:
            with self._lock:
                is_first = self._running is None
                running = self._running = self._running or Future()
            if is_first:
                return self._run(running, function)
            # It is cancelled where the thread that runs it is interrupted by the exception of a signal handler.
            with suppress(CancelledError):
                return running.result()

    def _run(self, running: Future[T], function: Callable[[], T]) -> T:
        try:
            result = function()
        except BaseException as error:
            self._end()
            if isinstance(error, KVPipeError):
                running.set_exception(error)
            else:
                running.cancel()
            raise
        self._end()
        running.set_result(result)
        return result

    def _end(self) -> None:
        with self._lock:
            self._running = None
