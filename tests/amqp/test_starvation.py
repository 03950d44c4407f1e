"""A process that got no CPU for longer than a time limit: what has arrived meanwhile counts as in time."""

import asyncio
import time

import pytest
import uvloop

from kvpipe.proxy.health import Health
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.upstream import Upstream, open_session
from kvpipe.queue.broker import called
from kvpipe.queue.decode_capacity import DecodeCapacity
from kvpipe.queue.messages import Reply, Request
from kvpipe.queue.pending import Pending
from tests.amqp.harness import COMPLETIONS, SILENCE_S, Decode, DecodeControl, ask, body, run, stage, text_of, written

LIMIT_S = 1.0
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def starve():
    """Gives the event loop no CPU for longer than the limit."""
    time.sleep(1.5 * LIMIT_S)


@LOOPS
def test_an_answer_that_arrived_while_the_process_was_starved_is_in_time(new_loop):
    async def answer(reader, writer):
        await reader.readline()
        writer.write(b"confirmed\n")
        writer.close()
        await writer.wait_closed()

    async def question(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"published\n")
        asyncio.get_running_loop().call_soon(starve)
        try:
            return await reader.readline()
        finally:
            writer.close()
            await writer.wait_closed()

    async def scene():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await called(question(port), LIMIT_S) == b"confirmed\n"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scene())


def test_a_call_without_an_answer_ends_at_its_limit():
    with pytest.raises(TimeoutError, match="no answer in time"):
        asyncio.run(called(asyncio.Event().wait(), 0.1))


@LOOPS
def test_a_front_end_that_was_starved_takes_no_confirm_for_a_late_one(broker, monkeypatch, new_loop):
    monkeypatch.setattr("kvpipe.queue.front._CONFIRM_TIMEOUT_S", LIMIT_S)

    async def scene():
        async with asyncio.timeout(60), stage(broker.url) as s:
            front, decode = await s.front(), await s.pair()
            publish = front._publish

            async def starved(request, timeout_s):
                asyncio.get_running_loop().call_later(0.0, starve)
                await publish(request, timeout_s)

            monkeypatch.setattr(front, "_publish", starved)
            assert text_of((await ask(front, body()))[1]) == written(decode.tokens())
            front.check()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scene())


def test_a_part_that_arrived_while_the_front_end_was_starved_is_in_time():
    async def scene():
        pending = Pending(Request("request", "front", COMPLETIONS, [], body()), LIMIT_S, None)
        reader = asyncio.create_task(pending.next())
        await asyncio.sleep(0)  # it waits
        starve()
        asyncio.get_running_loop().call_soon(pending.put, Reply("end", "request", "delivery", "worker"))
        assert (await reader).kind == "end"

    run(scene)


def test_an_instance_that_answered_while_its_worker_was_starved_is_healthy(monkeypatch):
    monkeypatch.setattr("kvpipe.queue.decode_capacity._TIMEOUT_S", LIMIT_S)

    async def scene():
        async with Decode(1) as decode, open_session(5.0, SILENCE_S) as session:
            capacity = DecodeCapacity(
                Instance(decode.url), Upstream(session, SILENCE_S), DecodeControl(), Health(SILENCE_S)
            )
            looking = asyncio.create_task(capacity.until_looked(is_busy=False))
            await asyncio.sleep(0)  # it asks
            starve()
            await looking
            assert capacity.reason == ""

    run(scene)
