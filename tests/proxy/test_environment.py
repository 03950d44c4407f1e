"""Settings of the proxy by the names that other proxies have."""

import logging

import pytest

from kvpipe import ConfigError
from kvpipe.proxy import Environment, Instance

P, Q, D = "http://10.0.0.1:8010", "http://10.0.0.2:8010", "http://10.0.0.3:8020"


@pytest.fixture
def env_file(tmp_path):
    return tmp_path / ".env"


def test_instances_and_address_are_read_from_the_environment(env_file):
    found = Environment.read(
        {"PREFILL_ENDPOINTS": f"{P}, {Q}/", "DECODE_ENDPOINTS": D, "LISTEN_HOST": "0.0.0.0", "LISTEN_PORT": "8030"},
        env_file,
    )
    assert found == Environment(prefill=(Instance(P), Instance(Q)), decode=(Instance(D),), host="0.0.0.0", port=8030)


def test_without_settings_nothing_is_set(env_file):
    assert Environment.read({"LISTEN_PORT": "", "HOME": "/"}, env_file) == Environment()


def test_a_control_address_may_follow_its_instance(env_file):
    found = Environment.read({"PREFILL_ENDPOINTS": f"{P},10.0.0.1:7100,{Q},10.0.0.2:7100"}, env_file)
    assert found.prefill == (Instance(P, "10.0.0.1:7100"), Instance(Q, "10.0.0.2:7100"))


def test_the_file_says_what_the_environment_does_not(env_file):
    env_file.write_text(f'PREFILL_ENDPOINTS="{P}"\n# a comment\nexport DECODE_ENDPOINTS={D}\nLISTEN_PORT=1\n')
    found = Environment.read({"LISTEN_PORT": "2"}, env_file)
    assert found == Environment(prefill=(Instance(P),), decode=(Instance(D),), port=2)


def test_keys_of_the_file_that_mean_nothing_are_named_without_their_values(env_file, caplog):
    env_file.write_text("LISTEN_PORT=1\nOTHER_SECRET=hidden\nADMIN_API_KEY=hidden\n")
    with caplog.at_level(logging.INFO):
        Environment.read({}, env_file)
    [line] = caplog.messages
    assert line.endswith("keys=ADMIN_API_KEY,OTHER_SECRET")
    assert "hidden" not in line


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("PREFILL_ENDPOINTS", "10.0.0.1:8010", r"PREFILL_ENDPOINTS: instance '10.0.0.1:8010'"),
        ("DECODE_ENDPOINTS", f"{D},nonsense", r"DECODE_ENDPOINTS: instance .*nonsense"),
        ("LISTEN_PORT", "http", r"LISTEN_PORT='http'"),
    ],
)
def test_a_value_of_another_form_is_named(env_file, name, value, text):
    with pytest.raises(ConfigError, match=text):
        Environment.read({name: value}, env_file)
