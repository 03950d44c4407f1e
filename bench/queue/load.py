"""Requests to a proxy before stand-in instances, and what became of each."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp
import uvloop

from bench.processes import SubjectError
from bench.queue.instances import PADDING, PATH, WRITTEN, prompt_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_DATA, _DONE = b"data: ", b"[DONE]"
_HEADERS = {"Content-Type": "application/json"}
# As aiohttp reports a connection that ends before a response, and within its body.
_CUTS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        number: Its number, which the answer's text repeats.
        num_tokens: Tokens of the answer.
        is_streamed: Whether the answer is a stream.
        gap_ms: Milliseconds between the tokens of a stream.
        request_padding: Letters that make the request longer.
        answer_padding: Letters that make the answer, or one event of it, longer.
    """

    number: int
    num_tokens: int
    is_streamed: bool = False
    gap_ms: int = 0
    request_padding: int = 0
    answer_padding: int = 0

    @property
    def body(self) -> bytes:
        """The body of the request."""
        prompt = prompt_of(self.number, self.gap_ms)
        body = {"model": "m", "prompt": prompt, "max_tokens": self.num_tokens, "stream": self.is_streamed}
        body |= {PADDING: self.answer_padding} if self.answer_padding else {}
        body |= {"user": "x" * self.request_padding} if self.request_padding else {}
        return json.dumps(body).encode()


@dataclass
class Reply:
    """What a client got for a request.

    Attributes:
        status: HTTP status.
        text: Text of the answer.
        padding: Letters that made it longer.
        took_s: From the request to the end of the answer.
        delays_s: For each token of a stream after the first one, from when D has written it to when it was read.
        error: Why the answer is not complete; empty if it is.
        is_unreached: Whether the proxy accepted no connection.
        is_cut: Whether the connection broke.
    """

    status: int = 0
    text: str = ""
    padding: int = 0
    took_s: float = 0.0
    delays_s: list[float] = field(default_factory=list)
    error: str = ""
    is_unreached: bool = False
    is_cut: bool = False


class Client:
    """An HTTP client of one proxy, used within one event loop."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url + PATH
        self._http = http

    async def ask(self, ask: Ask) -> Reply:
        """Sends a request and reads its whole answer."""
        reply = Reply()
        begun_s = time.monotonic()
        try:
            async with self._http.post(self._url, data=ask.body, headers=_HEADERS) as response:
                reply.status = response.status
                if response.status != HTTPStatus.OK:
                    reply.error = f"{response.status}: {await response.text()}"
                elif ask.is_streamed:
                    await _read_stream(response.content, reply)
                else:
                    _add(json.loads(await response.read()), reply)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reply.error = f"{type(error).__name__}: {error}"
            reply.is_unreached = isinstance(error, aiohttp.ClientConnectorError)
            reply.is_cut = isinstance(error, _CUTS) and not reply.is_unreached
        reply.took_s = time.monotonic() - begun_s
        return reply


async def _read_stream(content: aiohttp.StreamReader, reply: Reply) -> None:
    rest, is_complete = b"", False
    while piece := await content.readany():
        read_ns = time.monotonic_ns()
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(_DATA)
            if data == _DONE:
                is_complete = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                reply.error = str(chunk["error"])
                return
            _add(chunk, reply)
            if (written := chunk.get(WRITTEN)) is not None:
                reply.delays_s.append((read_ns - int(written)) / 1e9)
    if not is_complete:
        reply.error = "the stream ended early"


def _add(chunk: Mapping[str, Any], reply: Reply) -> None:
    reply.text += chunk["choices"][0]["text"]
    reply.padding += len(chunk.get(PADDING, ""))


def ask_all(url: str, asks: Iterable[Ask], num_at_once: int) -> list[Reply]:
    """Sends requests, a number of them at any time, and returns what came, in the order of the requests.

    Raises:
        SubjectError: An answer is not complete, or another one.
    """

    async def ask() -> list[Reply]:
        replies: dict[int, Reply] = {}
        left = iter(asks)
        async with open_session() as http:
            client = Client(url, http)

            async def ask_in_turn() -> None:
                for one in left:
                    replies[one.number] = await client.ask(one)
                    check(one, replies[one.number])

            async with asyncio.TaskGroup() as group:
                for _ in range(num_at_once):
                    group.create_task(ask_in_turn())
        return [replies[number] for number in sorted(replies)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(ask())
        except* SubjectError as errors:
            raise errors.exceptions[0] from None


def open_session(within_s: float = 60.0, *, keeps_connections: bool = True) -> aiohttp.ClientSession:
    """A session without a limit of connections, and with one for the time of an answer."""
    timeout = aiohttp.ClientTimeout(total=within_s)
    connector = aiohttp.TCPConnector(limit=0, force_close=not keeps_connections)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


def check(ask: Ask, reply: Reply) -> None:
    """Checks that an answer is the one that was asked for.

    Raises:
        SubjectError: It is not.
    """
    if reply.error:
        message = f"request {ask.number} failed: {reply.error}"
        raise SubjectError(message)
    if reply.text != (expected := text_of(ask.number, ask.num_tokens)):
        message = f"request {ask.number} was answered {reply.text!r} instead of {expected!r}"
        raise SubjectError(message)
