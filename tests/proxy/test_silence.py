"""A limit on silence is none on a transfer: what moves may take longer, in each direction."""

import asyncio
import socket

import orjson
import pytest
from aiohttp import web

from .harness import COMPLETIONS, REQUEST, SILENCE_S, answers, never_ends, run, stage, streams

LIMIT_S = 5.0
# Pieces that together take longer than the limit, each far less.
NUM_PIECES = 12
PAUSE_S = 0.5
# Much more than the buffer of a socket holds.
LARGE_BYTES = 16 << 20


async def in_pieces(body):
    size = len(body) // NUM_PIECES + 1
    for begin in range(0, len(body), size):
        await asyncio.sleep(PAUSE_S)
        yield body[begin : begin + size]


async def read_in_pieces(content, transport):
    """Reads with pauses; the kernel takes little meanwhile."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    body = bytearray()
    while not content.at_eof():
        until = len(body) + LARGE_BYTES // NUM_PIECES
        while len(body) < until and (piece := await content.readany()):
            body += piece
        await asyncio.sleep(PAUSE_S)
    return bytes(body)


def test_an_upload_that_moves_is_taken_however_long_it_lasts():
    async def scene():
        async with stage(client_timeout_s=LIMIT_S) as s:
            data = in_pieces(orjson.dumps(REQUEST))
            async with s.client.post(s.url + COMPLETIONS, data=data) as response:
                assert response.status == 200
            assert s.decode[0].bodies[0].items() >= REQUEST.items()

    run(scene)


def test_an_instance_that_takes_a_request_slowly_is_not_silent():
    async def scene():
        async def slow(request):
            return web.Response(body=b"{}")

        slow.read = lambda request: read_in_pieces(request.content, request.transport)
        async with stage(decode=[slow], silence_timeout_s=LIMIT_S) as s:
            body = REQUEST | {"prompt": "x" * LARGE_BYTES}
            assert (await s.post(body=body))[0] == 200
            assert s.decode[0].bodies[0]["prompt"] == body["prompt"]

    run(scene)


@pytest.mark.usefixtures("_each_scheme")
def test_an_instance_that_takes_nothing_of_a_request_is_silent():
    async def scene():
        async def stuck(request):
            raise AssertionError

        async def never(request):
            await asyncio.Event().wait()

        stuck.read = never
        async with stage(decode=[stuck], silence_timeout_s=LIMIT_S) as s:
            status, body, _ = await s.post(body=REQUEST | {"prompt": "x" * LARGE_BYTES})
            assert status == 504
            assert f"silent for {LIMIT_S:g} s (--silence-timeout)".encode() in body

    run(scene)


def test_an_instance_that_answers_slowly_is_not_silent():
    async def scene():
        answer = orjson.dumps({"id": "x" * 100})

        async def slow(request):
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            async for piece in in_pieces(answer):
                await response.write(piece)
            return response

        async with stage(decode=[slow], silence_timeout_s=LIMIT_S) as s:
            assert (await s.post())[:2] == (200, answer)

    run(scene)


def test_a_client_that_reads_an_answer_slowly_is_not_stalled():
    async def scene():
        answer = b"x" * LARGE_BYTES
        async with (
            stage(decode=[answers(body=answer)], client_timeout_s=LIMIT_S) as s,
            s.client.post(s.url + COMPLETIONS, json=REQUEST) as response,
        ):
            assert await read_in_pieces(response.content, response.connection.transport) == answer

    run(scene)


@pytest.mark.parametrize("begun", [(), (b"data: {}\n\n",)])
def test_the_error_for_a_silent_instance_names_the_limit_and_its_flag(begun):
    async def scene():
        behaviour = streams(*begun, then=never_ends) if begun else never_ends
        async with stage(decode=[behaviour], silence_timeout_s=SILENCE_S) as s:
            status, body, _ = await s.post(body=REQUEST | {"stream": True})
            assert status == (200 if begun else 504)
            assert f"silent for {SILENCE_S:g} s (--silence-timeout)".encode() in body

    run(scene)
