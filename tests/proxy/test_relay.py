import asyncio

import orjson
import pytest
from aiohttp import web

from .harness import CHAT, COMPLETIONS, EVENTS, LIMIT_S, REQUEST, SILENCE_S, answers, breaks_off, run, stage, streams

STREAMED = REQUEST | {"stream": True}
NUM_STREAMS = 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_passes_unchanged_with_its_content_type_and_the_handoff(path):
    async def scene():
        async with stage(decode=[streams(*EVENTS)]) as s:
            status, body, headers = await s.post(path, STREAMED)
            assert (status, body) == (200, b"".join(EVENTS))
            assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert headers["x-kvpipe-handoff"] == s.decode[0].handoffs[0]

    run(scene)


@pytest.mark.usefixtures("_each_scheme")
def test_each_chunk_reaches_the_client_before_the_instance_sends_the_next():
    async def scene():
        may_send = asyncio.Queue()

        async def decode(request):
            response = await streams()(request)
            for event in EVENTS:
                await response.write(event)
                await may_send.get()
            return response

        async with (
            stage(decode=[decode]) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            for event in EVENTS:
                assert await response.content.readany() == event
                may_send.put_nowait(None)
            assert await response.content.readany() == b""

    run(scene)


@pytest.mark.usefixtures("_each_scheme")
@pytest.mark.parametrize(("sent", "gap"), [(EVENTS[0], b""), (EVENTS[0] + b'data: {"te', b"\n\n")])
def test_decode_dying_in_mid_stream_gives_an_error_event_and_no_done(sent, gap):
    async def scene():
        async with stage(decode=[streams(sent, then=breaks_off), answers()]) as s:
            status, body, _ = await s.post(body=STREAMED)
            assert (status, body[: len(sent + gap)]) == (200, sent + gap)
            last = body[len(sent + gap) :]
            assert last.startswith(b"data: ")
            assert last.endswith(b"\n\n")
            error = orjson.loads(last.removeprefix(b"data: "))["error"]
            assert error["code"] == 502
            assert f"decode instance {s.decode[0].url}: failed in mid-stream" in error["message"]
            assert b"[DONE]" not in body
            await s.control.until_released()
            assert s.decode[1].bodies == []

    run(scene)


def test_decode_silent_in_mid_stream_gives_an_error_event():
    async def scene():
        async def stalls(request):
            await asyncio.sleep(5)

        async with stage(decode=[streams(EVENTS[0], then=stalls)], silence_timeout_s=SILENCE_S) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert b"no answer in time" in body
            await s.decode[0].aborted.wait()

    run(scene)


def test_decode_dying_in_an_answer_that_is_not_streamed_gives_502():
    async def scene():
        async def dies(request):
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            response.content_length = 100
            await response.prepare(request)
            await response.write(b'{"id":')
            return await breaks_off(request)

        async with stage(decode=[dies]) as s:
            status, body, headers = await s.post()
            assert (status, headers["Content-Type"]) == (502, "application/json")
            assert orjson.loads(body)["error"]["type"] == "BadGatewayError"
            await s.control.until_released()

    run(scene)


def test_many_streams_run_side_by_side():
    async def scene():
        num_open, all_open = 0, asyncio.Event()

        async def waits_for_all(request):
            nonlocal num_open
            num_open += 1
            if num_open == NUM_STREAMS:
                all_open.set()
            await all_open.wait()

        decode = [streams(EVENTS[0], then=waits_for_all)]
        async with stage(decode=decode, connect_timeout_s=LIMIT_S) as s:
            posts = (s.post(body=STREAMED) for _ in range(NUM_STREAMS))
            answers_seen = await asyncio.gather(*posts)
            assert {(status, body) for status, body, _ in answers_seen} == {(200, EVENTS[0])}
            handoffs = {headers["x-kvpipe-handoff"] for _, _, headers in answers_seen}
            assert len(handoffs) == NUM_STREAMS

    run(scene)
