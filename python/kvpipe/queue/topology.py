"""The queues and exchanges of one deployment, declared alike by all who use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aio_pika import ExchangeType
from aio_pika.exceptions import ChannelPreconditionFailed

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractQueue

# Deliveries after the first one. Each that fails may have ended an engine.
DELIVERY_LIMIT = 4
# Of RabbitMQ 4; older ones take 128 MiB. The broker does not tell its own before it refuses a message.
MAX_MESSAGE_BYTES = 16 << 20
# No broker is expected to refuse a message of this size.
SMALL_MESSAGE_BYTES = 128 << 10
# The clients of a front end that was away for so long have left.
REPLIES_EXPIRE_S = 60
_MAX_DEAD = 10_000
_DEAD_TTL_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Topology:
    """Names and limits of a deployment's queues.

    Attributes:
        name: prefix of all names. Deployments of different names share a broker without meeting.
        delivery_limit: number of redeliveries of a request before it goes to the dead-letter queue.
        max_message_bytes: largest request that is published; at most the broker's `max_message_size`.
    """

    name: str = "kvpipe"
    delivery_limit: int = DELIVERY_LIMIT
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 100 or not self.name.isprintable():  # noqa: PLR2004 - AMQP's names have 255 bytes
            message = f"queue name {self.name!r}: expected 1 to 100 printable characters"
            raise ConfigError(message)
        if self.delivery_limit < 0:
            message = f"delivery limit {self.delivery_limit}: expected 0 or more"
            raise ConfigError(message)
        if self.max_message_bytes < 2 * SMALL_MESSAGE_BYTES:
            message = f"max_message_bytes={self.max_message_bytes}: expected at least {2 * SMALL_MESSAGE_BYTES}"
            raise ConfigError(message)

    @property
    def requests(self) -> str:
        """Queue of requests."""
        return f"{self.name}.requests"

    @property
    def urgent_requests(self) -> str:
        """Queue of requests with high priority. Quorum queues know priorities from RabbitMQ 4.0 on only."""
        return f"{self.name}.requests.high"

    @property
    def dead(self) -> str:
        """Dead-letter queue, and the exchange that also gives front ends what goes there."""
        return f"{self.name}.dead"

    @property
    def shared_queues(self) -> tuple[str, ...]:
        """The queues that all share."""
        return self.requests, self.urgent_requests, self.dead

    @property
    def to_workers(self) -> str:
        """Exchange of what front ends send to all workers."""
        return f"{self.name}.workers"

    @property
    def of_workers(self) -> str:
        """Exchange of what workers report of themselves to all front ends."""
        return f"{self.name}.nodes"

    def replies(self, front: str) -> str:
        """Queue of a front end."""
        return f"{self.name}.front.{front}"

    def controls(self, worker: str) -> str:
        """Queue of a worker."""
        return f"{self.name}.worker.{worker}"

    async def declare(self, channel: AbstractChannel) -> None:
        """Declares what all share.

        Raises:
            ConfigError: The broker has one of the queues with other settings.
        """
        try:
            await self._declare(channel)
        except ChannelPreconditionFailed as error:
            message = f"{error}: use the same delivery limit everywhere, another name, or delete the queue"
            raise ConfigError(message) from error

    async def _declare(self, channel: AbstractChannel) -> None:
        dead = await channel.declare_exchange(self.dead, ExchangeType.FANOUT, durable=True)
        for name in (self.to_workers, self.of_workers):
            await channel.declare_exchange(name, ExchangeType.FANOUT, durable=True)
        kept: dict[str, Any] = {"x-queue-type": "quorum"}
        # Looking at letters is no delivery that ends them.
        limits = {"x-max-length": _MAX_DEAD, "x-message-ttl": _DEAD_TTL_S * 1000, "x-delivery-limit": 1 << 30}
        letters = await channel.declare_queue(self.dead, durable=True, arguments=kept | limits)
        await letters.bind(dead)
        requests = kept | {"x-delivery-limit": self.delivery_limit, "x-dead-letter-exchange": self.dead}
        for name in (self.requests, self.urgent_requests):
            await channel.declare_queue(name, durable=True, arguments=requests)

    async def declare_replies(self, channel: AbstractChannel, front: str) -> AbstractQueue:
        """Declares the queue of a front end, which gets replies, dead letters and what workers report.

        It outlives a connection and the broker's restart, so that no reply is lost with either. One consumer at a time
        gets them: the broker may notice late that an earlier one has ended.
        """
        arguments: dict[str, Any] = {"x-expires": REPLIES_EXPIRE_S * 1000, "x-single-active-consumer": True}
        queue = await channel.declare_queue(self.replies(front), durable=True, arguments=arguments)
        await queue.bind(self.dead)
        await queue.bind(self.of_workers)
        return queue

    async def declare_controls(self, channel: AbstractChannel, worker: str) -> AbstractQueue:
        """Declares the queue of a worker, which ends with its connection, as its deliveries do."""
        queue = await channel.declare_queue(self.controls(worker), exclusive=True, auto_delete=True)
        await queue.bind(self.to_workers)
        return queue
