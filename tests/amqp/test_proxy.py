"""`kvpipe proxy --dispatch amqp` as its clients see it: P's stand-in, a real broker, stand-ins for decode instances."""

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import orjson
import pytest
from aiohttp import web

from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.proxy.server import create_runner
from kvpipe.queue.front import DecodeQueue
from kvpipe.queue.topology import Topology
from kvpipe.transfer_params import ConsumeParams, LoadParams, parse
from tests.amqp.harness import COMPLETIONS, SILENCE_S, Stage, body, run, stage, text_of, written
from tests.proxy.harness import RecordingControl, StandIn, answers
from tests.proxy.test_early_streams import prefilled

WAYS = ["handoff", "store"]


@dataclass
class Deployment:
    """A proxy with one P."""

    stage: Stage
    url: str
    prefill: StandIn
    client: aiohttp.ClientSession
    control: RecordingControl

    async def post(self, raw, headers=None):
        async with self.client.post(self.url + COMPLETIONS, data=raw, headers=headers) as response:
            return response.status, await response.read()

    async def status(self):
        """The proxy's report of P's latest handoff."""
        async with self.client.get(f"{self.url}/status/{self.prefill.handoffs[-1]}") as response:
            return response.status, await response.json()


@asynccontextmanager
async def deployment(broker, way, max_model_len=None, api_key_file=None, **of_stage):
    async with stage(broker.url, **of_stage) as s, AsyncExitStack() as stack:
        prefill = StandIn("p0", healthy(prefilled()))
        stack.push_async_callback((await prefill.serve()).cleanup)
        instance = Instance(prefill.url, prefill.control if way == "handoff" else "")
        config = ProxyConfig(
            prefill=(instance,), decode=(), port=0, dispatch="amqp", drain_timeout_s=0.2, api_key_file=api_key_file
        )
        control = RecordingControl()
        control.max_model_lens[prefill.control] = max_model_len
        queue = DecodeQueue(s.url, s.topology, SILENCE_S, has_client_keys=api_key_file is not None)
        runner = create_runner(config, control, queue)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Deployment(s, f"http://127.0.0.1:{runner.addresses[0][1]}", prefill, client, control)


def healthy(behaviour):
    """An instance that is healthy, and else behaves so."""

    async def behave(request):
        return web.Response() if request.path == "/health" else await behaviour(request)

    return behave


async def until_health(it, status):
    """Returns once the proxy's health is so, with its report; workers report themselves to it."""
    while True:
        async with it.client.get(it.url + "/health") as response:
            report = await response.json()
            if response.status == status:
                return report
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", WAYS)
def test_the_client_has_prefills_token_before_a_worker_takes_the_request(broker, way):
    async def scene():
        async with deployment(broker, way) as it:
            decode = await it.stage.pair()
            await until_health(it, 200)
            decode.pause_after = 0
            async with it.client.post(it.url + COMPLETIONS, data=body()) as response:
                shown = b""
                while text_of(shown) != "ab":
                    shown += await response.content.readany()
                decode.go_on.set()
                whole = shown + await response.content.read()
            assert text_of(whole) == "ab" + written(decode.tokens((7,))[1:])
            params = parse(decode.bodies[0]["kv_transfer_params"])
            if way == "handoff":
                assert isinstance(params, ConsumeParams)
                assert params.producer == it.prefill.control
            else:
                assert isinstance(params, LoadParams)
                assert params.first_token == 7
            assert params.handoff.hex() == it.prefill.handoffs[0]

    run(scene)


@pytest.mark.parametrize("way", WAYS)
def test_another_instance_goes_on_after_prefills_token_too(broker, way):
    async def scene():
        async with deployment(broker, way) as it:
            first, second = await it.stage.decode(), await it.stage.decode()
            first.pause_after = 3
            process = await it.stage.process(first)
            await until_health(it, 200)
            async with it.client.post(it.url + COMPLETIONS, data=body()) as response:
                shown = b""
                while text_of(shown) != "ab" + written(first.tokens((7,))[1:3]):
                    shown += await response.content.readany()
                await it.stage.worker(second)
                process.kill()
                whole = shown + await response.content.read()
            assert text_of(whole) == "ab" + written([*first.tokens((7,))[1:3], *second.tokens()[3:]])
            assert parse(second.bodies[0]["kv_transfer_params"]).tokens == tuple(first.tokens((7,))[:3])

    run(scene)


@pytest.mark.parametrize("way", WAYS)
def test_a_whole_answer_comes_through_the_queue_too(broker, way):
    async def scene():
        async with deployment(broker, way) as it:
            decode = await it.stage.pair()
            status, answer = await it.post(body(stream=False))
            assert status == 200
            assert orjson.loads(answer)["id"] == f"by {decode.name}"

    run(scene)


def test_without_a_worker_the_proxy_says_so(broker):
    async def scene():
        async with deployment(broker, "handoff") as it:
            report = await until_health(it, 503)
            assert report["decode"] == {"queue": "no worker takes requests"}
            stopped = await it.stage.worker(await it.stage.decode())
            assert (await until_health(it, 200))["status"] == "ok"
            stopped.set()
            await until_health(it, 503)

    run(scene)


def test_without_a_broker_clients_get_503_and_prefill_is_not_asked(own_broker):
    async def scene():
        async with deployment(own_broker, "handoff") as it:
            await it.stage.pair()
            await until_health(it, 200)
            await asyncio.to_thread(own_broker.kill)
            await until_health(it, 503)
            status, answer = await it.post(body())
            assert status == 503
            assert "broker amqp://" in orjson.loads(answer)["error"]["message"]
            assert it.prefill.bodies == []

    run(scene)


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_is_too_large_for_the_queue_is_refused_before_prefill_computes_it(caplog, broker, way):
    caplog.set_level(logging.INFO, "kvpipe.proxy")

    async def scene():
        topology = Topology(f"too-large-{way}", max_message_bytes=256 << 10)
        async with deployment(broker, way, topology=topology) as it:
            decode = await it.stage.pair()
            await until_health(it, 200)
            status, answer = await it.post(body(user="x" * topology.max_message_bytes))
            assert status == 413
            assert "at most 262144; raise --max-message-bytes" in orjson.loads(answer)["error"]["message"]
            assert "status=413 outcome=refused" in caplog.text
            most = topology.max_message_bytes - (20 << 10)
            assert (await it.post(body(user="x" * most), {"x-large": "x" * (40 << 10)}))[0] == 413
            assert it.prefill.bodies == decode.bodies == []
            assert (await it.post(body()))[0] == 200

    run(scene)


@pytest.mark.parametrize("way", WAYS)
def test_the_size_that_the_queue_gets_counts_and_not_that_of_the_clients_body(broker, way):
    async def scene():
        topology = Topology(f"escaped-{way}", max_message_bytes=256 << 10)
        async with deployment(broker, way, topology=topology) as it:
            decode = await it.stage.pair()
            await until_health(it, 200)
            text = "\N{EURO SIGN}" * (50 << 10)  # 3 bytes each, and 6 as an escape
            escaped = body().removesuffix(b"}") + b',"user":"' + text.encode("ascii", "backslashreplace") + b'"}'
            assert len(escaped) > topology.max_message_bytes
            assert (await it.post(escaped))[0] == 200
            assert decode.bodies[0]["user"] == text

    run(scene)


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_prefill_answers_alone_may_be_larger_than_the_queue_takes(broker, way):
    async def scene():
        topology = Topology(f"large-prefill-{way}", max_message_bytes=256 << 10)
        async with deployment(broker, way, topology=topology) as it:
            decode = await it.stage.pair()
            await until_health(it, 200)
            it.prefill.behaviour = healthy(answers())
            large = {"user": "x" * topology.max_message_bytes, "max_tokens": 1, "stream": False}
            assert (await it.post(body(**large)))[0] == 200
            assert len(it.prefill.bodies) == 1
            assert (await it.post(body(**large, n=2)))[0] == 413, "decode would have it alone"
            assert (len(it.prefill.bodies), decode.bodies) == (1, [])

    run(scene)


def test_a_request_that_would_end_at_prefill_and_does_not_fit_there_has_the_size_limit_of_the_queue(broker, caplog):
    caplog.set_level(logging.INFO, "kvpipe.proxy")

    async def scene():
        topology = Topology("large-long", max_message_bytes=256 << 10)
        async with deployment(broker, "handoff", max_model_len=100, topology=topology) as it:
            decode = await it.stage.pair()
            await until_health(it, 200)
            large = body(prompt=[1] * 101, user="x" * topology.max_message_bytes, max_tokens=1, stream=False)
            status, answer = await it.post(large)
            assert status == 413
            assert "at most 262144; raise --max-message-bytes" in orjson.loads(answer)["error"]["message"]
            assert "status=413 outcome=refused" in caplog.text
            assert it.prefill.bodies == decode.bodies == []

    run(scene)


def test_queues_and_workers_are_shown_to_programs_and_to_people(broker):
    async def scene():
        async with deployment(broker, "handoff") as it:
            decode = await it.stage.pair(num_slots=3)
            await until_health(it, 200)
            async with it.client.get(it.url + "/queue") as response:
                state = await response.json()
            assert state["queues"][it.stage.topology.requests] == {"messages": 0, "consumers": 1}
            assert [(each["decode"], each["slots"]) for each in state["workers"]] == [(decode.url, 3)]
            async with it.client.get(it.url + "/queue", headers={"Accept": "text/html"}) as response:
                page = await response.text()
            assert response.content_type == "text/html"
            assert decode.url in page
            assert "0 of 3" in page

    run(scene)


def test_models_are_those_of_prefill(broker):
    async def scene():
        async with deployment(broker, "handoff") as it:

            async def models(_):
                return web.json_response({"data": [{"id": "m"}]})

            it.prefill.behaviour = healthy(models)
            async with it.client.get(it.url + "/v1/models") as response:
                assert await response.json() == {"data": [{"id": "m"}]}

    run(scene)


@pytest.mark.parametrize("prompt", [[1] * 512, "x" * 512])
def test_a_prompt_that_is_too_long_for_prefill_goes_to_the_queue_alone(broker, prompt):
    async def scene():
        async with deployment(broker, "handoff", max_model_len=512) as it:

            async def counts(request):
                assert request.path == "/tokenize"
                return web.json_response({"count": 512})

            it.prefill.behaviour = healthy(counts)
            decode = await it.stage.pair()
            await until_health(it, 200)
            status, answer = await it.post(body(prompt=prompt))
            assert status == 200
            assert text_of(answer) == written(decode.tokens(()))
            assert decode.bodies[0]["prompt"] == prompt
            assert all("kv_transfer_params" not in asked for asked in (*it.prefill.bodies, *decode.bodies))

    run(scene)


def test_an_endpoint_that_the_queue_does_not_carry_is_refused_with_the_reason(broker):
    async def scene():
        async with (
            deployment(broker, "handoff") as it,
            it.client.post(it.url + "/v1/embeddings", json={"input": "x"}) as response,
        ):
            assert response.status == 501
            assert "not served behind a broker" in (await response.json())["error"]["message"]

    run(scene)


FULL, PARTIAL = {"result": "full"}, {"result": "partial"}
FIRST, SECOND = "d1.control:7200", "d2.control:7200"


@pytest.mark.parametrize("stream", [True, False])
def test_the_instance_that_a_worker_has_chosen_is_asked_for_the_result_and_prefill_for_nothing(broker, stream):
    async def scene():
        async with deployment(broker, "handoff") as it:
            it.control.results = {FIRST: FULL}
            await it.stage.pair(port=FIRST)
            await until_health(it, 200)
            assert (await it.post(body(stream=stream)))[0] == 200
            await it.control.until_asked()
            assert await it.status() == (200, FULL)
        assert (set(it.control.asked), it.control.released) == ({FIRST}, [])

    run(scene)


def test_the_result_is_there_while_the_stream_runs(broker):
    async def scene():
        async with deployment(broker, "handoff") as it:
            it.control.results = {FIRST: FULL}
            decode = await it.stage.pair(port=FIRST)
            decode.pause_after = 1
            await until_health(it, 200)
            async with it.client.post(it.url + COMPLETIONS, data=body()) as response:
                await decode.has_paused.wait()
                while (await it.status())[0] != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                decode.go_on.set()
                await response.read()

    run(scene)


@pytest.mark.parametrize("result", [PARTIAL, None])
def test_prefill_is_released_where_the_instance_that_a_worker_has_chosen_did_not_have_all(broker, result, monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.results._ABORTED_AFTER_S", 0.0)

    async def scene():
        async with deployment(broker, "handoff") as it:
            it.control.results = {FIRST: result}
            await it.stage.pair(port=FIRST)
            await until_health(it, 200)
            assert (await it.post(body()))[0] == 200
            await it.control.until_released()
            assert it.control.released == [(it.prefill.control, it.prefill.handoffs[0])]
            assert FIRST in it.control.asked

    run(scene)


def test_after_a_lost_instance_the_one_that_went_on_is_asked_first(broker):
    async def scene():
        async with deployment(broker, "handoff") as it:
            first = await it.stage.pair(port=FIRST)
            first.pause_after, first.breaks = 3, "lost"
            await until_health(it, 200)
            async with it.client.post(it.url + COMPLETIONS, data=body()) as response:
                await first.has_paused.wait()
                first.is_healthy = False
                first.go_on.set()
                await until_health(it, 503)
                second = await it.stage.pair(port=SECOND)
                assert text_of(await response.read()).endswith(written(second.tokens()[3:]))
            it.control.asked.clear()
            it.control.results = {FIRST: FULL}
            assert await it.status() == (200, FULL)
            assert it.control.asked[:2] == [SECOND, FIRST]

    run(scene)


def test_prefill_is_released_where_no_control_port_of_the_instance_is_known(broker):
    async def scene():
        async with deployment(broker, "handoff") as it:
            await it.stage.pair()
            await until_health(it, 200)
            assert (await it.post(body()))[0] == 200
            await it.control.until_released()
            assert it.control.asked == [it.prefill.control]

    run(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_an_instance_behind_the_broker_that_wants_a_key_is_no_fault_of_a_client_with_a_key(broker, tmp_path, stream):
    key_file = tmp_path / "keys"
    key_file.write_text("of-the-client-0123456789abcdef\n")

    async def scene():
        async with deployment(broker, "handoff", api_key_file=key_file) as it:
            decode = await it.stage.pair()
            await until_health(it, 200)
            decode.status = 401
            status, answer = await it.post(
                body(stream=stream), {"Authorization": "Bearer of-the-client-0123456789abcdef"}
            )
            remedy = b"the instance wants an API key: name it by kvpipe worker --instances-api-key-file"
            assert (status, remedy in answer) == (200 if stream else 502, True)

    run(scene)
