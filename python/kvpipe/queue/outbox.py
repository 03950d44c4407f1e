"""Replies of a worker on their way to front ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from aio_pika.exceptions import DeliveryError, PublishError

from kvpipe.queue.broker import BROKER_ERRORS, called
from kvpipe.queue.messages import Reply, replies
from kvpipe.queue.topology import SMALL_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from aio_pika.abc import AbstractChannel

# With more on its way, nothing more of an answer is read.
_MAX_UNCONFIRMED_BYTES = 1 << 20


class ReplyOutbox:
    """Sends one small message at a time to each front end. What becomes ready meanwhile goes together in the next ones.

    Args:
        queue: of this worker, where front ends answer.
        channel: with confirms, on which messages that come back raise.
        when_unroutable: gets replies to a front end whose queue has ended.
    """

    def __init__(self, queue: str, channel: AbstractChannel, when_unroutable: Callable[[Reply], None]) -> None:
        self.queue = queue
        self._channel = channel
        self._when_unroutable = when_unroutable
        self._waiting: dict[str, deque[tuple[Reply, bytes]]] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def send(self, reply_to: str, reply: Reply) -> None:
        """Sends a reply after those before it. It returns at once if there is room for it."""
        await self._has_room.wait()
        framed = reply.framed()
        self._add_bytes(len(framed))
        if reply_to not in self._waiting:
            self._waiting[reply_to] = deque()
            self._senders[reply_to] = asyncio.create_task(self._send_all(reply_to))
        self._waiting[reply_to].append((reply, framed))

    async def send_confirmed(self, reply_to: str, reply: Reply) -> None:
        """Sends a reply that outlives the broker; returns once the broker has it, or has no queue for it."""
        message = replies(self.queue, [reply.framed()], is_kept=True)
        await called(self._channel.default_exchange.publish(message, reply_to, mandatory=False))

    def close(self) -> None:
        """Sends nothing more: the connection has ended."""
        for sender in self._senders.values():
            sender.cancel()

    async def _send_all(self, reply_to: str) -> None:
        with contextlib.suppress(*BROKER_ERRORS):  # which end the connection, and with it all deliveries
            while waiting := self._waiting[reply_to]:
                await self._send(reply_to, _first_of(waiting))
        del self._waiting[reply_to], self._senders[reply_to]

    async def _send(self, reply_to: str, batch: list[tuple[Reply, bytes]]) -> None:
        message = replies(self.queue, [framed for _, framed in batch])
        try:
            await self._channel.default_exchange.publish(message, reply_to, mandatory=True)
        except PublishError:
            for reply, _ in batch:
                self._when_unroutable(reply)
        except DeliveryError:
            pass  # the broker does not keep it: the front end misses a number, or the last reply is repeated
        finally:
            self._add_bytes(-len(message.body))

    def _add_bytes(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > _MAX_UNCONFIRMED_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()


def _first_of(waiting: deque[tuple[Reply, bytes]]) -> list[tuple[Reply, bytes]]:
    """Removes and returns the replies that fit into one small message; at least one."""
    batch = [waiting.popleft()]
    left = SMALL_MESSAGE_BYTES - len(batch[0][1])
    while waiting and len(waiting[0][1]) <= left:
        batch.append(waiting.popleft())
        left -= len(batch[-1][1])
    return batch
