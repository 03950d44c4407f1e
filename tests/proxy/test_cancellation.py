"""A client that leaves, at every stage: nothing it caused may go on."""

import asyncio

import pytest

from .harness import COMPLETIONS, EVENTS, REQUEST, answers, never_ends, run, stage, streams

STREAMED = REQUEST | {"stream": True}


async def leave(posting):
    posting.cancel()
    await asyncio.wait({posting})


@pytest.mark.parametrize("body", [REQUEST, STREAMED])
def test_leaving_during_prefill_aborts_prefill_and_releases_the_handoff(body):
    async def scene():
        async with stage([never_ends, answers()]) as s:
            posting = asyncio.create_task(s.post(body=body))
            await s.prefill[0].asked.wait()
            await leave(posting)
            await s.prefill[0].aborted.wait()
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, s.prefill[0].handoffs[0])]
            assert s.prefill[1].bodies == s.decode[0].bodies == []

    run(scene)


@pytest.mark.usefixtures("_each_scheme")
@pytest.mark.parametrize("body", [REQUEST, STREAMED])
def test_leaving_before_decodes_first_byte_aborts_decode_and_releases_the_handoff(body):
    async def scene():
        async with stage(decode=[never_ends]) as s:
            posting = asyncio.create_task(s.post(body=body))
            await s.decode[0].asked.wait()
            await leave(posting)
            await s.decode[0].aborted.wait()
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, s.decode[0].handoffs[0])]

    run(scene)


@pytest.mark.usefixtures("_each_scheme")
def test_leaving_in_mid_stream_aborts_decode_and_releases_the_handoff():
    async def scene():
        async with stage(decode=[streams(EVENTS[0], then=never_ends)]) as s:
            response = await s.client.post(s.url + COMPLETIONS, json=STREAMED)
            assert await response.content.readany() == EVENTS[0]
            response.close()
            await s.decode[0].aborted.wait()
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, s.decode[0].handoffs[0])]

    run(scene)


def test_leaving_during_concurrent_dispatch_aborts_both_and_releases_the_handoff():
    async def scene():
        async with stage([never_ends], [never_ends], dispatch="just-in-time") as s:
            posting = asyncio.create_task(s.post())
            await s.prefill[0].asked.wait()
            await s.decode[0].asked.wait()
            await leave(posting)
            await s.prefill[0].aborted.wait()
            await s.decode[0].aborted.wait()
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, s.prefill[0].handoffs[0])]

    run(scene)


def test_leaving_during_a_request_for_decode_alone_aborts_it():
    async def scene():
        async with stage(decode=[never_ends]) as s:
            posting = asyncio.create_task(s.post(body=REQUEST | {"n": 2}))
            await s.decode[0].asked.wait()
            await leave(posting)
            await s.decode[0].aborted.wait()
            assert s.control.released == []

    run(scene)


@pytest.mark.usefixtures("_each_scheme")
def test_a_client_that_reads_nothing_loses_its_answer():
    async def scene():
        async def floods(request):
            response = await streams()(request)
            while True:
                await response.write(b"data: " + b"x" * 65536 + b"\n\n")

        async with stage(decode=[floods], client_timeout_s=0.2) as s:
            reader, writer = await s.connect()
            body = b'{"prompt":"x","stream":true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            reader._transport.pause_reading()
            writer.write(head % len(body) + body)
            await s.decode[0].aborted.wait()
            await s.control.until_released()
            writer.transport.abort()

    run(scene)


def test_an_answer_from_all_of_prefills_kv_leaves_nothing_to_release():
    async def scene():
        async with stage(decode=[streams(*EVENTS)]) as s:
            s.control.results = {s.decode[0].control: {"result": "full"}}
            assert (await s.post(body=STREAMED))[1] == b"".join(EVENTS)
            await s.control.until_asked()
        assert s.control.released == []  # it waits for what is under way before it stops

    run(scene)


def test_a_prefill_beside_decode_that_decode_did_not_need_is_aborted_after_a_grace_time(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.handoff.PREFILL_GRACE_S", 0.05)

    async def scene():
        async def decode(request):
            await s.prefill[0].asked.wait()
            return await answers()(request)

        async with stage([never_ends], [decode], dispatch="just-in-time") as s:
            s.control.results = {s.decode[0].control: {"result": "full"}}
            assert (await s.post())[0] == 200
            await s.prefill[0].aborted.wait()
            await s.control.until_released()

    run(scene)
