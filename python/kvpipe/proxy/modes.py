"""When an attempt at a handoff asks D. All modes return D's answer, or P's where that is the client's."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvpipe.proxy.attempt import Attempt
from kvpipe.proxy.config import Dispatch
from kvpipe.proxy.upstream import Answer, InstanceError


async def _sequential(attempt: Attempt) -> Answer:
    return await attempt.ask_prefill() or await attempt.ask_decode()


async def _just_in_time(attempt: Attempt) -> Answer:
    """Ask P, then D shortly before the predicted end of P's prefill, or when P has answered."""
    attempt.prefilling = attempt.services.tasks.spawn(attempt.ask_prefill())
    await _until_due(attempt, attempt.prefilling)
    if attempt.prefilling.done():
        return attempt.prefilling.result() or await attempt.ask_decode()
    return await _overlap(attempt, attempt.prefilling)


Mode = Callable[[Attempt], Awaitable[Answer]]

# `store` is none of these: its handoffs go through a store, and no control port knows them.
MODES: dict[Dispatch, Mode] = {
    "sequential": _sequential,
    "just-in-time": _just_in_time,
    "amqp": _sequential,
}


async def _until_due(attempt: Attempt, prefilling: asyncio.Task[Answer | None]) -> None:
    if attempt.timing is None:
        return
    due = attempt.services.timer.is_due(attempt.timing, attempt.prefill.control, attempt.handoff)
    waiting = attempt.services.tasks.spawn(due)
    try:
        await asyncio.wait({prefilling, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not prefilling.done() and not waiting.result():
            await asyncio.wait({prefilling})
    finally:
        waiting.cancel()


async def _overlap(attempt: Attempt, prefilling: asyncio.Task[Answer | None]) -> Answer:
    """Ask D while P computes. D's answer is used once it begins; until then P's is, where it is the client's."""
    decoding = attempt.services.tasks.spawn(attempt.ask_decode())
    try:
        await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if _has_answer(decoding) and (first_bytes := decoding.result().first_bytes) is not None:
            either: set[asyncio.Task[Any]] = {prefilling, first_bytes}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if _is_left_to_decode(prefilling):
            return await decoding
        if not _has_begun(decoding) and prefilling.done() and (answer := prefilling.result()) is not None:
            _discard(decoding)
            return answer
        return await decoding
    except BaseException:
        _discard(decoding)
        raise


def _is_left_to_decode(prefilling: asyncio.Task[Answer | None]) -> bool:
    """Whether P has broken off. D computes the request then: one more P could be the third engine that it ends."""
    error = prefilling.exception() if prefilling.done() else None
    return isinstance(error, InstanceError) and error.has_broken_off


def _has_answer(task: asyncio.Task[Answer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _has_begun(decoding: asyncio.Task[Answer]) -> bool:
    """Whether D has answered, and a stream has its first bytes or has ended."""
    if not _has_answer(decoding):
        return False
    first_bytes = decoding.result().first_bytes
    return first_bytes is None or first_bytes.done()


def _discard(decoding: asyncio.Task[Answer]) -> None:
    """Abort the exchange with D, whether it has an answer or not."""
    if _has_answer(decoding):
        decoding.result().close()
    else:
        decoding.cancel()
