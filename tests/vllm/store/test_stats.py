"""The store connector's metrics in vLLM's `/metrics`, alone and under MultiConnector."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvpipe.store_connector import KVStoreConnector
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from kvpipe.vllm.plugin import register
from kvpipe.vllm.store.stats import KVStoreStats
from tests.vllm.store.engine import CHUNK
from tests.vllm.store.test_engine import prompt, stored

pytestmark = pytest.mark.vllm

LABELS = {"model_name": "tiny", "engine": "0"}


def carried(data: Any) -> Any:
    """As an API server gets it from the process of the engine."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(data))


@pytest.fixture
def prom(config: VllmConfig) -> Iterator[Any]:
    """vLLM's metrics of the connector, for one test alone."""
    yield KVConnectorProm(config, list(LABELS), {0: list(LABELS.values())})
    unregister_vllm_metrics()


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:kvpipe_store_{name}", LABELS | labels)


def test_what_engines_count_is_shown(prom: Any, new_engine: Any) -> None:
    tokens = prompt(3 * CHUNK)
    first, second = new_engine(), new_engine()
    stored(first, tokens)
    second.answer(tokens)
    for engine in (first, second):
        prom.observe(carried(engine.stats), 0)
    assert value("chunks_total", result="saved", reason="none") == 3
    assert value("chunks_total", result="loaded", reason="none") == 3
    assert value("decisions_total", reason="always") == 1
    assert value("bytes_total", operation="load") == 3 * CHUNK * 16
    assert value("bytes_total", operation="save") > value("bytes_total", operation="load")
    assert value("operations_total", operation="lookup") == 2
    [namespace] = second.stats["namespaces"]
    assert list(first.stats["namespaces"]) == [namespace]
    assert value("is_shared", namespace=namespace) == 1
    assert value("seconds_total", operation="load") > 0


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("has_processor", [False, True])
def test_an_engine_reports_whether_it_forces_first_tokens(
    prom: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, *, has_processor: bool
) -> None:
    monkeypatch.setattr(PENDING_FIRST_TOKENS, "has_processor", has_processor)
    engine.answer(prompt(CHUNK), 2)
    prom.observe(carried(engine.stats), 0)
    assert value("forces_first_tokens", reasoning_parser="") == has_processor


def test_stats_of_several_steps_add_up_and_states_are_the_latest() -> None:
    stats, other = KVStoreStats(), KVStoreStats()
    stats.add("loaded", "none", 2)
    other.add("loaded", "none", 3)
    other.add("missed", "missing", 1)
    stats.set_breaker("load", "closed")
    other.set_breaker("load", "open")
    before = stats.data["loaded"]
    stats.aggregate(other)
    assert stats.data["loaded"] == {"none": 5}
    assert before == {"none": 2}, "vLLM gives the same data to several loggers"
    assert stats.data["missed"] == {"missing": 1}
    assert stats.data["breakers"] == {"load": "open"}
    assert KVStoreConnector.build_kv_connector_stats(carried(stats.data)).reduce()["Store chunks loaded"] == 5


def test_the_metrics_work_under_multi_connector(config: VllmConfig) -> None:
    register()
    children = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": {}}
        for name in ("KVPipeConnector", "KVStoreConnector")
    ]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    before, config.kv_transfer_config = config.kv_transfer_config, transfer
    try:
        prom = KVConnectorProm(config, list(LABELS), {0: list(LABELS.values())})
        stats = MultiConnector.build_kv_connector_stats({"KVStoreConnector": {"loaded": {"none": 2}}})
        prom.observe(carried(stats.to_dict()), 0)
        assert value("chunks_total", result="loaded", reason="none") == 2
    finally:
        config.kv_transfer_config = before
        unregister_vllm_metrics()
