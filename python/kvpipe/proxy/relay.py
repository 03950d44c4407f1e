"""Sends an answer to the client, at once and unchanged except for an early token.

A client that accepts no data for `client_timeout_s` loses its connection, which cancels the handler.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from aiohttp import web

from kvpipe.proxy.bodies import error_body
from kvpipe.proxy.early_token import Continuation, ContradictionError, EarlyToken
from kvpipe.proxy.upstream import Answer, EarlyStart, Fault, InstanceError

logger = logging.getLogger(__name__)


class StalledClientError(ConnectionError):
    """The client accepted no data for too long."""


async def relay(request: web.Request, answer: Answer, timeout_s: float) -> web.StreamResponse:
    """Send an answer; every write is bounded by `timeout_s`.

    Raises:
        ConnectionError: the client left or stalled; aiohttp's server drops it silently.
        InstanceError: never after the first byte: the client then gets an error event.
    """
    client = _Client(request, timeout_s)
    if answer.stream is None:
        response: web.StreamResponse = web.Response(status=answer.status, headers=answer.headers, body=answer.body)
    else:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
    await client.send(response.prepare(request))
    if answer.stream is not None:
        await _relay_stream(client, response, answer)
    await client.send(response.write_eof())
    return response


async def _relay_stream(client: "_Client", response: web.StreamResponse, answer: Answer) -> None:
    last = b"\n\n"
    try:
        async for piece in (
            _pieces(answer) if answer.early_start is None else _with_early_token(answer, answer.early_start)
        ):
            await client.send(response.write(piece))
            last = piece
    except InstanceError as error:
        await client.send(response.write(_error_event(error, last)))


async def _pieces(answer: Answer) -> AsyncIterator[bytes]:
    if answer.body:
        yield answer.body
    async for piece in answer.rest():
        yield piece


async def _with_early_token(answer: Answer, start: EarlyStart) -> AsyncIterator[bytes]:
    """Yields P's token if it arrives first, then D's stream.

    Raises:
        InstanceError: the stream broke off, or no instance's stream begins with the early token.
    """
    either: set[asyncio.Future[Any]] = {start.first_bytes, start.token}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    token = None if start.first_bytes.done() else start.token.result()
    if token is None:
        answer.body = await start.first_bytes
        async for piece in _pieces(answer):
            yield piece
        return
    start.on_sent()
    yield token.events()
    async for event in _after(token, answer, start):
        yield event


async def _after(token: EarlyToken, answer: Answer, start: EarlyStart) -> AsyncIterator[bytes]:
    continuation = Continuation(token)
    try:
        answer.body = await start.first_bytes
        async for event in _continued(continuation, answer):
            yield event
    except (ContradictionError, InstanceError) as error:
        if continuation.has_sent:
            raise
        logger.warning("early_token.retry url=%s: %s", answer.instance.url, error)
        fault: Fault = "contradicted" if isinstance(error, ContradictionError) else "failed"
    else:
        return
    answer.close()
    answer.replace_stream(await start.retry(token, fault))
    try:
        async for event in _continued(Continuation(token), answer):
            yield event
    except ContradictionError as error:
        raise InstanceError(answer.role, answer.instance, str(error)) from error


async def _continued(continuation: Continuation, answer: Answer) -> AsyncIterator[bytes]:
    async for piece in _pieces(answer):
        for event in continuation.feed(piece):
            yield event
    if rest := continuation.end():
        yield rest


def _error_event(error: InstanceError, last: bytes) -> bytes:
    """An SSE event with the error; it begins a new event where the last one broke off."""
    gap = b"" if last.endswith(b"\n\n") else b"\n\n"
    return gap + b"data: " + error_body(502, str(error), "BadGatewayError") + b"\n\n"


class _Client:
    """The client's end of one response, with a bound on each write."""

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s

    async def send(self, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await work
        except TimeoutError as error:
            if self._request.transport is not None:
                # close() would wait for a buffer that the client does not read.
                self._request.transport.abort()
            raise StalledClientError(f"client accepted no data for {self._timeout_s} s") from error
