"""Front ends and workers on a real broker, with stand-ins where vLLM would be.

A stand-in samples tokens that depend on who it is, unless the request forces them, so that an answer which another one
continues shows who has sampled what. Real vLLM is in tests/e2e/test_queue.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import orjson
from aiohttp import web
from multidict import CIMultiDict

from kvpipe.proxy.instances import Instance
from kvpipe.proxy.upstream import Upstream, open_session
from kvpipe.queue.front import DecodeQueue
from kvpipe.queue.letters import letters
from kvpipe.queue.topology import Topology
from kvpipe.queue.worker import Worker
from kvpipe.transfer_params import ConsumeParams, LoadParams, parse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from kvpipe.queue.letters import DeadLetter
    from tests.proxy.stoppable import Stoppable

LIMIT_S = 60.0
SILENCE_S = 40.0
COMPLETIONS = "/v1/completions"
NUM_TOKENS = 8


def run(scene: Callable[[], Awaitable[None]]) -> None:
    """Runs one scene to its end; a test that would hang fails instead."""

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scene()

    asyncio.run(bounded())


def body(*, stream: bool = True, **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "prompt": "hello", "max_tokens": NUM_TOKENS, "stream": stream} | fields)


class Decode:
    """A stand-in for a decode instance. A request with `padding` gets so many letters after its second token.

    Attributes:
        bodies: bodies of its requests.
        headers: their headers.
        engines: its data-parallel ranks. Its requests wait in the first one.
        metrics_status: HTTP status of its metrics.
        num_aborted: requests that ended before their answer.
        num_waiting: number of waiting requests in its metrics.
        num_deferred: of those that wait for KV; None is a vLLM that does not tell these apart.
        is_described: true if its metrics say that it forces tokens; a real one's do from its first request on.
        pause_after: after so many tokens it waits for `go_on`.
        breaks: end of an answer there: `lost`, its connection; `aborted`, as vLLM on SIGTERM; `error`, as vLLM
            whose engine has died.
        prefilled: P's first token and its text, where a request brings P's KV.
    """

    def __init__(self, name: int) -> None:
        self.name = name
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.engines: Sequence[int] = (0,)
        self.metrics_status = 200
        self.num_aborted = 0
        self.num_waiting = 0
        self.num_deferred: int | None = None
        self.is_healthy = True
        self.is_described = True
        self.status = 200
        self.pause_after = -1
        self.has_paused = asyncio.Event()
        self.go_on = asyncio.Event()
        self.breaks = ""
        self.prefilled = (7, "ab")
        self.changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def tokens(self, forced: tuple[int, ...] = ()) -> list[int]:
        """Samples that no other stand-in has, after those that are forced."""
        return [*forced, *(self.name * 1000 + index for index in range(len(forced), NUM_TOKENS))]

    async def stop_listening(self) -> None:
        """Ends as vLLM does on SIGTERM where its engine ends first: answers stay open, and nothing more comes."""
        await self._site.stop()

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self.changed.clear()
            await self.changed.wait()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503, headers={"Connection": "close"})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = ""
        for engine in self.engines:
            is_first = engine == self.engines[0]
            counts = {"capacity": self.num_waiting * is_first, "deferred": (self.num_deferred or 0) * is_first}
            text += f'vllm:num_requests_running{{engine="{engine}"}} 0.0\n'
            text += f'vllm:num_requests_waiting{{engine="{engine}"}} {float(sum(counts.values()))}\n'
            for reason, count in counts.items() if self.num_deferred is not None else ():
                text += f'vllm:num_requests_waiting_by_reason{{engine="{engine}",reason="{reason}"}} {float(count)}\n'
        if self.is_described:
            text += 'vllm:kvpipe_store_forces_first_tokens{engine="0",model_name="m",reasoning_parser=""} 1.0\n'
        return web.Response(text=text, status=self.metrics_status, headers={"Connection": "close"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.bodies.append(asked)
        self.headers.append(request.headers)
        self.changed.set()
        if self.status != 200:
            return web.json_response({"error": {"message": "no", "code": self.status}}, status=self.status)
        try:
            return await self._stream(request, asked) if asked.get("stream") else await self._whole(asked)
        except BaseException:
            self.num_aborted += 1
            self.changed.set()
            raise

    async def _whole(self, asked: dict[str, Any]) -> web.Response:
        await self._pause(0)
        said = choice(self.tokens(forced_by(asked)))
        said["text"] += "x" * asked.get("padding", 0)
        if self.breaks == "aborted":
            said = choice([]) | {"finish_reason": "abort"}
        # As vLLM writes JSON: without spaces.
        raw = orjson.dumps({"id": f"by {self.name}", "choices": [said]})
        return web.Response(body=raw, content_type="application/json")

    async def _stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = self.tokens(forced_by(asked, self.prefilled[0]))
        for index, token in enumerate(tokens):
            await self._pause(index)
            if self.breaks and index == self.pause_after:
                await self._break_off(request, response)
                break
            said = choice([token]) | {"finish_reason": "length" if token == tokens[-1] else None}
            if token == self.prefilled[0]:
                said["text"] = self.prefilled[1]
            if index == 1:
                said["text"] += "x" * asked.get("padding", 0)
            if not asked.get("return_token_ids"):
                del said["token_ids"]
            chunk = {"id": f"by {self.name}", "created": self.name, "model": "m", "choices": [said]}
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _break_off(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.breaks == "lost":
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        error = {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}}
        aborted = {"id": f"by {self.name}", "choices": [choice([]) | {"finish_reason": "abort"}]}
        last = orjson.dumps(error if self.breaks == "error" else aborted)
        await response.write(b"data: " + last + b"\n\n")

    async def _pause(self, index: int) -> None:
        if index == self.pause_after:
            self.has_paused.set()
            await self.go_on.wait()


def choice(tokens: list[int]) -> dict[str, Any]:
    return {"index": 0, "text": "".join(f"<{token}>" for token in tokens), "token_ids": tokens}


def forced_by(asked: dict[str, Any], prefilled: int = 7) -> tuple[int, ...]:
    """The tokens that a request forces, P's where it brings P's KV."""
    params = parse(asked.get("kv_transfer_params"))
    if isinstance(params, ConsumeParams):
        return (prefilled,) if params.host else params.tokens
    return (prefilled,) if isinstance(params, LoadParams) else ()


class DecodeControl:
    """A stand-in for the client of control ports, for those instances that have one: of this data-parallel rank."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    async def describe(self, address: str, timeout: float = 5.0) -> dict[str, Any]:  # noqa: ASYNC109 - the real one has it
        return {"forces_first_tokens": True, "reasoning_parser": "", "data_parallel_rank": self.rank}


@dataclass
class Stage:
    """A deployment of its own on a broker: one front end, and workers as they are added."""

    url: str
    stack: AsyncExitStack
    topology: Topology = field(default_factory=lambda: Topology(f"test-{secrets.token_hex(4)}"))
    decodes: list[Decode] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    _upstream: Upstream | None = None
    _running: list[tuple[asyncio.Event, asyncio.Task[None]]] = field(default_factory=list)

    async def front(self, silence_s: float = SILENCE_S) -> DecodeQueue:
        """Another front end."""
        return await self.stack.enter_async_context(DecodeQueue(self.url, self.topology, silence_s))

    async def decode(self) -> Decode:
        """A decode instance without a worker."""
        decode = await self.stack.enter_async_context(Decode(len(self.decodes) + 1))
        self.decodes.append(decode)
        return decode

    async def worker(
        self, decode: Decode | Stoppable, num_slots: int = 4, port: str = "", **settings: Any
    ) -> asyncio.Event:
        """A worker in this process; the event that it returns makes it drain."""
        if self._upstream is None:
            session = await self.stack.enter_async_context(open_session(5.0, SILENCE_S))
            self._upstream = Upstream(session, SILENCE_S)
            self.stack.push_async_callback(self._end_workers)  # before their session
        worker = Worker(
            self.url,
            self.topology,
            Instance(decode.url, port),
            num_slots=num_slots,
            upstream=self._upstream,
            **{"control": DecodeControl()} | settings,
        )
        self.workers.append(worker)
        stopped = asyncio.Event()
        task = asyncio.create_task(worker.run(stopped, 5.0))
        self._running.append((stopped, task))
        return stopped

    async def pair(self, num_slots: int = 4, port: str = "") -> Decode:
        """A decode instance with a worker."""
        decode = await self.decode()
        await self.worker(decode, num_slots, port)
        return decode

    async def process(self, decode: Decode, *more: str) -> asyncio.subprocess.Process:
        """A worker in a process of its own."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvpipe",
            "worker",
            "--decode",
            decode.url,
            "--queue",
            self.topology.name,
            "--delivery-limit",
            str(self.topology.delivery_limit),
            *more,
            env={**os.environ, "KVPIPE_AMQP": self.url},
        )
        self.stack.push_async_callback(end, process)
        return process

    async def begun(
        self, front: DecodeQueue, num_before: int
    ) -> tuple[Client, asyncio.subprocess.Process, Decode, str]:
        """A stream of which a worker's process has sent some tokens, another D, and the answer that this one ends."""
        first, second = await self.decode(), await self.decode()
        first.pause_after = num_before
        process = await self.process(first)
        await until_healthy(front)
        client = Client(front, body(), {})
        await first.has_paused.wait()
        await client.until(num_before)
        return client, process, second, written([*first.tokens()[:num_before], *second.tokens()[num_before:]])

    async def _end_workers(self) -> None:
        for stopped, _ in self._running:
            stopped.set()
        for _, task in self._running:
            await task


async def end(process: asyncio.subprocess.Process) -> None:
    """Ends a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@contextlib.asynccontextmanager
async def stage(url: str, **fields: Any):
    """A deployment on a broker, without front end or worker."""
    async with AsyncExitStack() as stack:
        yield Stage(url, stack, **fields)


class Client:
    """A client that reads an answer as it comes.

    Attributes:
        shown: the bytes that it has.
        answering: ends with status and all bytes.
    """

    def __init__(self, front: DecodeQueue, raw: bytes, headers: dict[str, str]) -> None:
        self.shown = b""
        self._has_more = asyncio.Event()
        self.answering = asyncio.create_task(self._ask(front, raw, headers))

    async def until(self, num_tokens: int) -> None:
        """Returns once it has the text of so many tokens."""
        while text_of(self.shown).count("<") < num_tokens:
            self._has_more.clear()
            await self._has_more.wait()

    async def _ask(self, front: DecodeQueue, raw: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        answer = await front.post(COMPLETIONS, CIMultiDict(headers), raw, awaits_first_byte=True)
        try:
            self._show(answer.body)
            async for piece in answer.rest():
                self._show(piece)
        finally:
            answer.close()
        return answer.status, self.shown

    def _show(self, piece: bytes) -> None:
        self.shown += piece
        self._has_more.set()


async def ask(front: DecodeQueue, raw: bytes, **headers: str) -> tuple[int, bytes]:
    """Status and all bytes of an answer."""
    return await Client(front, raw, headers).answering


def text_of(answer: bytes) -> str:
    """The text in an answer."""
    parts = [part.strip().removeprefix(b"data:") for part in answer.split(b"\n\n")]
    chunks = [orjson.loads(part) for part in parts if part and b"[DONE]" not in part]
    return "".join(said["text"] for chunk in chunks for said in chunk["choices"])


def written(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


async def until_state(front: DecodeQueue, is_reached: Callable[[dict[str, Any]], bool]) -> None:
    """Polls queues and workers until they are so; the broker does not report changes."""
    while not is_reached(await front.state()):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def until_healthy(front: DecodeQueue, *, is_healthy: bool = True) -> None:
    """Returns once a front end's requests are answered, or are not."""
    await until(lambda: (front.health() == "ok") == is_healthy)


async def has_one_answer(client: Client, text: str) -> None:
    """Returns once a client has this text, whole and once."""
    status, answer = await client.answering
    assert status == 200
    assert text_of(answer) == text
    assert answer.count(b"[DONE]") == 1


async def until_letters(url: str, topology: Topology) -> list[DeadLetter]:
    """The dead letters, once there is one: it may come after what the client gets."""
    while not (found := await letters(url, topology)):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return found


async def until(is_reached: Callable[[], bool]) -> None:
    """Polls a condition without a notification."""
    while not is_reached():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
