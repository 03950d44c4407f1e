"""RabbitMQ closes the channel of a worker with a request that takes longer than its `consumer_timeout`."""

import pytest

from kvpipe.proxy.upstream import InstanceError
from kvpipe.queue.topology import Topology
from tests.amqp.harness import Client, ask, body, forced_by, run, stage, text_of, until_letters, written

pytestmark = pytest.mark.slow

AFTER_S = 5.0
TIMED_OUT = "delivery acknowledgement on channel 1 timed out"
NUM_BEFORE = 4


def test_an_answer_that_takes_longer_than_the_broker_waits_goes_on_without_a_lost_or_doubled_token(own_broker, caplog):
    own_broker.time_out_deliveries(AFTER_S)

    async def scene():
        async with stage(own_broker.url) as s:
            front, decode = await s.front(), await s.pair()
            decode.pause_after = NUM_BEFORE
            client = Client(front, body(), {})
            await client.until(NUM_BEFORE)
            for num_deliveries in (2, 3):
                await decode.until(lambda num=num_deliveries: len(decode.bodies) == num)
            decode.go_on.set()
            status, answer = await client.answering
            assert status == 200
            assert text_of(answer) == written(decode.tokens())
            assert answer.count(b"[DONE]") == 1
            assert [forced_by(asked) for asked in decode.bodies[1:]] == [tuple(decode.tokens()[:NUM_BEFORE])] * 2
            assert decode.num_aborted == 2
            assert text_of((await ask(front, body()))[1]) == written(decode.tokens())

    run(scene)
    assert caplog.text.count(TIMED_OUT) == 2


def test_an_answer_that_outlasts_all_its_deliveries_is_given_up_and_found_as_a_dead_letter(own_broker, caplog):
    own_broker.time_out_deliveries(AFTER_S)
    topology = Topology("long", delivery_limit=1)

    async def scene():
        async with stage(own_broker.url, topology=topology) as s:
            front, decode = await s.front(), await s.pair()
            decode.pause_after = NUM_BEFORE
            client = Client(front, body(), {})
            with pytest.raises(InstanceError, match="delivery_limit"):
                await client.answering
            assert text_of(client.shown) == written(decode.tokens()[:NUM_BEFORE])
            assert [each.reason for each in await until_letters(own_broker.url, topology)] == ["delivery_limit"]

    run(scene)
    assert caplog.text.count(TIMED_OUT) == 1 + topology.delivery_limit
