"""Sends an answer to the client, at once and unchanged except for the number of cached tokens.

A client that accepts no data for `client_timeout_s` loses its connection, which cancels the handler.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable

from aiohttp import hdrs, web

from kvpipe.proxy.aborts import ABORT_REASON, ChoiceCheck
from kvpipe.proxy.bodies import error_body
from kvpipe.proxy.request_record import RequestRecord
from kvpipe.proxy.silence import PIECE_BYTES
from kvpipe.proxy.upstream import Answer, InstanceError


class StalledClientError(ConnectionError):
    """The client accepted no data for too long."""


async def relay(request: web.Request, answer: Answer, timeout_s: float, record: RequestRecord) -> web.StreamResponse:
    """Send an answer; every write is bounded by `timeout_s`.

    Args:
        request: the client's request.
        answer: the answer.
        timeout_s: limit for one write.
        record: has the usage that P has reported, and gets tokens and times of the answer.

    Raises:
        ConnectionError: the client left or stalled; aiohttp's server drops it silently.
        InstanceError: never after the first byte: the client then gets an error event.
    """
    client = _Client(request, timeout_s)
    if answer.stream is None:
        body = record.usage.whole(answer.body)
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(body)
        await client.send(response.prepare(request))
        if request.method != hdrs.METH_HEAD:
            await client.write(response, body)
    else:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        await client.send(response.prepare(request))
        await _relay_stream(client, response, answer, record)
    await client.send(response.write_eof())
    record.answered(answer)
    return response


async def _relay_stream(client: "_Client", response: web.StreamResponse, answer: Answer, record: RequestRecord) -> None:
    last = b"\n\n"
    try:
        async for piece in _complete(answer, record.num_choices):
            if corrected := record.usage.feed(piece):
                await client.write(response, corrected)
                record.sent(corrected)
                last = corrected
        if rest := record.usage.end():
            await client.write(response, rest)
    except InstanceError as error:
        record.error = str(error)
        await client.send(response.write(_error_event(error, last)))


async def _complete(answer: Answer, num_choices: int) -> AsyncIterator[bytes]:
    """Yields the pieces of a stream; raises `InstanceError` where it ends without some of its choices."""
    choices = ChoiceCheck(num_choices)
    async for piece in answer.pieces():
        yield choices.feed(piece)
        if choices.has_found:
            raise InstanceError(answer.role, answer.instance, ABORT_REASON, "broken")
    if rest := choices.end():
        yield rest


def _error_event(error: InstanceError, last: bytes) -> bytes:
    """An SSE event with the error; it begins a new event where the last one broke off."""
    gap = b"" if last.endswith(b"\n\n") else b"\n\n"
    return gap + b"data: " + error_body(error.status, str(error)) + b"\n\n"


class _Client:
    """The client's end of one response, with a bound on each write."""

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s

    async def write(self, response: web.StreamResponse, body: bytes) -> None:
        """Write bytes; the limit holds for each of their pieces."""
        for begin in range(0, len(body), PIECE_BYTES):
            await self.send(response.write(body[begin : begin + PIECE_BYTES]))

    async def send(self, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await work
        except TimeoutError as error:
            if self._request.transport is not None:
                # close() would wait for a buffer that the client does not read.
                self._request.transport.abort()
            raise StalledClientError(f"client accepted no data for {self._timeout_s} s") from error
