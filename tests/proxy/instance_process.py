"""A stand-in for an instance in a process of its own, so that it can be stopped: HTTP and a real control port.

It prints its URL and its control address. A request for tokens opens its handoff at the control port; a stream gets its
headers at once. The answer waits until `POST /go`.
"""

import asyncio
import json

from aiohttp import web

from kvpipe import _kvpipe
from kvpipe.transfer_params import ProduceParams, parse


def main() -> None:
    control = _kvpipe.Control("127.0.0.1:0", b"", "engine")
    control.describe_as(json.dumps({"forces_first_tokens": True, "reasoning_parser": ""}))
    go = asyncio.Event()
    handoffs: list[str] = []
    released: list[str] = []
    num_aborted = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_aborted
        try:
            return await answer(request)
        except asyncio.CancelledError:
            num_aborted += 1
            raise

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = parse(body.get("kv_transfer_params"))
        handoffs.append("" if params is None else params.handoff.hex())
        if isinstance(params, ProduceParams):
            control.open(params.handoff, bytes(32), 5, [("127.0.0.1:1", bytes(16))])
        if not body.get("stream"):
            await go.wait()
            return web.json_response({"id": "process"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await go.wait()
        await response.write(b'data: {"choices": [{"index": 0, "text": "abcd"}]}\n\ndata: [DONE]\n\n')
        return response

    async def state(_: web.Request) -> web.Response:
        released.extend(event["handoff"].hex() for event in control.drain() if event["event"] == "released")
        return web.json_response({"handoffs": handoffs, "released": released, "num_aborted": num_aborted})

    async def let_go(_: web.Request) -> web.Response:
        go.set()
        return web.Response()

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/state", state), web.post("/go", let_go), web.get("/health", health)])
        app.add_routes([web.post("/v1/completions", complete)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]} {control.address}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
