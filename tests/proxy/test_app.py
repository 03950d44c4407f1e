import gzip

import orjson
import pytest
from aiohttp import web

from kvpipe.exceptions import ConnectError

from .harness import COMPLETIONS, DEAD, REQUEST, SILENCE_S, answers, never_ends, run, stage

HANDOFF = "0123456789abcdef" * 2


async def get(s, path):
    async with s.client.get(s.url + path) as response:
        return response.status, orjson.loads(await response.read())


def test_health_is_200_when_one_prefill_and_one_decode_answer_theirs():
    async def scene():
        async with stage([DEAD, answers()], [answers(503), answers()]) as s:
            status, report = await get(s, "/health")
            assert status == 200
            assert report["prefill"][s.prefill[0].url].startswith("cannot connect")
            assert report["decode"] == {s.decode[0].url: "answered 503", s.decode[1].url: "ok"}

    run(scene)


@pytest.mark.parametrize(("behaviour", "reason"), [(DEAD, "cannot connect"), (never_ends, "no answer in time")])
def test_health_is_503_and_names_who_does_not_answer(behaviour, reason):
    async def scene():
        async with stage(decode=[behaviour], connect_timeout_s=SILENCE_S) as s:
            status, report = await get(s, "/health")
            assert (status, report["status"]) == (503, "unavailable")
            assert report["prefill"] == {s.prefill[0].url: "ok"}
            assert report["decode"][s.decode[0].url].startswith(reason)

    run(scene)


@pytest.mark.parametrize(
    ("on_prefill_failure", "expected"), [("decode", (200, "degraded")), ("fail", (503, "unavailable"))]
)
def test_health_without_a_prefill_says_whether_decode_answers_alone(on_prefill_failure, expected):
    async def scene():
        async with stage([DEAD], on_prefill_failure=on_prefill_failure) as s:
            status, report = await get(s, "/health")
            assert (status, report["status"]) == expected
            assert report["decode"] == {s.decode[0].url: "ok"}
            assert (await s.post())[0] == (200 if status == 200 else 502)

    run(scene)


def test_models_come_from_a_decode_instance_that_answers():
    async def scene():
        models = {"object": "list", "data": [{"id": "m"}]}
        async with stage(decode=[DEAD, answers(body=orjson.dumps(models))]) as s:
            assert await get(s, "/v1/models") == (200, models)
            assert s.prefill[0].headers == []

    run(scene)


def test_models_are_not_asked_of_another_decode_after_a_time_out():
    async def scene():
        async with stage(decode=[never_ends, never_ends], silence_timeout_s=SILENCE_S) as s:
            async with s.client.get(s.url + "/v1/models") as response:
                assert response.status == 504
            assert [decode.asked.is_set() for decode in s.decode].count(True) == 1

    run(scene)


def test_status_is_decodes_result_of_the_handoff():
    async def scene():
        async with stage([answers()] * 2, [answers()] * 2) as s:
            s.control.results = {s.decode[0].control: {"result": "full"}}
            _, _, headers = await s.post()
            answer = await get(s, f"/status/{headers['x-kvpipe-handoff']}")
            assert answer == (200, {"result": "full"})
            assert set(s.control.asked) == {s.decode[0].control}

    run(scene)


@pytest.mark.parametrize("decodes_result", [None, ConnectError("refused")])
def test_status_fall_back_to_prefills_result(decodes_result):
    async def scene():
        async with stage([answers()] * 2, [answers()] * 2) as s:
            s.control.results = {
                s.decode[0].control: decodes_result,
                s.prefill[0].control: {"result": "released"},
            }
            _, _, headers = await s.post()
            answer = await get(s, f"/status/{headers['x-kvpipe-handoff']}")
            assert answer == (200, {"result": "released"})
            assert set(s.control.asked) == {s.decode[0].control, s.prefill[0].control}

    run(scene)


def test_status_of_an_unknown_handoff_is_404_and_no_instance_is_asked():
    async def scene():
        async with stage([answers()] * 2) as s:
            status, body = await get(s, f"/status/{HANDOFF}")
            assert (status, body["error"]["type"]) == (404, "NotFoundError")
            assert s.control.asked == []

    run(scene)


def test_status_is_502_when_those_who_could_know_are_not_reached():
    async def scene():
        async with stage() as s:
            s.control.results = {s.decode[0].control: ConnectError("refused")}
            _, _, headers = await s.post()
            status, body = await get(s, f"/status/{headers['x-kvpipe-handoff']}")
            assert status == 502
            assert f"{s.decode[0].control}: refused" in body["error"]["message"]

    run(scene)


@pytest.mark.parametrize("raw", [b"{", b"[]"])
def test_a_body_that_is_no_json_object_gives_400(raw):
    async def scene():
        async with stage() as s:
            async with s.client.post(s.url + COMPLETIONS, data=raw) as response:
                error = orjson.loads(await response.read())["error"]
                assert (response.status, error["type"]) == (400, "BadRequestError")
            assert s.prefill[0].bodies == s.decode[0].bodies == []

    run(scene)


def test_a_body_that_is_nested_too_deeply_to_be_passed_on_gives_400():
    async def scene():
        async with stage() as s:
            raw = b'{"model": "m", "prompt": "a", "x": ' + b"[" * 600 + b"]" * 600 + b"}"
            async with s.client.post(s.url + COMPLETIONS, data=raw) as response:
                assert (response.status, orjson.loads(await response.read())["error"]["code"]) == (400, 400)

    run(scene)


def test_a_body_with_a_wrong_content_encoding_gives_400():
    async def scene():
        async with stage() as s:
            headers = {"Content-Encoding": "gzip"}
            async with s.client.post(s.url + COMPLETIONS, data=b"{}", headers=headers) as response:
                assert response.status == 400

    run(scene)


def test_a_compressed_body_reaches_the_instances_as_plain_json():
    async def scene():
        async with stage() as s:
            headers = {"Content-Encoding": "gzip"}
            data = gzip.compress(orjson.dumps(REQUEST))
            async with s.client.post(s.url + COMPLETIONS, data=data, headers=headers) as response:
                assert response.status == 200
            assert s.decode[0].bodies[0].items() >= REQUEST.items()

    run(scene)


def test_an_instances_compressed_answer_passes_unchanged():
    async def scene():
        packed = gzip.compress(b'{"id":"d"}')

        async def compressed(request):
            return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

        async with stage(decode=[compressed]) as s:
            assert (await s.post())[:2] == (200, b'{"id":"d"}')
            async with s.client.get(s.url + "/v1/models") as response:
                assert response.headers["Content-Encoding"] == "gzip"

    run(scene)


def test_a_body_over_the_limit_gives_413():
    async def scene():
        async with stage(max_body_bytes=100) as s:
            status, body, _ = await s.post(body=REQUEST | {"prompt": "x" * 100})
            assert status == 413
            assert orjson.loads(body)["error"]["code"] == 413
            assert b"more than 100 bytes (--max-body-bytes)" in body

    run(scene)


def test_bodies_of_several_mebibytes_pass():
    async def scene():
        prompt = "x" * (3 << 20)
        async with stage() as s:
            assert (await s.post(body=REQUEST | {"prompt": prompt}))[0] == 200
            assert s.prefill[0].bodies[0]["prompt"] == s.decode[0].bodies[0]["prompt"] == prompt

    run(scene)


def test_a_client_that_does_not_send_its_body_gets_408():
    async def scene():
        async def half():
            yield b"{"
            await never_ends(None)

        async with (
            stage(client_timeout_s=0.1) as s,
            s.client.post(s.url + COMPLETIONS, data=half()) as response,
        ):
            assert response.status == 408
            assert "--client-timeout" in orjson.loads(await response.read())["error"]["message"]

    run(scene)


def test_unknown_paths_and_methods_give_errors_in_openais_form():
    async def scene():
        async with stage() as s:
            for path, expected in (("/v1/nothing", 404), (COMPLETIONS, 405), ("/status/x", 404)):
                status, body = await get(s, path)
                assert (status, body["error"]["code"]) == (expected, expected)

    run(scene)


def test_credentials_and_trace_ids_reach_both_instances_and_connection_headers_none():
    async def scene():
        passed = {"Authorization": "Bearer k", "X-Request-Id": "r", "traceparent": "00-1-2-01"}
        async with stage() as s:
            await s.post(headers=passed | {"Keep-Alive": "9", "Accept-Encoding": "br"})
            for seen in (s.prefill[0].headers[0], s.decode[0].headers[0]):
                assert {name: seen[name] for name in passed} == passed
                assert seen["Content-Type"] == "application/json"
                assert "Keep-Alive" not in seen
                assert seen["Accept-Encoding"] == "identity"

    run(scene)
