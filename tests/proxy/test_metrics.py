"""What the proxy counts, asked of a real one at `/metrics`."""

import asyncio

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

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
from .test_early import DONE, chunk
from .test_first_token import STREAMED, held, prefilled
from .test_just_in_time import NEAR_S, prefilling


async def metrics(s):
    """Value by name and labels, these in the order of their names."""
    async with s.client.get(s.url + "/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


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


def test_a_handoff_is_counted_by_the_result_that_status_tells():
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


def test_attempts_that_nobody_knows_are_counted_and_so_are_the_instances_that_were_replaced():
    async def scene():
        async with stage(prefill=[answers(500), answers()], decode=[answers(500), answers()]) as s:
            assert (await s.post())[0] == 200
            found = await counted(s, "kvpipe_handoffs_total", "unknown", value=3)
            assert found["kvpipe_replaced_instances_total", "failed", "prefill"] == 1
            assert found["kvpipe_replaced_instances_total", "failed", "decode"] == 1

    run(scene)


def test_lead_and_error_of_a_prediction_are_those_that_status_tells():
    async def scene():
        async with prefilling() as (scene, s, posting, handoff):
            scene.producer.progress(handoff, NEAR_S)
            await s.decode[0].asked.wait()
            scene.may_answer.set()
            await posting
            found = await counted(s, "kvpipe_dispatches_total", "due")
            async with s.client.get(f"{s.url}/status/{handoff.hex()}") as response:
                told = orjson.loads(await response.read())["dispatch"]
            assert found["kvpipe_dispatch_lead_seconds_count",] == 1
            assert found["kvpipe_dispatch_lead_seconds_sum",] == pytest.approx(told["lead_ms"] / 1000, abs=1e-5)
            assert told["prediction_error_ms"] < 0
            error = found["kvpipe_prediction_error_seconds_sum", "early"]
            assert error == pytest.approx(-told["prediction_error_ms"] / 1000, abs=1e-5)

    run(scene)


def test_a_token_that_is_shown_and_a_decode_that_contradicts_it_are_counted():
    async def scene():
        first, go = held(chunk("xb"), DONE)
        second = streams(chunk("abcd", finish_reason="length"), DONE)
        async with stage(prefill=[prefilled()], decode=[first, second]) as s:
            async with s.client.post(s.url + COMPLETIONS, json=STREAMED) as response:
                await response.content.readany()
                go.set()
                await response.content.read()
            found = await counted(s, "kvpipe_requests_total", "answered")
            assert found["kvpipe_first_tokens_shown_total",] == 1
            assert found["kvpipe_replaced_instances_total", "contradicted", "decode"] == 1

    run(scene)


def test_a_token_that_is_not_shown_is_not_counted():
    async def scene():
        async with stage(prefill=[prefilled()], decode=[answers()]) as s:
            await s.post(body=REQUEST)
            found = await counted(s, "kvpipe_requests_total", "answered")
            assert found["kvpipe_first_tokens_shown_total",] == 0

    run(scene)
