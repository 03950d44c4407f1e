"""Takes the place of a vLLM instance in tests of `kvpipe bench serving`: streams completions, at a known pace.

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
        leased: What its metrics show as leased blocks.
        bodies: Requests in their order.
    """

    num_at_once: int = 1000
    first_s: float = 0.0
    gap_s: float = 0.0
    fails: dict[int, int] = field(default_factory=dict)
    num_before_cut: dict[int, int] = field(default_factory=dict)
    error_after: dict[int, int] = field(default_factory=dict)
    leased: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._turn = asyncio.Semaphore(self.num_at_once)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        name = "vllm:kvpipe_leased_blocks"
        return web.Response(text=f'# TYPE {name} gauge\n{name}{{engine="0",model_name="m"}} {self.leased}\n')

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
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
    args, _ = parser.parse_known_args()
    web.run_app(StandIn(first_s=0.01, gap_s=0.001).app(), host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
