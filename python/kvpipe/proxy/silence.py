"""Limits on silence: time without a byte, never the time of a whole transfer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

# A part of a transfer that counts as a sign of life.
PIECE_BYTES = 64 << 10
# A time limit is waited for in so many slices. An event loop that got no CPU for seconds runs the timers that are due
# before, or together with, the first step of what has arrived meanwhile: all of that time counts as one slice.
_NUM_SLICES = 10


def silent_for(timeout_s: float) -> str:
    """Returns the reason of a request that has failed; it names the setting that allows more."""
    return f"no answer in time: silent for {timeout_s:g} s (--silence-timeout)"


@asynccontextmanager
async def silence_limit(timeout_s: float) -> AsyncIterator[Callable[[], None]]:
    """Bounds the time between calls of the function that it yields, which tasks other than the current one may call.

    Raises:
        TimeoutError: it was not called for so long.
    """
    now_s = asyncio.get_running_loop().time
    async with asyncio.timeout(timeout_s) as limit:
        is_over = False

        def moved() -> None:
            if not (is_over or limit.expired()):
                limit.reschedule(now_s() + timeout_s)

        try:
            yield moved
        finally:
            is_over = True


async def wait_awake(tasks: Collection[asyncio.Future[Any]], timeout_s: float) -> float:
    """Waits until one of the tasks has ended. Time in which this process got no CPU counts little.

    Returns:
        The seconds that count; `timeout_s` if none has ended.
    """
    now_s, slice_s, waited_s = asyncio.get_running_loop().time, timeout_s / _NUM_SLICES, 0.0
    for _ in range(_NUM_SLICES):
        began_s = now_s()
        if (await asyncio.wait(tasks, timeout=slice_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            return waited_s + min(now_s() - began_s, slice_s)
        waited_s += slice_s
    return timeout_s
