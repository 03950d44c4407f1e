"""A worker beside a decode instance: consumes requests as long as D has capacity, and answers them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aio_pika import DeliveryMode, Message
from aio_pika.exceptions import ChannelPreconditionFailed

from kvpipe.exceptions import ProtocolError
from kvpipe.proxy.probed import ProbedInstance
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.queue.broker import BROKER_ERRORS, CALL_TIMEOUT_S, Broker, called, num_consumers, publish_alone
from kvpipe.queue.decode_capacity import DecodeCapacity
from kvpipe.queue.delivery import Delivery
from kvpipe.queue.messages import DeliveryControl, Reply, Request
from kvpipe.queue.outbox import ReplyOutbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aio_pika.abc import (
        AbstractChannel,
        AbstractConnection,
        AbstractExchange,
        AbstractIncomingMessage,
        AbstractQueue,
    )

    from kvpipe.proxy.control import Control
    from kvpipe.proxy.instances import Instance
    from kvpipe.proxy.upstream import InstanceError, Upstream
    from kvpipe.queue.delivery import Finished
    from kvpipe.queue.topology import Topology

# Requests at once; while some wait in D no more are taken.
DEFAULT_SLOTS = 16
# Silence of D after which it is frozen, and a limit for one probe of its control port.
DEFAULT_FROZEN_AFTER_S = 5.0
_CONTROL_TIMEOUT_S = 5.0
# Requests of high priority need no free slot; so many of them are taken beyond the slots.
_URGENT_SHARE = 4
_COUNT = "x-delivery-count"
_LONGEST_REASON = 500
_MAX_CANCELLED = 10_000

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Link:
    """Channels, queues and deliveries of a worker on one connection."""

    connection: AbstractConnection
    requests: AbstractChannel
    replies: AbstractChannel
    outbox: ReplyOutbox
    is_read: Callable[[str], Awaitable[bool]]
    of_workers: AbstractExchange
    interrupted: list[Delivery]
    sources: tuple[AbstractQueue, ...] = ()
    deliveries: dict[str, tuple[Delivery, asyncio.Task[Any]]] = field(default_factory=dict)
    consumers: dict[str, AbstractQueue] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def channels(self) -> tuple[AbstractChannel, ...]:
        """All of them."""
        return self.requests, self.replies

    def lost(self, error: BaseException | None) -> None:
        """The broker gives all of them to other workers, and counts that. Interrupted ones count for the front end not.

        A delivery that has taken too long ends its channel by `PRECONDITION_FAILED`, and it is the oldest one.
        """
        self.is_lost = True
        self.outbox.close()
        num_at_fault = int(isinstance(error, ChannelPreconditionFailed))
        self.interrupted += [delivery for delivery, _ in self.deliveries.values()][num_at_fault:]
        for _, task in self.deliveries.values():
            task.cancel()

    def receive(self, control: DeliveryControl) -> None:
        """Gives a control to the deliveries of its request."""
        for delivery, _ in list(self.deliveries.values()):
            if delivery.request.id == control.id:
                delivery.receive(control)


class Worker:
    """Answers requests of the queue with one D.

    Args:
        url: of the broker.
        topology: its queues.
        decode: D.
        num_slots: requests at once.
        upstream: HTTP client of D.
        control: client of control ports.
        frozen_after_s: silence of all ports of D after which it is frozen; without a control port six times as long.
    """

    def __init__(
        self,
        url: str,
        topology: Topology,
        decode: Instance,
        *,
        num_slots: int,
        upstream: Upstream,
        control: Control,
        frozen_after_s: float = DEFAULT_FROZEN_AFTER_S,
    ) -> None:
        self._topology = topology
        self._decode = decode
        self._num_slots = num_slots
        self._upstream = upstream
        self._name = secrets.token_hex(8)
        self._broker = Broker(url, f"kvpipe worker {decode.url}", self._open)
        self._tasks = OwnedTasks()
        self._probed = ProbedInstance(
            "decode",
            decode,
            upstream,
            control,
            frozen_after_s=frozen_after_s,
            control_timeout_s=_CONTROL_TIMEOUT_S,
            tasks=self._tasks,
        )
        self._capacity = DecodeCapacity(decode, upstream, control, self._probed.health)
        # The latest request that a half-open D got.
        self._trial: asyncio.Task[None] | None = None
        self._is_draining = False
        self._changing = asyncio.Lock()
        # Deliveries of lost links that their front ends have to know of.
        self._interrupted: list[Delivery] = []
        # Requests whose clients have left, which may still be in the queue.
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    async def run(self, until: asyncio.Event, drain_timeout_s: float) -> None:
        """Takes requests until an event, then ends those that it has; others get what is left after the timeout.

        Raises:
            ConfigError: The broker refuses user, password or queues.
        """
        async with self._broker:
            watching, stopping = asyncio.create_task(self._watch()), asyncio.create_task(until.wait())
            try:
                await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()  # it ends by an error only
                self._is_draining = True
                await self._update_consumers()
                with contextlib.suppress(*BROKER_ERRORS):
                    await self._report()
                await self._drain(drain_timeout_s)
            finally:
                for task in (watching, stopping):
                    task.cancel()
                await asyncio.wait({watching, stopping})
                with contextlib.suppress(*BROKER_ERRORS):
                    await self._report(is_here=False)
        await self._tasks.close(0.0)

    async def _drain(self, timeout_s: float) -> None:
        link = self._broker.link
        running = {task for _, task in link.deliveries.values()} if link is not None else set()
        logger.info("worker.draining requests=%d timeout_s=%s", len(running), timeout_s)
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    async def _open(self, connection: AbstractConnection) -> _Link:
        requests = await connection.channel(publisher_confirms=True, on_return_raises=True)
        replies = await connection.channel(publisher_confirms=True, on_return_raises=True)
        await self._topology.declare(replies)
        controls = await self._topology.declare_controls(replies, self._name)
        of_workers = await replies.get_exchange(self._topology.of_workers, ensure=False)
        # A reply comes back if the front end's queue has ended. Its delivery is dropped.
        outbox = ReplyOutbox(
            controls.name, replies, lambda it: link.receive(DeliveryControl("drop", it.id, it.delivery))
        )
        is_read = partial(_is_read, connection)
        link = _Link(connection, requests, replies, outbox, is_read, of_workers, self._interrupted)
        await controls.consume(partial(self._receive_control, link), no_ack=True)
        link.sources = (
            await requests.get_queue(self._topology.urgent_requests, ensure=False),
            await requests.get_queue(self._topology.requests, ensure=False),
        )
        self._tasks.spawn(self._begin(link))
        return link

    async def _begin(self, link: _Link) -> None:
        with contextlib.suppress(*BROKER_ERRORS):
            await self._report_interrupted(link)
        await self._update_consumers(link)
        with contextlib.suppress(*BROKER_ERRORS):
            await self._report(link)

    async def _report_interrupted(self, link: _Link) -> None:
        """Tells front ends what has counted as a delivery without a fault of the request, before it comes again."""
        while self._interrupted:
            delivery = self._interrupted[0]
            reply = Reply("interrupted", delivery.request.id, delivery.id, link.outbox.queue)
            await link.outbox.send_confirmed(delivery.request.reply_to, reply)
            self._interrupted.remove(delivery)

    async def _watch(self) -> None:
        """Looks at D, consumes requests or not, and reports."""
        while True:
            is_busy = self._num_running() > 0 or self._probed.health.needs_trial
            await self._capacity.until_looked(is_busy=is_busy)
            await self._update_consumers()
            if self._capacity.is_unreachable:
                self._give_back()
            with contextlib.suppress(*BROKER_ERRORS):
                await self._report()

    def _give_back(self) -> None:
        """Has other workers go on with all requests."""
        link = self._broker.link
        for delivery, _ in [] if link is None else list(link.deliveries.values()):
            delivery.receive(DeliveryControl("requeue", delivery.request.id))

    async def _update_consumers(self, link: _Link | None = None) -> None:
        """Consumes if D has capacity, and else consumes no more. A half-open D gets one request, its trial."""
        link = link or self._broker.link
        if link is None or link.is_lost:
            return
        async with self._changing:
            try:
                await called(self._change_consumers(link))
            except BROKER_ERRORS as error:
                reason = str(error) or "no answer in time"
                logger.warning("worker.refused reason=%r", reason)
                self._capacity.failed(f"broker: {reason}")  # which is looked at again soon

    async def _change_consumers(self, link: _Link) -> None:
        health = self._probed.health
        has_capacity = not self._capacity.reason and not self._is_draining
        is_wanted = has_capacity and health.takes_requests and not health.needs_trial
        if is_wanted and not link.consumers:
            for source, num in zip(link.sources, self._prefetches(), strict=True):
                await link.requests.set_qos(prefetch_count=num)
                link.consumers[await source.consume(partial(self._receive, link))] = source
        while link.consumers and not is_wanted:
            tag, source = link.consumers.popitem()
            await source.cancel(tag)
        if has_capacity and health.needs_trial and (self._trial is None or self._trial.done()):
            # Not within this call: a request that came after its end would have no owner.
            self._trial = self._tasks.spawn(self._try_one(link))

    async def _try_one(self, link: _Link) -> None:
        """Answers one request, if there is one."""
        with contextlib.suppress(*BROKER_ERRORS):
            for source in link.sources:
                if (message := await source.get(fail=False)) is not None:
                    if (answering := await self._receive(link, message)) is not None:
                        await asyncio.wait({answering})
                    return

    def _prefetches(self) -> tuple[int, int]:
        return max(1, self._num_slots // _URGENT_SHARE), self._num_slots

    async def _receive(self, link: _Link, message: AbstractIncomingMessage) -> asyncio.Task[None] | None:
        if link.is_lost:
            return None
        if message.correlation_id in self._cancelled:
            await message.ack()
            return None
        self._capacity.got_request()
        try:
            request = Request.of(message, self._topology.replies(""))
        except ProtocolError as error:
            logger.warning("queue.message dropped: %s", error)
            await self._give_up(link, message, str(error))
            return None
        count = _delivery_count(message)
        delivery = Delivery(
            request,
            self._probed,
            self._upstream,
            link.outbox,
            link.is_read,
            rank=self._capacity.rank,
            is_redelivered=bool(message.redelivered or count or request.publication),
        )
        task = self._tasks.spawn(self._answer(link, message, delivery))
        link.deliveries[delivery.id] = delivery, task
        task.add_done_callback(lambda _: link.deliveries.pop(delivery.id, None))
        return task

    async def _answer(self, link: _Link, message: AbstractIncomingMessage, delivery: Delivery) -> None:
        try:
            finished = await delivery.run()
            if finished.failure is not None:
                await self._failed(finished.failure)
                if _delivery_count(message) >= self._topology.delivery_limit:
                    await self._end_last(link, message, delivery, finished)
                    return
                if finished.is_frozen:
                    await delivery.report_interruption()
            if finished.is_over:
                await message.ack()
            else:
                # Unlike `nack`, it counts in every version of RabbitMQ.
                await message.reject(requeue=True)
        except Exception as error:  # noqa: BLE001 - whatever it was, the message is not kept
            reason = str(error) or type(error).__name__
            logger.warning("worker.request id=%s is given to another worker: %s", delivery.request.id, reason)
            with contextlib.suppress(*BROKER_ERRORS):
                await message.reject(requeue=True)

    async def _end_last(
        self, link: _Link, message: AbstractIncomingMessage, delivery: Delivery, finished: Finished
    ) -> None:
        """Gives up a request, or has it published again if one of its deliveries was interrupted."""
        if finished.is_frozen or delivery.has_interruptions:
            await delivery.leave_to_front_end()
            await message.ack()
        elif finished.failure is not None:
            await delivery.fail(finished.failure)
            await self._give_up(link, message, finished.failure.reason)

    async def _failed(self, failure: InstanceError) -> None:
        """Consumes no more, so that another worker gets what has failed here."""
        logger.warning("decode.failed url=%s: %s", self._decode.url, failure.reason)
        self._capacity.failed(failure.reason)
        await self._update_consumers()

    async def _give_up(self, link: _Link, message: AbstractIncomingMessage, reason: str) -> None:
        """Moves a message to the dead-letter queue, with the reason."""
        copy = Message(
            message.body,
            type=message.type,
            correlation_id=message.correlation_id,
            reply_to=message.reply_to,
            headers={**message.headers, "reason": reason[:_LONGEST_REASON]},
            content_type=message.content_type,
            delivery_mode=DeliveryMode.PERSISTENT,
        )
        try:
            await publish_alone(link.connection, copy, self._topology.dead, CALL_TIMEOUT_S)
        except BROKER_ERRORS as error:
            logger.warning("queue.letter id=%s goes without its reason: %s", message.correlation_id, error)
            await message.reject(requeue=False)
        else:
            await message.ack()

    async def _receive_control(self, link: _Link, message: AbstractIncomingMessage) -> None:
        if message.type == "report":
            with contextlib.suppress(*BROKER_ERRORS):
                await self._report(link)
            return
        try:
            control = DeliveryControl.of(message)
        except ProtocolError as error:
            logger.warning("queue.message dropped: %s", error)
            return
        if control.kind == "cancel":
            self._cancelled[control.id] = None
            if len(self._cancelled) > _MAX_CANCELLED:
                self._cancelled.popitem(last=False)
        link.receive(control)

    def _num_running(self) -> int:
        link = self._broker.link
        return 0 if link is None else len(link.deliveries)

    async def _report(self, link: _Link | None = None, *, is_here: bool = True) -> None:
        """Reports to all front ends what this worker is and does."""
        link = link or self._broker.link
        if link is None:
            return
        described = self._capacity.description
        report = {
            "worker": link.outbox.queue,
            "is_here": is_here,
            "decode": self._decode.url,
            "slots": self._num_slots,
            "running": len(link.deliveries),
            "reason": "draining" if self._is_draining else self._capacity.reason,
            "forces_first_tokens": described.get("forces_first_tokens") is True,
            "reasoning_parser": described.get("reasoning_parser") or "",
        }
        await called(link.of_workers.publish(Message(orjson.dumps(report), type="node"), "", mandatory=False))


async def _is_read(connection: AbstractConnection, replies: str) -> bool:
    """True if a front end reads its replies, also where the broker does not answer."""
    try:
        return bool(await called(num_consumers(connection, replies)))
    except BROKER_ERRORS:
        return True


def _delivery_count(message: AbstractIncomingMessage) -> int:
    count: Any = message.headers.get(_COUNT, 0)
    return count if isinstance(count, int) else 0
