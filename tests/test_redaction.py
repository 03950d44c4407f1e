"""URLs with logins: no error or log has a password, or a part of one, whatever is wrong with the URL."""

import pytest

from kvpipe import cli
from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError, KVPipeError
from kvpipe.proxy import Environment, Instance
from kvpipe.queue.broker import checked_url
from kvpipe.store import open_store
from kvpipe.vllm.store import lmcache

SECRET = "geheim"
# After the scheme.
LOGINS = [
    "user:geheim@host",
    "user:geheim@host:1",
    ":geheim@host:1",
    "geheim@host:1",
    "user:geheim@host:port",
    "user:geheim@host:99999",
    "user:geheim@[host:1",
    "user:12/geheim@host:1",
    "user:geheim/x@host:1",
    "user:geheim#x@host:1",
    "user:x#geheim@host:1",
    "user:geheim?x@host:1",
    "user:x?geheim@host:1",
    "user:geheim@x@host:1",
    "user:x@geheim@host:1",
    "user:geheim[@host:1",
    "user:geheim\u2100@host:1",
    "user:geheim ",
    "user:geheim",
    "user:geheim@",
]
SCHEMES = ("kvpipe", "lookup", "local", "redis", "rediss", "amqp", "http", "lm", "ftp", "no.module:Class:ftp")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:geheim@host:1/0", "redis://user:…@host:1/0"),
        ("rediss://:geheim@host", "rediss://:…@host"),
        ("redis://geheim@host", "redis://…@host"),
        ("redis://user:geheim@a:1,[::1]:2/0?prefix=x", "redis://user:…@a:1,[::1]:2/0?prefix=x"),
        ("own.module:Class:redis://user:geheim@host", "own.module:Class:redis://user:…@host"),
        ("kvpipe://host:1", "kvpipe://host:1"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1"),
        ("http://h:8100,::1:7100", "http://h:8100,::1:7100"),
        ("module:Class", "module:Class"),
        ("host:1", "host:1"),
        ("", ""),
        ("redis://user:ge/heim@host", "redis://…"),
        ("user:geheim@host", "…"),
    ],
)
def test_what_a_message_may_quote_of_a_url(url, shown):
    assert redact(url) == shown


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("login", LOGINS)
def test_no_malformed_url_is_quoted_with_its_password(scheme, login):
    assert SECRET not in redact(f"{scheme}://{login}")


PARSERS = {
    "store": (("kvpipe", "lookup", "local", "ftp", "no.module:Class:ftp"), lambda url: open_store(url, timeout=0.01)),
    "broker": (("amqp", "amqps", "http"), checked_url),
    "instance": (("http", "https", "ftp"), Instance.parse),
    "control address": (("http",), lambda url: Instance.parse(f"http://host:1,{url.partition('://')[2]}")),
    "instance of the environment": (("http",), lambda url: Environment.read({"PREFILL_ENDPOINTS": url})),
    "LMCache's": (("lm",), lambda url: lmcache._store("file", url)),
    "proxy": (("http",), lambda url: cli.main(["proxy", "--prefill", url, "--decode", url])),
}


def errors_of(parse, url):
    """The error of a URL, and those that a traceback shows behind it."""
    try:
        parse(url)
    except (KVPipeError, SystemExit) as error:
        found = [error]
        while error := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
            found.append(error)
        return found
    return []


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("login", LOGINS)
@pytest.mark.parametrize("parser", PARSERS)
def test_no_error_quotes_a_password(parser, login, capfd, caplog):
    schemes, parse = PARSERS[parser]
    for scheme in schemes:
        shown = [str(error) for error in errors_of(parse, f"{scheme}://{login}")]
        out, err = capfd.readouterr()
        assert SECRET not in "".join([*shown, out, err, caplog.text])


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("scheme", ["kvpipe", "lookup"])
@pytest.mark.parametrize("login", ["user:geheim@", ":geheim@", "geheim@", "@"])
def test_a_store_that_knows_no_login_refuses_one(scheme, login):
    with pytest.raises(ConfigError, match="expected"):
        open_store(f"{scheme}://{login}127.0.0.1:1", timeout=0.01)
