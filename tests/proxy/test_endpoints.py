"""Endpoints that no handoff can answer: D answers them alone, with the client's own request."""

import logging

import orjson
import pytest
from aiohttp import web

from kvpipe.proxy.endpoints import ABOUT_INSTANCE, ALONE, AUDIO

from .harness import DEAD, answers, breaks_off, run, stage, streams

BODY = {"model": "m", "input": "hello", "prompt": "hello", "messages": [], "max_tokens": 1, "stream": False}
EVENTS = [b"event: response.created\ndata: {}\n\n", b"event: response.completed\ndata: {}\n\n"]
FORM = b'--limit\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n--\r\n--limit--\r\n'
ADMINISTRATION = [
    *("abort_requests", "collective_rpc", "pause", "reset_prefix_cache", "resume", "scale_elastic_ep", "server_info"),
    *("sleep", "start_profile", "update_weights", "v1/load_lora_adapter", "v1/responses/id", "v1/unload_lora_adapter"),
    *("wake_up", "inference/v1/generate", "invocations", "v1/chat/completions/render"),
]


@pytest.mark.parametrize("path", ALONE)
def test_decode_alone_answers_what_cannot_be_handed_off_and_log_and_metric_say_so(caplog, path):
    caplog.set_level(logging.INFO, "kvpipe")

    async def scene():
        async with stage(decode=[answers(body=b'{"object":"x"}')]) as s:
            status, body, headers = await s.post(path, BODY, headers={"Authorization": "Bearer k"})
            assert (status, body) == (200, b'{"object":"x"}')
            assert "x-kvpipe-handoff" not in headers
            assert s.decode[0].paths == [path]
            assert s.decode[0].bodies == [BODY]
            assert s.decode[0].headers[0]["Authorization"] == "Bearer k"
            assert s.prefill[0].headers == s.control.released == []
            assert f"path={path} status=200 outcome=answered" in caplog.text
            assert "alone=endpoint" in caplog.text
            async with s.client.get(s.url + "/metrics") as metrics:
                assert 'kvpipe_decode_alone_total{reason="endpoint"} 1.0' in await metrics.text()

    run(scene)


def test_a_stream_of_another_endpoint_passes_as_it_comes():
    async def scene():
        async with stage(decode=[streams(*EVENTS)]) as s:
            status, body, headers = await s.post("/v1/responses", BODY | {"stream": True})
            assert (status, body) == (200, b"".join(EVENTS))
            assert headers["Content-Type"].startswith("text/event-stream")

    run(scene)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/pooling"])
def test_a_clients_transfer_parameters_reach_no_endpoint(path):
    async def scene():
        params = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
        async with stage() as s:
            await s.post(path, BODY | params | {"vllm_xargs": params | {"a": 1}})
            assert s.decode[0].bodies == [BODY | {"vllm_xargs": {"a": 1}}]

    run(scene)


@pytest.mark.parametrize("failing", [DEAD, answers(500), breaks_off])
def test_another_decode_answers_an_endpoint_when_one_fails(failing):
    async def scene():
        async with stage(decode=[failing, answers(body=b"{}")]) as s:
            assert (await s.post("/v1/embeddings", BODY))[:2] == (200, b"{}")

    run(scene)


@pytest.mark.parametrize("path", AUDIO)
def test_a_form_with_a_file_reaches_decode_byte_by_byte(path):
    async def scene():
        forms = []

        async def transcribes(request):
            return web.json_response({"text": "x"})

        async def read(request):
            forms.append((request.headers["Content-Type"], await request.read()))
            return b"{}"

        transcribes.read = read
        async with stage(decode=[transcribes]) as s:
            headers = {"Content-Type": "multipart/form-data; boundary=limit"}
            async with s.client.post(s.url + path, data=FORM, headers=headers) as response:
                assert (response.status, await response.json()) == (200, {"text": "x"})
            assert forms == [(headers["Content-Type"], FORM)]

    run(scene)


@pytest.mark.parametrize("path", ABOUT_INSTANCE)
def test_an_instance_says_what_it_is(path):
    async def scene():
        async with stage(decode=[answers(body=b'{"version":"1"}')]) as s:
            async with s.client.get(s.url + path) as response:
                assert (response.status, await response.read()) == (200, b'{"version":"1"}')
            assert s.decode[0].paths == [path]

    run(scene)


@pytest.mark.parametrize("path", ADMINISTRATION)
def test_administration_of_instances_is_not_passed_on(path):
    async def scene():
        async with stage() as s:
            for method in ("POST", "GET"):
                async with s.client.request(method, f"{s.url}/{path}", json={}) as response:
                    assert response.status == 404
                    assert orjson.loads(await response.read())["error"]["code"] == 404
            assert s.prefill[0].headers == s.decode[0].headers == []

    run(scene)
