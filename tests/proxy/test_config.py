import dataclasses

import pytest

from kvpipe.exceptions import ConfigError
from kvpipe.proxy import Instance, ProxyConfig

P = Instance("http://p:1", "p:2")
D = Instance("http://d:1")
GOOD = {"prefill": (P,), "decode": (D,)}

BAD = [
    ({"prefill": ()}, "prefill=.*at least one"),
    ({"decode": ()}, "decode=.*at least one"),
    ({"decode": (D, D)}, "decode=.*different"),
    ({"prefill": (D,)}, "prefill='http://d:1'.*control-host"),
    ({"dispatch": "both"}, "dispatch='both': must be just-in-time or sequential or store"),
    ({"port": 70000}, "port=70000: must be 0 to 65535"),
    ({"split_from": -1}, "split_from=-1: must be 0 or more tokens"),
    ({"max_body_bytes": 0}, "max_body_bytes=0"),
    ({"silence_timeout_s": 0}, "silence_timeout_s=0: must be more than 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_settings_are_named_with_value_and_choices(change, message):
    with pytest.raises(ConfigError, match=message):
        ProxyConfig(**GOOD | change)


def test_settings_are_frozen_and_do_not_show_the_token():
    config = ProxyConfig(**GOOD, token="secret")
    assert "secret" not in repr(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1


def test_dispatch_is_just_in_time_by_default():
    assert ProxyConfig(**GOOD).dispatch == "just-in-time"
