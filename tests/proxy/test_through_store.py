"""Dispatch `store`: P and D share a KV store, and need not know each other."""

import asyncio
import itertools
import json

import pytest

from kvpipe import ConfigError
from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.transfer_params import load, save

from .harness import (
    CHAT,
    COMPLETIONS,
    DEAD,
    EVENTS,
    REQUEST,
    answers,
    breaks_off,
    describes,
    never_ends,
    run,
    stage,
    streams,
)
from .test_early_streams import STREAMED, prefilled
from .test_early_token import DONE, chunk, parsed, text_of

ONE_TOKEN = {"max_tokens": 1, "n": 1, "stream": False}


def without_params(bodies):
    """Bodies without `kv_transfer_params`, each of which saves a handoff of its own."""
    handoffs = [body["kv_transfer_params"]["kvpipe"]["handoff"] for body in bodies]
    assert [body["kv_transfer_params"] for body in bodies] == [save(handoff) for handoff in handoffs]
    assert len(set(handoffs)) == len(handoffs)
    return [{name: value for name, value in body.items() if name != "kv_transfer_params"} for body in bodies]


async def saves(request):
    """A P that saves its handoff in the store."""
    handoff = (await request.json())["kv_transfer_params"]["kvpipe"]["handoff"]
    return await answers(body=json.dumps({"id": "p", "kv_transfer_params": load(handoff)}).encode())(request)


def test_prefill_computes_one_token_and_then_decode_answers_without_a_handoff():
    async def scene():
        may_answer = asyncio.Event()

        async def waits(request):
            await may_answer.wait()
            return await answers()(request)

        async with stage([waits], [answers(body=b'{"id":"d"}')], dispatch="store") as s:
            posting = asyncio.create_task(s.post())
            await s.prefill[0].asked.wait()
            await asyncio.sleep(0.05)
            assert s.decode[0].bodies == []
            may_answer.set()
            status, body, headers = await posting
            assert (status, body) == (200, b'{"id":"d"}')
            assert "x-kvpipe-handoff" not in headers
            assert without_params(s.prefill[0].bodies) == [REQUEST | ONE_TOKEN]
            assert s.decode[0].bodies == [REQUEST]
            assert s.control.released == []

    run(scene)


def test_a_stream_of_decode_is_passed_on():
    async def scene():
        async with stage(decode=[streams(*EVENTS)], dispatch="store") as s:
            body = {"model": "m", "messages": [], "stream": True, "stream_options": {"include_usage": True}}
            status, answer, _ = await s.post(CHAT, body)
            assert (status, answer) == (200, b"".join(EVENTS))
            [prefilled] = without_params(s.prefill[0].bodies)
            assert prefilled == {"model": "m", "messages": [], "max_completion_tokens": 1} | ONE_TOKEN

    run(scene)


def test_a_refusal_of_prefill_is_the_clients():
    async def scene():
        async with stage([answers(422, b'{"error":"no"}')], dispatch="store") as s:
            status, body, _ = await s.post()
            assert (status, body) == (422, b'{"error":"no"}')
            assert s.decode[0].bodies == []

    run(scene)


def test_a_token_that_ends_the_request_is_the_answer():
    async def scene():
        stopped = answers(body=b'{"choices":[{"finish_reason":"stop","text":"."}]}')
        async with stage([stopped], dispatch="store") as s:
            status, body, _ = await s.post()
            assert status == 200
            assert b'"finish_reason":"stop"' in body
            assert s.decode[0].bodies == []

    run(scene)


@pytest.mark.parametrize("failing", [DEAD, breaks_off, answers(503)])
def test_another_prefill_is_asked_when_one_fails_and_decode_alone_when_none_is_left(failing):
    async def scene():
        async with stage([failing, answers()], [answers(body=b'{"id":"d"}')], dispatch="store") as s:
            assert (await s.post())[:2] == (200, b'{"id":"d"}')
            assert without_params(s.prefill[1].bodies) == [REQUEST | ONE_TOKEN]
        async with stage([failing], [answers(body=b'{"id":"d"}')], dispatch="store") as s:
            assert (await s.post())[:2] == (200, b'{"id":"d"}')
            assert s.decode[0].bodies == [REQUEST]
        async with stage([failing], dispatch="store", on_prefill_failure="fail") as s:
            assert (await s.post())[0] >= 500
            assert s.decode[0].bodies == []

    run(scene)


def test_another_decode_is_asked_when_one_fails_after_the_prefill_which_is_not_repeated():
    async def scene():
        async with stage(decode=[DEAD, answers(body=b'{"id":"d"}')], dispatch="store") as s:
            assert (await s.post())[:2] == (200, b'{"id":"d"}')
            assert len(s.prefill[0].bodies) == 1

    run(scene)


def test_decode_loads_what_prefill_reports_as_saved():
    async def scene():
        async with stage([saves], [answers(body=b'{"id":"d"}')], dispatch="store") as s:
            assert (await s.post())[:2] == (200, b'{"id":"d"}')
            handoff = s.prefill[0].bodies[0]["kv_transfer_params"]["kvpipe"]["handoff"]
            assert s.decode[0].bodies == [REQUEST | {"kv_transfer_params": load(handoff)}]

    run(scene)


@pytest.mark.parametrize(("failing", "is_loading"), [(DEAD, True), (breaks_off, False), (answers(503), False)])
def test_another_decode_loads_it_only_where_the_first_was_not_reached(failing, is_loading):
    async def scene():
        async with stage([saves], [failing, answers(body=b'{"id":"d"}')], dispatch="store") as s:
            assert (await s.post())[:2] == (200, b'{"id":"d"}')
            assert ("kv_transfer_params" in s.decode[1].bodies[0]) == is_loading

    run(scene)


def test_a_client_that_leaves_during_the_prefill_aborts_it():
    async def scene():
        async with stage([never_ends], dispatch="store") as s:
            posting = asyncio.create_task(s.post())
            await s.prefill[0].asked.wait()
            posting.cancel()
            await s.prefill[0].aborted.wait()
            assert s.decode[0].bodies == []

    run(scene)


def test_requests_of_several_sequences_go_to_decode_alone():
    async def scene():
        async with stage(dispatch="store") as s:
            assert (await s.post(COMPLETIONS, REQUEST | {"n": 2}))[0] == 200
            assert s.prefill[0].bodies == []

    run(scene)


def test_prefill_instances_need_no_control_address():
    instances = {"prefill": (Instance("http://a:1"),), "decode": (Instance("http://b:1"),)}
    assert ProxyConfig(**instances, dispatch="store").dispatch == "store"
    with pytest.raises(ConfigError, match="dispatch='store'"):
        ProxyConfig(**instances)


# --- the early token


@pytest.mark.parametrize("value", [1.0, 0.0])
def test_decode_gets_prefills_token_only_if_the_client_may_have_it_already(value):
    async def scene():
        decode = describes(streams(chunk("abcd"), DONE), value)
        async with stage([prefilled()], [decode], dispatch="store") as s:
            _, body, _ = await s.post(body=STREAMED)
            assert text_of(body) == "abcd"
            [handoff] = s.prefill[0].handoffs
            params = load(handoff, 7 if value else None)
            assert s.decode[0].bodies == [STREAMED | {"kv_transfer_params": params}]

    run(scene)


def test_a_decode_that_fails_before_its_stream_is_asked_again_whether_it_forces_tokens(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.descriptions._REFRESH_S", 1000.0)
    monkeypatch.setattr("kvpipe.proxy.descriptions._MIN_INTERVAL_S", 0.01)

    async def scene():
        is_read_again, num_read = asyncio.Event(), itertools.count(1)
        described = describes(streams(then=breaks_off))

        async def decode(request):
            if request.path == "/metrics" and next(num_read) > 1:
                is_read_again.set()
            return await described(request)

        async with stage([prefilled()], [decode, describes(streams(chunk("abcd"), DONE))], dispatch="store") as s:
            _, body, _ = await s.post(body=STREAMED)
            assert text_of(body) == "abcd"
            await is_read_again.wait()

    run(scene)


def test_a_stream_whose_decodes_all_contradict_ends_with_an_error():
    async def scene():
        decode = [describes(streams(chunk(text), DONE)) for text in "xy"]
        async with stage([prefilled()], decode, dispatch="store") as s:
            _, body, _ = await s.post(body=STREAMED)
            assert text_of(body[: body.rindex(b"data: ")]) == "ab"
            assert parsed(body)[-1]["error"]["code"] == 502

    run(scene)


@pytest.mark.parametrize(
    ("described", "path"),
    [
        (lambda decode: decode, COMPLETIONS),
        (lambda decode: describes(decode, 0.0), COMPLETIONS),
        (lambda decode: describes(decode, parser="olmo3"), CHAT),
    ],
)
def test_no_early_token_is_sent_where_decode_may_begin_with_something_else(described, path):
    async def scene():
        decode = streams(chunk("xy", path), DONE)
        async with stage([prefilled(path)], [described(decode)], dispatch="store") as s:
            _, body, _ = await s.post(path, STREAMED)
            assert body == chunk("xy", path) + DONE

    run(scene)


def test_with_early_token_off_decode_is_not_asked_what_it_forces_and_the_stream_is_its_own():
    async def scene():
        decode = streams(chunk("xy"), DONE)
        async with stage([prefilled()], [describes(decode)], dispatch="store", early_token=False) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert body == chunk("xy") + DONE
            assert len(s.decode[0].headers) == 1

    run(scene)
