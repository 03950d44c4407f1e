"""Operations on GPU memory, begun when its stream has done what it had been given, in the order of the calls."""

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

# A thread that has had nothing to wait for ends; the next operation that has to wait makes another.
_IDLE_S = 10.0


class Ready(Protocol):
    """What an operation has to wait for before it begins."""

    def wait(self) -> None:
        """Waits for it."""


class DeferredQueue:
    """Begins operations one after the other, each when what it waits for is done, on a thread of its own.

    Only what has to wait, or comes after such, gets to the thread, which the first of them makes.

    Attributes:
        is_idle: Whether nothing waits, so that an operation may begin at once.
    """

    def __init__(self) -> None:
        self.is_idle = True
        self._changed = threading.Condition()
        self._waiting: deque[Deferred] = deque()
        self._is_running = False
        self._is_closed = False

    def post(self, ready: Ready | None, begin: Begin, timeout: float | None = None) -> _kvpipe.Work | Deferred:
        """Begins an operation now, or when its turn has come and what it waits for is done.

        Args:
            ready: What it waits for; `None` if for its turn only.
            begin: Begins it, given the seconds that are left of the timeout.
            timeout: Seconds from now; `None` has no bound.

        Raises:
            ClosedError: It was closed.
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
            pass  # and keeps nothing of it alive

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
        """Waits until everything has begun or failed; false if that took longer than `timeout` seconds."""
        if self.is_idle:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """What has not begun fails, and the thread ends once its stream is done. Closing twice is fine."""
        with self._changed:
            self._is_closed = True
            abandoned, self._waiting = self._waiting, deque()
            self.is_idle = True
            self._changed.notify_all()
        message = "it was closed before the tensor's stream was done"
        for deferred in abandoned:
            deferred.withdraw(ClosedError(message))


class Deferred:
    """An operation that begins later; till then it stands in for the native one.

    Attributes:
        begun: The native operation, once there is one.
    """

    def __init__(self, ready: Ready | None, begin: Begin, timeout: float | None) -> None:
        self.begun: _kvpipe.Work | None = None
        self._steps: tuple[Ready | None, Begin] | None = (ready, begin)
        self._until = None if timeout is None else time.monotonic() + timeout
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_settled = threading.Event()  # has begun, or never will
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def run(self) -> None:
        """Waits for what is to be waited for, then begins; errors come out of the result."""
        steps = self._steps
        if steps is None:
            return
        ready, begin = steps
        try:
            if ready is not None:
                ready.wait()
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
        """Has an operation that has not begun never begin, and end with this error; else does nothing."""
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
        """Seconds until the operation's own end, or the caller's if that is sooner."""
        if self._until is None:
            return timeout
        left = max(0.0, self._until - time.monotonic())
        return left if timeout is None else min(left, timeout)

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._is_settled.is_set() and (self.begun is None or self.begun.is_completed())

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; false if it did not come within `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        if not self._is_settled.wait(self._left(timeout)):
            if self._until is None or time.monotonic() < self._until:
                return False
            message = "the tensor's stream was not done in time; it was withdrawn, nothing was moved, all is usable"
            self.withdraw(TransferTimeoutError(message))
            self._is_settled.wait()  # at once, if it was not withdrawn: it has just begun
        if self.begun is None:
            return True
        return self.begun.wait(None if until is None else max(0.0, until - time.monotonic()))

    def result(self) -> Any:
        """What the native operation ended with, or raises why it did not begin.

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
        """Waits in the running loop until the operation has begun, or never will."""
        import asyncio  # noqa: PLC0415 - whoever awaits has it

        loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_settled.is_set():
                return
            slept = loop.create_future()
            self._sleepers.append((loop, slept))
        await slept


def _wake_sleeper(slept: asyncio.Future[None]) -> None:
    if not slept.done():
        slept.set_result(None)
