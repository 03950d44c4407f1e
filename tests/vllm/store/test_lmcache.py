"""A file of settings that was written for LMCache, as splitwise-demos has one."""

import pytest

from kvpipe import ConfigError
from kvpipe.vllm.store.lmcache import LMCacheSettings, read_lmcache_settings

FILE = """
chunk_size: 32 # a comment
local_device: "cpu"
remote_url: "redis://192.168.0.1:10080"
remote_serde: "naive"
max_local_cpu_size: 20 # GB
pipelined_backend: False
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        file = tmp_path / "example.yaml"
        file.write_text(text)
        return read_lmcache_settings({"LMCACHE_CONFIG_FILE": str(file)})

    return read


def test_the_keys_that_mean_something_become_settings_and_the_others_are_named(read):
    found = read(FILE)
    assert found.settings == {"chunk_size": 32, "store": "redis://192.168.0.1:10080", "serde": "naive"}
    assert set(found.ignored) == {"local_device", "max_local_cpu_size", "pipelined_backend"}
    assert all(found.ignored.values())


def test_an_unknown_key_is_named(read):
    assert read("enable_blending: true").ignored == {"enable_blending": "it has no counterpart"}


@pytest.mark.parametrize(("name", "serde"), [("kivi", "kivi2"), ("cachegen", "cachegen")])
def test_the_names_of_serdes_are_translated(read, name, serde):
    assert read(f"remote_serde: {name}").settings == {"serde": serde}


def test_without_the_variable_or_values_there_are_no_settings(read):
    assert read_lmcache_settings({}) == LMCacheSettings()
    assert read("") == LMCacheSettings()
    assert read("remote_url: null\nremote_serde: null").settings == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("remote_url: lm://localhost:8000", r"lm://localhost:8000.*kvpipe store serve"),
        ("remote_url: 5", r"remote_url=5"),
        ("remote_serde: zip", r"remote_serde='zip'.*naive, kivi, cachegen"),
        ("- a", r"expected keys and values"),
        ("a: [", r"cannot be read"),
    ],
)
def test_what_cannot_be_kept_is_an_error_that_names_it(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"LMCACHE_CONFIG_FILE='/nowhere/x.yaml' cannot be read"):
        read_lmcache_settings({"LMCACHE_CONFIG_FILE": "/nowhere/x.yaml"})
