"""Just-in-time dispatch over real control ports; vLLM's part is played by the instances of the harness."""

import asyncio
import logging
from contextlib import asynccontextmanager

import orjson
import pytest

from kvpipe import _kvpipe
from kvpipe.control import ControlClient
from kvpipe.proxy.just_in_time import Leads, RollingMedian, Timing
from kvpipe.transfer_params import parse

from .harness import answers, dead_port, never_ends, run, stage

# Over any lead, and under any: the proxy has to wait, or not.
FAR_S, NEAR_S = 1000.0, 0.0


class Scene:
    """P's and D's control ports, and their answers in the test's hands."""

    def __init__(self):
        self.producer = _kvpipe.Control("127.0.0.1:0", b"", "p")
        self.consumer = _kvpipe.Control("127.0.0.1:0", b"", "d")
        self.client = ControlClient("")
        self.may_answer = asyncio.Event()

    async def prefill(self, request):
        self.open(await handoff_of(request))
        await self.may_answer.wait()
        return await answers()(request)

    async def decode(self, request):
        handoff = await handoff_of(request)
        self.consumer.watch(handoff, self.producer.address)
        self.consumer.set_result(handoff, '{"result": "full"}')
        await self.client.watched(self.producer.address, handoff.hex())
        await self.may_answer.wait()  # a D has no answer before P's KV
        return await answers(body=b"decoded")(request)

    def open(self, handoff):
        self.producer.open(handoff, bytes(32), 100, [])

    def finish(self, handoff):
        self.producer.finish(handoff, [7], "length", 0, bytes(32))

    async def is_received(self):
        """Waits until P's port has processed earlier messages, and the proxy's loop the answers."""
        await self.client.describe(self.producer.address)

    def close(self):
        for end in (self.client, self.consumer, self.producer):
            end.close()


async def handoff_of(request):
    body = orjson.loads(await request.read())
    return parse(body["kv_transfer_params"]).handoff


@asynccontextmanager
async def timed(prefill=None, decode=None, producer=None, control=None):
    scene = Scene()
    control = control or ControlClient("")
    ports = (producer or scene.producer.address, scene.consumer.address)
    behaviours = prefill or [scene.prefill], decode or [scene.decode]
    try:
        async with stage(*behaviours, control=control, ports=ports, dispatch="just-in-time") as s:
            yield scene, s
    finally:
        control.close()
        scene.close()


@asynccontextmanager
async def prefilling(**options):
    """A request that P works on: the ports, the proxy, the posting task, the handoff."""
    async with timed(**options) as (scene, s):
        posting = asyncio.create_task(s.post())
        await s.prefill[0].asked.wait()
        yield scene, s, posting, bytes.fromhex(s.prefill[0].handoffs[0])


async def is_not_asked(scene, instance):
    for _ in range(5):
        await scene.is_received()
        await asyncio.sleep(0.02)
    assert not instance.asked.is_set()


async def is_logged(caplog, text):
    while text not in caplog.text:  # noqa: ASYNC110 - what is awaited is the proxy's
        await asyncio.sleep(0.01)


async def status_of(s, handoff):
    async with s.client.get(f"{s.url}/status/{handoff}") as response:
        return orjson.loads(await response.read())


def test_decode_is_asked_while_prefill_works_once_its_end_is_predicted_near():
    async def scene():
        async with prefilling() as (scene, s, posting, handoff):
            await is_not_asked(scene, s.decode[0])
            scene.producer.progress(handoff, FAR_S)
            await is_not_asked(scene, s.decode[0])
            scene.producer.progress(handoff, NEAR_S)
            await s.decode[0].asked.wait()
            assert not scene.may_answer.is_set()
            scene.may_answer.set()
            assert (await posting)[:2] == (200, b"decoded")

    run(scene)


def test_decode_is_asked_at_a_predicted_time_without_further_reports():
    async def scene():
        async with prefilling() as (scene, s, posting, handoff):
            scene.producer.progress(handoff, 0.5)
            await s.decode[0].asked.wait()
            scene.may_answer.set()
            assert (await posting)[0] == 200

    run(scene)


def test_status_has_lead_admission_and_error_of_the_prediction():
    async def scene():
        async with prefilling() as (scene, s, posting, handoff):
            scene.producer.progress(handoff, NEAR_S)
            await s.decode[0].asked.wait()
            while "admission_ms" not in (await status_of(s, handoff.hex())).get("dispatch", {}):
                await scene.is_received()
            await asyncio.sleep(0.02)
            scene.may_answer.set()
            await posting
            told = {}
            while "prediction_error_ms" not in told:
                status = await status_of(s, handoff.hex())
                told = status["dispatch"]
            assert status["result"] == "full"
            assert (told["trigger"], told["lead_ms"]) == ("due", 190.0)
            assert told["admission_ms"] > 0
            assert told["prediction_error_ms"] < 0  # P answered after the end that was predicted

    run(scene)


def test_the_log_has_the_timing_of_a_handoff(caplog):
    async def scene():
        async with prefilling() as (scene, _, posting, handoff):
            scene.producer.progress(handoff, NEAR_S)
            scene.may_answer.set()
            await posting

    with caplog.at_level(logging.DEBUG, "kvpipe.proxy"):
        run(scene)
    assert "handoff.dispatch handoff=" in caplog.text
    assert "lead_ms=190.0" in caplog.text


def test_the_lead_follows_the_admission_of_that_decode():
    async def scene():
        async def answers_once_measured(request):
            answer = await scene.decode(request)
            while "admission_ms" not in (await status_of(s, s.decode[0].handoffs[-1]))["dispatch"]:  # noqa: ASYNC110 - what is awaited is the proxy's
                await asyncio.sleep(0.01)
            return answer

        async with timed(decode=[answers_once_measured]) as (scene, s):
            scene.may_answer.set()
            told = []
            for _ in range(2):
                _, _, headers = await s.post()
                told.append((await status_of(s, headers["x-kvpipe-handoff"]))["dispatch"])
            assert told[1]["lead_ms"] == pytest.approx(told[0]["admission_ms"] + 10, abs=0.01)

    run(scene)


def test_decode_is_asked_when_prefill_has_finished_before_it_answers():
    async def scene():
        async with prefilling() as (scene, s, posting, handoff):
            await scene.is_received()
            scene.finish(handoff)
            await s.decode[0].asked.wait()
            scene.may_answer.set()
            assert (await posting)[0] == 200
            assert (await status_of(s, handoff.hex()))["dispatch"]["trigger"] == "finished"

    run(scene)


def test_without_a_prediction_decode_is_asked_when_prefill_has_answered():
    async def scene():
        async with prefilling() as (scene, s, posting, handoff):
            await is_not_asked(scene, s.decode[0])
            scene.may_answer.set()
            assert (await posting)[:2] == (200, b"decoded")
            assert (await status_of(s, handoff.hex()))["dispatch"]["trigger"] == "answer"

    run(scene)


def test_a_handoff_that_prefill_withdraws_is_dispatched_sequentially_and_logged(caplog):
    async def scene():
        async with prefilling(decode=[answers(body=b"decoded")]) as (scene, s, posting, handoff):
            scene.producer.withdraw(handoff, "preempted")
            await is_logged(caplog, "subscribe: preempted; sequential dispatch instead")
            await is_not_asked(scene, s.decode[0])
            scene.may_answer.set()
            assert (await posting)[:2] == (200, b"decoded")

    run(scene)


@pytest.mark.parametrize("token", ["", "another"])
def test_a_port_that_refuses_or_is_not_there_means_sequential_dispatch_and_a_line_in_the_log(token, caplog):
    async def scene():
        control = ControlClient(token)
        decode = [answers(body=b"decoded")]
        producer = None if token else dead
        async with prefilling(producer=producer, control=control, decode=decode) as (scene, s, posting, _):
            await is_logged(caplog, "sequential dispatch instead")
            await is_not_asked(scene, s.decode[0])
            scene.may_answer.set()
            assert (await posting)[:2] == (200, b"decoded")

    with dead_port() as port:
        dead = f"127.0.0.1:{port}"
        run(scene)


def test_leaving_before_decode_is_due_aborts_prefill_and_releases_the_handoff():
    async def scene():
        async with prefilling() as (scene, s, posting, handoff):
            await scene.is_received()
            subscribed = scene.client.subscribe(scene.producer.address, handoff.hex(), NEAR_S)
            posting.cancel()
            await s.prefill[0].aborted.wait()
            told = await subscribed
            assert (told.kind, told.reason) == ("ended", "it was released")
            assert s.decode[0].bodies == []

    run(scene)


def test_leaving_after_decode_was_asked_aborts_both_and_releases_the_handoff():
    async def scene():
        async with prefilling(decode=[never_ends]) as (scene, s, posting, handoff):
            scene.producer.progress(handoff, NEAR_S)
            await s.decode[0].asked.wait()
            awaited = scene.client.watched(scene.producer.address, handoff.hex())
            posting.cancel()
            await s.prefill[0].aborted.wait()
            await s.decode[0].aborted.wait()
            assert (await awaited).kind == "ended"

    run(scene)


def test_a_prefill_that_fails_before_decode_is_due_is_followed_by_the_next():
    async def scene():
        async with timed(prefill=[answers(500), answers()], decode=[answers(body=b"decoded")]) as (_, s):
            status, body, headers = await s.post()
            assert (status, body) == (200, b"decoded")
            assert s.decode[0].handoffs == s.prefill[1].handoffs == [headers["x-kvpipe-handoff"]]

    run(scene)


def measured(*seconds):
    times = RollingMedian()
    for each in seconds:
        times.add(each)
    return times


def test_a_lead_is_the_median_admission_and_a_margin():
    leads = Leads()
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.19)
    leads.admitted("d", 0.03)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.04)
    assert leads.lead_s("p", "another", 1000) == pytest.approx(0.19)


def test_a_lead_grows_with_the_error_of_that_prefills_predictions_and_shrinks_again():
    leads = Leads()
    leads.admitted("d", 0.02)
    leads.answered("p", 0.0)
    before_s = leads.lead_s("p", "d", 1000)
    for error_s in (0.08, -0.02, 0.08, -0.02):
        leads.answered("p", error_s)
    grown_s = leads.lead_s("p", "d", 1000)
    assert before_s + 0.05 < grown_s < 0.2
    assert leads.lead_s("another", "d", 1000) == before_s
    for _ in range(50):
        leads.answered("p", 0.0)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(before_s, abs=0.001)


def test_a_lead_covers_what_that_decode_has_to_read_first():
    leads = Leads()
    leads.admitted("d", 0.02)
    leads.moved("d", 0.1, 1000)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.13)


def test_what_a_decode_has_to_read_first_is_as_much_as_the_request_is_long():
    leads = Leads()
    leads.admitted("d", 0.02)
    leads.moved("d", 0.1, 12_000)
    assert leads.lead_s("p", "d", 12_000) == pytest.approx(0.13)
    assert leads.lead_s("p", "d", 6_000) == pytest.approx(0.03 + 0.1 * 10_096 / 16_096)


def test_short_requests_between_long_ones_do_not_bring_the_lead_to_its_bound():
    leads = Leads()
    leads.admitted("d", 0.02)
    for _ in range(4):
        leads.moved("d", 0.06, 12_000)
        leads.moved("d", 0.002, 150)
    assert 0.09 <= leads.lead_s("p", "d", 12_000) < 0.15
    assert leads.lead_s("p", "d", 150) < 0.07


def test_a_lead_covers_the_steps_of_a_busy_decode_until_its_load_has_begun():
    leads = Leads()
    leads.admitted("d", 0.02)
    leads.stepped("d", 0.003)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.03), "10 ms at least"
    for _ in range(8):
        leads.stepped("d", 0.15)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.17)
    assert leads.lead_s("p", "another", 1000) == pytest.approx(0.19)


def test_steps_of_a_decode_that_never_has_room_do_not_lengthen_the_lead_for_ever():
    leads = Leads()
    leads.admitted("d", 0.03)
    for _ in range(100):
        leads.stepped("d", leads.lead_s("p", "d", 1000) + 0.3)
    assert leads.lead_s("p", "d", 1000) <= 1.2


@pytest.mark.parametrize(("steps_s", "lead_s"), [(0.01, 0.21), (0.15, 0.35)])
def test_errors_and_backlogs_never_bring_a_lead_over_200_ms_and_the_steps_of_decode(steps_s, lead_s):
    leads = Leads()
    leads.admitted("d", 0.05)
    leads.stepped("d", steps_s)
    for _ in range(50):
        leads.answered("p", 3.0)
        leads.moved("d", 3.0, 1000)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(lead_s)


def test_an_admission_that_takes_longer_is_covered_up_to_5_s():
    leads = Leads()
    leads.admitted("d", 0.4)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.41)
    leads.answered("p", 1.0)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.41)
    leads.admitted("slow", 1e9)
    assert leads.lead_s("p", "slow", 1000) == 5.0


def test_predictions_that_are_too_early_never_make_a_lead_negative():
    leads = Leads()
    leads.admitted("d", 0.01)
    leads.answered("p", -1.0)
    assert leads.lead_s("p", "d", 1000) == 0.0


def test_one_time_that_is_far_out_hardly_counts():
    assert measured(*[0.1] * 20, 60.0).upper_s == pytest.approx(0.1)
    around = [0.09, 0.1, 0.11, 0.1] * 5
    assert measured(*around, 60.0).upper_s == pytest.approx(measured(*around).upper_s, abs=0.02)


def test_times_that_vary_are_expected_within_twice_their_mean_deviation():
    assert measured(*[0.1, 0.3] * 20).upper_s == pytest.approx(0.4, abs=0.05)


def test_a_change_is_the_median_after_eight_measurements():
    assert measured(*[0.1] * 20, *[0.4] * 8).upper_s == pytest.approx(0.4)


@pytest.mark.parametrize("first_s", [3.0, 1e9])
def test_a_cold_first_admission_is_out_of_the_lead_after_two_more_requests(first_s):
    leads = Leads()
    for admission_s in (first_s, 0.1, 0.1):
        leads.admitted("d", admission_s)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.11)


@pytest.mark.parametrize("first_s", [-2.0, 3.0])
def test_a_first_prediction_that_was_far_off_is_out_of_the_lead_after_two_more_requests(first_s):
    leads = Leads()
    leads.admitted("d", 0.1)
    for error_s in (first_s, 0.0, 0.0):
        leads.answered("p", error_s)
    assert leads.lead_s("p", "d", 1000) == pytest.approx(0.11)


def test_one_admission_of_3_s_among_steady_ones_hardly_moves_the_lead():
    leads = Leads()
    for admission_s in [0.1] * 20:
        leads.admitted("d", admission_s)
    for admission_s in (3.0, 0.1, 0.1):
        leads.admitted("d", admission_s)
        assert leads.lead_s("p", "d", 1000) == pytest.approx(0.11)


def test_a_prediction_that_comes_too_late_lengthens_the_next_lead():
    async def scene():
        async with timed() as (scene, s):
            leads = []
            for _ in range(2):
                scene.may_answer.clear()
                s.prefill[0].asked.clear()
                posting = asyncio.create_task(s.post())
                await s.prefill[0].asked.wait()
                handoff = bytes.fromhex(s.prefill[0].handoffs[-1])
                scene.producer.progress(handoff, 100.0)
                scene.finish(handoff)
                s.decode[0].asked.clear()
                await s.decode[0].asked.wait()
                scene.may_answer.set()
                await posting
                leads.append((await status_of(s, handoff.hex()))["dispatch"])
            assert leads[0]["prediction_error_ms"] > 50_000
            bound_ms = max(200.0, leads[0].get("admission_ms", 0.0)) + 10
            assert leads[1]["lead_ms"] == pytest.approx(bound_ms, abs=0.01)

    run(scene)


def test_a_report_has_only_known_facts():
    assert Timing(0.2, 1).report() == {"trigger": "answer", "lead_ms": 200.0}
    known = Timing(0.2, 1, "due", admission_s=0.1, predicted_at_s=5.0, answered_at_s=4.0)
    assert known.report()["prediction_error_ms"] == 1000.0
