"""One delivery of a request at a worker: D answers it, and its answer goes to the front end piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from multidict import CIMultiDict

from kvpipe import transfer_params
from kvpipe.proxy import exact_json
from kvpipe.proxy.bodies import PARAMS
from kvpipe.proxy.events import Events
from kvpipe.proxy.headers import headers_for_rank
from kvpipe.proxy.upstream import Answer, InstanceError, failed
from kvpipe.queue.chunks import (
    chunk_of,
    event_of,
    failure_in,
    is_for_tokens,
    tokens_of,
    without_tokens,
)
from kvpipe.queue.messages import MAX_REPLY_BYTES, DeliveryControl, Reply, ReplyKind, Request
from kvpipe.queue.topology import SMALL_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvpipe.proxy.probed import ProbedInstance
    from kvpipe.proxy.upstream import Upstream
    from kvpipe.queue.messages import ControlKind

# Interval and number of repeats of a reply that a front end has to answer. One that does not is without the broker, or
# has died.
_ASK_EVERY_S = 2.0
_NUM_REPEATS = 15
# Of a reply that goes in parts. Each with its other fields is a small message.
_PART_BYTES, _PART_TOKENS = SMALL_MESSAGE_BYTES // 2, SMALL_MESSAGE_BYTES // 32


class Replies(Protocol):
    """Destination of replies."""

    queue: str

    async def send(self, reply_to: str, reply: Reply) -> None:
        """Sends a reply, when there is room for it."""

    async def send_confirmed(self, reply_to: str, reply: Reply) -> None:
        """Sends a reply, and returns once the broker has it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a delivery.

    Attributes:
        is_over: true if the request has ended; else another worker is to have it.
        failure: D's failure, for which another one is to be asked.
    """

    is_over: bool
    failure: InstanceError | None = None

    @property
    def is_frozen(self) -> bool:
        """True if D was frozen, and has not begun to answer: that is no fault of the request."""
        return self.failure is not None and self.failure.failure == "frozen"


class Delivery:
    """A request that this worker has.

    Args:
        request: the request.
        is_redelivered: true if another worker may have begun with it.
        decode: D.
        upstream: HTTP client of D.
        replies: destination of its answer.
        is_read: returns true if a front end reads its queue.
        rank: data-parallel rank of D whose control port is reported; None if it has one engine.

    Attributes:
        id: chosen here; the front end tells the deliveries of a request apart by it.
        has_interruptions: true if the broker has counted an earlier delivery that ended without a fault of the request.
    """

    def __init__(
        self,
        request: Request,
        decode: ProbedInstance,
        upstream: Upstream,
        replies: Replies,
        is_read: Callable[[str], Awaitable[bool]],
        *,
        rank: int | None,
        is_redelivered: bool,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.has_interruptions = False
        self.request = request
        self._is_redelivered = is_redelivered
        self._is_read = is_read
        self._rank = rank
        self._probed = decode
        self._decode = decode.instance
        self._upstream = upstream
        self._replies = replies
        self._number = 0
        self._last: Reply | None = None
        self._controls: asyncio.Queue[DeliveryControl] = asyncio.Queue()

    def receive(self, control: DeliveryControl) -> None:
        """Takes a message of the front end about the request."""
        if control.delivery in ("", self.id):
            self._controls.put_nowait(control)

    async def run(self) -> Finished:
        """Answers the request, until the front end has the answer or does not want it."""
        tokens: tuple[int, ...] = ()
        if self._is_redelivered:
            control = await self._begin()
            if control.kind != "continue":
                return _finished(control)
            tokens, self.has_interruptions = control.tokens, control.has_interruptions
        answering = asyncio.create_task(self._answer(tokens))
        interrupted = asyncio.create_task(self._end_control())
        try:
            await asyncio.wait({answering, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return _finished(interrupted.result())
            if (failure := answering.result()) is not None:
                return Finished(is_over=False, failure=failure)
            return _finished(await self._repeat_last_until(interrupted))
        finally:
            for task in (answering, interrupted):
                task.cancel()
            await asyncio.wait({answering, interrupted})

    async def fail(self, failure: InstanceError) -> None:
        """Reports to the front end that no D answers the request."""
        reply = self._reply("failed", status=failure.status, reason=failure.reason)
        # Before its front end sees it in the dead-letter queue.
        await self._replies.send_confirmed(self.request.reply_to, reply)

    async def report_interruption(self) -> None:
        """Tells the front end that this delivery, which the broker counts, ends without a fault of the request."""
        await self._replies.send_confirmed(self.request.reply_to, self._reply("interrupted"))

    async def leave_to_front_end(self) -> None:
        """Has the front end publish the request again."""
        await self._replies.send_confirmed(self.request.reply_to, self._reply("returned"))

    async def _begin(self) -> DeliveryControl:
        """Asks what the client has. A front end may be without the broker, too."""
        for _ in range(_NUM_REPEATS):
            await self._send_one("begin")
            if self._controls.empty() and not await self._is_read(self.request.reply_to):
                return await self._return()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_EVERY_S):
                    return await self._controls.get()
        return self._control("requeue")

    async def _return(self) -> DeliveryControl:
        """Leaves the request to its front end, which publishes it again if it comes back.

        One that has died does not. Here its request would be delivered again and again, and become a dead letter.
        """
        await self.leave_to_front_end()
        return self._control("drop")

    def _control(self, kind: ControlKind) -> DeliveryControl:
        return DeliveryControl(kind, self.request.id, self.id)

    async def _end_control(self) -> DeliveryControl:
        """Returns the control that ends the delivery. A `begin` that was sent twice has two answers."""
        while (control := await self._controls.get()).kind == "continue":
            pass
        return control

    async def _repeat_last_until(self, interrupted: asyncio.Task[DeliveryControl]) -> DeliveryControl:
        """Sends the last reply again, until the front end answers it, is away, or has not answered for long."""
        for _ in range(_NUM_REPEATS):
            await asyncio.wait({interrupted}, timeout=_ASK_EVERY_S)
            if interrupted.done():
                return interrupted.result()
            if not await self._is_read(self.request.reply_to):
                return await self._return()  # which is left out if the answer before it is complete
            if self._last is not None:
                await self._replies.send(self.request.reply_to, self._last)
        return self._control("requeue")

    async def _answer(self, tokens: tuple[int, ...]) -> InstanceError | None:
        """Sends D's answer. Returns the failure for which another D should be asked."""
        body, hides_tokens = _body(self.request, tokens)
        headers = headers_for_rank(CIMultiDict(self.request.headers), self._rank)
        try:
            answer = await self._post(headers, body)
            try:
                if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise failed(answer)
                await self._send_answer(answer, hides_tokens=hides_tokens)
            finally:
                answer.close()
        except InstanceError as error:
            if error.failure not in ("timeout", "given_up"):
                return error
            await self._send_one("failed", status=error.status, reason=error.reason)
        return None

    async def _post(self, headers: CIMultiDict[str], body: bytes) -> Answer:
        """Asks D, as long as it is not frozen."""
        self._probed.check()
        exchange = self._upstream.post("decode", self._decode, self.request.path, headers, body)
        try:
            return await self._probed.unless_frozen(exchange, lambda: True)
        except InstanceError as error:
            if error.failure != "frozen":
                self._probed.failed()
            raise

    async def _send_answer(self, answer: Answer, *, hides_tokens: bool) -> None:
        head: dict[str, Any] = {
            "status": answer.status,
            "headers": tuple(answer.headers.items()),
            "decode_control": self._decode.control,
        }
        if answer.is_complete:
            await self._send("head", answer.body, **head)
            return
        await self._send("head", is_stream=True, **head)
        events = Events()
        piece = answer.body
        while piece:
            found = [self._visible(event, hides_tokens=hides_tokens) for event in events.feed(piece)]
            if not self._is_redelivered and found:  # else the front end leaves out events
                found = [(b"".join(body for body, _ in found), tuple(token for _, ids in found for token in ids))]
            for body, tokens in found:
                await self._send("piece", body, tokens=tokens)
            self._check_size(events.num_bytes_left)
            piece = await answer.piece()
        if rest := events.end():
            await self._send("piece", rest)
        await self._send_one("end")

    def _visible(self, event: bytes, *, hides_tokens: bool) -> tuple[bytes, tuple[int, ...]]:
        """The part of an event for the front end: the bytes for the client, and the token ids.

        Raises:
            InstanceError: D breaks off with it.
        """
        chunk = chunk_of(event)
        if chunk is None:
            if failure := failure_in(event):
                raise InstanceError("decode", self._decode, failure, "broken")
            return event + b"\n\n", ()
        tokens = tokens_of(chunk)
        if not hides_tokens:
            return event + b"\n\n", tokens
        shown = without_tokens(chunk)
        return b"" if is_for_tokens(shown) else event_of(shown), tokens

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > MAX_REPLY_BYTES:
            reason = f"an answer, or an event of one, of more than {MAX_REPLY_BYTES} bytes does not go through a queue"
            raise InstanceError("decode", self._decode, reason, "given_up")

    async def _send(self, kind: ReplyKind, body: bytes = b"", *, tokens: tuple[int, ...] = (), **fields: Any) -> None:
        """Sends a reply of any size, in parts if need be.

        Raises:
            InstanceError: A front end would not take it.
        """
        self._check_size(len(body))
        num_parts = max(1, -(-len(body) // _PART_BYTES), -(-len(tokens) // _PART_TOKENS))
        for part in range(num_parts):
            is_last = part == num_parts - 1
            await self._send_one(
                kind if is_last else "part",
                body[part * _PART_BYTES : (part + 1) * _PART_BYTES],
                tokens=tokens[part * _PART_TOKENS : (part + 1) * _PART_TOKENS],
                **(fields if is_last else {}),
            )

    async def _send_one(self, kind: ReplyKind, body: bytes = b"", **fields: Any) -> None:
        reply = self._reply(kind, body, **fields)
        if kind in ("head", "piece", "part"):
            self._number += 1
        self._last = reply
        await self._replies.send(self.request.reply_to, reply)

    def _reply(self, kind: ReplyKind, body: bytes = b"", **fields: Any) -> Reply:
        return Reply(kind, self.request.id, self.id, self._replies.queue, self._number, body, **fields)


def _finished(control: DeliveryControl) -> Finished:
    """Fate of a message, by the front end's answer."""
    return Finished(is_over=control.kind != "requeue")


def _body(request: Request, tokens: tuple[int, ...]) -> tuple[bytes, bool]:
    """The body for D, and whether the client does not want the token ids that D is asked for."""
    body = exact_json.read(request.body) if request.parsed is None else request.parsed
    # With `echo` vLLM leaves out the prompt where it returns token ids.
    if body.get("stream") is not True or body.get("echo"):
        return request.body, False
    hides_tokens = not body.get("return_token_ids")
    changed: dict[str, Any] = {"return_token_ids": True}
    if tokens:
        changed[PARAMS] = transfer_params.resume(secrets.token_hex(16), tokens)
    return orjson.dumps(body | changed), hides_tokens
