"""Requests through a real broker: answers, failures of workers and of decode instances, clients that leave."""

import asyncio
import signal

import pytest

from kvpipe.proxy.upstream import InstanceError
from kvpipe.queue.decode_capacity import DecodeCapacity
from kvpipe.queue.letters import letters, replay
from kvpipe.queue.topology import Topology
from tests.amqp.harness import (
    NUM_TOKENS,
    Client,
    DecodeControl,
    ask,
    body,
    has_one_answer,
    run,
    stage,
    text_of,
    until_healthy,
    until_letters,
    until_state,
    written,
)


def test_a_stream_and_a_whole_answer_come_as_from_the_instance_itself(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            status, answer = await ask(front, body())
            assert status == 200
            assert text_of(answer) == written(decode.tokens())
            assert answer.endswith(b"data: [DONE]\n\n")
            assert b"token_ids" not in answer
            status, answer = await ask(front, body(stream=False))
            assert (status, text_of(answer)) == (200, written(decode.tokens()))
            status, answer = await ask(front, body(return_token_ids=True))
            assert b"token_ids" in answer

    run(scene)


def test_a_request_goes_to_the_data_parallel_rank_whose_control_port_the_worker_has(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.decode()
            decode.engines = (0, 1)
            await s.worker(decode, port="d:7101", control=DecodeControl(1))
            await until_healthy(front)
            assert (await ask(front, body()))[0] == 200
            assert decode.headers[0]["x-data-parallel-rank"] == "1"

    run(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_instance_is_the_clients_answer(broker, stream):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            decode.status = 400
            status, answer = await ask(front, body(stream=stream))
            assert status == 400
            assert b'"no"' in answer
            assert len(decode.bodies) == 1

    run(scene)


def test_tokens_come_as_soon_as_they_are_sampled(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            decode.pause_after = 3
            client = Client(front, body(), {})
            await client.until(3)
            assert text_of(client.shown) == written(decode.tokens()[:3])
            decode.go_on.set()
            assert text_of((await client.answering)[1]) == written(decode.tokens())

    run(scene)


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_another_instance_goes_on_after_the_tokens_that_the_client_has(broker, num_before):
    async def scene():
        async with stage(broker.url) as s:
            client, process, second, text = await s.begun(await s.front(), num_before)
            await s.worker(second)
            process.kill()
            await has_one_answer(client, text)

    run(scene)


@pytest.mark.parametrize("how", ["lost", "aborted", "error"])
@pytest.mark.parametrize("num_before", [0, 4])
def test_an_instance_that_breaks_off_is_replaced_by_another_one(broker, num_before, how):
    async def scene():
        async with stage(broker.url) as s:
            front, first = await s.front(), await s.pair()
            first.pause_after, first.breaks = num_before, how
            client = Client(front, body(), {})
            await client.until(num_before)
            await first.has_paused.wait()
            first.is_healthy = False
            first.go_on.set()
            await until_healthy(front, is_healthy=False)
            second = await s.pair()
            _, answer = await client.answering
            assert text_of(answer) == written([*first.tokens()[:num_before], *second.tokens()[num_before:]])

    run(scene)


def test_an_instance_that_listens_no_more_and_keeps_its_answers_open_is_replaced_by_another_one(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, first = await s.front(), await s.pair()
            first.pause_after = 4
            client = Client(front, body(), {})
            await client.until(4)
            await first.stop_listening()
            await until_healthy(front, is_healthy=False)
            second = await s.pair()
            _, answer = await client.answering
            assert text_of(answer) == written([*first.tokens()[:4], *second.tokens()[4:]])
            assert first.num_aborted == 1

    run(scene)


def test_an_answer_that_an_instance_aborts_is_given_by_another_one(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, first = await s.front(), await s.pair()
            first.breaks, first.pause_after = "aborted", 0
            asking = asyncio.create_task(ask(front, body(stream=False)))
            await first.has_paused.wait()
            first.is_healthy = False
            first.go_on.set()
            await until_healthy(front, is_healthy=False)
            second = await s.pair()
            assert text_of((await asking)[1]) == written(second.tokens())

    run(scene)


def test_a_request_that_breaks_every_instance_is_given_up_and_found_with_its_reason(broker):
    async def scene():
        topology = Topology("poison", delivery_limit=2)
        async with stage(broker.url, topology=topology) as s:
            front, decode = await s.front(), await s.pair()
            decode.status = 500
            with pytest.raises(InstanceError, match="answered 500") as failed:
                await ask(front, body(stream=False))
            assert failed.value.status == 502
            assert len(decode.bodies) == 1 + topology.delivery_limit
            [letter] = await until_letters(broker.url, topology)
            assert "answered 500" in letter.reason
            decode.status = 200
            shown = []
            assert await replay(broker.url, topology, [letter.id], 20.0, lambda *what: shown.append(what))
            assert [(name, status) for name, status, _ in shown] == [(letter.id, 200)]
            assert await letters(broker.url, topology) == []

    run(scene)


def test_a_request_whose_workers_die_is_given_up_by_the_broker(broker):
    async def scene():
        topology = Topology("deadly", delivery_limit=1)
        async with stage(broker.url, topology=topology) as s:
            front, decode = await s.front(), await s.decode()
            decode.pause_after = 2
            asking = asyncio.create_task(ask(front, body()))
            for number in range(1, 3):
                process = await s.process(decode)
                await decode.until(lambda number=number: len(decode.bodies) == number)
                process.kill()
            with pytest.raises(InstanceError, match="delivery_limit"):
                await asking
            [letter] = await until_letters(broker.url, topology)
            assert letter.reason == "delivery_limit"

    run(scene)


def test_a_channel_that_closes_counts_against_the_oldest_of_its_requests_alone(broker):
    """RabbitMQ closes the channel of a delivery that takes too long, and counts all deliveries of the channel."""

    async def scene():
        topology = Topology("closed-channel", delivery_limit=1)
        async with stage(broker.url, topology=topology) as s:
            front, decode = await s.front(), await s.pair()
            decode.pause_after = 3
            oldest = Client(front, body(user="oldest"), {})
            await oldest.until(3)
            beside = [Client(front, body(user="beside"), {}) for _ in range(2)]
            for client in beside:
                await client.until(3)
            for num_deliveries in (3, 6):
                await decode.until(lambda num=num_deliveries: len(decode.bodies) == num)
                channel = await s.workers[0]._broker.link.requests.get_underlay_channel()
                await channel.basic_ack(1 << 40)  # the broker closes it, with the reply code of a late delivery
            with pytest.raises(InstanceError, match="delivery_limit"):
                await oldest.answering
            await decode.until(lambda: len(decode.bodies) == 8)
            decode.go_on.set()
            for client in beside:
                await has_one_answer(client, written(decode.tokens()))
            assert [asked["user"] for asked in decode.bodies[6:]] == ["beside", "beside"]

    run(scene)


def test_connections_that_are_lost_count_against_no_request(broker):
    async def scene():
        async with stage(broker.url, topology=Topology("lost-connections", delivery_limit=1)) as s:
            front, decode = await s.front(), await s.pair()
            decode.pause_after = 3
            client = Client(front, body(), {})
            for num_deliveries in range(1, 5):
                await decode.until(lambda num=num_deliveries: len(decode.bodies) == num)
                await client.until(3)
                if num_deliveries < 4:
                    await s.workers[0]._broker.link.connection.close()
            decode.go_on.set()
            await has_one_answer(client, written(decode.tokens()))

    run(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_at_the_instance(broker, stream):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            decode.pause_after = 0
            asking = asyncio.create_task(ask(front, body(stream=stream)))
            await decode.has_paused.wait()
            asking.cancel()
            await decode.until(lambda: decode.num_aborted == 1)
            decode.pause_after = -1
            assert (await ask(front, body()))[0] == 200

    run(scene)


def test_a_request_whose_client_leaves_while_a_worker_is_full_never_reaches_its_instance(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair(num_slots=1)
            decode.pause_after = 0
            first = asyncio.create_task(ask(front, body(user="first")))
            await decode.has_paused.wait()
            left = asyncio.create_task(ask(front, body(user="left")))
            await until_state(front, lambda state: state["queues"][s.topology.requests]["messages"] == 1)
            left.cancel()
            await asyncio.wait({left})
            decode.go_on.set()
            assert (await first)[0] == 200
            assert (await ask(front, body(user="last")))[0] == 200
            assert [asked["user"] for asked in decode.bodies] == ["first", "last"]

    run(scene)


def test_a_request_whose_client_leaves_before_a_worker_takes_it_is_not_answered(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.decode()
            decode.pause_after = 1
            asking = asyncio.create_task(ask(front, body()))
            await until_state(front, lambda state: state["queues"][s.topology.requests]["messages"] == 1)
            asking.cancel()
            await s.worker(decode)
            assert (await ask(front, body(stream=False)))[0] == 200
            await decode.until(lambda: decode.num_aborted == 1)

    run(scene)


def test_no_answer_in_time_is_an_error_that_says_so(broker):
    async def scene():
        async with stage(broker.url) as s:
            front = await s.front(silence_s=0.3)
            with pytest.raises(InstanceError, match="no answer in time") as failed:
                await ask(front, body())
            assert failed.value.status == 504

    run(scene)


def test_a_request_that_no_worker_takes_ends_in_the_queue(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.messages._LONGEST_TTL_S", 0.3)

    async def scene():
        async with stage(broker.url) as s:
            front = await s.front()
            with pytest.raises(InstanceError, match="no answer in time") as failed:
                await ask(front, body())
            assert failed.value.status == 504
            [letter] = await until_letters(broker.url, s.topology)
            assert letter.reason == "expired"

    run(scene)


def test_an_answer_that_is_older_than_its_requests_time_to_live_goes_on_at_another_instance(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.messages._LONGEST_TTL_S", 3.0)

    async def scene():
        async with stage(broker.url) as s:
            client, process, second, text = await s.begun(await s.front(), 3)
            await asyncio.sleep(3.0)
            process.kill()
            await s.worker(second)
            await has_one_answer(client, text)

    run(scene)


def test_a_worker_that_gets_a_second_signal_ends_at_once_and_another_one_goes_on(broker):
    async def scene():
        async with stage(broker.url) as s:
            front = await s.front()
            client, process, second, text = await s.begun(front, 3)
            process.terminate()
            await until_state(front, lambda state: [each["reason"] for each in state["workers"]] == ["draining"])
            process.terminate()
            assert await process.wait() == -signal.SIGTERM
            await s.worker(second)
            await has_one_answer(client, text)

    run(scene)


def test_a_worker_that_cannot_look_at_its_instance_any_more_ends_with_the_error(broker, monkeypatch):
    async def broken(self, *, is_busy):
        raise RuntimeError("broken")

    monkeypatch.setattr(DecodeCapacity, "until_looked", broken)

    async def scene():
        async with stage(broker.url) as s:
            await s.pair()
            _, working = s._running.pop()
            with pytest.raises(RuntimeError, match="broken"):
                await working

    run(scene)


def test_a_worker_without_requests_sees_that_its_instance_has_died(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.decode_capacity.REPORT_EVERY_S", 0.3)

    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            await until_healthy(front)
            decode.is_healthy = False
            await until_healthy(front, is_healthy=False)
            decode.is_healthy = True
            await until_healthy(front)
            assert decode.bodies == []

    run(scene)


def test_a_worker_takes_no_more_than_its_slots_and_others_get_the_rest(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, first = await s.front(), await s.pair(num_slots=2)
            first.pause_after = 0
            asking = [asyncio.create_task(ask(front, body())) for _ in range(5)]
            await first.until(lambda: len(first.bodies) == 2)
            second = await s.pair(num_slots=8)
            await second.until(lambda: len(second.bodies) == 3)
            first.go_on.set()
            assert {status for status, _ in await asyncio.gather(*asking)} == {200}
            assert len(first.bodies) == 2

    run(scene)


def test_an_instance_in_which_requests_wait_gets_no_more(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, first = await s.front(), await s.decode()
            first.num_waiting = 1
            await s.worker(first)
            second = await s.pair()
            assert (await ask(front, body()))[0] == 200
            assert (len(first.bodies), len(second.bodies)) == (0, 1)
            expected = {first.url: "1 requests wait in it", second.url: ""}
            await until_state(
                front, lambda state: {each["decode"]: each["reason"] for each in state["workers"]} == expected
            )

    run(scene)


def test_an_instance_in_which_requests_wait_for_their_kv_gets_more(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.decode()
            decode.num_deferred = 3
            await s.worker(decode)
            assert (await ask(front, body()))[0] == 200
            await until_state(front, lambda state: [each["reason"] for each in state["workers"]] == [""])
            decode.pause_after = 0
            asking = asyncio.create_task(ask(front, body()))
            await decode.has_paused.wait()
            decode.num_waiting = 1
            await until_state(front, lambda state: state["workers"][0]["reason"] == "1 requests wait in it")
            decode.go_on.set()
            assert (await asking)[0] == 200

    run(scene)


def test_front_ends_learn_that_an_instance_forces_tokens_when_it_says_so_with_its_first_request(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.decode()
            decode.is_described = False
            await s.worker(decode)
            await until_state(front, lambda state: [each["reason"] for each in state["workers"]] == [""])
            assert front.describe() == {"forces_first_tokens": False, "reasoning_parser": ""}
            decode.is_described = True
            await ask(front, body())
            await until_state(front, lambda state: state["workers"][0]["forces_first_tokens"])
            assert front.describe() == {"forces_first_tokens": True, "reasoning_parser": ""}

    run(scene)


def test_an_urgent_request_needs_no_free_slot(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair(num_slots=1)
            decode.pause_after = 0
            waiting = [asyncio.create_task(ask(front, body())) for _ in range(3)]
            await decode.has_paused.wait()
            urgent = asyncio.create_task(ask(front, body(user="urgent"), **{"x-kvpipe-priority": "high"}))
            await decode.until(lambda: len(decode.bodies) == 2)
            assert decode.bodies[1]["user"] == "urgent"
            decode.go_on.set()
            assert {status for status, _ in await asyncio.gather(urgent, *waiting)} == {200}

    run(scene)


def test_a_worker_that_drains_ends_what_it_has_and_takes_nothing(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, first = await s.front(), await s.decode()
            first.pause_after = 1
            process = await s.process(first)
            asking = asyncio.create_task(ask(front, body()))
            await first.has_paused.wait()
            process.terminate()
            await until_state(front, lambda state: [each["reason"] for each in state["workers"]] == ["draining"])
            second = await s.pair()
            assert text_of((await ask(front, body()))[1]) == written(second.tokens())
            first.go_on.set()
            assert text_of((await asking)[1]) == written(first.tokens())
            assert await process.wait() == 0
            assert len(first.bodies) == 1

    run(scene)


def test_front_ends_share_the_workers(broker):
    async def scene():
        async with stage(broker.url) as s:
            decode = await s.pair(num_slots=16)
            fronts = [await s.front() for _ in range(4)]
            answers = await asyncio.gather(*(ask(front, body()) for front in fronts for _ in range(25)))
            assert {(status, text_of(answer)) for status, answer in answers} == {(200, written(decode.tokens()))}
            assert len(decode.tokens()) == NUM_TOKENS

    run(scene)
