"""Channels and queues of a front end on one connection to the broker."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aio_pika.exceptions import ChannelPreconditionFailed

from kvpipe.queue.broker import BROKER_ERRORS, CALL_TIMEOUT_S, called, publish_alone, uncut
from kvpipe.queue.topology import SMALL_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aio_pika import Message
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, AbstractQueue

    from kvpipe.queue.messages import DeliveryControl

# A message is a transfer, too.
_SLOWEST_BYTES_PER_S = 1 << 20

logger = logging.getLogger(__name__)


class MessageTooLargeError(Exception):
    """The broker takes no message of this size."""

    def __init__(self, num_bytes: int, limit: int, reason: str = "") -> None:
        why = reason or "raise --max-message-bytes, and the broker's max_message_size with it"
        super().__init__(f"{num_bytes} bytes: the queue takes at most {limit}; {why}")


@dataclass(slots=True)
class FrontLink:
    """Channels and queues of a front end.

    Attributes:
        max_message_bytes: limit above which messages are refused; the broker's refusals lower it.
    """

    connection: AbstractConnection
    max_message_bytes: int
    requests: AbstractChannel
    controls: AbstractChannel
    to_workers: AbstractExchange
    replies: AbstractQueue
    consumer: str

    @property
    def channels(self) -> tuple[AbstractChannel, ...]:
        """All of them."""
        return self.requests, self.controls

    def lost(self, error: BaseException | None) -> None:
        """Requests are the broker's, and their replies come to the same queue after it has come back."""

    async def publish(self, message: Message, queue: str, timeout_s: float) -> None:
        """Publishes a request; returns once the broker has it on disk.

        Raises:
            MessageTooLargeError: The broker takes none of this size.
        """
        await self._publish(self.requests, message, queue, timeout_s, mandatory=True)

    async def send(self, control: DeliveryControl, worker: str) -> None:
        """Sends to a worker, if it is there.

        Raises:
            MessageTooLargeError: The broker takes none of this size.
        """
        await self._publish(self.controls, control.message(), worker, CALL_TIMEOUT_S, mandatory=False)

    async def send_to_all(self, message: Message) -> None:
        """Sends to all workers."""
        await called(self.to_workers.publish(message, "", mandatory=False))

    async def _publish(
        self, channel: AbstractChannel, message: Message, queue: str, timeout_s: float, *, mandatory: bool
    ) -> None:
        """Publishes a large message on a channel of its own: the broker closes the channel of one that it refuses."""
        num_bytes = len(message.body)
        if num_bytes <= SMALL_MESSAGE_BYTES:
            await called(channel.default_exchange.publish(message, queue, mandatory=mandatory), timeout_s)
            return
        if num_bytes > self.max_message_bytes:
            raise MessageTooLargeError(num_bytes, self.max_message_bytes)
        timeout_s += num_bytes / _SLOWEST_BYTES_PER_S
        try:
            await publish_alone(self.connection, message, queue, timeout_s, mandatory=mandatory)
        except ChannelPreconditionFailed as error:
            reason = f"--max-message-bytes is too high for the broker: {error}"
            logger.warning("queue.refused bytes=%d: %s", num_bytes, reason)
            self.max_message_bytes = min(self.max_message_bytes, num_bytes - 1)
            raise MessageTooLargeError(num_bytes, self.max_message_bytes, reason) from error


async def depths_of(connection: AbstractConnection, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Messages and consumers of queues, on a channel of its own: the broker closes it where one is missing."""

    async def ask() -> list[AbstractQueue]:
        channel = await called(connection.channel())
        try:
            return [await called(channel.declare_queue(name, passive=True)) for name in names]
        finally:
            with contextlib.suppress(*BROKER_ERRORS):
                await called(channel.close())

    counts = {queue.name: queue.declaration_result for queue in await uncut(ask())}
    return {
        name: {"messages": count.message_count or 0, "consumers": count.consumer_count or 0}
        for name, count in counts.items()
    }
