"""Hosts to which a request may have a consumer connect."""

import pytest

from kvpipe import ConfigError
from kvpipe.vllm.handoff.allowed_producers import AllowedProducers
from kvpipe.vllm.handoff.config import ConnectorConfig


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("", "anything"),
        (" ", "203.0.113.9"),
        ("10.0.0.1", "10.0.0.1"),
        ("prefill-0, 10.0.0.0/8", "10.200.0.1"),
        ("Prefill-0,10.0.0.0/8", "prefill-0"),
        ("fd00::/8", "fd00::7"),
    ],
)
def test_a_host_among_them_is_accepted(text, host):
    AllowedProducers(text).check(host)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("10.0.0.1", "10.0.0.2"),
        ("10.0.0.0/8", "11.0.0.1"),
        ("10.0.0.0/8", "prefill-0"),
        ("prefill-0", "prefill-1"),
        ("prefill-0", "10.0.0.1"),
        ("10.0.0.0/8", "::ffff:10.0.0.1"),
    ],
)
def test_any_other_host_is_refused_by_name(text, host):
    with pytest.raises(ConfigError, match=f"remote_host='{host}' is not among allowed_producers='{text}'"):
        AllowedProducers(text).check(host)


def test_separators_alone_are_refused_at_start_up():
    with pytest.raises(ConfigError, match="leave it empty to allow any"):
        ConnectorConfig.parse({"allowed_producers": " , "})


def test_what_is_no_network_is_refused_at_start_up():
    with pytest.raises(ConfigError, match=r"'10\.0\.0\.0/99' is no network"):
        ConnectorConfig.parse({"allowed_producers": "prefill-0,10.0.0.0/99"})
