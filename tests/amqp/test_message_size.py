"""What is larger than one message of the broker: it fails alone, or goes in parts; those beside it do not notice."""

import asyncio

import pytest

from kvpipe.exceptions import ConfigError
from kvpipe.proxy.upstream import InstanceError
from kvpipe.queue.letters import letters, replay
from kvpipe.queue.topology import Topology
from tests.amqp.harness import SILENCE_S, ask, body, run, stage, text_of, until_healthy, written

LIMIT_BYTES = 256 << 10
NUM_BESIDE = 30


def large(num_bytes=LIMIT_BYTES, **fields):
    return body(user="x" * num_bytes, **fields)


@pytest.mark.parametrize("is_limit_set", [True, False])
def test_a_request_that_is_too_large_for_the_broker_fails_alone(broker, is_limit_set):
    """Where the limit is not set, the broker refuses the message, once."""

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


def test_a_limit_that_is_too_low_is_refused():
    with pytest.raises(ConfigError, match="max_message_bytes=1000: expected at least 262144"):
        Topology(max_message_bytes=1000)
