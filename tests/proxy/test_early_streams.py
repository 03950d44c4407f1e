"""P's token before D's stream, through a real proxy."""

import asyncio

import orjson
import pytest

from kvpipe.transfer_params import SaveParams, load, parse

from .harness import (
    CHAT,
    COMPLETIONS,
    REQUEST,
    RecordingControl,
    answers,
    breaks_off,
    describes,
    never_ends,
    run,
    stage,
    streams,
)
from .test_early_token import DONE, chunk, parsed, text_of

STREAMED = REQUEST | {"stream": True}
MODES = ["sequential", "just-in-time"]


def prefilled(path=COMPLETIONS, text="ab", token=7):
    """A P that reports its token, and what D needs to load where it saves its handoff in a store."""
    content = {"message": {"role": "assistant", "content": text}} if path == CHAT else {"text": text}
    body = {"id": "cmpl-1", "created": 5, "model": "m", "choices": [{"index": 0, "finish_reason": "length", **content}]}

    async def behaviour(request):
        asked = parse((await request.json())["kv_transfer_params"])
        is_saved = isinstance(asked, SaveParams)
        params = load(asked.handoff.hex(), token) if is_saved else {"kvpipe": {"first_token": token}}
        return await answers(body=orjson.dumps(body | {"kv_transfer_params": params}))(request)

    return behaviour


def held(*pieces, then=None):
    """Streams its headers at once, the rest when `go` is set; `then` as in `streams`."""
    go = asyncio.Event()

    async def behaviour(request):
        response = await streams()(request)
        await go.wait()
        for piece in pieces:
            await response.write(piece)
        if then is not None:
            await then(request)
        return response

    return behaviour, go


@pytest.mark.usefixtures("_each_scheme")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("dispatch", [*MODES, "store"])
def test_the_client_has_the_first_token_before_decodes_stream(dispatch, path):
    async def scene():
        decode, go = held(chunk("ab", path), chunk("cd", path), chunk("", path, "length"), DONE)
        async with (
            stage(prefill=[prefilled(path)], decode=[describes(decode)], dispatch=dispatch) as s,
            s.client.post(s.url + path, json=STREAMED) as response,
        ):
            shown = b""
            while text_of(shown) != "ab":
                shown += await response.content.readany()
            go.set()
            whole = shown + await response.content.read()
            assert text_of(whole) == "abcd"
            assert whole.endswith(DONE)
            assert {event["id"] for event in parsed(whole)} == {"cmpl-1"}

    run(scene)


NO_CHUNKS = [
    [b'data: {"choices": ' + choices + b"}\n\n"] for choices in (b"5", b"[5]", b'[{"text": 5}]', b'[{"text": ["a"]}]')
]


@pytest.mark.parametrize("dispatch", [*MODES, "store"])
@pytest.mark.parametrize("spoiled", [[chunk("xb"), DONE], [chunk("a"), chunk("x")], [chunk("a")], [], *NO_CHUNKS])
def test_a_decode_that_contradicts_is_replaced_by_one_that_gets_the_token(dispatch, spoiled):
    async def scene():
        first, go = held(*spoiled)
        second = streams(chunk("a"), chunk("bcd", finish_reason="length"), DONE)
        async with (
            stage(prefill=[prefilled()], decode=[describes(first), describes(second)], dispatch=dispatch) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            shown = await response.content.readany()
            assert text_of(shown) == "ab"
            go.set()
            assert text_of(shown + await response.content.read()) == "abcd"
            params = parse(s.decode[1].bodies[0]["kv_transfer_params"])
            assert (params.tokens, params.producer) == ((7,), "")
            assert params.handoff.hex() != s.decode[0].handoffs[0]

    run(scene)


@pytest.mark.parametrize("malformed", NO_CHUNKS)
def test_what_is_no_chunk_passes_unchanged_once_decode_has_spoken(malformed):
    async def scene():
        decode = streams(chunk("abc"), *malformed, chunk("d"), DONE)
        async with stage(prefill=[prefilled()], decode=[decode, decode]) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert malformed[0] in body
            assert s.decode[1].bodies == []

    run(scene)


def test_a_lone_decode_that_contradicts_ends_its_request_before_it_is_asked_again():
    async def scene():
        may_speak = asyncio.Event()

        async def contradicts_first(request):
            if len(s.decode[0].bodies) > 1:
                await s.decode[0].aborted.wait()
                return await streams(chunk("abcd"), DONE)(request)
            response = await streams()(request)
            await may_speak.wait()
            await response.write(chunk("xb"))
            return await never_ends(request)

        async with (
            stage(prefill=[prefilled()], decode=[contradicts_first]) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            shown = await response.content.readany()
            may_speak.set()
            assert text_of(shown + await response.content.read()) == "abcd"

    run(scene)


def test_a_decode_that_dies_before_its_stream_is_replaced_by_one_that_gets_the_token():
    async def scene():
        async with stage(prefill=[prefilled()], decode=[streams(then=breaks_off), streams(chunk("abcd"), DONE)]) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert text_of(body) == "abcd"
            assert s.decode[1].bodies[0]["kv_transfer_params"]["kvpipe"]["tokens"] == [7]

    run(scene)


def test_a_second_contradiction_ends_the_stream_with_an_error():
    async def scene():
        async with stage(prefill=[prefilled()], decode=[streams(chunk("x")), streams(chunk("y"))]) as s:
            _, body, _ = await s.post(body=STREAMED)
            *shown, last = parsed(body)
            assert [event["choices"][0]["text"] for event in shown] in (["ab"], [])
            assert shown == [] or last["error"]["code"] == 502

    run(scene)


def test_a_decode_that_dies_after_it_has_spoken_is_not_asked_again():
    async def scene():
        is_shown = asyncio.Event()

        async def dies(request):
            await is_shown.wait()
            await breaks_off(request)

        decode = [streams(chunk("abc"), then=dies), streams(chunk("abcd"), DONE)]
        async with (
            stage(prefill=[prefilled()], decode=decode) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            body = b""
            while text_of(body) != "abc":
                body += await response.content.readany()
            is_shown.set()
            body += await response.read()
            assert text_of(body[: body.rindex(b"data: ")]) == "abc"
            assert parsed(body)[-1]["error"]["code"] == 502
            assert s.decode[1].bodies == []

    run(scene)


def test_a_decode_that_ended_with_an_error_before_it_spoke_is_replaced():
    async def scene():
        error = b'data: {"error":{"code":500}}\n\n'
        async with stage(prefill=[prefilled()], decode=[streams(error, DONE), streams(chunk("abcd"), DONE)]) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert text_of(body) == "abcd"

    run(scene)


@pytest.mark.parametrize("dispatch", MODES)
def test_a_decode_that_dies_before_its_stream_is_replaced_without_an_early_token(dispatch):
    async def scene():
        async with stage(decode=[streams(then=breaks_off), streams(chunk("abcd"), DONE)], dispatch=dispatch) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert body == chunk("abcd") + DONE
            assert parse(s.decode[1].bodies[0]["kv_transfer_params"]).producer

    run(scene)


@pytest.mark.parametrize(
    ("description", "path"),
    [
        ({}, COMPLETIONS),
        ({"forces_first_tokens": False}, COMPLETIONS),
        ({"forces_first_tokens": True, "reasoning_parser": "olmo3"}, CHAT),
        (OSError("not reached"), COMPLETIONS),
    ],
)
@pytest.mark.parametrize("dispatch", MODES)
def test_no_early_token_is_sent_where_decode_may_begin_with_something_else(dispatch, description, path):
    async def scene():
        decode = streams(chunk("xy", path), DONE)
        control = RecordingControl()
        control.description = description
        async with stage(prefill=[prefilled(path)], decode=[decode], dispatch=dispatch, control=control) as s:
            _, body, _ = await s.post(path, STREAMED)
            assert body == chunk("xy", path) + DONE

    run(scene)


@pytest.mark.parametrize("dispatch", MODES)
def test_with_early_token_off_the_stream_begins_with_decodes_first_event(dispatch):
    async def scene():
        decode, go = held(chunk("ab"), chunk("cd", finish_reason="length"), DONE)
        async with stage(prefill=[prefilled()], decode=[decode], dispatch=dispatch, early_token=False) as s:
            asking = asyncio.create_task(s.client.post(s.url + COMPLETIONS, json=STREAMED))
            await s.decode[0].asked.wait()
            await asyncio.wait({asking}, timeout=0.3)
            assert not asking.done()
            go.set()
            async with await asking as response:
                assert await response.read() == b"".join([chunk("ab"), chunk("cd", finish_reason="length"), DONE])

    run(scene)


def test_no_early_token_is_sent_where_the_stream_is_not_plain():
    async def scene():
        decode, go = held(chunk("ab"), DONE)
        async with stage(prefill=[prefilled()], decode=[decode]) as s:
            posting = asyncio.create_task(s.post(body=STREAMED | {"stop": ["b"]}))
            await s.decode[0].asked.wait()
            assert not posting.done()
            go.set()
            _, body, _ = await posting
            assert body == chunk("ab") + DONE

    run(scene)


def test_a_prefill_that_fails_beside_a_waiting_decode_is_replaced():
    async def scene():
        async def waits(_):
            await asyncio.Event().wait()

        async def waits_first(request):
            is_first = len(s.decode[0].bodies) == 1
            return await (streams(then=waits) if is_first else streams(chunk("abcd"), DONE))(request)

        async def fails(request):
            await s.decode[0].asked.wait()
            return await answers(503)(request)

        async with stage(prefill=[fails, prefilled()], decode=[waits_first], dispatch="just-in-time") as s:
            _, body, _ = await s.post(body=STREAMED)
            assert text_of(body) == "abcd"
            await s.decode[0].aborted.wait()

    run(scene)


@pytest.mark.usefixtures("_each_scheme")
def test_a_client_that_leaves_after_the_first_token_ends_the_request():
    async def scene():
        decode, _ = held()
        async with stage(prefill=[prefilled()], decode=[decode]) as s:
            async with s.client.post(s.url + COMPLETIONS, json=STREAMED) as response:
                assert text_of(await response.content.readany()) == "ab"
            await s.decode[0].aborted.wait()
            await s.control.until_released()

    run(scene)
