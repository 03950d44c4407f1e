"""Stand-ins for P and D, as a process: `python -m bench.queue.instances NUM_PREFILL NUM_DECODE`.

They compute nothing, so that what remains is dispatch. Their control ports are real, and each handoff is opened,
watched and released as a connector does. Token `i` of request `n` has the text `n:i `, whoever computes it, and a
chunk says when it was written.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

import orjson
import uvloop
from aiohttp import web

from bench.programs.request import compose
from kvpipe import _kvpipe, transfer_params
from kvpipe.config import resolve_token
from kvpipe.transfer_params import ConsumeParams, ProduceParams

PATH = "/v1/completions"
# A chunk's field that vLLM does not use and that every part of the way passes on.
WRITTEN = "system_fingerprint"
# A field of requests, which says how many letters are in this field of the answer, or of its second event.
PADDING = "padding"
NUM_SLOTS = 256
_LISTEN, _HOST = "127.0.0.1:0", "127.0.0.1"
_DESCRIPTION = {
    "forces_first_tokens": True,
    "reasoning_parser": "",
    "max_model_len": 1 << 20,
    "max_num_seqs": NUM_SLOTS,
}
_HASH, _RANKS = bytes(32), [("127.0.0.1:1", bytes(16))]
_METRICS = "vllm:num_requests_waiting 0.0\n"


def prompt_of(number: int, gap_ms: int = 0) -> list[int]:
    """The prompt of a request: its number, and the milliseconds between tokens of its answer."""
    return [number, gap_ms]


def text_of(number: int, num_tokens: int) -> str:
    """The text of its whole answer."""
    return "".join(_token_text(number, index) for index in range(num_tokens))


def _token_text(number: int, index: int) -> str:
    return f"{number}:{index} "


class _Instance:
    """What P and D share: a control port and the handoffs that are under way."""

    def __init__(self, engine_id: str) -> None:
        self.control = _kvpipe.Control(_LISTEN, resolve_token(), engine_id)
        self.control.describe_as(json.dumps(_DESCRIPTION))
        self._ids = itertools.count()
        self.num_answered = 0

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=_METRICS)

    async def counts(self, _: web.Request) -> web.Response:
        return web.json_response({"answered": self.num_answered})

    def _answer(self, number: int, num_tokens: int, **more: Any) -> web.Response:
        self.num_answered += 1
        usage = {"prompt_tokens": 2, "completion_tokens": num_tokens, "total_tokens": num_tokens + 2}
        choice = {
            "index": 0,
            "text": text_of(number, num_tokens),
            "token_ids": list(range(num_tokens)),
            "logprobs": None,
            "finish_reason": "length",
        }
        answer = self._head() | {"choices": [choice], "usage": usage} | more
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    def _head(self) -> dict[str, Any]:
        return {"id": f"cmpl-{next(self._ids)}", "object": "text_completion", "created": 5, "model": "m"}


class Prefill(_Instance):
    """P: answers each request with one token, and keeps the handoff until it is released."""

    def __init__(self) -> None:
        super().__init__("p")
        self._open: set[bytes] = set()

    async def post(self, request: web.Request) -> web.Response:
        """Answers a request, which may be for a handoff."""
        body = orjson.loads(await request.read())
        params = transfer_params.parse(body.get("kv_transfer_params"))
        number = body["prompt"][0]
        if not isinstance(params, ProduceParams) or params.handoff is None:
            return self._answer(number, body["max_tokens"])
        self._forget_ended()
        handoff = params.handoff
        self.control.open(handoff, _HASH, 2, _RANKS)
        self.control.finish(handoff, [0], "length", 0, _HASH)
        self._open.add(handoff)
        produced = transfer_params.produced(
            handoff.hex(),
            self.control.address or "",
            engine_id="p",
            parallel_size=1,
            num_tokens=2,
            block_ids=[[0]],
            first_token=0,
        )
        return self._answer(number, 1, kv_transfer_params=produced)

    async def counts(self, _: web.Request) -> web.Response:
        """How many answers it has sent, and how many handoffs it still has."""
        self._forget_ended()
        return web.json_response({"answered": self.num_answered, "handoffs": len(self._open)})

    def _forget_ended(self) -> None:
        self._open -= {event["handoff"] for event in self.control.drain() if event["event"] == "released"}


class Decode(_Instance):
    """D: answers with as many tokens as are asked for, and acknowledges the handoff before the first one."""

    def __init__(self) -> None:
        super().__init__("d")

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Answers a request, as a stream if it asks for one."""
        body = orjson.loads(await request.read())
        params = transfer_params.parse(body.get("kv_transfer_params"))
        if isinstance(params, ConsumeParams) and params.producer:
            self._consume(params)
        number, gap_ms = body["prompt"]
        padding = {PADDING: "x" * body.get(PADDING, 0)}
        if not body.get("stream"):
            return self._answer(number, body["max_tokens"], **padding)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        head, has_ids = self._head(), body.get("return_token_ids") is True
        for index in range(body["max_tokens"]):
            if index and gap_ms:
                await asyncio.sleep(gap_ms / 1000)
            choice = {"index": 0, "text": _token_text(number, index), "logprobs": None, "finish_reason": None}
            choice |= {"token_ids": [index]} if has_ids else {}
            chunk = head | {"choices": [choice], WRITTEN: str(time.monotonic_ns())} | (padding if index == 1 else {})
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.num_answered += 1
        return response

    def _consume(self, params: ConsumeParams) -> None:
        self.control.watch(params.handoff, params.producer)
        self.control.unwatch(params.handoff, is_acknowledged=True)
        self.control.set_result(params.handoff, '{"result": "full", "bytes": 1}')
        self.control.drain()


async def _serve(num_prefill: int, num_decode: int) -> None:
    """Prints the addresses of all instances, and serves until its input ends."""
    async with AsyncExitStack() as stack:
        prefill = [await _start(stack, Prefill()) for _ in range(num_prefill)]
        decode = [await _start(stack, Decode()) for _ in range(num_decode)]
        sys.stdout.write(compose("hello", {"prefill": ";".join(prefill), "decode": ";".join(decode)}) + "\n")
        sys.stdout.flush()
        with suppress(asyncio.CancelledError):
            await _end_of_input()


async def _start(stack: AsyncExitStack, instance: Prefill | Decode) -> str:
    """Starts an instance; returns its address as the proxy takes it."""
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(
        [
            web.post(PATH, instance.post),
            web.get("/health", instance.health),
            web.get("/metrics", instance.metrics),
            web.get("/counts", instance.counts),
        ]
    )
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    stack.callback(instance.control.close)
    await web.TCPSite(runner, _HOST, 0, backlog=1024).start()
    return f"http://{_HOST}:{runner.addresses[0][1]},{instance.control.address}"


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop_runner:
        loop_runner.run(_serve(*map(int, sys.argv[1:])))
