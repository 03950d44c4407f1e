"""Acknowledgements that go together, on a real broker."""

import aio_pika
import pytest

from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.queue.acks import Acks
from tests.amqp.harness import run, until


@pytest.mark.parametrize("num", [1, 3, 200])
def test_deliveries_that_were_acknowledged_together_do_not_come_again(broker, num):
    name = f"acks-{num}"

    async def scene():
        tasks, received = OwnedTasks(), []
        acks = Acks(tasks)

        async def receive(message):
            acks.add(message)
            received.append(message.body)

        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(name)
            for index in range(num):
                await channel.default_exchange.publish(aio_pika.Message(b"%d" % index), name)
            await queue.consume(receive)
            await until(lambda: len(received) == num and acks._last is None)
            await tasks.close(1.0)
        async with await aio_pika.connect(broker.url) as connection:
            queue = await (await connection.channel()).declare_queue(name)
            assert queue.declaration_result.message_count == 0
            await queue.delete()
        assert received == [b"%d" % index for index in range(num)]

    run(scene)
