"""API keys of the proxy's clients, and the one that it sends to instances."""

import asyncio
import logging
import re

import aiohttp
import orjson
import pytest
from multidict import CIMultiDict

from kvpipe.cli import main
from kvpipe.exceptions import ConfigError
from kvpipe.proxy import Instance, ProxyConfig, serve
from kvpipe.proxy.api_keys import ApiKeys, instances_authorization
from kvpipe.proxy.endpoints import ALONE, AUDIO, HANDED_OFF
from kvpipe.proxy.instances import QUEUE
from kvpipe.proxy.server import _warn, create_runner, listen
from kvpipe.proxy.upstream import Answer

from .harness import COMPLETIONS, DEAD, REQUEST, RecordingControl, StandIn, answers, run, stage, streams

KEY, NEXT, WRONG, OF_INSTANCES = "sk-current-3f", "sk-next-a9", "sk-wrong-77", "sk-of-instances-c1"
MODELS = b'{"data": [{"id": "m", "max_model_len": 4096}]}'


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path, monkeypatch):
    """It is looked at whenever it is used."""
    monkeypatch.setattr("kvpipe.proxy.files._CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "keys"
    path.write_text(f"# of the proxy's clients\n{KEY}\n\n  {NEXT}  \n")
    return path


@pytest.fixture
def instances_key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(OF_INSTANCES)
    return path


@pytest.mark.parametrize(
    ("authorization", "is_accepted"),
    [
        (f"Bearer {KEY}", True),
        (f"bearer {NEXT}", True),
        (f"Bearer {WRONG}", False),
        (f"Bearer {KEY[:-1]}", False),
        (f"Bearer {KEY} ", False),
        (f"Basic {KEY}", False),
        (KEY, False),
        ("Bearer ", False),
        ("Bearer # of the proxy's clients", False),
        ("Bearer \udcff", False),
        ("", False),
    ],
)
def test_a_client_needs_one_of_the_keys_in_the_file(key_file, authorization, is_accepted):
    assert ApiKeys(key_file).accepts(authorization) is is_accepted


def test_a_request_without_a_valid_key_gets_401_in_openais_form_and_reaches_no_instance(key_file, caplog):
    caplog.set_level(logging.INFO)

    async def scene():
        async with stage(api_key_file=key_file) as s:
            for headers in ({}, bearer(WRONG)):
                status, body, head = await s.post(headers=headers)
                assert (status, head["WWW-Authenticate"], head["Content-Type"]) == (401, "Bearer", "application/json")
                assert orjson.loads(body)["error"] == {
                    "message": "no valid API key: send one of the proxy's as Authorization: Bearer KEY",
                    "type": "UnauthorizedError",
                    "param": None,
                    "code": 401,
                }
            assert s.prefill[0].bodies == s.decode[0].bodies == []
            assert caplog.text.count(f"request.end path={COMPLETIONS} status=401 outcome=refused") == 2
            async with s.client.get(s.url + "/metrics") as metrics:
                assert 'kvpipe_requests_total{outcome="refused"} 2.0' in await metrics.text()
            assert (await s.post(headers=bearer(NEXT)))[0] == 200

    run(scene)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/ping", f"/status/{'0' * 32}"])
def test_probes_and_reports_need_no_key(key_file, path):
    async def scene():
        async with stage(api_key_file=key_file) as s, s.client.get(s.url + path) as response:
            assert response.status in (200, 404)

    run(scene)


def test_everything_else_needs_a_key_whatever_its_spelling(key_file):
    asked = [("POST", path) for path in (*HANDED_OFF, *ALONE, *AUDIO)]
    asked += [("GET", "/v1/models"), ("GET", "/none"), ("POST", "/health"), ("GET", "/status/x"), ("GET", "//health")]
    asked += [("POST", "/%76%31/completions"), ("POST", "/health/../v1/completions")]

    async def scene():
        async with stage(api_key_file=key_file) as s:
            for method, path in asked:
                url = aiohttp.client.URL(s.url + path, encoded=True)
                async with s.client.request(method, url) as response:
                    assert response.status == 401, path
            assert s.decode[0].paths == s.prefill[0].paths == []

    run(scene)


def test_a_preflight_of_a_browser_needs_no_key_and_its_page_may_read_the_401(key_file):
    async def scene():
        async with stage(api_key_file=key_file, allowed_origins=("https://page.example",)) as s:
            asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
            async with s.client.options(s.url + COMPLETIONS, headers=asks) as response:
                assert response.status == 200
            status, _, head = await s.post(headers={"Origin": "https://page.example"})
            assert (status, head["Access-Control-Allow-Origin"]) == (401, "https://page.example")

    run(scene)


def test_a_changed_file_counts_without_a_restart(key_file, caplog):
    caplog.set_level(logging.INFO)
    keys = ApiKeys(key_file)
    key_file.write_text(f"{NEXT}\n{WRONG}\n")
    accepted = [key for key in (KEY, NEXT, WRONG) if keys.accepts(f"Bearer {key}")]
    assert accepted == [NEXT, WRONG]
    assert [record.getMessage() for record in caplog.records] == [f"file.reloaded files={key_file}"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no key; write one a line into it"),
        (b"# none\n \n", "has no key; write one a line into it"),
        (f"{KEY} {NEXT}\n".encode(), "line 1 is no key: expected ASCII without spaces, one key a line; # begins"),
        (f"{KEY}\n\n{NEXT}é".encode(), "line 3 is no key: expected ASCII without spaces, one key a line; # begins"),
        (b"\xff\xfe\x00", "line 1 is no key"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_without_usable_keys_is_refused_and_at_a_change_the_old_ones_are_kept(key_file, caplog, content, reason):
    keys = ApiKeys(key_file)
    key_file.unlink()
    if content is not None:
        key_file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        ApiKeys(key_file)
    assert str(error.value).startswith(f"api_key_file='{key_file}'")
    assert reason in str(error.value)
    assert [keys.accepts(f"Bearer {key}") for key in (KEY, NEXT, WRONG)] == [True, True, False]
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"file.refused reason={str(error.value)!r}"
    assert KEY not in line
    key_file.write_text(NEXT)
    assert not keys.accepts(f"Bearer {KEY}")


def test_the_proxy_does_not_start_without_usable_keys(tmp_path, capsys):
    for flag in ("api-key-file", "instances-api-key-file"):
        instances = ["--prefill", "http://127.0.0.1:1,127.0.0.1:2", "--decode", "http://127.0.0.1:3"]
        assert main(["proxy", *instances, "--port", "0", f"--{flag}", str(tmp_path / "none")]) == 1
        named = f"error: {flag.replace('-', '_')}='{tmp_path / 'none'}' cannot be read: No such file or directory\n"
        assert capsys.readouterr().err == named


def test_instances_get_one_key(key_file):
    with pytest.raises(ConfigError, match=r"instances_api_key_file=.* has 2 keys: leave one"):
        instances_authorization(key_file)


def test_instances_get_their_own_key_with_every_request_and_none_of_the_clients(key_file, instances_key_file):
    async def scene():
        settings = {"api_key_file": key_file, "instances_api_key_file": instances_key_file}
        async with stage(decode=[answers(body=MODELS)], has_control=False, dispatch="store", **settings) as s:
            assert (await s.post(headers=bearer(KEY)))[0] == 200
            for path in ("/v1/models", "/health"):
                async with s.client.get(s.url + path, headers=bearer(KEY)) as response:
                    assert response.status == 200
            seen = s.prefill[0].headers + s.decode[0].headers
            assert {"/health", "/metrics", "/v1/models", COMPLETIONS} <= set(s.prefill[0].paths + s.decode[0].paths)
            assert [headers.getall("Authorization") for headers in seen] == [[f"Bearer {OF_INSTANCES}"]] * len(seen)

    run(scene)


@pytest.mark.parametrize(
    ("names", "seen"),
    [((), KEY), (("api_key_file",), None), (("instances_api_key_file",), OF_INSTANCES)],
)
def test_a_clients_key_passes_to_instances_only_where_the_proxy_has_none(key_file, instances_key_file, names, seen):
    files = {"api_key_file": key_file, "instances_api_key_file": instances_key_file}

    async def scene():
        async with stage(**{name: files[name] for name in names}) as s:
            assert (await s.post(headers=bearer(KEY)))[0] == 200
            got = [it.headers[-1].getall("Authorization", []) for it in (s.prefill[0], s.decode[0])]
            assert got == [[f"Bearer {seen}"] if seen else []] * 2

    run(scene)


def test_an_instance_that_refuses_the_proxys_key_has_failed_with_the_remedy(instances_key_file, caplog):
    async def scene():
        refuses = answers(401, b'{"error":"Unauthorized"}')
        async with stage([refuses], [refuses], instances_api_key_file=instances_key_file) as s:
            status, body, _ = await s.post()
            reason = "refuses the key of --instances-api-key-file: start it with this key among those of --api-key"
            assert (status, reason in body.decode()) == (502, True)
            for role, instance in (("prefill", s.prefill[0]), ("decode", s.decode[0])):
                assert f"instance.failed role={role} url={instance.url} reason='{reason}'" in caplog.text

    run(scene)


def test_an_instance_that_wants_a_key_of_a_proxy_without_one_for_it_has_failed_with_the_remedy(key_file, caplog):
    async def scene():
        refuses = answers(401, b'{"error":"Unauthorized"}')
        async with stage(decode=[refuses], api_key_file=key_file) as s:
            status, body, _ = await s.post(headers=bearer(KEY))
            reason = "wants an API key of its own: name it by --instances-api-key-file"
            assert (status, orjson.loads(body)["error"]["message"]) == (
                502,
                f"decode instance {s.decode[0].url}: {reason}",
            )
            assert f"instance.failed role=decode url={s.decode[0].url} reason={reason!r}" in caplog.text

    run(scene)


def test_no_key_is_in_a_log_a_status_or_an_error(key_file, instances_key_file, caplog):
    caplog.set_level(logging.DEBUG)
    settings = {"api_key_file": key_file, "instances_api_key_file": instances_key_file}

    async def scene():
        shown = ""

        async def ask(s, method, path, key, **options):
            nonlocal shown
            async with s.client.request(method, s.url + path, headers=bearer(key), **options) as response:
                shown += f"{response.headers} {await response.text()}"

        for decode in (answers(), answers(500), answers(401), DEAD, streams(b'data: {"text":"a"}\n\n')):
            async with stage(decode=[decode], **settings) as s:
                for key in (KEY, NEXT, WRONG):
                    await ask(s, "POST", COMPLETIONS, key, json=REQUEST)
                    await ask(s, "POST", COMPLETIONS, key, data=b"{")
                    await ask(s, "POST", f"{COMPLETIONS}?key={key}", key, json=REQUEST)
                for path in ("/health", "/metrics", "/v1/models"):
                    await ask(s, "GET", path, KEY)
                for handoff in s.prefill[0].handoffs:
                    await ask(s, "GET", f"/status/{handoff}", KEY)
        assert "instance.failed" in caplog.text
        assert "no valid API key" in shown
        assert [key for key in (KEY, NEXT, WRONG, OF_INSTANCES) if key in caplog.text + shown] == []

    run(scene)


def test_only_hashes_of_the_clients_keys_are_kept(key_file):
    keys = ApiKeys(key_file)
    assert keys.accepts(f"Bearer {KEY}")
    kept = repr([vars(keys), vars(keys._hashes)])
    assert KEY not in kept
    assert all(isinstance(each, bytes) and len(each) == 32 for each in keys._hashes.current())


async def ask(reader, writer, head, body=b""):
    """The first line of the answer to a request that is written by hand, after which its body has been read."""
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode()
    size = re.search(r"Content-Length: (\d+)", answer)
    await reader.readexactly(int(size[1]) if size else 0)
    return answer.splitlines()[0]


def test_a_revoked_key_is_refused_on_a_connection_that_was_kept_which_ends(key_file):
    async def scene():
        async with stage(api_key_file=key_file) as s:
            reader, writer = await s.connect()
            head = f"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}"
            assert await ask(reader, writer, head) == "HTTP/1.1 200 OK"
            key_file.write_text(NEXT)
            assert await ask(reader, writer, head) == "HTTP/1.1 401 Unauthorized"
            assert await reader.read() == b""
            writer.close()

    run(scene)


@pytest.mark.parametrize(("key", "line"), [(KEY, "HTTP/1.1 100 Continue"), (WRONG, "HTTP/1.1 401 Unauthorized")])
def test_a_client_that_waits_with_its_body_is_asked_for_it_only_with_a_key(key_file, key, line):
    async def scene():
        async with stage(api_key_file=key_file) as s:
            reader, writer = await s.connect()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\nExpect: 100-continue\r\n"
            assert await ask(reader, writer, f"{head}Authorization: Bearer {key}") == line
            writer.close()

    run(scene)


@pytest.mark.parametrize("path", ["/version", "/ping"])
@pytest.mark.parametrize("names", [("api_key_file",), ("instances_api_key_file",)])
def test_requests_that_need_no_key_bring_no_headers_of_their_own_to_an_instance(
    key_file, instances_key_file, path, names
):
    files = {"api_key_file": key_file, "instances_api_key_file": instances_key_file}

    async def scene():
        async with stage(**{name: files[name] for name in names}) as s:
            async with s.client.get(s.url + path, headers={"X-Mine": "1", "x-api-key": KEY}) as response:
                assert response.status == 200
            assert s.decode[0].paths == [path]
            assert {"X-Mine", "x-api-key"} & set(s.decode[0].headers[0]) == set()

    run(scene)


def test_a_clients_x_api_key_ends_at_a_proxy_with_keys(key_file):
    async def scene():
        async with stage(api_key_file=key_file) as s:
            assert (await s.post(headers=bearer(KEY) | {"x-api-key": KEY, "X-Mine": "1"}))[0] == 200
            for instance in (s.prefill[0], s.decode[0]):
                assert "X-Mine" in instance.headers[-1]
                assert "x-api-key" not in instance.headers[-1]

    run(scene)


class KeptQueue:
    """Decode instances behind a broker, which keeps the headers that it gets."""

    def __init__(self):
        self.headers = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    def check(self, num_bytes=0):
        pass

    def describe(self):
        return None

    def health(self):
        return "ok"

    async def state(self):
        return {"workers": []}

    async def post(self, path, headers, body, *, awaits_first_byte, when_begun=None):
        self.headers.append(headers)
        return Answer("decode", QUEUE, 200, CIMultiDict(), b"{}")


def test_behind_a_broker_no_message_has_a_key_and_the_page_of_the_queue_needs_none(key_file, instances_key_file):
    async def scene():
        prefill = StandIn("p0", answers())
        instances = await prefill.serve()
        instance = Instance(prefill.url, prefill.control)
        settings = {"api_key_file": key_file, "instances_api_key_file": instances_key_file, "port": 0}
        config = ProxyConfig(prefill=(instance,), decode=(), dispatch="amqp", drain_timeout_s=0.2, **settings)
        runner = create_runner(config, RecordingControl(), queue := KeptQueue())
        try:
            await listen(runner, config)
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with aiohttp.ClientSession() as client:
                for headers in ({}, bearer(WRONG)):
                    async with client.get(url + "/queue", headers=headers) as response:
                        assert (response.status, await response.json()) == (200, {"workers": []})
                headers = bearer(KEY) | {"x-api-key": KEY, "X-Mine": "1"}
                async with client.post(url + COMPLETIONS, json=REQUEST, headers=headers) as response:
                    assert response.status == 200
            [sent] = queue.headers
            assert sent["X-Mine"] == "1"
            assert {"authorization", "x-api-key"} & {name.lower() for name in sent} == set()
        finally:
            await runner.cleanup()
            await instances.cleanup()

    run(scene)


def warnings_at(caplog, hosts, **settings):
    caplog.clear()
    instances = {"prefill": (Instance("http://127.0.0.1:1", "127.0.0.1:2"),), "decode": (Instance("http://[::1]:3"),)}
    _warn(ProxyConfig(**instances | settings), hosts)
    return [record.getMessage().split()[0] for record in caplog.records]


def test_a_proxy_whose_every_client_uses_its_key_for_instances_is_warned_of(key_file, instances_key_file, caplog):
    beyond, only = ["127.0.0.1", "10.0.0.1"], {"instances_api_key_file": instances_key_file}
    assert warnings_at(caplog, beyond, **only) == ["proxy.unauthenticated"]
    assert warnings_at(caplog, ["127.0.0.1", "::1"], **only) == []
    assert warnings_at(caplog, beyond, api_key_file=key_file, **only) == ["proxy.unencrypted"]
    assert warnings_at(caplog, beyond) == []


def test_each_instance_that_gets_the_key_unencrypted_is_warned_of_once(instances_key_file, caplog):
    far = (Instance("http://10.0.0.1:1"), Instance("https://10.0.0.2:1"), Instance("http://localhost:1"))
    settings = {"decode": far, "prefill": (Instance("http://10.0.0.1:1", "10.0.0.1:2"),)}
    assert warnings_at(caplog, ["127.0.0.1"], **settings) == []
    settings["instances_api_key_file"] = instances_key_file
    assert warnings_at(caplog, ["127.0.0.1"], **settings) == ["instance.unencrypted"]
    assert "url=http://10.0.0.1:1 " in caplog.text
    assert OF_INSTANCES not in caplog.text


@pytest.mark.parametrize(("host", "has_tls"), [("0.0.0.0", False), ("127.0.0.1", False), ("0.0.0.0", True)])
def test_keys_that_travel_unencrypted_beyond_this_host_are_warned_of(key_file, certificate, caplog, host, has_tls):
    caplog.set_level(logging.INFO)
    files = {"api_key_file": key_file} | (certificate.of_endpoint if has_tls else {})
    instances = {
        "prefill": (Instance("http://127.0.0.1:1", "127.0.0.1:2"),),
        "decode": (Instance("http://127.0.0.1:3"),),
    }

    async def scene():
        listening = asyncio.Event()

        class Listens(logging.Handler):
            def emit(self, record):
                if record.msg.startswith("proxy.listening"):
                    listening.set()

        logging.getLogger("kvpipe.proxy.server").addHandler(handler := Listens())
        serving = asyncio.create_task(serve(ProxyConfig(**instances, host=host, port=0, **files), RecordingControl()))
        await listening.wait()
        logging.getLogger("kvpipe.proxy.server").removeHandler(handler)
        serving.cancel()
        await asyncio.wait({serving})
        assert ("proxy.unencrypted" in caplog.text) is (host == "0.0.0.0" and not has_tls)

    run(scene)
