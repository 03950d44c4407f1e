"""Settings of the store connector: where they come from, and how a bad one is named."""

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpipe.exceptions import ConfigError
from kvpipe.store_connector import KVStoreConnector
from kvpipe.vllm.handoff.metadata import HandshakeMetadata
from kvpipe.vllm.store.config import StoreConnectorConfig
from tests.vllm.handoff.engine import cache_config
from tests.vllm.store.engine import store_config
from tests.vllm.store.stores import URL

pytestmark = pytest.mark.vllm

STORE = {"store": URL + "x"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no store": ({}, "store is not set"),
    "unknown key": (STORE | {"chunksize": 1}, "unknown key 'chunksize'"),
    "chunk size": (STORE | {"chunk_size": 48}, "chunk_size=48: expected a multiple of vLLM's block size, 32 tokens"),
    "no number": (STORE | {"chunk_size": "many"}, "chunk_size='many': expected a whole number above 0"),
    "no count": (STORE | {"num_io_threads": 0}, "num_io_threads=0: expected a whole number above 0"),
    "no boolean": (STORE | {"always_load": "perhaps"}, "always_load='perhaps': expected true or false"),
    "serde": (STORE | {"serde": "zip"}, "serde='zip': expected one of naive"),
    "seconds": (STORE | {"load_timeout_s": -1}, "load_timeout_s=-1: expected a number of seconds above 0"),
    "policy": (STORE | {"on_load_failure": "retry"}, "on_load_failure='retry': expected one of recompute, fail"),
    "scheme": ({"store": "ftp://x"}, "store URL 'ftp://x': expected kvpipe://host:port"),
}


@pytest.mark.parametrize(("extra", "message"), BAD.values(), ids=BAD)
def test_a_bad_setting_is_named_with_what_is_expected(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", "\\(")):
        StoreConnectorConfig.parse(extra, 32)


def test_the_configuration_wins_over_variables_and_these_over_the_file_of_lmcache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"chunk_size: 64\nremote_url: '{URL}of-file'\nlocal_cpu: true\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    found = StoreConnectorConfig.parse({}, 32)
    assert (found.chunk_size, found.store) == (64, URL + "of-file")
    monkeypatch.setenv("KVPIPE_STORE_CHUNK_SIZE", "96")
    monkeypatch.setenv("KVPIPE_STORE", URL + "of-variable")
    monkeypatch.setenv("KVPIPE_STORE_ALWAYS_LOAD", "true")
    found = StoreConnectorConfig.parse({"chunk_size": 128}, 32)
    assert (found.chunk_size, found.store, found.always_load) == (128, URL + "of-variable", True)


def test_settings_of_lmcache_that_mean_nothing_here_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("local_cpu: true\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    StoreConnectorConfig.parse(STORE, 32)
    assert "config.ignored local_cpu of LMCache's file" in log.text


def test_hashes_that_can_collide_are_refused(tiny_model: str) -> None:
    config = store_config(tiny_model, "x")
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(
        ConfigError, match=r"prefix_caching_hash_algo='xxhash'.*write --prefix-caching-hash-algo sha256"
    ):
        KVStoreConnector(config, KVConnectorRole.SCHEDULER, cache_config())


def test_a_model_whose_files_cannot_be_compared_needs_a_namespace(tiny_model: str) -> None:
    config = store_config(tiny_model, "x")
    config.load_config.load_format = "dummy"
    with pytest.raises(ConfigError, match=r'weights is not compared: loaded by load_format=dummy.*"namespace"'):
        KVStoreConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    named = store_config(tiny_model, "x", namespace="the dummy of the tests")
    named.load_config.load_format = "dummy"
    KVStoreConnector(named, KVConnectorRole.SCHEDULER, cache_config()).shutdown()


def test_handshake_metadata_of_another_connectors_pipeline_stages_changes_nothing(tiny_model: str) -> None:
    connector = KVStoreConnector(store_config(tiny_model, "x"), KVConnectorRole.SCHEDULER, cache_config())
    connector.set_xfer_handshake_metadata_pp_aware({(1, 0): HandshakeMetadata("127.0.0.1:1", bytes(16))})
    connector.shutdown()
