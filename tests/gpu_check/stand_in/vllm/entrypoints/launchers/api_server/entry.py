"""Stand-in for vLLM's server: P, D or an instance without connector, with vLLM's command line, and a real control port.

P opens a handoff and finishes it, D watches and acknowledges it, as the connector does; nothing is moved. The lines of
the trace are those from which the check computes a hand-over.
"""

import argparse
import asyncio
import json
import os
import time

import orjson
from aiohttp import web
from stand_in_tokens import following

from kvpipe import _kvpipe, transfer_params
from kvpipe.config import resolve_token
from kvpipe.transfer_params import ConsumeParams, ProduceParams

TOKENS_PER_S, GAP_S = 20_000, 0.001
# Of answers during which an instance is killed.
LONG, LONG_S = 400, 5.0
BLOCK_BYTES = 1 << 10
_DESCRIPTION = {"forces_first_tokens": True, "reasoning_parser": "", "max_model_len": 8192, "max_num_seqs": 64}
_HASH, _RANKS = bytes(32), [("127.0.0.1:1", bytes(16))]


class Instance:
    def __init__(self, role, listen):
        self.role, self.num_running, self.handoffs = role, 0, set()
        self.turn = asyncio.Lock()
        self.trace = _kvpipe.Trace(os.environ.get("KVPIPE_TRACE", ""), role or "undivided")
        self.control = None
        if role:
            self.control = _kvpipe.Control(listen, resolve_token(), role)
            self.control.describe_as(json.dumps(_DESCRIPTION))

    async def health(self, _):
        return web.Response()

    async def metrics(self, _):
        if self.control is not None:
            self.handoffs -= {event["handoff"] for event in self.control.drain() if event["event"] == "released"}
        values = {"num_requests_running": self.num_running, "num_requests_waiting": 0}
        values["kv_cache_usage_perc"] = (len(self.handoffs) + self.num_running) / 1000
        return web.Response(text="".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items()))

    async def post(self, request):
        body = orjson.loads(await request.read())
        self.num_running += 1
        try:
            return await self.answer(request, body)
        finally:
            self.num_running -= 1

    async def answer(self, request, body):
        params = transfer_params.parse(body.get("kv_transfer_params"))
        tokens = following(body["prompt"], body["max_tokens"], body.get("seed"))
        if isinstance(params, ConsumeParams) and params.producer:
            self.consume(params, body)
        else:
            async with self.turn:
                await asyncio.sleep(len(body["prompt"]) / TOKENS_PER_S)
        if isinstance(params, ProduceParams) and params.handoff is not None:
            return _json(tokens, kv_transfer_params=self.produce(params.handoff, body["prompt"], tokens[0]))
        if not body.get("stream"):
            await asyncio.sleep(LONG_S if len(tokens) >= LONG else GAP_S * len(tokens))
            return _json(tokens)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for token in tokens:
            ids = {"token_ids": [token]} if body.get("return_token_ids") else {}
            choice = {"index": 0, "text": f"w{token} ", "logprobs": None, "finish_reason": None, **ids}
            await response.write(b"data: " + orjson.dumps(_head() | {"choices": [choice]}) + b"\n\n")
            await asyncio.sleep(GAP_S)
        await response.write(b"data: [DONE]\n\n")
        return response

    def produce(self, handoff, prompt, token):
        self.control.open(handoff, _HASH, len(prompt), _RANKS)
        self.control.finish(handoff, [token], "length", 0, _HASH)
        self.trace.instant("sampled", handoff)
        self.handoffs.add(handoff)
        return transfer_params.produced(
            handoff.hex(),
            self.control.address,
            engine_id=self.role,
            parallel_size=1,
            num_tokens=len(prompt),
            block_ids=[[0]],
            first_token=token,
        )

    def consume(self, params, body):
        num_tokens = len(body["prompt"])
        is_v1 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
        num_computed = int(bool(body.get("logprobs")) or (is_v1 and "seed" in body))
        began = time.monotonic()
        self.trace.instant("queued", params.handoff)
        self.trace.instant("admitted", params.handoff)
        self.control.watch(params.handoff, params.producer)
        self.control.unwatch(params.handoff, is_acknowledged=True)
        result = {"result": "full", "transport": "cuda_ipc", "first_token": "exact", "computed_tokens": num_computed}
        result |= {"bytes": num_tokens * BLOCK_BYTES, "transfer_ms": 1.0}
        self.control.set_result(params.handoff, json.dumps(result))
        self.control.drain()
        self.trace.span("load", params.handoff, began)
        self.trace.instant("loaded", params.handoff)
        self.trace.span("first step", params.handoff, time.monotonic())


def _head():
    return {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}


def _json(tokens, **more):
    text = "".join(f"w{token} " for token in tokens)
    choice = {"index": 0, "text": text, "token_ids": tokens, "logprobs": None, "finish_reason": "length"}
    return web.Response(body=orjson.dumps(_head() | {"choices": [choice]} | more), content_type="application/json")


async def application(given):
    config = json.loads(given.kv_transfer_config or "{}")
    instance = Instance(config.get("kv_role", ""), config.get("kv_connector_extra_config", {}).get("listen"))
    app = web.Application(client_max_size=1 << 30)
    routes = [web.post("/v1/completions", instance.post), web.get("/health", instance.health)]
    app.add_routes([*routes, web.get("/metrics", instance.metrics)])
    return app


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", default="")
    given, others = parser.parse_known_args()
    print(f"stand-in for vLLM, which ignores {others}", flush=True)
    web.run_app(application(given), host=given.host, port=given.port, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
