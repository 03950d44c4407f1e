"""Requests and replies larger than one message of the broker: they fail alone, or go in parts, unnoticed by others."""

import asyncio

import pytest

from kvpipe.exceptions import ConfigError
from kvpipe.proxy.upstream import InstanceError
from kvpipe.queue.letters import letters, replay
from kvpipe.queue.messages import Reply
from kvpipe.queue.topology import Topology
from tests.amqp.harness import (
    SILENCE_S,
    Client,
    ask,
    body,
    run,
    stage,
    text_of,
    until,
    until_healthy,
    until_letters,
    until_state,
    written,
)

LIMIT_BYTES = 256 << 10
NUM_BESIDE = 30


def large(num_bytes=LIMIT_BYTES, **fields):
    return body(user="x" * num_bytes, **fields)


@pytest.mark.parametrize("is_limit_set", [True, False])
def test_a_request_that_is_too_large_for_the_broker_fails_alone(broker, is_limit_set):
    """Without a limit in the settings, the broker refuses the message, once."""

    async def scene():
        limit = {"max_message_bytes": LIMIT_BYTES} if is_limit_set else {}
        async with stage(broker.url, topology=Topology(f"large-{is_limit_set}", **limit)) as s:
            front, decode = await s.front(), await s.pair(num_slots=NUM_BESIDE)
            await until_healthy(front)
            link = front._broker.link
            beside = [asyncio.create_task(ask(front, body())) for _ in range(NUM_BESIDE)]
            status, answer = await ask(front, large())
            assert status == 413
            assert b"--max-message-bytes" in answer
            assert str(LIMIT_BYTES).encode() in answer
            answers = await asyncio.gather(*beside)
            assert {(status, text_of(answer)) for status, answer in answers} == {(200, written(decode.tokens()))}
            assert len(decode.bodies) == NUM_BESIDE
            with pytest.raises(InstanceError, match="--max-message-bytes") as refused:
                front.check(LIMIT_BYTES + 1000)
            assert refused.value.status == 413
            assert front._broker.link is link
            refusals = broker.log.count("larger than configured max size")
            assert (await ask(front, large(LIMIT_BYTES + 1000)))[0] == 413
            assert broker.log.count("larger than configured max size") == refusals, "it is known now"

    with broker.limited(LIMIT_BYTES):
        run(scene)


def test_clients_that_leave_at_any_moment_of_a_large_request_end_no_connection(broker):
    async def scene():
        async with stage(broker.url) as s:
            front = await s.front()
            await s.pair(num_slots=NUM_BESIDE)
            await until_healthy(front)
            link = front._broker.link
            for number in range(300):
                asking = asyncio.create_task(ask(front, large()))
                await asyncio.sleep(0.00003 * number)
                asking.cancel()
                await asyncio.wait({asking})
            await front.state()  # an answer of the broker after all that was sent before
            assert front._broker.link is link

    run(scene)


def test_a_dead_letter_that_is_too_large_now_is_not_answered_and_stays(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.messages._LONGEST_TTL_S", 0.3)
    topology = Topology("letters-large")

    async def leave():
        async with stage(broker.url, topology=topology) as s:
            front = await s.front()
            with pytest.raises(InstanceError, match="no answer in time"):
                await ask(front, large())

    async def again():
        [letter] = await letters(broker.url, topology)
        shown = []
        assert not await replay(broker.url, topology, [letter.id], SILENCE_S, lambda *what: shown.append(what))
        assert [(each[0], each[1]) for each in shown] == [(letter.id, 413)]
        assert await letters(broker.url, topology) == [letter]

    run(leave)
    with broker.limited(LIMIT_BYTES):
        run(again)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_larger_than_a_message_comes_whole_and_those_beside_it_too(broker, stream):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair(num_slots=NUM_BESIDE)
            beside = [asyncio.create_task(ask(front, body(stream=number % 3 > 0))) for number in range(NUM_BESIDE)]
            sizes = [LIMIT_BYTES, 5 * LIMIT_BYTES + 1]
            answers = await asyncio.gather(*(ask(front, body(stream=stream, padding=size)) for size in sizes))
            for size, (status, answer) in zip(sizes, answers, strict=True):
                text = text_of(answer)
                assert (status, text.count("x"), text.replace("x", "")) == (200, size, written(decode.tokens()))
            answers = await asyncio.gather(*beside)
            assert {(status, text_of(answer)) for status, answer in answers} == {(200, written(decode.tokens()))}
            assert len(decode.bodies) == NUM_BESIDE + len(sizes), "each was asked once"

    with broker.limited(LIMIT_BYTES):
        run(scene)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_too_large_for_the_front_ends_memory_fails_alone(broker, monkeypatch, stream):
    monkeypatch.setattr("kvpipe.queue.delivery.MAX_REPLY_BYTES", LIMIT_BYTES)

    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair(num_slots=NUM_BESIDE)
            beside = [asyncio.create_task(ask(front, body())) for _ in range(NUM_BESIDE)]
            with pytest.raises(InstanceError, match=f"more than {LIMIT_BYTES} bytes") as failed:
                await ask(front, body(stream=stream, padding=3 * LIMIT_BYTES))
            assert failed.value.status == 502
            assert {status for status, _ in await asyncio.gather(*beside)} == {200}
            assert len(decode.bodies) == NUM_BESIDE + 1, "no other instance is asked"

    run(scene)


def test_an_instance_goes_on_after_a_large_event_of_another_one(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, first, second = await s.front(), await s.decode(), await s.decode()
            first.pause_after = 3
            process = await s.process(first)
            await until_healthy(front)
            client = Client(front, body(padding=LIMIT_BYTES), {})
            await first.has_paused.wait()
            await client.until(3)
            process.kill()
            await s.worker(second)
            status, answer = await client.answering
            text = text_of(answer)
            assert (status, text.count("x")) == (200, LIMIT_BYTES)
            assert text.replace("x", "") == written([*first.tokens()[:3], *second.tokens()[3:]])

    with broker.limited(LIMIT_BYTES):
        run(scene)


def test_a_request_that_is_too_large_for_a_dead_letter_now_is_one_without_its_reason(broker):
    topology = Topology("refused-letter", delivery_limit=0)

    async def scene():
        async with stage(broker.url, topology=topology) as s:
            front, decode = await s.front(), await s.decode()
            decode.status = 500
            asking = asyncio.create_task(ask(front, large(stream=False)))
            await until_state(front, lambda state: state["queues"][topology.requests]["messages"] == 1)
            with broker.limited(LIMIT_BYTES):
                await s.worker(decode)
                with pytest.raises(InstanceError, match="answered 500"):
                    await asking
                [letter] = await until_letters(broker.url, topology)
            assert letter.reason == "rejected"
            assert len(decode.bodies) == 1
            decode.status = 200
            assert text_of((await ask(front, body()))[1]) == written(decode.tokens())

    run(scene)


def test_an_answer_of_more_tokens_than_another_worker_can_be_told_fails_alone(broker):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            await until_healthy(front)
            link = front._broker.link
            worker = s.workers[0]._broker.link.outbox.queue
            decode.pause_after = 0
            client = Client(front, body(), {})
            await decode.has_paused.wait()
            [request] = front._pending
            for reply in (
                Reply("head", request, "first", worker, is_stream=True),
                Reply("piece", request, "first", worker, 1, b"data: x\n\n", tuple(range(100_000, 150_000))),
                Reply("begin", request, "second", worker),
            ):
                front._receive_reply(reply)
            with pytest.raises(InstanceError, match="another worker cannot go on"):
                await client.answering
            assert front._broker.link is link

    with broker.limited(LIMIT_BYTES):
        run(scene)


def test_a_large_event_may_take_longer_than_the_limit_on_silence(broker):
    async def scene():
        async with stage(broker.url) as s:
            front = await s.front(silence_s=2.0)
            client = Client(front, body(), {})
            await until(lambda: front._pending)
            [request] = front._pending
            front._receive_reply(Reply("head", request, "delivery", "worker", is_stream=True))
            for number in range(1, 9):
                await asyncio.sleep(0.4)
                front._receive_reply(Reply("part", request, "delivery", "worker", number, b"da"))
            front._receive_reply(Reply("piece", request, "delivery", "worker", 9, b"end"))
            front._receive_reply(Reply("end", request, "delivery", "worker", 10))
            assert await client.answering == (200, b"da" * 8 + b"end")

    run(scene)


def test_parts_of_an_overtaken_delivery_are_no_sign_of_life(broker):
    async def scene():
        async with stage(broker.url) as s:
            front = await s.front(silence_s=2.0)
            client = Client(front, body(), {})
            await until(lambda: front._pending)
            [request] = front._pending
            front._receive_reply(Reply("head", request, "first", "worker", is_stream=True))
            front._receive_reply(Reply("begin", request, "second", "another"))
            for number in range(1, 20):
                await asyncio.sleep(0.4)
                if client.answering.done():
                    break
                front._receive_reply(Reply("part", request, "first", "worker", number, b"da"))
            assert client.answering.done()
            with pytest.raises(InstanceError, match="silent for 2 s"):
                await client.answering

    run(scene)


def test_a_limit_that_is_too_low_is_refused():
    with pytest.raises(ConfigError, match="max_message_bytes=1000: expected at least 262144"):
        Topology(max_message_bytes=1000)
