"""The implementation that a URL names."""

import subprocess
import sys
import traceback

import pytest

from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError
from kvpipe.store import LocalStore, open_store
from kvpipe.store.urls import resolve_url
from kvpipe.store.valkey.settings import ValkeySettings


class OwnStore(LocalStore):
    """A user's own."""

    @classmethod
    def open(cls, url, *, token=None, timeout=10):
        store = cls()
        store.opened_with = (url, token, timeout)
        return store


class NoStore:
    """Not a store."""


def test_a_scheme_names_its_implementation():
    with open_store("local://") as store:
        assert type(store) is LocalStore


@pytest.mark.parametrize(
    ("rest", "expected"), [("", ""), (":", ""), (":/folder", "/folder"), (":a://b:1/c", "a://b:1/c")]
)
def test_a_users_class_is_opened_with_what_follows_it(rest, expected):
    with open_store(f"tests.store.test_urls:OwnStore{rest}", "secret", 3) as store:
        assert isinstance(store, LocalStore)
        assert store.opened_with == (expected, "secret", 3)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host", "store URL 'ftp://host': expected kvpipe://host:port"),
        ("", "store URL '': expected"),
        ("host:1", "store URL 'host:1': expected"),
        ("no.such.module:Class", "no.such.module:Class cannot be imported: No module named"),
        ("tests.store.test_urls:Missing", "tests.store.test_urls:Missing cannot be imported"),
        ("tests.store.test_urls:NoStore", "is no subclass of kvpipe.store.KVStore"),
    ],
)
def test_a_url_that_names_nothing_is_an_error_that_says_what_is_expected(url, message):
    with pytest.raises(ConfigError) as caught:
        resolve_url(url)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:12/geheim@host",
        "redis://user:12/0/geheim@host",
        "redis://:geheim#x@host",
        "redis://:x#geheim@host",
        "redis://:a@geheim#b@host",
        "redis://:geheim[@host:1",
        "redis://:geheim\u2100@host",
        "redis://user:geheim?x@host",
        "redis://user:12?geheim@host",
        "redis://user:12?connections=geheim@host",
    ],
)
def test_a_login_that_is_not_percent_encoded_is_an_error_that_quotes_nothing_of_it(url):
    with pytest.raises(ConfigError, match=r"login.*must be percent-encoded") as caught:
        ValkeySettings.from_url(url)
    assert "geheim" not in "".join(traceback.format_exception_only(caught.value))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_password_is_in_no_message():
    assert redact("redis://user:geheim@host:1/0") == "redis://user:…@host:1/0"
    assert redact("rediss://:geheim@host") == "rediss://:…@host"
    assert redact("kvpipe://host:1") == "kvpipe://host:1"
    with pytest.raises(ConfigError) as caught:
        resolve_url("ftp://user:geheim@host")
    assert "geheim" not in str(caught.value)


def test_no_implementation_is_imported_before_it_is_named():
    program = (
        "import sys, kvpipe.store.urls\n"
        "names = ('redis', 'glide_sync', 'kvpipe.store.valkey', 'torch')\n"
        "print([name for name in names if name in sys.modules])"
    )
    found = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert found.strip() == "[]"
