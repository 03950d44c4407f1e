"""Operations on GPU memory, deferred until the memory's stream has done its previous work, in call order."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from kvpipe.exceptions import ClosedError, ConfigError, TransferTimeoutError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvpipe import _kvpipe

    Begin = Callable[[float | None], _kvpipe.Work]

# An idle thread ends after this; the next deferred operation starts another.
_IDLE_S = 10.0


class Ready(Protocol):
    """A condition that an operation waits for, such as a CUDA event."""

    def wait(self) -> None:
        """Waits until the condition holds."""


class DeferredQueue:
    """Begins operations in call order on its own thread, each when its condition holds.

    Only operations that wait, and those behind them, use the thread. The first of them starts it.

    Attributes:
        is_idle: True if the queue is empty, so that an operation may begin at once.
    """

    def __init__(self) -> None:
        self.is_idle = True
        self._changed = threading.Condition()
        self._waiting: deque[Deferred] = deque()
        self._is_running = False
        self._is_closed = False

    def post(self, ready: Ready | None, begin: Begin, timeout: float | None = None) -> _kvpipe.Work | Deferred:
        """Begins an operation, now or when the operations before it have begun and its condition holds.

        Args:
            ready: Its condition; `None` if it only waits for the operations before it.
            begin: Begins it, with the remaining seconds of the timeout.
            timeout: Seconds from now; `None` has no limit.

        Raises:
            ClosedError: The queue was closed.
        """
        with self._changed:
            if ready is None and not self._waiting:
                return begin(timeout)
            if self._is_closed:
                message = "the pipe or agent was closed"
                raise ClosedError(message)
            deferred = Deferred(ready, begin, timeout)
            self._waiting.append(deferred)
            self.is_idle = False
            self._wake()
        return deferred

    def _wake(self) -> None:
        if self._is_running:
            self._changed.notify_all()
            return
        self._is_running = True
        threading.Thread(target=self._run, name="kvpipe-deferred", daemon=True).start()

    def _run(self) -> None:
        while self._begin_next():
            pass  # no local variable keeps the last operation alive

    def _begin_next(self) -> bool:
        deferred = self._next()
        if deferred is None:
            return False
        deferred.run()
        with self._changed:
            if self._waiting:  # else closed meanwhile
                self._waiting.popleft()
            self.is_idle = not self._waiting
            self._changed.notify_all()
        return True

    def _next(self) -> Deferred | None:
        with self._changed:
            if not self._waiting and not self._is_closed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed, _IDLE_S)
            if self._waiting:
                return self._waiting[0]
            self._is_running = False
            return None

    def drain(self, timeout: float | None) -> bool:
        """Waits until all operations have begun or failed; returns false after `timeout` seconds."""
        if self.is_idle:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """Fails all deferred operations. The thread ends once its stream is done. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            abandoned, self._waiting = self._waiting, deque()
            self.is_idle = True
            self._changed.notify_all()
        message = "it was closed before the tensor's stream was done"
        for deferred in abandoned:
            deferred.withdraw(ClosedError(message))


class Deferred:
    """A deferred operation, with the interface of the native one.

    Attributes:
        begun: The native operation, once it has begun.
    """

    def __init__(self, ready: Ready | None, begin: Begin, timeout: float | None) -> None:
        self.begun: _kvpipe.Work | None = None
        self._steps: tuple[Ready | None, Begin] | None = (ready, begin)
        self._until = None if timeout is None else time.monotonic() + timeout
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_settled = threading.Event()  # begun, or withdrawn
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def run(self) -> None:
        """Waits for the condition, then begins the operation; `result` raises its errors."""
        steps = self._steps
        if steps is None:
            return
        ready, begin = steps
        try:
            if ready is not None:
                ready.wait()
            if self._withdraw_if_late():
                return
            with self._lock:
                if self._steps is None:
                    return  # withdrawn
                self.begun = begin(self._left(None))
                self._steps = None
        except Exception as error:  # noqa: BLE001 - raised by result()
            self.withdraw(error)
            return
        self._settle()

    def withdraw(self, error: BaseException | None = None) -> None:
        """Ends an operation that has not begun with this error; otherwise does nothing."""
        with self._lock:
            if self._steps is None:
                return
            self._steps, self._error = None, error or ClosedError("it was withdrawn before it began")
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            self._is_settled.set()
            sleepers, self._sleepers = self._sleepers, []
        for loop, slept in sleepers:
            loop.call_soon_threadsafe(_wake_sleeper, slept)

    def _left(self, timeout: float | None) -> float | None:
        """Returns the seconds until the operation's deadline or the caller's, whichever is earlier."""
        if self._until is None:
            return timeout
        left = max(0.0, self._until - time.monotonic())
        return left if timeout is None else min(left, timeout)

    def _withdraw_if_late(self) -> bool:
        """Withdraws an operation that has not begun by its deadline. Returns true if the deadline has passed."""
        is_late = self._until is not None and time.monotonic() >= self._until
        if is_late:
            message = "the tensor's stream was not done in time; the operation was withdrawn, everything is usable"
            self.withdraw(TransferTimeoutError(message))
        return is_late

    def is_completed(self) -> bool:
        """True if the operation has ended, with a result or an error."""
        if not self._is_settled.is_set():
            self._withdraw_if_late()
        return self._is_settled.is_set() and (self.begun is None or self.begun.is_completed())

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; returns false after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        if not self._wait_begun(timeout):
            return False
        return self.begun is None or self.begun.wait(_left_until(until))

    def wait_settled(self, timeout: float | None = None) -> bool:
        """Waits as `wait` does, until nothing of the operation is under way."""
        until = None if timeout is None else time.monotonic() + timeout
        if not self._wait_begun(timeout):
            return False
        return self.begun is None or self.begun.wait_settled(_left_until(until))

    def _wait_begun(self, timeout: float | None) -> bool:
        """Waits until the operation has begun or is withdrawn; returns false after `timeout` seconds."""
        if not self._is_settled.wait(self._left(timeout)):
            if not self._withdraw_if_late():
                return False
            self._is_settled.wait()  # returns at once: it is withdrawn, or has just begun
        return True

    def result(self) -> Any:
        """Returns the native operation's result, or raises the error that prevented it.

        Raises:
            ConfigError: The operation has not begun.
        """
        if self._error is not None:
            raise self._error
        if self.begun is None:
            message = "not completed yet: wait() first"
            raise ConfigError(message)
        return self.begun.result()

    async def settled(self) -> None:
        """Waits in the running loop until the operation has begun or is withdrawn."""
        import asyncio  # noqa: PLC0415 - a caller that awaits has imported it

        loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_settled.is_set():
                return
            slept = loop.create_future()
            self._sleepers.append((loop, slept))
        try:
            await asyncio.wait_for(slept, self._left(None))
        except TimeoutError:
            self._withdraw_if_late()
            await self.settled()


def _left_until(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def _wake_sleeper(slept: asyncio.Future[None]) -> None:
    if not slept.done():
        slept.set_result(None)
