"""Messages that the HTTP parser refuses, at the proxy and at its instances."""

import logging

import orjson
import pytest
from aiohttp import web

from kvpipe.proxy.connections import MAX_HEAD_BYTES
from kvpipe.proxy.headers import MAX_LINE_BYTES

from .harness import COMPLETIONS, REQUEST, run, stage

SECRET = "s3cr3t"
BODY = orjson.dumps(REQUEST)
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
POST = f"{HEAD}Content-Length: {len(BODY)}\r\n"
CHUNKED = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n"
TOO_LONG = SECRET * (MAX_LINE_BYTES // len(SECRET) + 1)
REFUSED = {
    "authorization": f"{POST}Authorization: Bearer {TOO_LONG}\r\n\r\n",
    "cookie": f"{POST}Cookie: {TOO_LONG}\r\n\r\n",
    "name of a header": f"{POST}{TOO_LONG}: 1\r\n\r\n",
    "url": f"POST {COMPLETIONS}?key={TOO_LONG} HTTP/1.1\r\nHost: x\r\n\r\n",
    "too many headers": POST + f"A: {SECRET}\r\n" * 300 + "\r\n",
    "all headers": (POST + f"A: {SECRET * 9000}\r\n" * 20)[: MAX_HEAD_BYTES + 1],
    "no HTTP": f"{SECRET} hello\r\n\r\n",
    "version": f"POST {COMPLETIONS} {SECRET}/9\r\n\r\n",
    "control character": f"{POST}Authorization: {SECRET}\x01\r\n\r\n",
    "no host": f"POST {COMPLETIONS} HTTP/1.1\r\nAuthorization: {SECRET}\r\n\r\n",
    "length": f"{HEAD}Content-Length: {SECRET}\r\n\r\n",
    "chunk size": f"{CHUNKED}{SECRET}\r\n\r\n",
    "chunk": f"{CHUNKED}1\r\n{SECRET}{SECRET}\r\n",
}


async def sent(s, raw):
    """The whole answer to these bytes."""
    reader, writer = await s.connect()
    try:
        writer.write(raw)
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_parser_refuses_gets_an_error_is_counted_once_and_no_header_is_shown(caplog, case):
    caplog.set_level(logging.INFO)

    async def scene():
        async with stage() as s:
            answer = await sent(s, REFUSED[case].encode())
            head, _, body = answer.partition(b"\r\n\r\n")
            status = int(head.split()[1])
            assert status in (400, 431)
            assert b"application/json" in head
            error = orjson.loads(body)["error"]
            assert error["code"] == status
            [line] = [record for record in caplog.records if record.name.startswith(("kvpipe", "aiohttp"))]
            text = logging.Formatter().format(line)
            assert text.startswith(f"request.end status={status} outcome=refused ")
            assert repr(error["message"]) in text
            assert "\n" not in text
            assert SECRET not in text + answer.decode()
            async with s.client.get(s.url + "/metrics") as metrics:
                assert 'kvpipe_requests_total{outcome="refused"} 1.0' in await metrics.text()
            assert s.prefill[0].bodies == s.decode[0].bodies == []

    run(scene)


@pytest.mark.parametrize(
    ("settings", "is_readable"),
    [
        ({"allowed_origins": ("*",)}, True),
        ({"allowed_origins": ("*",), "allow_credentials": True}, False),
        ({"allowed_origins": ("https://page.example",)}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("case", ["authorization", "no HTTP"])
def test_what_the_parser_refuses_can_be_read_by_pages_where_all_may_read(case, settings, is_readable):
    async def scene():
        async with stage(**settings) as s:
            head = (await sent(s, REFUSED[case].encode())).partition(b"\r\n\r\n")[0]
            assert (b"\r\nAccess-Control-Allow-Origin: *" in head) is is_readable

    run(scene)


@pytest.mark.usefixtures("_each_scheme")
def test_bodies_and_later_requests_of_a_connection_do_not_count_as_its_headers():
    async def scene():
        async with stage() as s:
            for _ in range(3):
                assert (await s.post(body=REQUEST | {"user": "x" * (2 * MAX_HEAD_BYTES)}))[0] == 200
            large = "".join(f"A{index}: {'x' * 60_000}\r\n" for index in range(12))
            request = f"{HEAD}Content-Length: {len(BODY)}\r\n{large}\r\n".encode() + BODY
            reader, writer = await s.connect()
            for _ in range(6):
                writer.write(request)
                assert (await reader.readuntil(b'{"id":"x"}')).startswith(b"HTTP/1.1 200 OK")
            writer.close()

    run(scene, 60)


def test_headers_and_urls_as_vllm_takes_them_reach_both_instances():
    async def scene():
        long = {"Authorization": "Bearer " + "x" * 60_000, "Cookie": "y" * 60_000}
        async with stage() as s:
            assert (await s.post(f"{COMPLETIONS}?key={'z' * 60_000}", headers=long))[0] == 200
            for seen in (s.prefill[0].headers[0], s.decode[0].headers[0]):
                assert {name: seen[name] for name in long} == long

    run(scene)


def responds(headers):
    async def behaviour(request):
        return web.Response(body=b"{}", headers=headers)

    return behaviour


def test_large_headers_of_an_answer_reach_the_client():
    async def scene():
        async with stage(decode=[responds({"X-Large": "x" * 60_000})]) as s:
            _, _, headers = await s.post(max_field_size=1 << 17)
            assert headers["X-Large"] == "x" * 60_000

    run(scene)


async def sends_no_http(request):
    request.transport.write(f"{SECRET}\r\n\r\n".encode())
    request.transport.close()
    return web.Response()


async def sends_a_control_character(request):
    request.transport.write(f"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nSet-Cookie: {SECRET}\x01\r\n\r\n".encode())
    request.transport.close()
    return web.Response()


async def sends_a_broken_chunk(request):
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    request.transport.write(f"{head}{SECRET}\r\n".encode())
    request.transport.close()
    return web.Response()


async def closes_amid_its_headers(request):
    request.transport.write(f"HTTP/1.1 200 OK\r\nSet-Cookie: {SECRET}\r\nX-Next: 1\r\n".encode())
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    "behaviour",
    [
        responds({"Set-Cookie": TOO_LONG}),
        sends_no_http,
        sends_a_control_character,
        sends_a_broken_chunk,
        closes_amid_its_headers,
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_answer_that_cannot_be_parsed_fails_the_request_and_no_header_of_it_is_shown(caplog, role, behaviour):
    caplog.set_level(logging.INFO)

    async def scene():
        async with stage(**{role: [behaviour]}, on_prefill_failure="fail") as s:
            status, body, _ = await s.post()
            assert status == 502
            assert "its answer" in orjson.loads(body)["error"]["message"]
            assert SECRET not in caplog.text + body.decode()

    run(scene)
