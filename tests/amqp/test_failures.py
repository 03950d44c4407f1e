"""Failures of a broker, and the answers of clients: whole ones, or errors with the reason."""

import asyncio
from types import SimpleNamespace

import pytest
from multidict import CIMultiDict

from kvpipe.exceptions import ConfigError
from kvpipe.proxy.upstream import InstanceError
from kvpipe.queue.front import DecodeQueue
from kvpipe.queue.messages import Reply
from kvpipe.queue.outbox import ReplyOutbox
from kvpipe.queue.topology import Topology
from tests.amqp.harness import (
    COMPLETIONS,
    SILENCE_S,
    Client,
    ask,
    body,
    end,
    has_one_answer,
    run,
    stage,
    text_of,
    until,
    until_healthy,
    until_state,
    written,
)

ENDS = {
    "killed": lambda broker: (broker.save_directory(), broker.kill(), broker.start()),
    "restarted": lambda broker: broker.restart(),
    "connections closed": lambda broker: broker.close_connections(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "num_before"), [("killed", 0), ("killed", 3), ("restarted", 3), ("connections closed", 0)]
)
def test_a_client_gets_its_whole_answer_through_what_happens_to_the_broker(own_broker, how, num_before):
    async def scene():
        async with stage(own_broker.url) as s:
            front, decode = await s.front(), await s.pair()
            decode.pause_after = num_before
            client = Client(front, body(), {})
            await decode.has_paused.wait()
            await client.until(num_before)
            await asyncio.to_thread(ENDS[how], own_broker)
            decode.go_on.set()
            status, answer = await client.answering
            assert status == 200
            assert text_of(answer) == written(decode.tokens())
            assert answer.count(b"[DONE]") == 1
            assert text_of((await ask(front, body()))[1]) == written(decode.tokens())

    run(scene)


@pytest.mark.slow
def test_a_request_that_waits_in_the_queue_outlives_the_broker(own_broker):
    async def scene():
        async with stage(own_broker.url) as s:
            front, decode = await s.front(), await s.decode()
            client = Client(front, body(), {})
            await until_state(front, lambda state: state["queues"][s.topology.requests]["messages"] == 1)
            await asyncio.to_thread(ENDS["killed"], own_broker)
            await s.worker(decode)
            assert text_of((await client.answering)[1]) == written(decode.tokens())

    run(scene)


@pytest.mark.slow
def test_without_a_broker_requests_are_refused_at_once_and_answered_again_after_it_came_back(own_broker):
    async def scene():
        async with stage(own_broker.url) as s:
            front, decode = await s.front(), await s.pair()
            await asyncio.to_thread(own_broker.save_directory)
            await asyncio.to_thread(own_broker.kill)
            await until_healthy(front, is_healthy=False)
            with pytest.raises(InstanceError) as refused:
                await ask(front, body())
            assert refused.value.status == 503
            assert "broker amqp://127.0.0.1" in str(refused.value)
            assert "guest" not in str(refused.value)
            await asyncio.to_thread(own_broker.start)
            await until_healthy(front)
            assert text_of((await ask(front, body()))[1]) == written(decode.tokens())

    run(scene)


@pytest.mark.parametrize("resource", ["memory", "disk"])
def test_a_broker_that_takes_no_messages_is_said_and_recovers_by_itself(broker, resource, monkeypatch):
    async def scene():
        async with stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            with broker.blocked(resource):
                with monkeypatch.context() as quick:
                    quick.setattr("kvpipe.queue.front._CONFIRM_TIMEOUT_S", 0.5)
                    with pytest.raises(InstanceError, match="does not take requests") as refused:
                        await ask(front, body())
                assert refused.value.status == 503
                with pytest.raises(InstanceError, match="does not take requests"):
                    front.check()  # without another wait
                assert "does not take requests" in front.health()
            await until(lambda: not front._is_blocked)
            assert text_of((await ask(front, body()))[1]) == written(decode.tokens())

    run(scene)


@pytest.mark.slow
def test_a_front_end_waits_for_a_broker_that_is_not_there_yet(own_broker):
    async def scene():
        own_broker.kill()
        async with stage(own_broker.url) as s:
            front = await s.front()
            with pytest.raises(InstanceError, match="broker amqp://"):
                front.check()
            await asyncio.to_thread(own_broker.start)
            decode = await s.pair()
            await until_healthy(front)
            assert text_of((await ask(front, body()))[1]) == written(decode.tokens())

    run(scene)


def test_a_wrong_password_is_said_at_the_start(broker):
    async def scene():
        url = broker.url.replace("guest:guest", "guest:wrong")
        with pytest.raises(ConfigError, match="user and password are refused") as refused:
            async with DecodeQueue(url, Topology(), SILENCE_S):
                pass
        assert "wrong" not in str(refused.value)

    run(scene)


def test_another_delivery_limit_is_said_at_the_start(broker):
    async def scene():
        async with DecodeQueue(broker.url, Topology("limits", delivery_limit=3), SILENCE_S):
            pass
        with pytest.raises(ConfigError, match="same delivery limit everywhere"):
            async with DecodeQueue(broker.url, Topology("limits", delivery_limit=4), SILENCE_S):
                pass

    run(scene)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "amqp://", "127.0.0.1:5672"])
def test_a_url_that_is_none_of_a_broker_is_refused(url):
    with pytest.raises(ConfigError, match="AMQP URL"):
        DecodeQueue(url, Topology(), SILENCE_S)


def when_returned(monkeypatch):
    """Set once the broker has a request that a worker of this process leaves to its front end."""
    returned, send = asyncio.Event(), ReplyOutbox.send_confirmed

    async def send_confirmed(self, reply_to, reply):
        await send(self, reply_to, reply)
        if reply.kind == "returned":
            returned.set()

    monkeypatch.setattr(ReplyOutbox, "send_confirmed", send_confirmed)
    return returned


async def away_while_its_worker_dies(s, front, num_before, monkeypatch):
    """A client whose front end is away from the broker while its worker dies and another one gets its request."""
    monkeypatch.setattr("kvpipe.queue.delivery._ASK_EVERY_S", 0.1)
    returned = when_returned(monkeypatch)
    client, process, second, text = await s.begun(front, num_before)
    await front._broker.__aexit__()
    await end(process)
    await s.worker(second)
    await returned.wait()
    assert not second.bodies
    return client, text


async def has_its_answer(front, client, text):
    """Has the front end come back to the broker: its client gets one answer."""
    await front._broker.__aenter__()
    await has_one_answer(client, text)


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_front_end_that_was_away_while_its_worker_died_has_its_request_answered(broker, monkeypatch, num_before):
    async def scene():
        async with stage(broker.url) as s:
            front = await s.front()
            await has_its_answer(front, *await away_while_its_worker_dies(s, front, num_before, monkeypatch))

    run(scene)


@pytest.mark.slow
def test_a_request_that_was_left_to_its_front_end_outlives_the_broker(own_broker, monkeypatch):
    async def scene():
        async with stage(own_broker.url) as s:
            front = await s.front()
            client, text = await away_while_its_worker_dies(s, front, 3, monkeypatch)
            await asyncio.to_thread(ENDS["killed"], own_broker)
            await has_its_answer(front, client, text)

    run(scene)


def test_a_front_end_whose_queue_has_ended_meanwhile_has_its_requests_answered(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.topology.REPLIES_EXPIRE_S", 1)

    async def scene():
        async with stage(broker.url) as s:
            front = await s.front()
            client, text = await away_while_its_worker_dies(s, front, 3, monkeypatch)
            await until(lambda: front._replies not in broker.queues())
            await has_its_answer(front, client, text)

    run(scene)


def test_an_answer_that_came_while_its_front_end_was_away_is_not_asked_for_again(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.delivery._ASK_EVERY_S", 0.1)

    async def scene():
        async with stage(broker.url) as s:
            front, decode, other = await s.front(), await s.pair(), await s.front()
            decode.pause_after = 1
            client = Client(front, body(), {})
            await client.until(1)
            await until_running(other, 1)
            await front._broker.__aexit__()
            decode.go_on.set()
            await until_running(other, 0)
            await front._broker.__aenter__()
            await front._broker.until_open()
            assert text_of((await client.answering)[1]) == written(decode.tokens())
            assert text_of((await ask(front, body()))[1]) == written(decode.tokens())
            assert len(decode.bodies) == 2

    run(scene)


async def published(front, topology, broker):
    """A client whose request is in the queue, for which there is no worker, and the request's id."""
    client = Client(front, body(), {})
    await until(lambda: broker.queues()[topology.requests] == 1)
    (request,) = front._pending
    return client, request


def test_a_message_that_leaves_a_request_to_its_front_end_and_comes_twice_has_it_published_once(broker):
    async def scene():
        async with stage(broker.url) as s:
            front = await s.front()
            client, request = await published(front, s.topology, broker)
            for delivery in ("first", "first", "second"):
                front._receive_reply(Reply("returned", request, delivery, "worker"))
            await front._tasks.close(SILENCE_S)
            assert broker.queues()[s.topology.requests] == 3
            front._receive_reply(Reply("begin", request, "second", "worker"))
            assert front._pending[request].assembly.worker == "", "the delivery has ended"
            client.answering.cancel()

    run(scene)


def test_a_dead_letter_that_comes_twice_or_of_an_earlier_publication_changes_nothing(broker):
    async def scene():
        async with stage(broker.url) as s:
            front = await s.front()
            client, request = await published(front, s.topology, broker)
            front._receive_reply(Reply("begin", request, "delivery", "worker"))
            for reason in ("expired", "expired", "delivery_limit"):
                deaths = {"x-death": [{"reason": reason}]}
                front._is_dead(SimpleNamespace(correlation_id=request, message_id="0", headers=deaths))
            await front._tasks.close(SILENCE_S)
            assert broker.queues()[s.topology.requests] == 2
            assert request in front._pending
            client.answering.cancel()

    run(scene)


async def front_that_dies(stage, decode):
    """The queue of a front end that dies while D answers its request."""
    front = DecodeQueue(stage.url, stage.topology, SILENCE_S)
    await front.__aenter__()
    decode.pause_after = 1
    asking = asyncio.create_task(front.post(COMPLETIONS, CIMultiDict(), body(), awaits_first_byte=True))
    await decode.has_paused.wait()
    await front._broker.__aexit__()  # as its process would end
    asking.cancel()
    return front._replies


async def until_running(front, *counts):
    """Returns once the workers report to have so many requests."""
    await until_state(front, lambda state: [each["running"] for each in state["workers"]] == list(counts))


def test_a_request_whose_front_end_has_died_leaves_nothing_behind(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.topology.REPLIES_EXPIRE_S", 1)

    async def scene():
        async with stage(broker.url) as s:
            other, decode = await s.front(), await s.pair()
            replies = await front_that_dies(s, decode)
            await until_running(other, 1)
            await until(lambda: replies not in broker.queues())
            decode.go_on.set()
            await until_running(other, 0)
            assert (await ask(other, body()))[0] == 200

    run(scene)


@pytest.mark.slow
def test_a_front_end_that_has_died_does_not_hold_up_a_worker(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.topology.REPLIES_EXPIRE_S", 15)
    monkeypatch.setattr("kvpipe.queue.delivery._ASK_EVERY_S", 0.1)

    async def scene():
        async with stage(broker.url) as s:
            other, decode = await s.front(), await s.pair()
            replies = await front_that_dies(s, decode)
            await until_running(other, 1)
            decode.go_on.set()
            await until_running(other, 0)
            assert replies in broker.queues(), "the answer waits for a front end that comes back"
            assert broker.queues()[s.topology.requests] == 0
            await until(lambda: replies not in broker.queues())

    run(scene)


def test_a_request_of_a_front_end_that_has_died_is_not_computed_by_a_second_instance(broker, monkeypatch):
    monkeypatch.setattr("kvpipe.queue.delivery._ASK_EVERY_S", 0.1)
    returned = when_returned(monkeypatch)

    async def scene():
        async with stage(broker.url) as s:
            other, first = await s.front(), await s.pair()
            first.breaks = "lost"
            await front_that_dies(s, first)
            first.is_healthy = False
            first.go_on.set()
            await until_healthy(other, is_healthy=False)
            second = await s.pair()
            await returned.wait()
            await until_running(other, 0, 0)
            assert second.bodies == []
            assert broker.queues()[s.topology.requests] == 0
            assert broker.queues()[s.topology.dead] == 0

    run(scene)
