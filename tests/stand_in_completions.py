"""Takes the place of a vLLM instance in tests of benchmarks: streams completions, at a known pace.

In a test's process it is an application; as a program it accepts vLLM's command line, and starts at once.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class StandIn:
    """An instance.

    Attributes:
        num_at_once: Requests that it answers at once; others wait.
        first_s: From the beginning of a request's turn to its first token.
        gap_s: Between tokens.
        fails: Statuses of requests by their order; 200 for those not listed.
        num_before_cut: Tokens after which a stream breaks off, by the order of requests.
        error_after: Tokens after which a stream has an error event, by the order of requests.
        leased: Number of leased blocks in its metrics.
        has_store: True if it loads prompts that it was asked before, as its metrics show, unless it still has them in
            its prefix cache.
        bodies: Requests in their order.
        log: Prompts, and resets of the prefix cache with their success. The first reset after a prompt is refused, as
            by vLLM while blocks are held.
    """

    num_at_once: int = 1000
    first_s: float = 0.0
    gap_s: float = 0.0
    fails: dict[int, int] = field(default_factory=dict)
    num_before_cut: dict[int, int] = field(default_factory=dict)
    error_after: dict[int, int] = field(default_factory=dict)
    leased: float = 0.0
    has_store: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    log: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._turn = asyncio.Semaphore(self.num_at_once)
        self._cached: list[Any] = []
        self._num_loaded = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_get("/log", self._send_log)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        name = "vllm:kvpipe_leased_blocks"
        text = f'# TYPE {name} gauge\n{name}{{engine="0",model_name="m"}} {self.leased}\n'
        return web.Response(text=f"{text}vllm:external_prefix_cache_hits_total{{}} {self._num_loaded}\n")

    async def _reset(self, _: web.Request) -> web.Response:
        is_done = self.log[-1][0] != "prompt"
        self.log.append(("reset", is_done))
        if is_done:
            self._cached.clear()
        return web.json_response({"success": is_done})

    async def _send_log(self, _: web.Request) -> web.Response:
        return web.json_response(self.log)

    def _note(self, prompt: Any) -> None:
        is_stored = self.has_store and ("prompt", prompt) in self.log
        if is_stored and prompt not in self._cached:
            self._num_loaded += len(prompt)
        self._cached.append(prompt)
        self.log.append(("prompt", prompt))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self._note(body["prompt"])
        if number in self.fails:
            return web.Response(status=self.fails[number], text="out of order")
        async with self._turn:
            if not body.get("stream"):
                return web.json_response({"kv_transfer_params": {"remote_block_ids": [number]}})
            return await self._stream(request, body["max_tokens"], number)

    async def _stream(self, request: web.Request, num_tokens: int, number: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for place in range(num_tokens):
            await asyncio.sleep(self.gap_s if place else self.first_s)
            if self.num_before_cut.get(number) == place:
                request.transport.abort()
                return response
            if self.error_after.get(number) == place:
                await response.write(_event({"error": {"message": "the engine is dead"}}))
                return response
            await response.write(_event({"choices": [{"text": f" w{place}"}]}))
        await response.write(_event({"choices": [], "usage": {"completion_tokens": num_tokens}}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@asynccontextmanager
async def listening(instance: StandIn) -> AsyncIterator[StandIn]:
    """An instance that listens on a free port of loopback."""
    runner = web.AppRunner(instance.app(), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        instance.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield instance
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", default="")
    args, _ = parser.parse_known_args()
    stand_in = StandIn(first_s=0.01, gap_s=0.001, has_store=bool(args.kv_transfer_config))
    web.run_app(stand_in.app(), host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
