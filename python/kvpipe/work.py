"""Work: a pending operation."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from kvpipe import _kvpipe
from kvpipe._deferred import Deferred
from kvpipe.exceptions import TransferTimeoutError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator

T = TypeVar("T")


class Work(Generic[T]):
    """A pending operation: wait for it, query it, or await it.

    Any thread may use it. Dropping it does not cancel the operation, nor does an expired wait or a cancelled await. It
    keeps the memory of the operation alive.
    """

    def __init__(self, native: _kvpipe.Work | Deferred, convert: Callable[[Any], T]) -> None:
        self._native = native
        self._convert = convert
        self._converted: tuple[T] | None = None

    def is_completed(self) -> bool:
        """True if the operation has ended, with a result or an error."""
        return self._native.is_completed()

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the end and returns the result.

        Args:
            timeout: Seconds; `None` waits until the operation ends.

        Raises:
            TransferTimeoutError: The operation has not ended in time. It continues; wait again.
        """
        if not self._native.wait(timeout):
            message = f"not completed within {timeout} s; the operation continues"
            raise TransferTimeoutError(message)
        return self.result()

    def settled(self, timeout: float | None = None) -> None:
        """Waits until nothing of the operation is under way: no read uses its memory any more.

        An operation that has ended well is settled. One that failed at its deadline may be settled later, because a
        remote read that has begun cannot be taken back. Until then, blocks of an agent are busy, and new operations on
        them are refused; a tensor of a pipe must not be changed or used.

        Args:
            timeout: Seconds; `None` waits until the operation is settled.

        Raises:
            TransferTimeoutError: It is not settled in time; wait again.
        """
        if not self._native.wait_settled(timeout):
            message = f"not settled within {timeout} s; its memory is still in use"
            raise TransferTimeoutError(message)

    def result(self) -> T:
        """Returns the result of an ended operation, the same object at each call, or raises its error.

        Raises:
            ConfigError: The operation has not ended.
        """
        if self._converted is None:
            self._converted = (self._convert(self._native.result()),)
        return self._converted[0]

    def __await__(self) -> Generator[Any, None, T]:
        """Waits in an asyncio loop, without a thread: one descriptor wakes a loop for all works that it awaits."""
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> T:
        deferred = self._native
        if isinstance(deferred, Deferred):
            await deferred.settled()
        begun = deferred.begun if isinstance(deferred, Deferred) else deferred
        if begun is not None and not begun.is_completed():
            await _completed(begun)
        return self.result()

    def __repr__(self) -> str:
        state = "completed" if self.is_completed() else "under way"
        return f"<Work {state}>"


class _LoopCompletions:
    """The works that an asyncio loop awaits, and the descriptor that wakes it when some have ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ended = _kvpipe.Completions()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        loop.add_reader(self._ended.fileno(), self._wake)

    async def wait(self, loop: asyncio.AbstractEventLoop, work: _kvpipe.Work) -> None:
        """Waits until the work has ended."""
        key, ended = next(self._ids), loop.create_future()
        if not work.watch(self._ended, key):
            return
        self._waiting[key] = ended
        try:
            await ended
        finally:
            if self._waiting.pop(key, None) is not None:  # the await was cancelled
                work.unwatch(self._ended, key)

    def _wake(self) -> None:
        for key in self._ended.drain():
            ended = self._waiting.pop(key, None)
            if ended is not None and not ended.done():
                ended.set_result(None)


# The loop itself keeps its completions, as its reader: with the futures that wait, they refer to the loop.
_completions: WeakKeyDictionary[asyncio.AbstractEventLoop, ref[_LoopCompletions]] = WeakKeyDictionary()
# A forked child shares its parent's descriptors and must not drain them.
os.register_at_fork(after_in_child=_completions.clear)


async def _completed(work: _kvpipe.Work) -> None:
    import asyncio  # noqa: PLC0415 - half of kvpipe's import time, and a caller that awaits has imported it

    loop = asyncio.get_running_loop()
    known = _completions.get(loop)
    completions = None if known is None else known()
    if completions is None:
        completions = _LoopCompletions(loop)
        _completions[loop] = ref(completions)
    await completions.wait(loop, work)


# Futures by loop and descriptor, because a loop accepts one reader for each descriptor.
_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, list[asyncio.Future[None]]]] = WeakKeyDictionary()


async def readable(descriptor: int) -> None:
    """Waits in the running loop until a descriptor is readable. Several tasks may wait for one."""
    import asyncio  # noqa: PLC0415 - as above

    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    waiting = _waiters(loop).setdefault(descriptor, [])
    waiting.append(ended)
    if len(waiting) == 1:
        loop.add_reader(descriptor, _wake, loop, descriptor)
    try:
        await ended
    finally:
        _leave(loop, descriptor, ended)


def _waiters(loop: asyncio.AbstractEventLoop) -> dict[int, list[asyncio.Future[None]]]:
    return _by_loop.setdefault(loop, {})


def _wake(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    for ended in _waiters(loop).get(descriptor, []):
        if not ended.done():
            ended.set_result(None)


def _leave(loop: asyncio.AbstractEventLoop, descriptor: int, ended: asyncio.Future[None]) -> None:
    waiting = _waiters(loop).get(descriptor, [])
    if ended in waiting:
        waiting.remove(ended)
    if not waiting:
        _waiters(loop).pop(descriptor, None)
        loop.remove_reader(descriptor)
