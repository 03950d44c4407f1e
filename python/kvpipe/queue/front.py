"""The front end's side: any worker with capacity answers a request, and its replies become one answer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

import orjson
from aio_pika import Message
from aio_pika.exceptions import DeliveryError
from multidict import CIMultiDict

from kvpipe.exceptions import ProtocolError
from kvpipe.proxy.bodies import error_body
from kvpipe.proxy.instances import QUEUE
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import Answer, InstanceError, failed
from kvpipe.queue.acks import Acks
from kvpipe.queue.broker import BROKER_ERRORS, Broker, called, num_consumers
from kvpipe.queue.front_link import FrontLink, MessageTooLargeError, depths_of
from kvpipe.queue.messages import DeliveryControl, Reply, Request, publication_of
from kvpipe.queue.nodes import Nodes
from kvpipe.queue.pending import TOO_LATE, Pending, queue_error

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from aio_pika.abc import AbstractConnection, AbstractIncomingMessage

    from kvpipe.proxy.upstream import WhenBegun
    from kvpipe.queue.topology import Topology

# The broker confirms once a majority of its nodes has the message on disk; one that blocks publishers does not.
# Two busy cores took 5.5 s for the first messages of new queues.
_CONFIRM_TIMEOUT_S = 10.0
_NO_KEY_FOR_IT = "the instance wants an API key: name it by kvpipe worker --instances-api-key-file"
_BLOCKED = "does not take requests: it confirms none in time"
# A request has these besides its client's body and headers: fields of its own, and where P's KV is.
_ADDED_BYTES = 4 << 10
# For what has been sent to workers when the front end ends.
_CLOSE_TIMEOUT_S = 1.0
_PRIORITY = "x-kvpipe-priority"
_DESCRIPTION = ("forces_first_tokens", "reasoning_parser")

logger = logging.getLogger(__name__)


class _QueuedStream:
    """A stream whose pieces come through the broker."""

    def __init__(self, front: DecodeQueue, id: str, pending: Pending) -> None:  # noqa: A002 - as in the messages
        self._front = front
        self._id = id
        self._pending = pending

    async def piece(self) -> bytes:
        """Returns the next bytes; none at the end.

        Raises:
            InstanceError: The request has failed, or its answer is no stream.
        """
        while (part := await self._pending.next()).kind != "end":
            if part.kind == "head" and not part.is_stream:
                self._front.check_key(part)
                raise failed(Answer("decode", QUEUE, part.status, CIMultiDict(part.headers), part.body))
            if part.body:
                return part.body
        return b""

    def close(self) -> None:
        """Has the worker abort the request, unless it has ended."""
        self._front.forget(self._id)


class DecodeQueue:
    """The decode instances behind a broker, as the proxy asks one instance.

    Args:
        url: of the broker.
        topology: its queues.
        silence_timeout_s: limit for the first part of an answer, the wait in the queue included, and between parts.
        has_client_keys: true if the keys of clients end at the proxy: then a 401 is no fault of a client.
    """

    def __init__(
        self, url: str, topology: Topology, silence_timeout_s: float, *, has_client_keys: bool = False
    ) -> None:
        self._topology = topology
        self._silence_timeout_s = silence_timeout_s
        self._has_client_keys = has_client_keys
        name = secrets.token_hex(8)
        self._replies = topology.replies(name)
        self._name = name
        self._broker = Broker(url, f"kvpipe front {name}", self._open)
        self._pending: dict[str, Pending] = {}
        self._nodes = Nodes()
        self._tasks = OwnedTasks()
        self._is_blocked = False

    async def __aenter__(self) -> Self:
        """Connects.

        Raises:
            ConfigError: The broker refuses user, password or queues.
        """
        await self._broker.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        link = self._broker.link
        if link is not None:
            try:
                await called(link.replies.cancel(link.consumer))
                await called(link.replies.delete(if_unused=False, if_empty=False))
            except BROKER_ERRORS as failure:
                logger.info("queue.kept name=%s it ends by itself: %s", self._replies, failure)
        await self._broker.__aexit__(*error)

    def check(self, num_bytes: int = 0) -> None:
        """Refuses requests while there is no broker, and one with more bytes of body and headers than the queue takes.

        Raises:
            InstanceError: There is none, and why, or the request is too large.
        """
        limit = self._opened().max_message_bytes
        if self._is_blocked:
            raise self._unavailable(_BLOCKED)
        if num_bytes + _ADDED_BYTES > limit:
            raise _too_large(MessageTooLargeError(num_bytes, limit))

    def describe(self) -> dict[str, Any] | None:
        """One description of all decode instances, of what they have in common; `None` while none is known."""
        return self._nodes.common(_DESCRIPTION, time.monotonic())

    async def post(
        self,
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        awaits_first_byte: bool,
        when_begun: WhenBegun | None = None,
    ) -> Answer:
        """Has a decode instance answer. The header `x-kvpipe-priority: high` has it asked before others.

        Raises:
            InstanceError: The broker does not take the request, or no instance answers it.
        """
        self.check()
        request = Request(secrets.token_hex(16), self._replies, path, list(headers.items()), body)
        pending = self._pending[request.id] = Pending(request, self._silence_timeout_s, when_begun)
        try:
            await self._publish(request, _CONFIRM_TIMEOUT_S)
            return await self._answer(request.id, pending) if awaits_first_byte else self._begun(request.id, pending)
        except BaseException as error:
            self.forget(request.id)
            if isinstance(error, InstanceError) and error.failure == "too_large":
                return _refusal(error)
            raise

    def health(self) -> str:
        """`ok`, or why no decode instance answers."""
        if self._broker.link is None:
            return self._broker.reason
        if self._is_blocked:
            return f"the broker {_BLOCKED}"
        reasons = [report["reason"] for report in self._nodes.all(time.monotonic())]
        return "ok" if "" in reasons else next(iter(reasons), "no worker takes requests")

    async def state(self) -> dict[str, Any]:
        """The queues and the workers, for people.

        Raises:
            InstanceError: There is no broker.
        """
        self.check()
        now_s = time.monotonic()
        try:
            depths = await called(depths_of(self._opened().connection, self._topology.shared_queues))
        except BROKER_ERRORS as error:
            raise self._unavailable(str(error) or type(error).__name__) from error
        return {"broker": self._broker.address, "queues": depths, "workers": self._nodes.all(now_s)}

    def forget(self, id: str) -> None:  # noqa: A002 - as in the messages
        """Forgets a request, and has its worker abort it."""
        pending = self._pending.pop(id, None)
        if pending is not None:
            self._send(DeliveryControl("cancel", id), pending.assembly.worker)

    def check_key(self, head: Reply) -> None:
        """Refuses an answer that says that the worker's instance wants a key where the clients' keys are no keys of it.

        Raises:
            InstanceError: It says so.
        """
        if head.status == HTTPStatus.UNAUTHORIZED and self._has_client_keys:
            raise queue_error(_NO_KEY_FOR_IT, "answered")

    def _opened(self) -> FrontLink:
        """Channels and queues on the connection to the broker; raises without one."""
        if self._broker.link is None:
            raise self._unavailable(self._broker.reason)
        return self._broker.link

    def _unavailable(self, reason: str) -> InstanceError:
        return queue_error(f"broker {self._broker.address}: {reason}", "unavailable")

    async def _publish(self, request: Request, timeout_s: float) -> None:
        is_urgent = CIMultiDict(request.headers).get(_PRIORITY, "").lower() == "high"
        queue = self._topology.urgent_requests if is_urgent else self._topology.requests
        link = self._opened()
        try:
            await link.publish(request.message(self._silence_timeout_s), queue, timeout_s)
        except MessageTooLargeError as error:
            raise _too_large(error) from error
        except TimeoutError as error:
            self._blocked(link)
            raise self._unavailable(_BLOCKED) from error
        except DeliveryError as error:
            raise self._unavailable(f"refuses the request: {error}") from error
        except BROKER_ERRORS as error:
            raise self._unavailable(str(error) or type(error).__name__) from error

    def _begun(self, id: str, pending: Pending) -> Answer:  # noqa: A002
        """A stream that no worker has begun: the request may wait for one."""
        headers = CIMultiDict({"Content-Type": "text/event-stream; charset=utf-8"})
        stream = _QueuedStream(self, id, pending)
        return Answer("decode", QUEUE, HTTPStatus.OK, headers, b"", stream, is_complete=False)

    async def _answer(self, id: str, pending: Pending) -> Answer:  # noqa: A002
        head = await pending.next()
        self.check_key(head)
        headers = CIMultiDict(head.headers)
        if not head.is_stream:
            return Answer("decode", QUEUE, head.status, headers, head.body)
        stream = _QueuedStream(self, id, pending)
        answer = Answer("decode", QUEUE, head.status, headers, b"", stream, is_complete=False)
        answer.body = await answer.begin()
        return answer

    async def _open(self, connection: AbstractConnection) -> FrontLink:
        channel = await connection.channel(publisher_confirms=False)
        await self._topology.declare(channel)
        # The broker deletes a queue that is idle for too long, with the replies in it.
        has_lost_replies = self._pending and await num_consumers(connection, self._replies) is None
        queue = await self._topology.declare_replies(channel, self._name)
        link = FrontLink(
            connection,
            self._topology.max_message_bytes,
            await connection.channel(on_return_raises=True),
            channel,
            await channel.get_exchange(self._topology.to_workers, ensure=False),
            queue,
            await queue.consume(partial(self._receive, Acks(self._tasks))),
        )
        await link.send_to_all(Message(b"", type="report"))
        for pending in self._pending.values() if has_lost_replies else ():
            self._publish_again(pending)
        return link

    async def _receive(self, acks: Acks, message: AbstractIncomingMessage) -> None:
        acks.add(message)
        try:
            if message.type == "node":
                self._nodes.add(orjson.loads(message.body), time.monotonic())
            elif message.type == "request":
                self._is_dead(message)
            elif message.type == "probe":
                pass
            else:
                for reply in Reply.all_of(message):
                    self._receive_reply(reply)
        except (ProtocolError, ValueError) as error:
            logger.warning("queue.message dropped: %s", error)

    def _receive_reply(self, reply: Reply) -> None:
        pending = self._pending.get(reply.id)
        if pending is None:
            self._send(DeliveryControl("drop", reply.id, reply.delivery), reply.worker)
            return
        if reply.kind == "returned":
            self._return(pending, reply)
            return
        if reply.kind == "interrupted":
            pending.interrupted.add(reply.delivery)
            return
        if reply.kind == "begin" and reply.delivery in pending.returned_by:
            return  # it came twice, and the delivery has ended
        outcome = pending.assembly.receive(reply)
        if outcome.control is not None:
            control = dataclasses.replace(outcome.control, has_interruptions=bool(pending.interrupted))
            self._send(control, reply.worker)
        if outcome.has_more_of_part:
            pending.advanced()
        if outcome.decode_control:
            pending.begun(outcome.decode_control)
        if outcome.part is None:
            return
        if outcome.part.is_last:
            self._pending.pop(reply.id, None)
        pending.put(outcome.part)

    def _return(self, pending: Pending, reply: Reply) -> None:
        """A worker has left the request to this front end. Its message may come twice."""
        if reply.delivery not in pending.returned_by:
            pending.returned_by.add(reply.delivery)
            self._publish_again(pending)

    def _publish_again(self, pending: Pending) -> None:
        """Publishes a request again. What becomes of the message before does not count any more."""
        pending.interrupted.clear()
        pending.request = dataclasses.replace(pending.request, publication=pending.request.publication + 1)
        self._tasks.spawn(self._until_published(pending.request))

    async def _until_published(self, request: Request) -> None:
        """Publishes a request, with the next connection where one is lost meanwhile."""
        while True:
            link = await self._broker.until_open()
            if request.id not in self._pending:
                return
            try:
                await self._publish(request, self._silence_timeout_s)
            except InstanceError as error:
                if link.requests.is_closed or self._broker.link is not link:
                    continue
                if pending := self._pending.pop(request.id, None):
                    pending.put(error)
            return

    def _is_dead(self, message: AbstractIncomingMessage) -> None:
        """The dead-letter queue has a request now."""
        request = str(message.correlation_id)
        pending = self._pending.get(request)
        if pending is None or pending.request.publication != publication_of(message):
            return
        deaths: Any = message.headers.get("x-death") or [{}]
        reason = deaths[0].get("reason", "unknown")
        if (reason == "expired" and pending.assembly.worker) or (reason == "delivery_limit" and pending.interrupted):
            # A worker had begun to answer it: the broker counts the time from the publication, also while a worker has
            # it, and as deliveries also those that ended with a worker's channel.
            self._publish_again(pending)
            return
        del self._pending[request]
        if reason == "expired":
            pending.put(queue_error(TOO_LATE, "timeout"))
        else:
            pending.put(queue_error(f"the request went to the dead-letter queue: {reason}", "given_up"))

    def _send(self, control: DeliveryControl, worker: str) -> None:
        """Sends to a worker, or to all workers while the owner of the request is unknown."""
        link = self._broker.link
        if link is not None:  # else the worker repeats what has to be answered
            sending = link.send(control, worker) if worker else link.send_to_all(control.message())
            self._tasks.spawn(self._sent(control, sending))

    def _blocked(self, link: FrontLink) -> None:
        """Refuses requests until the broker confirms a message again."""
        if not self._is_blocked:
            self._is_blocked = True
            self._tasks.spawn(self._until_confirmed(link))

    async def _until_confirmed(self, link: FrontLink) -> None:
        try:
            while self._broker.link is link:
                with contextlib.suppress(TimeoutError):
                    await link.publish(Message(b"", type="probe"), self._replies, _CONFIRM_TIMEOUT_S)
                    return
        except BROKER_ERRORS as error:
            logger.debug("queue.probe lost: %s", error)
        finally:
            self._is_blocked = False

    async def _sent(self, control: DeliveryControl, sending: Awaitable[None]) -> None:
        try:
            await sending
        except MessageTooLargeError as error:
            if pending := self._pending.pop(control.id, None):
                pending.put(queue_error(f"another worker cannot go on: {error}", "given_up"))
        except BROKER_ERRORS as error:
            logger.debug("queue.control lost: %s", error)


def _too_large(error: MessageTooLargeError) -> InstanceError:
    return queue_error(str(error), "too_large")


def _refusal(error: InstanceError) -> Answer:
    """The answer to a request that the queue does not take; no instance has failed."""
    json = CIMultiDict({"Content-Type": "application/json"})
    return Answer("decode", QUEUE, error.status, json, error_body(error.status, error.reason))
