"""Sends an answer to the client, at once and unchanged except for an early token and the number of cached tokens.

A client that accepts no data for `client_timeout_s` loses its connection, which cancels the handler.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable

from aiohttp import hdrs, web

from kvpipe.proxy.bodies import error_body
from kvpipe.proxy.early_token import Continuation, ContradictionError
from kvpipe.proxy.request_record import RequestRecord
from kvpipe.proxy.silence import PIECE_BYTES
from kvpipe.proxy.upstream import Answer, EarlyStart, InstanceError
from kvpipe.proxy.usage import StreamUsage, with_cached_tokens

logger = logging.getLogger(__name__)


class StalledClientError(ConnectionError):
    """The client accepted no data for too long."""


async def relay(request: web.Request, answer: Answer, timeout_s: float, record: RequestRecord) -> web.StreamResponse:
    """Send an answer; every write is bounded by `timeout_s`.

    Args:
        request: the client's request.
        answer: the answer.
        timeout_s: limit for one write.
        record: has the cached tokens as P counted them, and gets tokens and times of the answer.

    Raises:
        ConnectionError: the client left or stalled; aiohttp's server drops it silently.
        InstanceError: never after the first byte: the client then gets an error event.
    """
    client = _Client(request, timeout_s)
    if answer.stream is None:
        body = _with_usage(answer.body, record)
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


def _with_usage(body: bytes, record: RequestRecord) -> bytes:
    record.read_usage(body)
    return body if record.cached_tokens is None else with_cached_tokens(body, record.cached_tokens)


async def _relay_stream(client: "_Client", response: web.StreamResponse, answer: Answer, record: RequestRecord) -> None:
    last = b"\n\n"
    usage = StreamUsage()
    try:
        async for piece in (
            _pieces(answer) if answer.early_start is None else _with_early_token(answer, answer.early_start)
        ):
            corrected = piece if record.cached_tokens is None else usage.feed(piece, record.cached_tokens)
            if corrected:
                await client.write(response, corrected)
                record.sent(corrected)
                last = corrected
        if rest := usage.end():
            await client.write(response, rest)
    except InstanceError as error:
        record.error = str(error)
        await client.send(response.write(_error_event(error, last)))


async def _pieces(answer: Answer) -> AsyncIterator[bytes]:
    if answer.body:
        yield answer.body
    async for piece in answer.rest():
        yield piece


async def _with_early_token(answer: Answer, start: EarlyStart) -> AsyncIterator[bytes]:
    """Yields P's token, then D's stream after it.

    Raises:
        InstanceError: the stream broke off, or no instance's stream begins with the early token.
    """
    start.resumption.token_sent()
    yield start.token.events()
    async for event in _after(start, answer):
        yield event


async def _after(start: EarlyStart, answer: Answer) -> AsyncIterator[bytes]:
    while True:
        continuation = Continuation(start.token)
        try:
            if answer.first_bytes is not None:
                answer.body = await answer.first_bytes
            async for event in _continued(continuation, answer):
                yield event
        except ContradictionError as contradiction:
            error = InstanceError("decode", answer.instance, str(contradiction), "contradicted")
        except InstanceError as failure:
            if continuation.has_sent:
                raise
            error = failure
        else:
            return
        logger.warning("early_token.retry url=%s: %s", answer.instance.url, error.reason)
        answer.close()
        answer.replace_stream(await start.resumption.retry(start.token, error))


async def _continued(continuation: Continuation, answer: Answer) -> AsyncIterator[bytes]:
    async for piece in _pieces(answer):
        for event in continuation.feed(piece):
            yield event
    if rest := continuation.end():
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
