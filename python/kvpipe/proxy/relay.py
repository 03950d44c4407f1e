"""Writes an answer to the client: at once and unchanged.

A client that takes nothing for `client_timeout_s` loses its connection, which cancels the handler.
"""

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from kvpipe.proxy.bodies import error_body
from kvpipe.proxy.upstream import Answer, InstanceError


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
    await client.takes(response.prepare(request))
    if answer.stream is not None:
        await _relay_stream(client, response, answer)
    await client.takes(response.write_eof())
    return response


async def _relay_stream(client: "_Client", response: web.StreamResponse, answer: Answer) -> None:
    last = answer.body
    await client.takes(response.write(last))
    try:
        async for piece in answer.rest():
            await client.takes(response.write(piece))
            last = piece
    except InstanceError as error:
        await client.takes(response.write(_error_event(error, last)))


def _error_event(error: InstanceError, last: bytes) -> bytes:
    """An SSE event that says why no more comes; it starts anew where the last one broke off."""
    gap = b"" if last.endswith(b"\n\n") else b"\n\n"
    return gap + b"data: " + error_body(502, str(error), "BadGatewayError") + b"\n\n"


class _Client:
    """The client's end of one response, with a bound on each write."""

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s

    async def takes(self, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await work
        except TimeoutError as error:
            if self._request.transport is not None:
                # close() would wait for the buffer that the client does not take.
                self._request.transport.abort()
            raise StalledClientError(f"no data taken for {self._timeout_s} s") from error
