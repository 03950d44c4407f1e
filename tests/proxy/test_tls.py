"""TLS of the proxy's endpoint, and of the connections to its instances."""

import asyncio
import logging
import os
import re
import ssl
from contextlib import asynccontextmanager, suppress

import aiohttp
import orjson
import pytest
from aiohttp import web

from kvpipe.cli import main
from kvpipe.exceptions import ConfigError
from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.proxy import files as files_module
from kvpipe.proxy.api_keys import ApiKeys
from kvpipe.proxy.tls import instances_context, server_context
from kvpipe.queue.command import WorkerConfig, _work
from kvpipe.queue.topology import Topology

from . import harness
from .certificates import Authority, Certificate, encrypted
from .harness import StandIn, answers, run, stage


@pytest.fixture
def files(authority, certificate, tmp_path):
    """Files by their kind, usable and not."""
    found = {"ca": certificate.ca, "cert": certificate.cert, "key": certificate.key, "other": authority.issue().key}
    found |= {name: tmp_path / name for name in ("missing", "junk", "encrypted")} | {"folder": tmp_path, "none": None}
    found["junk"].write_bytes(b"junk")
    found["encrypted"].write_bytes(encrypted(certificate.key))
    return found


@pytest.fixture
def https(certificate, monkeypatch):
    """All of a stage speaks TLS."""
    monkeypatch.setattr(harness, "CERTIFICATE", certificate)
    return certificate


@pytest.fixture
def renewable(certificate, monkeypatch, tmp_path):
    """As `https`, with a certificate in files of its own, which are looked at whenever they are used."""
    monkeypatch.setattr("kvpipe.proxy.files._CHECK_INTERVAL_S", 0.0)
    files = Certificate(certificate.ca, tmp_path / "cert.pem", tmp_path / "key.pem")
    renew(files, certificate)
    monkeypatch.setattr(harness, "CERTIFICATE", files)
    return files


def renew(files, certificate):
    replace(files.key, certificate.key.read_bytes())
    replace(files.cert, certificate.cert.read_bytes())


def replace(path, content):
    """As cert-manager and certbot do it."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


UNUSABLE = [
    ("cert", "none", "ssl_certfile='{cert}' without ssl_keyfile: name its private key (--ssl-keyfile)"),
    ("none", "key", "ssl_keyfile='{key}' without ssl_certfile: name its certificate (--ssl-certfile)"),
    ("missing", "key", "ssl_certfile='{missing}' cannot be read: No such file or directory"),
    ("cert", "missing", "ssl_keyfile='{missing}' cannot be read: No such file or directory"),
    ("cert", "folder", "ssl_keyfile='{folder}' is not a regular file: a pipe or a folder cannot be read again"),
    ("junk", "key", "ssl_certfile='{junk}' has no certificate in PEM form"),
    ("cert", "cert", "ssl_keyfile='{cert}' has no private key in PEM form"),
    ("cert", "other", "ssl_keyfile='{other}' with ssl_certfile='{cert}' cannot be used: the key is not that of"),
    ("cert", "encrypted", "ssl_keyfile='{encrypted}' is protected by a passphrase; write it without one: openssl pkey"),
]


@pytest.mark.parametrize(("cert", "key", "words"), UNUSABLE)
def test_certificate_and_key_that_cannot_be_used_are_named_with_the_remedy(files, cert, key, words):
    with pytest.raises(ConfigError) as error:
        server_context(files[cert], files[key])
    assert str(error.value).startswith(words.format(**files))


def test_a_proxy_does_not_start_with_a_certificate_that_it_cannot_use(files, capsys):
    options = ["--ssl-certfile", str(files["cert"]), "--ssl-keyfile", str(files["other"]), "--port", "0"]
    assert (
        main(["proxy", "--prefill", "http://127.0.0.1:1,127.0.0.1:2", "--decode", "http://127.0.0.1:3", *options]) == 1
    )
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: ssl_keyfile='{files['other']}' with")


@pytest.mark.parametrize(
    ("ca", "words"),
    [
        ("missing", "instances_ca_file='{missing}' cannot be read: No such file or directory"),
        ("junk", "instances_ca_file='{junk}' has no certificate in PEM form"),
    ],
)
def test_authorities_that_cannot_be_read_are_named(files, ca, words):
    with pytest.raises(ConfigError) as error:
        instances_context(files[ca])
    assert str(error.value).startswith(words.format(**files))


def test_authorities_without_an_instance_that_speaks_tls_are_refused(certificate):
    prefill, decode = Instance("http://127.0.0.1:1", "127.0.0.1:2"), Instance("http://127.0.0.1:3")
    expected = f"instances_ca_file='{certificate.ca}': must be left out, or an instance written as https://host:port"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ProxyConfig(prefill=(prefill,), decode=(decode,), instances_ca_file=certificate.ca)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        WorkerConfig("amqp://b", Topology("q"), decode, instances_ca_file=certificate.ca)


def test_tls_is_1_2_or_newer_and_instances_are_verified_by_name(certificate):
    endpoint, instances = server_context(certificate.cert, certificate.key), instances_context(certificate.ca)
    for context in (endpoint.latest.current(), instances):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    for context in (instances, instances_context(None)):
        # Those of each version of Python, and not strict: CA certificates without keyUsage are taken.
        assert context.verify_flags == ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert instances.check_hostname
    assert instances.verify_mode == ssl.CERT_REQUIRED
    assert len(instances.get_ca_certs()) == 1  # the system's are not among them


def test_an_endpoint_with_a_certificate_answers_nothing_without_tls(https):
    async def scene():
        async with stage() as s:
            assert (await s.post())[0] == 200
            with pytest.raises(aiohttp.ClientError):
                await s.client.get(s.url.replace("https:", "http:") + "/health")

    run(scene)


async def shown(s):
    """The certificate that a new connection gets."""
    _, writer = await s.connect()
    writer.close()
    return ssl.DER_cert_to_PEM_cert(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))


def lines(caplog, event):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(event)]


def test_a_renewed_certificate_is_used_without_a_restart(renewable, authority, caplog):
    caplog.set_level(logging.INFO)

    async def scene():
        async with stage() as s:
            assert await shown(s) in renewable.cert.read_text()
            renew(renewable, authority.issue())
            assert await shown(s) in renewable.cert.read_text()
            assert (await s.post())[0] == 200
            assert len(lines(caplog, "file.reloaded ")) == 1

    run(scene)


def test_a_renewal_that_cannot_be_used_is_logged_once_and_the_old_certificate_is_kept(renewable, authority, caplog):
    async def scene():
        async with stage() as s:
            before = renewable.cert.read_text()
            for content in (authority.issue().cert.read_bytes(), b"junk"):
                replace(renewable.cert, content)
                assert [await shown(s) in before for _ in range(3)] == [True] * 3
            renewable.cert.unlink()
            assert await shown(s) in before
            reasons = ("the key is not that of", "has no certificate in PEM form", "cannot be read: No such file")
            logged = lines(caplog, "file.refused ")
            assert [reason in line for reason, line in zip(reasons, logged, strict=True)] == [True] * 3
            assert all(str(renewable.cert) in line for line in logged)

    run(scene)


@pytest.fixture
def reads(monkeypatch):
    """Settings whose files are read, in turn."""
    read, names = files_module.read, []

    def counted(name, path):
        names.append(name)
        return read(name, path)

    monkeypatch.setattr(files_module, "read", counted)
    return names


def test_files_are_read_at_most_once_a_second_and_each_once(renewable, authority, monkeypatch, reads):
    now_s = 1000.0
    monkeypatch.setattr(files_module, "_CHECK_INTERVAL_S", 1.0)
    monkeypatch.setattr(files_module.time, "monotonic", lambda: now_s)
    latest = server_context(renewable.cert, renewable.key).latest
    first = latest.current()
    once = ["ssl_certfile", "ssl_keyfile"]
    renew(renewable, authority.issue())
    now_s = 1000.9
    assert [latest.current() for _ in range(3)] == [first] * 3
    assert reads == once
    now_s = 1001.0
    assert latest.current() is latest.current() is not first
    assert reads == once * 2


def test_refused_files_are_not_tried_again_until_they_change(renewable, monkeypatch):
    latest = server_context(renewable.cert, renewable.key).latest
    load, tries = latest._load, []
    monkeypatch.setattr(latest, "_load", lambda contents: [tries.append(1), load(contents)][1])
    for content in (b"junk", b"other junk"):
        replace(renewable.cert, content)
        for _ in range(3):
            latest.current()
    assert len(tries) == 2


def handshake(server, client, session=None):
    """Client and server after a handshake in memory, and one byte from the server, which brings the client tickets."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1", session=session),
    ]
    for _ in range(3):
        for end in reversed(ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    ends[0].write(b"x")
    assert ends[1].read(1) == b"x"
    return ends[1]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_that_resumes_its_session_gets_the_renewed_certificate(renewable, authority, version):
    server, client = server_context(renewable.cert, renewable.key), renewable.client_context()
    client.maximum_version = version
    session = handshake(server, client).session
    assert handshake(server, client, session).session_reused
    renew(renewable, authority.issue())
    connection = handshake(server, client, session)
    assert not connection.session_reused
    shown = ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True))
    assert shown in renewable.cert.read_text()


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, certificate):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for load in (
        lambda: server_context(pipe, certificate.key),
        lambda: instances_context(pipe),
        lambda: ApiKeys(pipe),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"='{pipe}' is not a regular file: a pipe or a folder")):
            load()


@asynccontextmanager
async def decode_with(certificate, behaviour=None):
    decode = StandIn("d0", behaviour or answers(), certificate=certificate)
    runner = await decode.serve()
    try:
        yield decode
    finally:
        await runner.cleanup()


def strange(kind, authority, tmp_path):
    """A certificate that the proxy has to refuse."""
    match kind:
        case "authority":
            return Authority(tmp_path).issue()
        case "expired":
            return authority.issue_expired()
        case "host":
            return authority.issue("another.host")
        case "address":
            return authority.issue("127.0.0.9")
    return None


REFUSED = {
    "authority": "its certificate is of an unknown CA (unable to get local issuer certificate): name the CA's "
    "own certificate by --instances-ca-file",
    "expired": "its certificate is out of date (certificate has expired): renew it, and restart vLLM if it lacks "
    "--enable-ssl-refresh",
    "host": "its certificate is for another host (IP address mismatch, certificate is not valid for '127.0.0.1'): use "
    "a name of its subjectAltName, or add this one to it",
    "address": "its certificate is for another host (IP address mismatch, certificate is not valid for '127.0.0.1'): "
    "use a name of its subjectAltName, or add this one to it",
    "no TLS": "does not speak TLS: write http:// for it, or start it with --ssl-certfile and --ssl-keyfile",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_instance_that_cannot_be_trusted_gets_no_request_and_is_named_with_the_remedy(
    https, authority, tmp_path, caplog, kind
):
    async def scene():
        async with decode_with(strange(kind, authority, tmp_path)) as decode:
            decode.url = decode.url.replace("http:", "https:")
            async with stage(decode=[decode]) as s:
                status, body, _ = await s.post()
                assert status == 502
                message = orjson.loads(body)["error"]["message"]
                assert message == f"decode instance {decode.url}: {REFUSED[kind]}"
                async with s.client.get(s.url + "/health") as response:
                    assert response.status == 503
                    assert (await response.json())["decode"] == {decode.url: REFUSED[kind]}
                assert f"instance.failed role=decode url={decode.url} reason={REFUSED[kind]!r}" in caplog.text
                assert decode.paths == []
                await s.control.until_released()

    run(scene)


def test_without_the_flag_only_authorities_of_the_system_are_trusted(https):
    async def scene():
        async with stage(instances_ca_file=None) as s:
            async with s.client.get(s.url + "/health") as response:
                assert (await response.json())["decode"][s.decode[0].url].endswith("by --instances-ca-file")
            assert s.decode[0].paths == []

    run(scene)


def test_a_connection_to_an_instance_is_used_again(https):
    async def scene():
        ports = []

        async def behave(request):
            ports.append(request.transport.get_extra_info("peername")[1])
            return web.Response(body=b"{}")

        async with stage(decode=[behave]) as s:
            ports.clear()
            for _ in range(3):
                assert (await s.post())[0] == 200
            assert len(set(ports)) == 1

    run(scene)


def test_a_worker_asks_its_instance_by_tls_with_its_api_key(https, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("of-the-instance\n")

    async def scene():
        async with decode_with(https) as decode:
            instance = Instance(decode.url)
            files = {"instances_ca_file": https.ca, "instances_api_key_file": key_file}
            with harness.dead_port() as port:
                broker = f"amqp://127.0.0.1:{port}"
                worker = asyncio.create_task(_work(WorkerConfig(broker, Topology("q"), instance, **files)))
                try:
                    await decode.asked.wait()
                finally:
                    worker.cancel()
                    await asyncio.wait({worker})
            assert decode.headers[0]["Authorization"] == "Bearer of-the-instance"

    run(scene)
