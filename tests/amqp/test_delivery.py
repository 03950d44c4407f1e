"""A delivery and its front end, in any order of what they send each other. The front end is a stand-in in memory."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvpipe.proxy import exact_json
from kvpipe.proxy.health import Health
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.probed import ProbedInstance
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import Upstream, open_session
from kvpipe.queue.decode_capacity import DecodeCapacity
from kvpipe.queue.delivery import Delivery
from kvpipe.queue.messages import DeliveryControl, Request
from kvpipe.queue.topology import SMALL_MESSAGE_BYTES
from tests.amqp.harness import COMPLETIONS, SILENCE_S, Decode, DecodeControl, body, forced_by, run, text_of, written


class Front:
    """Keeps what it gets, and answers as a test says.

    Attributes:
        is_reading: true if it reads its replies.
    """

    queue = "the worker's"

    def __init__(self):
        self.replies = []
        self.is_reading = True
        self._changed = asyncio.Event()

    async def send(self, reply_to, reply):
        self.replies.append(reply)
        self._changed.set()

    send_confirmed = send

    async def is_read(self, replies):
        return self.is_reading

    async def until(self, kind, num=1):
        """Returns once it has got so many replies of a kind."""
        while [reply.kind for reply in self.replies].count(kind) < num:
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def delivered(
    *, is_redelivered=False, is_read=True, silence_s=SILENCE_S, more=b"}", is_half_open=False, rank=None
):
    """A delivery that runs, with D and the front end."""
    async with AsyncExitStack() as stack:
        decode = await stack.enter_async_context(Decode(1))
        session = await stack.enter_async_context(open_session(5.0, silence_s))
        front = Front()
        front.is_reading = is_read
        raw = body().removesuffix(b"}") + more
        request = Request.of(Request("request", "the front end's", COMPLETIONS, [], raw).message(60.0))
        upstream = Upstream(session, silence_s)
        limits = {"frozen_after_s": SILENCE_S, "control_timeout_s": SILENCE_S}
        probed = ProbedInstance("decode", Instance(decode.url), upstream, DecodeControl(), **limits, tasks=OwnedTasks())
        if is_half_open:
            probed.health.silent(probed.health.left_s)
            assert probed.health.freeze()
            probed.health.answered(is_http=True)
        delivery = Delivery(request, probed, upstream, front, front.is_read, rank=rank, is_redelivered=is_redelivered)
        running = asyncio.create_task(delivery.run())
        stack.callback(running.cancel)
        yield decode, front, delivery, running


@asynccontextmanager
async def looked(engine, **fields):
    """The capacity of a D with these fields, looked at once by a worker that has the control port of this engine."""
    async with Decode(1) as decode, open_session(5.0, SILENCE_S) as session:
        for name, value in fields.items():
            setattr(decode, name, value)
        instance, upstream = Instance(decode.url, "d:7100"), Upstream(session, SILENCE_S)
        capacity = DecodeCapacity(instance, upstream, DecodeControl(engine), Health(SILENCE_S))
        await capacity.until_looked(is_busy=False)
        yield capacity


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("kvpipe.queue.delivery._ASK_EVERY_S", 0.05)


def test_numbers_that_json_has_not_reach_decode_as_they_came():
    async def scene():
        async with delivered(more=b',"more":[NaN,1e400,18446744073709551616]}') as (decode, front, *_):
            await front.until("end")
            assert repr(decode.bodies[0]["more"]) == "[nan, inf, 18446744073709551616]"

    run(scene)


@pytest.mark.parametrize("rank", [None, 1])
def test_decode_is_told_the_rank_whose_control_port_is_reported(rank):
    async def scene():
        async with delivered(rank=rank) as (decode, front, *_):
            await front.until("end")
            assert decode.headers[0].get("x-data-parallel-rank") == (None if rank is None else "1")

    run(scene)


@pytest.mark.parametrize(
    ("engine", "engines", "rank"), [(None, (0,), None), (None, (), None), (1, (0, 1), 1), (5, (4, 5), 1)]
)
def test_the_rank_of_a_control_port_is_counted_from_the_first_one_behind_the_url(engine, engines, rank):
    async def scene():
        async with looked(engine, engines=engines) as capacity:
            assert (capacity.reason, capacity.rank) == ("", rank)

    run(scene)


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ((), "its metrics list none; start it without --disable-log-stats"),
        ((0, 1), "its metrics list [0, 1]; name a control port of this URL"),
    ],
)
def test_an_instance_whose_metrics_do_not_list_the_rank_gets_no_requests_and_the_reason_has_the_remedy(engines, reason):
    async def scene():
        async with looked(3, engines=engines) as capacity:
            assert capacity.reason == f"d:7100 is the control port of engine 3, and {reason}"

    run(scene)


@pytest.mark.parametrize(("engine", "reason"), [(1, "answered 503"), (None, "")])
def test_without_metrics_only_an_instance_of_several_ranks_gets_no_requests(engine, reason):
    async def scene():
        async with looked(engine, engines=(0, 1), metrics_status=503) as capacity:
            assert capacity.reason.partition(":")[0] == reason

    run(scene)


def test_metrics_that_cannot_be_read_are_a_reason_to_take_no_request():
    async def scene():
        async with looked(4, engines=("9" * 5000,)) as capacity:
            assert "digits" in capacity.reason

    run(scene)


@pytest.mark.parametrize("num_deferred", [None, 0])
@pytest.mark.parametrize(("engine", "num_waiting"), [(4, 2), (5, 0), (None, 2)])
def test_requests_that_wait_in_another_rank_do_not_count(engine, num_waiting, num_deferred):
    async def scene():
        async with looked(engine, engines=(4, 5), num_waiting=2, num_deferred=num_deferred) as capacity:
            assert capacity.reason == (f"{num_waiting} requests wait in it" if num_waiting else "")

    run(scene)


def test_a_body_is_parsed_once(monkeypatch):
    parsed, read = [], exact_json.read

    def noting(raw):
        parsed.append(raw)
        return read(raw)

    monkeypatch.setattr(exact_json, "read", noting)

    async def scene():
        async with delivered() as (decode, front, delivery, _):
            await front.until("end")
            assert parsed.count(delivery.request.body) == 1
            assert decode.bodies[0]["return_token_ids"]

    run(scene)


def test_an_answer_of_the_front_end_that_comes_twice_ends_nothing():
    async def scene():
        async with delivered(is_redelivered=True) as (decode, front, delivery, running):
            decode.pause_after = 3
            await front.until("begin", 2)
            for _ in range(2):
                delivery.receive(DeliveryControl("continue", "request", delivery.id, (7, 8)))
            await decode.has_paused.wait()
            assert not running.done()
            decode.go_on.set()
            await front.until("end")
            delivery.receive(DeliveryControl("done", "request", delivery.id))
            assert (await running).is_over
            assert forced_by(decode.bodies[0]) == (7, 8)
            answer = b"".join(reply.body for reply in front.replies if reply.kind == "piece")
            assert text_of(answer).endswith(written(decode.tokens((7, 8))[1:]))

    run(scene)


@pytest.mark.parametrize("num_before", [0, 3])
def test_an_instance_that_is_silent_for_too_long_has_failed_the_request_for_good(num_before):
    async def scene():
        async with delivered(silence_s=0.3) as (decode, front, delivery, running):
            decode.pause_after = num_before
            await front.until("failed")
            assert front.replies[-1].status == 504
            delivery.receive(DeliveryControl("done", "request", delivery.id))
            ended = await running
            assert ended.is_over
            assert ended.failure is None, "no other instance is asked"

    run(scene)


@pytest.mark.parametrize("failure", ["silent", "answered", "lost"])
def test_a_trial_of_an_instance_ends_with_its_failure(failure):
    async def scene():
        silence_s = 0.3 if failure == "silent" else SILENCE_S
        async with delivered(silence_s=silence_s, is_half_open=True) as (decode, front, delivery, running):
            decode.pause_after = 0
            decode.status = 500 if failure == "answered" else 200
            decode.breaks = "lost" if failure == "lost" else ""
            if failure != "answered":
                await decode.has_paused.wait()
                assert not delivery._probed.health.takes_requests
            if failure == "silent":
                await front.until("failed")
            else:
                decode.go_on.set()
                assert (await running).failure.failure in ("answered", "broken")
            assert delivery._probed.health.takes_requests

    run(scene)


def test_the_end_is_sent_until_the_front_end_has_it():
    async def scene():
        async with delivered() as (_, front, delivery, running):
            await front.until("end", 3)
            delivery.receive(DeliveryControl("done", "request", delivery.id))
            assert (await running).is_over

    run(scene)


def test_a_request_whose_front_end_does_not_answer_is_given_back(monkeypatch):
    monkeypatch.setattr("kvpipe.queue.delivery._NUM_REPEATS", 3)

    async def scene():
        for is_redelivered in (False, True):
            async with delivered(is_redelivered=is_redelivered) as (_, _, _, running):
                assert not (await running).is_over

    run(scene)


@pytest.mark.parametrize(("kind", "is_over"), [("cancel", True), ("drop", True), ("requeue", False)])
def test_the_front_end_may_end_a_delivery_at_any_time(kind, is_over):
    async def scene():
        async with delivered() as (decode, _, delivery, running):
            decode.pause_after = 2
            await decode.has_paused.wait()
            delivery.receive(DeliveryControl(kind, "request"))
            assert (await running).is_over == is_over
            await decode.until(lambda: decode.num_aborted == 1)

    run(scene)


def test_what_is_meant_for_another_delivery_ends_nothing():
    async def scene():
        async with delivered() as (decode, front, delivery, running):
            decode.pause_after = 1
            await decode.has_paused.wait()
            delivery.receive(DeliveryControl("drop", "request", "another"))
            decode.go_on.set()
            await front.until("end")
            assert not running.done()

    run(scene)


def test_after_an_unread_answer_the_request_is_left_to_its_front_end():
    async def scene():
        async with delivered(is_read=False) as (_, front, _, running):
            assert (await running).is_over
            assert [reply.kind for reply in front.replies][-2:] == ["end", "returned"]

    run(scene)


def test_a_request_whose_front_end_is_away_is_left_to_it_and_asked_of_no_second_instance():
    async def scene():
        async with delivered(is_redelivered=True, is_read=False) as (decode, front, _, running):
            assert (await running).is_over
            assert [reply.kind for reply in front.replies] == ["begin", "returned"]
            assert decode.bodies == []

    run(scene)


def test_every_reply_of_an_answer_of_any_size_is_a_small_message():
    async def scene():
        async with delivered(is_redelivered=True) as (_, front, delivery, _):
            await front.until("begin")
            body, tokens = bytes(300_000), tuple(range(100_000, 130_000))
            await delivery._send("piece", body, tokens=tokens)
            replies = front.replies[1:]
            assert [reply.kind for reply in replies] == ["part"] * (len(replies) - 1) + ["piece"]
            assert [reply.number for reply in replies] == list(range(len(replies)))
            assert max(len(reply.framed()) for reply in replies) <= SMALL_MESSAGE_BYTES
            assert b"".join(reply.body for reply in replies) == body
            assert tuple(token for reply in replies for token in reply.tokens) == tokens

    run(scene)
