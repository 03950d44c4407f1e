"""Roles, the failure policy, resets, and kvpipe under MultiConnector: what the configuration says is what happens."""

import json
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

from kvpipe import _kvpipe
from kvpipe.connector import KVPipeConnector
from kvpipe.control import ControlClient
from kvpipe.exceptions import ConfigError
from kvpipe.store_connector import KVStoreConnector
from kvpipe.transfer_params import consume, produce, resume
from kvpipe.vllm.engine_checks import check_cascade, check_pipeline, load_failure_policy
from kvpipe.vllm.first_token.logits_processor import ForcedOutputs
from kvpipe.vllm.handoff.metadata import HandoffEnd
from tests.vllm.handoff.engine import Engine, cache_config, engine_config, new_id
from tests.vllm.handoff.test_scheduler import FREE, produced, prompt, scheduled, until

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine_of(tiny_model: str) -> Iterator[Callable[..., Engine]]:
    """Makes engines by their `--kv-transfer-config`; further arguments are settings of the connector."""
    engines: list[Engine] = []

    def make(transfer: Mapping[str, Any], **extra: Any) -> Engine:
        engines.append(Engine(engine_config(tiny_model, transfer=transfer, **extra)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


# --- roles


def test_a_pure_producer_ignores_a_consuming_request_and_says_so_and_its_producer_frees_the_blocks(
    engine_of: Callable[..., Engine], producer: _kvpipe.Control, log: pytest.LogCaptureFixture
) -> None:
    engine, handoff = engine_of({"kv_role": "kv_producer"}), new_id()
    producer.expect(bytes.fromhex(handoff))
    producer.open(bytes.fromhex(handoff), bytes(32), 100, [])
    producer.finish(bytes.fromhex(handoff), [7], "length", 0, bytes(32))
    request = engine.add(prompt(100), params=consume(handoff, str(producer.address)))
    assert scheduled(engine, request) == 100
    assert ForcedOutputs.of(request.sampling_params) is None
    assert "kv_role=kv_producer: this instance consumes no handoffs; start it with kv_role=kv_both" in log.text
    released = until(lambda: [event for event in producer.drain() if event["event"] == "released"])
    assert released[0]["handoff"].hex() == handoff
    until(lambda: engine.step() and request.is_finished())
    assert (engine.num_free_blocks, len(engine.role._consuming)) == (FREE, 0)


def test_a_pure_producer_ignores_a_token_to_go_on_from(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of({"kv_role": "kv_producer"})
    request = engine.add(prompt(40), params=resume(new_id(), [9]))
    assert scheduled(engine, request) == 40
    assert (ForcedOutputs.of(request.sampling_params), len(engine.role._consuming)) == (None, 0)


def test_a_pure_consumer_ignores_a_producing_request_and_says_so(
    engine_of: Callable[..., Engine], log: pytest.LogCaptureFixture
) -> None:
    engine = engine_of({"kv_role": "kv_consumer"})
    request = engine.add(prompt(100), max_tokens=1, params=produce(new_id()))
    assert scheduled(engine, request) == 100
    assert request.is_finished()
    assert "kv_role=kv_consumer: this instance produces no handoffs; start it with kv_role=kv_both" in log.text
    assert (engine.num_free_blocks, len(engine.role._producing)) == (FREE, 0)


def test_a_request_that_is_not_produced_ends_the_wait_of_its_consumers_with_the_reason(
    engine_of: Callable[..., Engine],
) -> None:
    """A router may have asked decode already."""
    engine, handoff = engine_of({"kv_role": "kv_consumer"}), new_id()
    consumer = _kvpipe.Control(None, b"", "consumer")
    consumer.watch(bytes.fromhex(handoff), engine.role.address)
    engine.add(prompt(100), max_tokens=1, params=produce(handoff))
    [ended] = until(lambda: [event for event in consumer.drain() if event["event"] == "ended"])
    assert "kv_role=kv_consumer" in ended["reason"]
    consumer.close()


def test_a_second_request_of_a_handoff_does_not_end_the_first(engine_of: Callable[..., Engine]) -> None:
    engine, handoff = engine_of({}), new_id()
    consumer = _kvpipe.Control(None, b"", "consumer")
    consumer.watch(bytes.fromhex(handoff), engine.role.address)
    engine.add(prompt(100), max_tokens=1, params=produce(handoff))
    engine.add(prompt(100), max_tokens=1, params=produce(handoff))
    seen: list[str] = []
    until(lambda: engine.step() and (seen.extend(event["event"] for event in consumer.drain()), "finished" in seen)[1])
    assert [name for name in seen if name != "log"] == ["opened", "finished"]
    consumer.close()


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_an_instance_that_produces_does_so_in_each_of_its_roles(engine_of: Callable[..., Engine], role: str) -> None:
    engine = engine_of({"kv_role": role})
    request = engine.add(prompt(100), max_tokens=1, params=produce(new_id()))
    assert scheduled(engine, request) == 100
    assert engine.num_free_blocks == FREE - 4


def test_only_an_instance_that_consumes_checks_producers(
    engine_of: Callable[..., Engine], producer: _kvpipe.Control
) -> None:
    client = ControlClient("")
    try:
        for role, reason in {"kv_producer": "this engine consumes no handoffs", "kv_consumer": ""}.items():
            address = engine_of({"kv_role": role}).role.address
            assert client.check(address, str(producer.address)).wait(5) == reason
    finally:
        client.close()


def test_a_client_of_the_control_port_cannot_have_an_engine_connect_outside_allowed_producers(
    engine_of: Callable[..., Engine], producer: _kvpipe.Control
) -> None:
    engine = engine_of({}, allowed_producers="10.0.0.0/8, prefill-0")
    client = ControlClient("")
    try:
        reason = client.check(engine.role.address, str(producer.address)).wait(5)
        assert reason == '"127.0.0.1" is not among allowed_producers'
    finally:
        client.close()
    assert not producer.drain()


# --- the failure policy


@pytest.mark.parametrize(
    ("ours", "vllms", "policy"),
    [
        ("", "fail", "recompute"),  # vLLM's default, which may be implicit
        ("", "recompute", "recompute"),
        ("recompute", "fail", "recompute"),
        ("recompute", "recompute", "recompute"),
        ("fail", "fail", "fail"),
    ],
)
def test_the_policy_is_vllms_and_on_load_failure_is_an_alias_of_it(
    engine_of: Callable[..., Engine], ours: str, vllms: str, policy: str
) -> None:
    extra = {"on_load_failure": ours} if ours else {}
    extra = {"listen": "127.0.0.1:0", **extra}
    engine = engine_of({"kv_load_failure_policy": vllms, "kv_connector_extra_config": extra})
    assert engine.scheduler.recompute_kv_load_failures is (policy == "recompute")
    assert engine.role._consuming._is_recomputed is (policy == "recompute")


def test_policies_that_contradict_are_an_error_with_the_line_to_write() -> None:
    with pytest.raises(ConfigError) as raised:
        load_failure_policy("fail", "recompute")
    assert "on_load_failure='fail' and kv_load_failure_policy='recompute' differ" in str(raised.value)
    assert '"kv_load_failure_policy": "recompute"' in str(raised.value)


# --- memory that vLLM can take away


@pytest.mark.parametrize("setting", ["enable_sleep_mode", "enable_cumem_allocator"])
@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize("connector", [KVPipeConnector, KVStoreConnector])
def test_a_cache_that_vllm_can_unmap_is_refused_by_both_connectors_in_both_roles_with_the_flag_to_leave_out(
    tiny_model: str, connector: Any, role: KVConnectorRole, setting: str
) -> None:
    config = engine_config(tiny_model)
    setattr(config.model_config, setting, True)
    flag = f"--{setting.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag}: vLLM can unmap the KV cache.*; start vLLM without it"):
        connector(config, role, cache_config())


@pytest.mark.parametrize(
    ("setting", "name"), [("enable_sleep_mode", "Sleep mode"), ("enable_cumem_allocator", "cumem allocator")]
)
def test_vllm_itself_has_no_sleep_mode_and_no_cumem_allocator_on_a_cpu(
    tiny_model: str, setting: str, name: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported on current platform"):
        engine_config(tiny_model, {setting: True})


# --- parallelism that kvpipe does not hand over


@pytest.mark.parametrize("connector", [KVPipeConnector, KVStoreConnector])
def test_prefill_context_parallelism_is_refused_by_both_connectors_with_the_flag_to_leave_out(
    tiny_model: str, connector: Any
) -> None:
    config = engine_config(tiny_model)
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ConfigError, match=r"--prefill-context-parallel-size 2: .*; start vLLM without it"):
        connector(config, KVConnectorRole.SCHEDULER, cache_config())


@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_consumer_with_several_stages_is_refused_with_the_remedy(tiny_model: str, role: KVConnectorRole) -> None:
    config = engine_config(tiny_model)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match=r"pipeline parallel size is 2: .*kv_producer"):
        KVPipeConnector(config, role, cache_config())


def test_stages_with_speculative_decoding_are_refused_where_vllm_does_not_call_all_of_them() -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=2)
    v1, v2 = (
        SimpleNamespace(parallel_config=parallel, speculative_config=SimpleNamespace(), use_v2_model_runner=uses_v2)
        for uses_v2 in (False, True)
    )
    check_pipeline(v2, is_consumer=False)
    with pytest.raises(ConfigError, match=r"pipeline parallel size is 2: .*VLLM_USE_V2_MODEL_RUNNER=1"):
        check_pipeline(v1, is_consumer=False)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_cascade_attention_is_refused_where_blocks_are_held_on_a_gpu(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, role: KVConnectorRole
) -> None:
    # vLLM's own, which went with cascade attention.
    monkeypatch.setattr(KVCacheCoordinator, "get_num_common_prefix_blocks", None, raising=False)
    config = engine_config(tiny_model)
    config.device_config.device_type = "cuda"
    config.model_config.disable_cascade_attn = False
    with pytest.raises(ConfigError, match=r"--no-disable-cascade-attn: .*; start vLLM without it"):
        KVStoreConnector(config, role, cache_config())


def test_cascade_attention_is_no_reason_where_it_is_off_or_vllm_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheCoordinator, "get_num_common_prefix_blocks", None, raising=False)
    check_cascade(SimpleNamespace(disable_cascade_attn=True))
    monkeypatch.delattr(KVCacheCoordinator, "get_num_common_prefix_blocks")
    check_cascade(SimpleNamespace(disable_cascade_attn=False))


# --- caches that vLLM resets


def test_a_reset_withdraws_what_is_leased_and_what_is_computed(engine: Engine) -> None:
    _, leased = produced(engine, prompt(100))
    engine.step()
    running, half = produced(engine, prompt(600, seed=2))
    engine.step()
    waiting = new_id()
    consumer = _kvpipe.Control(None, b"", "consumer")
    for handoff in (leased, half):
        consumer.watch(handoff, engine.role.address)
    until(lambda: len([event for event in consumer.drain() if event["event"] == "opened"]) or None)
    last = engine.add(prompt(100, seed=3), max_tokens=1, params=produce(waiting))
    assert engine.scheduler.connector.reset_cache() is True
    _, metadata = engine.step()
    reason = "the producer's cache was reset"
    assert metadata.ended == [HandoffEnd(leased, reason), HandoffEnd(half, reason)]
    ended = until(lambda: [event for event in consumer.drain() if event["event"] == "ended"])
    assert all(event["is_withdrawn"] and event["reason"] == reason for event in ended)
    until(lambda: engine.step() and running.is_finished() and last.is_finished())
    consumer.close()


# --- MultiConnector

KVPIPE = {"kv_connector": "KVPipeConnector", "kv_connector_module_path": "kvpipe.connector", "kv_role": "kv_both"}
OTHER = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "/nonexistent"},
}


def multi(tiny_model: str, *connectors: Mapping[str, Any], **parent: Any) -> VllmConfig:
    config = engine_config(tiny_model)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": list(connectors)},
        **parent,
    )
    # As vLLM does where a connector does not support it.
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    return config


def worker(config: VllmConfig) -> Any:
    """The connector of a worker, made as vLLM's worker does it."""
    with set_current_vllm_config(config):
        return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config())


def with_policy(policy: str) -> dict[str, Any]:
    return KVPIPE | {"kv_connector_extra_config": {"on_load_failure": policy}}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_under_multi_connector_the_parents_policy_has_to_agree(tiny_model: str, policy: str) -> None:
    worker(multi(tiny_model, with_policy(policy), OTHER, kv_load_failure_policy=policy))
    other = "fail" if policy == "recompute" else "recompute"
    with pytest.raises(ConfigError) as raised:
        worker(multi(tiny_model, with_policy(policy), OTHER, kv_load_failure_policy=other))
    line = json.dumps({"kv_load_failure_policy": policy}).strip("{}")
    assert f'write {line} beside "kv_connector": "MultiConnector"' in str(raised.value)


def test_vllms_default_policy_under_multi_connector_is_refused_with_the_line_to_write(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match='write "kv_load_failure_policy": "recompute" beside'):
        worker(multi(tiny_model, KVPIPE, OTHER))


def test_a_consumer_under_a_pure_producer_is_refused_with_the_line_to_write(tiny_model: str) -> None:
    """VLLM frees a producer's blocks at once: a step that is under way would write into what is loaded."""
    config = multi(tiny_model, KVPIPE, OTHER, kv_load_failure_policy="recompute")
    config.kv_transfer_config.kv_role = "kv_producer"
    with pytest.raises(ConfigError, match='write "kv_role": "kv_both" beside "kv_connector": "MultiConnector"'):
        worker(config)
    producer = KVPIPE | {"kv_role": "kv_producer"}
    config = multi(tiny_model, producer, OTHER, kv_load_failure_policy="recompute")
    config.kv_transfer_config.kv_role = "kv_producer"
    worker(config)


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector", "NixlPushConnector"])
def test_nixl_beside_kvpipe_is_refused_in_the_constructor(tiny_model: str, name: str) -> None:
    nixl = {"kv_connector": name, "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match=f"MultiConnector has {name} beside KVPipeConnector"):
        worker(multi(tiny_model, KVPIPE, nixl, kv_load_failure_policy="recompute"))
