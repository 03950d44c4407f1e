"""One log line and the times of a request, and the usage in its answer."""

import logging
import re
from types import SimpleNamespace

import orjson
import pytest

from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.request_record import RequestRecord
from kvpipe.proxy.usage import Usage, read_tokens, with_cached_tokens

from .harness import CHAT, COMPLETIONS, DEAD, EVENTS, REQUEST, answers, breaks_off, run, stage, streams
from .test_early_streams import STREAMED, prefilled
from .test_early_token import DONE, chunk, text_of
from .test_metrics import metrics

# As vLLM 0.32 writes them, with --enable-prompt-tokens-details.
USAGE = {
    "prompt_tokens": 50,
    "total_tokens": 58,
    "completion_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 48, "created_cache_tokens": None, "multimodal_tokens": None},
}
USAGE_EVENT = b"data: " + orjson.dumps({"choices": [], "usage": USAGE}) + b"\n\n"
TOLD = orjson.dumps({"choices": [{"text": '"cached_tokens":9'}], "usage": USAGE})


def prefill_usage(num_cached):
    usage = {"prompt_tokens": 50, "prompt_tokens_details": {"cached_tokens": num_cached}}
    return orjson.dumps({"usage": usage})


def lines(caplog):
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request.end")]
    return [dict(re.findall(r"(\w+)=('[^']*'|\"[^\"]*\"|\S+)", line)) for line in told]


def logged(caplog, scene):
    with caplog.at_level(logging.INFO, "kvpipe.proxy"):
        run(scene)
    [line] = lines(caplog)
    return line


def test_a_request_has_one_log_line_with_its_instances_tokens_and_times(caplog):
    seen = {}

    async def scene():
        async with stage([answers(body=prefill_usage(16))], [answers(body=TOLD)]) as s:
            _, _, headers = await s.post(headers={"X-Request-Id": "mine " + "x" * 100})
            seen.update(handoff=headers["x-kvpipe-handoff"], prefill=s.prefill[0].url, decode=s.decode[0].url)

    line = logged(caplog, scene)
    assert float(line.pop("duration_ms")) > 0
    assert line == seen | {
        "request_id": f"'mine {'x' * 59}'",
        "path": COMPLETIONS,
        "status": "200",
        "outcome": "answered",
        "attempts": "1",
        "prompt_tokens": "50",
        "cached_tokens": "16",
        "output_tokens": "8",
    }


def test_the_log_line_of_a_stream_has_its_time_to_first_token(caplog):
    async def scene():
        async with stage(decode=[streams(EVENTS[0], USAGE_EVENT, DONE)]) as s:
            await s.post(CHAT, STREAMED)

    line = logged(caplog, scene)
    assert 0 < float(line["ttft_ms"]) <= float(line["duration_ms"])
    assert (line["path"], line["output_tokens"]) == (CHAT, "8")


@pytest.mark.parametrize(
    ("decode", "facts"),
    [
        ([answers(404)], {"outcome": "refused", "status": "404", "attempts": "1"}),
        ([DEAD, DEAD], {"outcome": "failed", "status": "502", "attempts": "2"}),
        ([answers(503), answers()], {"outcome": "answered", "status": "200", "attempts": "2"}),
        ([streams(EVENTS[0], then=breaks_off)], {"outcome": "broken_off", "status": "200", "attempts": "1"}),
    ],
)
def test_the_log_line_says_how_a_request_ended_and_what_it_took(caplog, decode, facts):
    async def scene():
        async with stage(decode=decode) as s:
            await s.post()

    line = logged(caplog, scene)
    assert line.items() >= facts.items()
    assert ("error" in line) == (facts["outcome"] in ("failed", "broken_off"))


def test_a_body_that_is_none_has_a_log_line_too(caplog):
    async def scene():
        async with stage() as s, s.client.post(s.url + COMPLETIONS, data=b"{"):
            pass

    assert logged(caplog, scene).items() >= {"outcome": "refused", "status": "400", "attempts": "0"}.items()


def test_a_streams_first_bytes_and_the_distance_of_its_events_are_measured():
    async def scene():
        async with stage(decode=[streams(*EVENTS)]) as s:
            await s.post(body=STREAMED)
            found = await metrics(s)
            assert found["kvpipe_time_to_first_token_seconds_count",] == 1

    run(scene)


def test_events_that_arrive_together_share_their_distance_and_the_end_mark_is_none(monkeypatch):
    now_s = iter([100.0, 101.0, 104.0, 105.0, 106.0])
    monkeypatch.setattr("kvpipe.proxy.request_record.time", SimpleNamespace(monotonic=lambda: next(now_s)))
    measured = Metrics()
    record = RequestRecord("/", measured)
    for piece in (EVENTS[0], b"data: {", b"}\n\n" + EVENTS[1], EVENTS[1], DONE):
        record.sent(piece)
    text = measured.response().body.decode()
    assert "kvpipe_inter_token_latency_seconds_count 3.0" in text
    assert "kvpipe_inter_token_latency_seconds_sum 5.0" in text
    assert 'kvpipe_inter_token_latency_seconds_bucket{le="2.5"} 3.0' in text


def test_an_answer_that_is_not_streamed_has_no_time_to_first_token():
    async def scene():
        async with stage() as s:
            await s.post()
            assert (await metrics(s))["kvpipe_time_to_first_token_seconds_count",] == 0

    run(scene)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_client_sees_the_cached_tokens_that_prefill_found(path):
    async def scene():
        async with stage([answers(body=prefill_usage(16))], [answers(body=TOLD)]) as s:
            _, body, _ = await s.post(path)
            assert body == TOLD.replace(b'"cached_tokens":48', b'"cached_tokens":16')

    run(scene)


@pytest.mark.parametrize("prefill", [answers(), answers(body=b'{"usage":{"prompt_tokens_details":null}}')])
def test_the_usage_stays_where_prefill_says_nothing(prefill):
    async def scene():
        async with stage([prefill], [answers(body=TOLD)]) as s:
            assert (await s.post())[1] == TOLD

    run(scene)


def test_the_cached_tokens_of_a_decode_that_works_alone_stay():
    async def scene():
        async with stage([answers(body=prefill_usage(16))], [answers(body=TOLD)]) as s:
            assert (await s.post(body=REQUEST | {"n": 2}))[1] == TOLD

    run(scene)


def test_the_cached_tokens_of_a_decode_that_works_alone_after_a_handoff_failed_stay():
    async def scene():
        async def prefill(request):
            is_first = len(s.prefill[0].bodies) == 1
            return await (answers(body=prefill_usage(16)) if is_first else answers(503))(request)

        async with stage([prefill], [answers(503), answers(body=TOLD)]) as s:
            assert (await s.post())[1] == TOLD

    run(scene)


@pytest.mark.parametrize("has_early_token", [False, True])
def test_the_usage_event_of_a_stream_has_the_cached_tokens_that_prefill_found(has_early_token):
    async def scene():
        async def prefill(request):
            answer = orjson.loads((await prefilled()(request)).body) if has_early_token else {"choices": []}
            return await answers(body=orjson.dumps(answer | orjson.loads(prefill_usage(16))))(request)

        async with stage([prefill], [streams(chunk("abcd"), USAGE_EVENT[:40], USAGE_EVENT[40:], DONE)]) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert text_of(body) == "abcd"
            assert b'"cached_tokens":16' in body
            assert body.endswith(DONE)

    run(scene)


@pytest.mark.parametrize("piece_len", [1, 7, 1000])
def test_a_usage_event_is_corrected_however_the_stream_is_cut(piece_len):
    stream = EVENTS[0] + USAGE_EVENT + DONE + b"rest"
    usage = Usage()
    usage.prefilled(50, 3)
    pieces = [stream[at : at + piece_len] for at in range(0, len(stream), piece_len)]
    corrected = b"".join(usage.feed(piece) for piece in pieces) + usage.end()
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (50, 3, 8)
    assert corrected == stream.replace(b'"cached_tokens":48', b'"cached_tokens":3')


def test_an_event_without_an_end_is_not_kept_back_for_ever():
    usage = Usage()
    usage.prefilled(50, 3)
    assert usage.feed(b"x" * (1 << 20)) == b""
    assert usage.feed(b"y") == b"x" * (1 << 20) + b"y"


def test_tokens_are_read_from_the_usage_and_not_from_the_text():
    text = orjson.dumps({"choices": [{"text": '"usage":{"prompt_tokens":1,"completion_tokens":2}'}], "usage": USAGE})
    assert read_tokens(text) == (50, 8)
    assert read_tokens(b'{"usage":null}') is None
    assert with_cached_tokens(b'{"text":"\\"cached_tokens\\":48"}', 3) == b'{"text":"\\"cached_tokens\\":48"}'
