"""Browsers: the same rules as vLLM's middleware, for answers of instances, errors and streams."""

import orjson
import pytest
from aiohttp import web

from kvpipe import cli

from .harness import COMPLETIONS, EVENTS, answers, run, stage, streams

PAGE = "https://page.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}
ALLOWED = "Access-Control-Allow-Origin"


async def preflight(s, path=COMPLETIONS, **headers):
    async with s.client.options(s.url + path, headers=PREFLIGHT | headers) as response:
        return response.status, response.headers, await response.text()


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/health", "/nothing"])
def test_a_preflight_is_answered_for_every_path(path):
    async def scene():
        async with stage(allowed_origins=("*",)) as s:
            status, headers, _ = await preflight(s, path)
            assert status == 200
            assert headers[ALLOWED] == "*"
            assert "POST" in headers["Access-Control-Allow-Methods"]
            assert headers["Access-Control-Allow-Headers"] == "authorization, content-type"
            assert s.decode[0].headers == []

    run(scene)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({}, "--allowed-origins"),
        ({"allowed_origins": ("https://other.example",)}, "--allowed-origins"),
        ({"allowed_origins": (PAGE,), "allowed_methods": ("GET",)}, "--allowed-methods"),
        ({"allowed_origins": (PAGE,), "allowed_headers": ("x-request-id",)}, "--allowed-headers"),
    ],
)
def test_a_preflight_that_is_refused_names_the_flag_that_would_allow_it(settings, flag):
    async def scene():
        async with stage(**settings) as s:
            status, headers, body = await preflight(s)
            assert status == 400
            assert flag in orjson.loads(body)["error"]["message"]
            assert headers.get(ALLOWED, PAGE) != "*"

    run(scene)


def test_a_page_that_is_allowed_by_name_gets_its_name_and_no_other_page_does():
    async def scene():
        async with stage(allowed_origins=(PAGE,), allow_credentials=True) as s:
            _, headers, _ = await preflight(s)
            assert (headers[ALLOWED], headers["Access-Control-Allow-Credentials"]) == (PAGE, "true")
            assert "Origin" in headers["Vary"]
            _, _, headers = await s.post(headers={"Origin": PAGE})
            assert (headers[ALLOWED], headers["Access-Control-Allow-Credentials"]) == (PAGE, "true")
            assert "Origin" in headers["Vary"]
            _, _, headers = await s.post(headers={"Origin": "https://other.example"})
            assert ALLOWED not in headers
            assert "Origin" in headers["Vary"]

    run(scene)


def test_with_credentials_all_pages_get_their_own_name():
    async def scene():
        async with stage(allowed_origins=("*",), allow_credentials=True) as s:
            assert (await preflight(s))[1][ALLOWED] == PAGE
            assert (await s.post(headers={"Origin": PAGE}))[2][ALLOWED] == PAGE

    run(scene)


@pytest.mark.parametrize(
    ("path", "decode", "status"),
    [
        (COMPLETIONS, answers(), 200),
        (COMPLETIONS, streams(*EVENTS), 200),
        (COMPLETIONS, answers(400), 400),
        (COMPLETIONS, answers(500), 500),
        ("/nothing", answers(), 404),
    ],
)
def test_answers_streams_and_errors_can_be_read_by_an_allowed_page(path, decode, status):
    async def scene():
        async with stage(decode=[decode], allowed_origins=("*",)) as s:
            found, _, headers = await s.post(path, headers={"Origin": PAGE})
            assert (found, headers.getall(ALLOWED)) == (status, ["*"])

    run(scene)


def test_an_error_of_the_proxy_itself_can_be_read_by_an_allowed_page():
    async def scene():
        async with stage(allowed_origins=("*",)) as s:
            headers = {"Origin": PAGE}
            async with s.client.post(s.url + COMPLETIONS, data=b"{", headers=headers) as response:
                assert (response.status, response.headers[ALLOWED]) == (400, "*")

    run(scene)


def test_the_rules_are_the_proxys_and_not_those_of_an_instance():
    async def scene():
        async def allows_all(request):
            return web.Response(body=b"{}", headers={ALLOWED: "*"})

        async with stage(decode=[allows_all]) as s:
            assert ALLOWED not in (await s.post(headers={"Origin": PAGE}))[2]

    run(scene)


@pytest.mark.parametrize("text", ["*", "[1]", '{"a": 1}', '"*"'])
def test_a_list_of_origins_that_is_none_is_refused(capsys, text):
    with pytest.raises(SystemExit):
        cli.main(["proxy", "--allowed-origins", text])
    assert "must be a JSON list of strings" in capsys.readouterr().err
