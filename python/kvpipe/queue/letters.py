"""Requests in the dead-letter queue: which there are, and sending them again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aio_pika
from multidict import CIMultiDict

from kvpipe.exceptions import ConfigError, ConnectError, ProtocolError
from kvpipe.proxy.upstream import InstanceError
from kvpipe.queue.broker import BROKER_ERRORS, checked_url
from kvpipe.queue.front import DecodeQueue
from kvpipe.queue.messages import Request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from aio_pika.abc import AbstractIncomingMessage, AbstractQueue

    from kvpipe.queue.topology import Topology

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up.

    Attributes:
        id: of the request.
        reason: D's reason, or `delivery_limit` or `expired` if the broker gave it up.
        path: API path.
        num_bytes: size of its body.
    """

    id: str
    reason: str
    path: str
    num_bytes: int

    @classmethod
    def of(cls, message: AbstractIncomingMessage) -> DeadLetter:
        """Reads a message of the dead-letter queue, from any writer."""
        deaths: Any = message.headers.get("x-death") or [{}]
        reason = message.headers.get("reason") or deaths[0].get("reason", "unknown")
        try:
            path = Request.of(message).path
        except ProtocolError:
            path = ""
        return cls(str(message.correlation_id or ""), str(reason), path, len(message.body))


async def letters(url: str, topology: Topology) -> list[DeadLetter]:
    """The requests in the dead-letter queue, oldest first. They stay there.

    Raises:
        ConnectError: The broker cannot be used.
    """
    async with _dead_letters(url, topology) as queue:
        return [DeadLetter.of(message) async for message in _messages(queue)]


async def replay(url: str, topology: Topology, ids: Sequence[str], timeout_s: float, show: Callable[..., None]) -> bool:
    """Sends requests again, and removes those that are answered.

    Args:
        url: of the broker.
        topology: its queues.
        ids: the ids of the requests; empty for all.
        timeout_s: limit for one answer.
        show: gets the id of each, its status, and its answer or why there is none.

    Returns:
        Whether all of them were answered.

    Raises:
        ConfigError: A request is not there.
        ConnectError: The broker cannot be used.
    """
    left = set(ids)
    is_good = True
    async with _dead_letters(url, topology) as queue, DecodeQueue(url, topology, timeout_s) as decode:
        found = [message async for message in _messages(queue)]
        for message in found:
            id = DeadLetter.of(message).id  # noqa: A001 - as in the messages
            if ids and id not in left:
                continue
            left.discard(id)
            try:
                status, answer = await _answered(decode, message)
            except (InstanceError, ProtocolError) as error:
                show(id, 0, str(error))
                is_good = False
                continue
            show(id, status, answer)
            if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # the queue has not taken it
                is_good = False
            else:
                await message.ack()
    if left:
        message_text = f"no dead letter {', '.join(sorted(left))}: kvpipe queue list shows them"
        raise ConfigError(message_text)
    return is_good


async def _answered(decode: DecodeQueue, message: AbstractIncomingMessage) -> tuple[int, str]:
    request = Request.of(message)
    headers = CIMultiDict(request.headers)
    answer = await decode.post(request.path, headers, request.body, awaits_first_byte=True)
    pieces = [answer.body, *[piece async for piece in answer.rest()]]
    return answer.status, b"".join(pieces).decode(errors="replace")


@contextlib.asynccontextmanager
async def _dead_letters(url: str, topology: Topology) -> AsyncIterator[AbstractQueue]:
    """The dead-letter queue; messages that were got and not acknowledged are in it again afterwards."""
    try:
        async with await aio_pika.connect(checked_url(url), timeout=_TIMEOUT_S) as connection:
            channel = await connection.channel()
            await topology.declare(channel)
            yield await channel.get_queue(topology.dead, ensure=False)
    except BROKER_ERRORS as error:
        message = f"broker: {error or type(error).__name__}"
        raise ConnectError(message) from error


async def _messages(queue: AbstractQueue) -> AsyncIterator[AbstractIncomingMessage]:
    while (message := await queue.get(fail=False, timeout=_TIMEOUT_S)) is not None:
        yield message
