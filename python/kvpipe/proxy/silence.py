"""Limits on silence: time without a byte, never the time of a whole transfer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

# A part of a transfer that counts as a sign of life.
PIECE_BYTES = 64 << 10


def silent_for(timeout_s: float) -> str:
    """Why a request has failed; names the setting that allows more."""
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
