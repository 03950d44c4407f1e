"""Replies on their way to front ends, on a real broker."""

import asyncio
import contextlib

import aio_pika

from kvpipe.queue.messages import Reply
from kvpipe.queue.outbox import ReplyOutbox
from kvpipe.queue.topology import SMALL_MESSAGE_BYTES
from tests.amqp.harness import run, until

# A sender that is blocked is not done for so long.
UNDONE_S = 0.3


def reply(number, num_bytes=1):
    return Reply("piece", "request", "delivery", "the worker's", number, bytes(num_bytes))


class Scene:
    """An outbox, the queue of a front end, and what has come there and back."""

    def __init__(self, channel, queue):
        self.queue = queue
        self.messages, self.unroutable = [], []
        self.outbox = ReplyOutbox("the worker's", channel, self.unroutable.append)

    async def send(self, *replies):
        for each in replies:
            await self.outbox.send(self.queue.name, each)

    async def receive(self, message):
        self.messages.append([each.number for each in Reply.all_of(message)])

    @property
    def numbers(self):
        return [number for message in self.messages for number in message]


@contextlib.asynccontextmanager
async def scene(broker, **arguments):
    async with await aio_pika.connect(broker.url) as connection, await aio_pika.connect(broker.url) as front:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        queue = await (await front.channel()).declare_queue(exclusive=True, arguments=arguments)
        yield Scene(channel, queue)


def test_replies_that_become_ready_while_one_is_confirmed_go_together_and_in_order(broker):
    async def play():
        async with scene(broker) as s:
            await s.queue.consume(s.receive, no_ack=True)
            await s.send(reply(0))
            await until(lambda: s.numbers == [0])
            with broker.blocked():
                await s.send(reply(1))
                await asyncio.sleep(0)  # its message is on its way
                for number in range(2, 50):
                    await s.send(reply(number))
            await until(lambda: len(s.numbers) == 50)
            assert s.numbers == list(range(50))
            assert len(s.messages) <= 3

    run(play)


def test_a_sender_waits_while_a_mebibyte_is_not_confirmed(broker):
    async def play():
        async with scene(broker) as s:
            await s.queue.consume(s.receive, no_ack=True)
            await s.send(reply(0))
            await until(lambda: s.numbers == [0])
            with broker.blocked():
                await s.send(reply(1, 600_000), reply(2, 600_000))
                waiting = asyncio.create_task(s.send(reply(3)))
                done, _ = await asyncio.wait({waiting}, timeout=UNDONE_S)
                assert not done
            await waiting
            await until(lambda: s.numbers == [0, 1, 2, 3])

    run(play)


def test_replies_to_a_queue_that_has_ended_come_back_and_others_go_on(broker):
    async def play():
        async with scene(broker) as s, scene(broker) as other:
            await s.queue.delete()
            await s.send(reply(0, 2 << 20), reply(1))
            await until(lambda: [each.number for each in s.unroutable] == [0, 1])
            await other.queue.consume(other.receive, no_ack=True)
            await s.outbox.send(other.queue.name, reply(2))
            await until(lambda: other.numbers == [2])

    run(play)


def test_replies_that_the_broker_does_not_keep_leave_room_for_the_next(broker):
    async def play():
        async with scene(broker, **{"x-max-length": 1, "x-overflow": "reject-publish"}) as s:
            for number in range(8):  # the queue has one, and refuses the others
                await s.send(reply(number, 600_000))
                await asyncio.sleep(0)  # its message is on its way
            await until(lambda: not s.outbox._waiting)
            assert s.outbox._num_bytes == 0
            await s.queue.consume(s.receive, no_ack=True)
            await until(lambda: s.numbers == [0])
            await s.send(reply(8))
            await until(lambda: s.numbers == [0, 8])

    run(play)


def test_a_message_is_small_however_much_is_ready(broker):
    async def play():
        async with scene(broker) as s:
            await s.queue.consume(s.receive, no_ack=True)
            await s.send(*(reply(number, 50_000) for number in range(12)))
            await until(lambda: len(s.numbers) == 12)
            assert s.numbers == list(range(12))
            assert max(map(len, s.messages)) == 2

    with broker.limited(SMALL_MESSAGE_BYTES):
        run(play)
