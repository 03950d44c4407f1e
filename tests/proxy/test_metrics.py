"""Counts of a real proxy at `/metrics`."""

import asyncio

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpipe.control import Moment

from .harness import (
    COMPLETIONS,
    EVENTS,
    REQUEST,
    RecordingControl,
    answers,
    breaks_off,
    never_ends,
    run,
    stage,
    streams,
)
from .test_early_streams import STREAMED, held, prefilled
from .test_early_token import DONE, chunk
from .test_just_in_time import NEAR_S, prefilling


async def metrics(s):
    """Value by name and labels, these in the order of their names."""
    async with s.client.get(s.url + "/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


async def dispatch_of(s, handoff):
    async with s.client.get(f"{s.url}/status/{handoff}") as response:
        return orjson.loads(await response.read())["dispatch"]


async def counted(s, *key, value=1):
    """All metrics, when that one has its value: a handoff is counted after its answer has gone out."""
    while (found := await metrics(s)).get(key) != value:  # noqa: ASYNC110 - what is awaited is the proxy's
        await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("decode", "outcome"),
    [
        (answers(), "answered"),
        (streams(*EVENTS), "answered"),
        (answers(404), "refused"),
        (answers(500), "failed"),
        (streams(EVENTS[0], then=breaks_off), "broken_off"),
    ],
)
def test_a_request_is_counted_by_how_it_ended(decode, outcome):
    async def scene():
        async with stage(decode=[decode]) as s:
            await s.post()
            found = await counted(s, "kvpipe_requests_total", outcome)
            assert [key for key in found if key[0] == "kvpipe_requests_total"] == [("kvpipe_requests_total", outcome)]

    run(scene)


def test_a_body_that_is_none_is_a_refused_request():
    async def scene():
        async with stage() as s:
            async with s.client.post(s.url + COMPLETIONS, data=b"{"):
                pass
            await counted(s, "kvpipe_requests_total", "refused")

    run(scene)


@pytest.mark.parametrize("decode", [never_ends, streams(EVENTS[0], then=never_ends)])
def test_a_client_that_leaves_is_counted(decode):
    async def scene():
        async with stage(decode=[decode]) as s:
            posting = asyncio.create_task(s.post())
            await s.decode[0].asked.wait()
            posting.cancel()
            await counted(s, "kvpipe_requests_total", "client_left")

    run(scene)


def test_a_handoff_is_counted_by_the_result_in_its_status():
    async def scene():
        control = RecordingControl()
        control.results = {"d0.control:7100": {"result": "partial", "bytes": 4096, "recomputed_tokens": 31}}
        async with stage(control=control) as s:
            _, _, headers = await s.post()
            found = await counted(s, "kvpipe_handoffs_total", "partial")
            async with s.client.get(f"{s.url}/status/{headers['x-kvpipe-handoff']}") as response:
                told = orjson.loads(await response.read())
            assert found["kvpipe_handoffs_total", told["result"]] == 1
            assert found["kvpipe_handoff_received_bytes_total",] == told["bytes"]
            assert found["kvpipe_handoff_recomputed_tokens_total",] == told["recomputed_tokens"]

    run(scene)


def test_the_result_of_a_handoff_is_asked_for_once_for_metrics_and_leads():
    async def scene():
        control = RecordingControl()
        control.results = {"d0.control:7100": {"result": "full", "bytes": 4096, "backlog_ms": 50.0, "steps_ms": 25.0}}
        control.moment = Moment("finished")
        async with stage(control=control, dispatch="just-in-time") as s:
            handoffs = []
            sizes = []
            for num in (1, 2):
                body = REQUEST | {"prompt": "hello" * 1000 * num}
                sizes.append(4096 + len(orjson.dumps(body)))
                handoffs.append((await s.post(body=body))[2]["x-kvpipe-handoff"])
                await counted(s, "kvpipe_handoffs_total", "full", value=num)
                await asyncio.sleep(0.05)
                assert control.asked == ["d0.control:7100"] * num
            first, second = [await dispatch_of(s, handoff) for handoff in handoffs]
            backlog_ms = 50 * sizes[1] / sizes[0]
            assert second["lead_ms"] == pytest.approx(first["admission_ms"] + 25 + backlog_ms, abs=0.01)

    run(scene)


class AnswersLater(RecordingControl):
    """D's port, which knows a result only when it is asked for the second time."""

    def __init__(self, result):
        super().__init__()
        self._later = result

    async def result(self, address, handoff, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        self.asked.append(address)
        return self._later if self.asked.count("d0.control:7100") > 1 else None


@pytest.mark.parametrize(("told", "result"), [({"result": "aborted"}, "aborted"), (None, "unknown")])
def test_a_decode_that_knows_no_result_yet_is_asked_once_more_after_a_while(monkeypatch, told, result):
    monkeypatch.setattr("kvpipe.proxy.results._ABORTED_AFTER_S", 0.05)

    async def scene():
        async with stage(decode=[never_ends], control=AnswersLater(told)) as s:
            posting = asyncio.create_task(s.post())
            await s.decode[0].asked.wait()
            posting.cancel()
            found = await counted(s, "kvpipe_handoffs_total", result)
            assert [key for key in found if key[0] == "kvpipe_handoffs_total"] == [("kvpipe_handoffs_total", result)]
            await asyncio.sleep(0.2)
            assert s.control.asked.count("d0.control:7100") == 2

    run(scene)


def test_a_result_is_asked_for_once_where_decode_was_not_asked():
    async def scene():
        async with stage(prefill=[answers(404)]) as s:
            await s.post()
            await counted(s, "kvpipe_handoffs_total", "unknown")
            assert s.control.asked == ["d0.control:7100", "p0.control:7100"]

    run(scene)


def test_a_proxy_that_stops_does_not_wait_before_it_asks_once_more(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.results._ABORTED_AFTER_S", 1000.0)

    async def scene():
        async with stage(control=AnswersLater({"result": "aborted"})) as s:
            await s.post()
            while len(s.control.asked) < 2:  # noqa: ASYNC110 - what is awaited is the proxy's
                await asyncio.sleep(0.01)
            assert s.control.asked.count("d0.control:7100") == 1
        # It waits for what is under way for some seconds, and then cancels it.
        assert s.control.asked.count("d0.control:7100") == 2

    run(scene)


def test_unknown_attempts_are_counted_and_so_are_the_instances_that_were_replaced(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.results._ABORTED_AFTER_S", 0.0)

    async def scene():
        async with stage(prefill=[answers(503), answers()], decode=[answers(503), answers()]) as s:
            assert (await s.post())[0] == 200
            found = await counted(s, "kvpipe_handoffs_total", "unknown", value=3)
            assert found["kvpipe_replaced_instances_total", "failed", "prefill"] == 1
            assert found["kvpipe_replaced_instances_total", "failed", "decode"] == 1

    run(scene)


@pytest.mark.parametrize(("prefill", "asked"), [([answers(404)], 0), ([answers(500), answers()], 1)])
def test_a_dispatch_is_counted_only_where_decode_is_asked(monkeypatch, prefill, asked):
    monkeypatch.setattr("kvpipe.proxy.results._ABORTED_AFTER_S", 0.0)

    async def scene():
        control = RecordingControl()
        control.moment = Moment("ended", reason="preempted")
        async with stage(prefill=prefill, control=control, dispatch="just-in-time") as s:
            await s.post()
            found = await counted(s, "kvpipe_handoffs_total", "unknown", value=len(prefill))
            assert len(s.decode[0].bodies) == asked
            assert found.get(("kvpipe_dispatches_total", "answer"), 0) == asked
            assert found["kvpipe_dispatch_lead_seconds_count",] == asked

    run(scene)


def test_lead_and_error_of_a_prediction_are_those_of_its_status():
    async def scene():
        async with prefilling() as (scene, s, posting, handoff):
            scene.producer.progress(handoff, NEAR_S)
            await s.decode[0].asked.wait()
            scene.may_answer.set()
            await posting
            # Decode answers without prefill's KV, perhaps before prefill does.
            found = await counted(s, "kvpipe_prediction_error_seconds_count", "early")
            told = await dispatch_of(s, handoff.hex())
            assert found["kvpipe_dispatches_total", "due"] == 1
            assert found["kvpipe_dispatch_lead_seconds_count",] == 1
            assert found["kvpipe_dispatch_lead_seconds_sum",] == pytest.approx(told["lead_ms"] / 1000, abs=1e-5)
            assert told["prediction_error_ms"] < 0
            error = found["kvpipe_prediction_error_seconds_sum", "early"]
            assert error == pytest.approx(-told["prediction_error_ms"] / 1000, abs=1e-5)

    run(scene)


@pytest.mark.parametrize(
    ("pieces", "then", "reason"),
    [((chunk("xb"), DONE), None, "contradicted"), ((), breaks_off, "failed")],
)
def test_an_early_token_and_a_decode_that_is_replaced_for_it_are_counted(pieces, then, reason):
    async def scene():
        second = streams(chunk("abcd", finish_reason="length"), DONE)
        found = await after_an_early_token([second], *pieces, then=then)
        assert found["kvpipe_early_tokens_total",] == 1
        assert replaced(found) == {("kvpipe_replaced_instances_total", reason, "decode"): 1}

    run(scene)


def test_a_lone_decode_that_is_asked_again_is_not_counted_as_replaced():
    async def scene():
        found = await after_an_early_token([], chunk("xb"), DONE, outcome="broken_off")
        assert found["kvpipe_early_tokens_total",] == 1
        assert replaced(found) == {}

    run(scene)


async def after_an_early_token(others, *pieces, then=None, outcome="answered"):
    """The metrics after a stream in which the first decode has gone on so after the token was shown."""
    first, go = held(*pieces, then=then)
    async with stage(prefill=[prefilled()], decode=[first, *others]) as s:
        async with s.client.post(s.url + COMPLETIONS, json=STREAMED) as response:
            await response.content.readany()
            go.set()
            await response.content.read()
        return await counted(s, "kvpipe_requests_total", outcome)


def replaced(found):
    return {key: value for key, value in found.items() if key[0] == "kvpipe_replaced_instances_total"}


def test_a_token_that_is_not_sent_early_is_not_counted():
    async def scene():
        async with stage(prefill=[prefilled()], decode=[answers()]) as s:
            await s.post(body=REQUEST)
            found = await counted(s, "kvpipe_requests_total", "answered")
            assert found["kvpipe_early_tokens_total",] == 0

    run(scene)
