"""Decode instances behind workers that are stopped (SIGSTOP), on a real broker."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest

from kvpipe.queue.topology import Topology
from tests.amqp.harness import Client, ask, body, has_one_answer, run, stage, text_of, until, until_healthy, written
from tests.amqp.test_proxy import deployment, until_health
from tests.proxy.stoppable import FROZEN_AFTER_S, real_control, stoppable

# From the freeze to the other instance's answers; on an idle machine it takes 4 s.
WITHIN_S = 25.0
# A worker looks at its instance each second.
LOOKS_S = 2.5


@asynccontextmanager
async def frozen_stage(url, **fields):
    """A deployment without workers, with an instance that can be stopped and an HTTP client to look at it."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(stoppable())
        it = SimpleNamespace(client=await stack.enter_async_context(aiohttp.ClientSession()))
        settings = {"control": stack.enter_context(real_control())[0], "frozen_after_s": FROZEN_AFTER_S}
        s = await stack.enter_async_context(stage(url, **fields))

        async def work(num_slots=4):
            await s.worker(first, num_slots, first.control, **settings)

        yield s, first, it, work


def num_queued(broker, topology):
    """Requests that wait in the queue or are at workers."""
    return broker.queues()[topology.requests]


@pytest.mark.parametrize("stream", [True, False])
def test_requests_at_a_frozen_instance_are_answered_by_another_one(broker, stream):
    async def scene():
        async with frozen_stage(broker.url) as (s, first, it, work):
            front = await s.front()
            await work()
            clients = [Client(front, body(stream=stream), {}) for _ in range(3)]
            await first.until_state(it, lambda state: len(state["handoffs"]) == 3)
            second = await s.pair()
            first.stop()
            stopped_s = time.monotonic()
            for client in clients:
                status, answer = await client.answering
                assert (status, text_of(answer)) == (200, written(second.tokens()))
                assert not stream or answer.count(b"[DONE]") == 1
            assert time.monotonic() - stopped_s < WITHIN_S
            # It gets nothing new.
            for _ in range(3):
                assert text_of((await ask(front, body(stream=stream)))[1]) == written(second.tokens())
            assert len(second.bodies) == 6, "each was asked once"
            first.go_on()
            state = await first.until_state(it, lambda state: state["num_aborted"] == 3)
            assert len(state["handoffs"]) == 3
            assert (num_queued(broker, s.topology), broker.queues()[s.topology.dead]) == (0, 0)
            # After its trial it is one as before.
            await first.answer_all(it)
            second.is_healthy = False
            await until(lambda: s.workers[1]._capacity.reason)
            for _ in range(3):
                assert (await ask(front, body()))[0] == 200
            assert len((await first.until_state(it, bool))["handoffs"]) >= 6

    run(scene)


def test_the_only_instance_gets_one_request_when_it_goes_on_and_then_the_others(broker):
    async def scene():
        async with frozen_stage(broker.url) as (s, first, it, work):
            front = await s.front()
            await work()
            clients = [Client(front, body(), {}) for _ in range(3)]
            await first.until_state(it, lambda state: len(state["handoffs"]) == 3)
            await until_healthy(front)
            first.stop()
            await until_healthy(front, is_healthy=False)
            clients += [Client(front, body(), {}), Client(front, body(), {"x-kvpipe-priority": "high"})]
            await until(lambda: s.workers[0]._num_running() == 0)
            first.go_on()
            await first.until_state(it, lambda state: len(state["handoffs"]) == 4)
            await asyncio.sleep(LOOKS_S)
            assert len((await first.until_state(it, bool))["handoffs"]) == 4, "its trial has no answer"
            await until_healthy(front)
            await first.answer_all(it)
            for client in clients:
                await has_one_answer(client, "abcd")
            assert len((await first.until_state(it, bool))["handoffs"]) == 3 + 5

    run(scene)


def test_freezes_count_against_no_request(broker):
    async def scene():
        topology = Topology("frozen-often", delivery_limit=1)
        async with frozen_stage(broker.url, topology=topology) as (s, first, it, work):
            front = await s.front()
            await work()
            client = Client(front, body(), {})
            for number in range(1, 5):
                await first.until_state(it, lambda state, num=number: len(state["handoffs"]) == num)
                if number < 4:
                    first.stop()
                    await until(lambda: s.workers[0]._probed.health.is_frozen)
                    await until(lambda: s.workers[0]._num_running() == 0)
                    first.go_on()
            await first.answer_all(it)
            await has_one_answer(client, "abcd")
            assert broker.queues()[topology.dead] == 0

    run(scene)


def test_a_failure_after_a_freeze_is_followed_by_as_many_deliveries_as_after_none(broker):
    async def scene():
        async with frozen_stage(broker.url, topology=Topology("frozen-failed", delivery_limit=1)) as (
            s,
            first,
            it,
            work,
        ):
            front, second = await s.front(), await s.decode()
            second.status = 500
            await work()
            client = Client(front, body(), {})
            await first.until_state(it, lambda state: len(state["handoffs"]) == 1)
            first.stop()
            await until(lambda: s.workers[0]._num_running() == 0)
            await s.worker(second)
            await second.until(lambda: len(second.bodies) == 1)
            second.status = 200
            await has_one_answer(client, written(second.tokens()))
            assert broker.queues()[s.topology.dead] == 0

    run(scene)


def test_a_worker_that_dies_after_a_freeze_has_the_whole_delivery_limit(broker):
    async def scene():
        async with frozen_stage(broker.url, topology=Topology("frozen-killed", delivery_limit=1)) as (
            s,
            first,
            it,
            work,
        ):
            front, second = await s.front(), await s.decode()
            second.pause_after = 2
            await work()
            client = Client(front, body(), {})
            await first.until_state(it, lambda state: len(state["handoffs"]) == 1)
            first.stop()
            await until(lambda: s.workers[0]._num_running() == 0)
            for num_deliveries in (1, 2):
                process = await s.process(second)
                await second.until(lambda num=num_deliveries: len(second.bodies) == num)
                await client.until(2)
                if num_deliveries == 1:
                    process.kill()
            second.go_on.set()
            await has_one_answer(client, written(second.tokens()))

    run(scene)


def test_a_stream_that_has_prefills_token_leaves_a_frozen_instance(broker):
    async def scene():
        async with deployment(broker, "store") as it, stoppable() as first:
            with real_control() as (control, _):
                await it.stage.worker(first, 4, first.control, control=control, frozen_after_s=FROZEN_AFTER_S)
                await until_health(it, 200)
                async with it.client.post(it.url + "/v1/completions", data=body()) as response:
                    shown = b""
                    while text_of(shown) != "ab":
                        shown += await response.content.readany()
                    await first.until_state(it, lambda state: len(state["handoffs"]) == 1)
                    second = await it.stage.pair()
                    first.stop()
                    whole = shown + await response.content.read()
                assert text_of(whole) == "ab" + written(second.tokens((7,))[1:])
                await it.stage._end_workers()

    run(scene)


def test_a_stream_that_has_begun_waits_for_its_frozen_instance(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            decode.pause_after = 2
            client = Client(front, body(), {})
            await client.until(2)
            assert not s.workers[0]._probed._probes._owed, "a freeze would end its answer"
            health = s.workers[0]._probed.health
            health.silent(health.left_s)
            assert health.freeze()
            await s.pair()
            await asyncio.sleep(LOOKS_S)
            assert not client.answering.done()
            decode.go_on.set()
            await has_one_answer(client, written(decode.tokens()))

    run(scene)
