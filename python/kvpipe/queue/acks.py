"""Acknowledgements of deliveries, several together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kvpipe.queue.broker import BROKER_ERRORS

if TYPE_CHECKING:
    from aio_pika.abc import AbstractIncomingMessage

    from kvpipe.proxy.tasks import OwnedTasks

_MOST = 64
_WITHIN_S = 0.05


class Acks:
    """Acknowledges the deliveries of one channel, in order, after 64 or 50 ms. What is lost before is delivered again.

    Args:
        tasks: owns the task that waits.
    """

    def __init__(self, tasks: OwnedTasks) -> None:
        self._tasks = tasks
        self._last: AbstractIncomingMessage | None = None
        self._num = 0
        self._is_full = asyncio.Event()

    def add(self, message: AbstractIncomingMessage) -> None:
        """Acknowledges a delivery and all before it, soon."""
        if self._last is None:
            self._tasks.spawn(self._ack_soon())
        self._last = message
        self._num += 1
        if self._num >= _MOST:
            self._is_full.set()

    async def _ack_soon(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WITHIN_S):
                await self._is_full.wait()
        last, self._last, self._num = self._last, None, 0
        self._is_full.clear()
        if last is not None:
            with contextlib.suppress(*BROKER_ERRORS):
                await last.ack(multiple=True)
