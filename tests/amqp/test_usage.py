"""However a request is dispatched, alone or through the broker, its client is told the same usage."""

from contextlib import AsyncExitStack

import aiohttp
import orjson
import pytest
from aiohttp import web

from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.proxy.server import create_runner
from kvpipe.queue.front import DecodeQueue
from kvpipe.transfer_params import SaveParams, load, parse
from tests.amqp.harness import COMPLETIONS, SILENCE_S, body, run, stage, until_healthy
from tests.proxy.harness import RecordingControl, StandIn, answers, streams

# Dispatch, and whether P has a control port: without one, D loads from a store.
MODES = [("just-in-time", True), ("sequential", True), ("store", False), ("amqp", True), ("amqp", False)]


def usage(num_cached, num_output):
    details = {"cached_tokens": num_cached}
    return {
        "prompt_tokens": 13,
        "total_tokens": 13 + num_output,
        "completion_tokens": num_output,
        "prompt_tokens_details": details,
    }


async def prefill(request):
    """A P that computes 13 tokens, none of which it has cached."""
    asked = parse((await request.json())["kv_transfer_params"])
    params = load(asked.handoff.hex(), 7) if isinstance(asked, SaveParams) else {"kvpipe": {"first_token": 7}}
    said = {"id": "p", "created": 5, "model": "m", "usage": usage(0, 1), "kv_transfer_params": params}
    choice = {"index": 0, "text": "ab", "finish_reason": "length"}
    return await answers(body=orjson.dumps(said | {"choices": [choice]}))(request)


async def decode(request):
    """A D that has KV for 12 of them, and counts it as cached."""
    if request.method == "GET":
        text = 'vllm:kvpipe_store_forces_first_tokens{engine="0",model_name="m",reasoning_parser=""} 1.0\n'
        return web.Response(text=text if request.path == "/metrics" else "")
    said = {"id": "d", "created": 6, "model": "m"}
    whole = said | {"choices": [{"index": 0, "text": "abcd", "finish_reason": "length"}], "usage": usage(12, 4)}
    if not (await request.json()).get("stream"):
        return await answers(body=orjson.dumps(whole))(request)
    events = [whole | {"usage": None}, said | {"choices": [], "usage": usage(12, 4)}]
    return await streams(*(b"data: " + orjson.dumps(event) + b"\n\n" for event in events), b"data: [DONE]\n\n")(request)


def usage_in(answer):
    events = [part.removeprefix(b"data: ") for part in answer.split(b"\n\n") if part and b"[DONE]" not in part]
    return orjson.loads(events[-1])["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("dispatch", "has_control"), MODES)
def test_the_client_is_told_the_usage_that_prefill_has_counted(broker, dispatch, has_control, stream):
    async def scene():
        async with stage(broker.url) as s, AsyncExitStack() as stack:
            instances = []
            for behaviour in (prefill, decode):
                stand_in = StandIn("x", behaviour)
                stack.push_async_callback((await stand_in.serve()).cleanup)
                instances.append(Instance(stand_in.url, stand_in.control if has_control else ""))
            queue = DecodeQueue(s.url, s.topology, SILENCE_S) if dispatch == "amqp" else None
            decodes = () if queue else (instances[1],)
            config = ProxyConfig(prefill=(instances[0],), decode=decodes, dispatch=dispatch, drain_timeout_s=0.2)
            runner = create_runner(config, RecordingControl(), queue)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            if queue:
                await s.worker(stand_in)
                await until_healthy(queue)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            url = f"http://127.0.0.1:{runner.addresses[0][1]}{COMPLETIONS}"
            options = {"stream_options": {"include_usage": True}} if stream else {}
            async with client.post(url, data=body(stream=stream, **options)) as response:
                assert usage_in(await response.read()) == usage(0, 4)

    run(scene)
