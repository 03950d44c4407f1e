"""Which integrity a worker's agent has: validation only where blocks change after their handoff is marked as ended."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from kvpipe.connector import integrity
from kvpipe.connector.config import ConnectorConfig
from kvpipe.connector.integrity import choose_integrity, objection_to_validate
from kvpipe.connector.metadata import StepMetadata
from kvpipe.connector.worker import WorkerRole
from kvpipe.exceptions import ConfigError
from tests.connector.test_worker import Pair, received, sent, until

pytestmark = pytest.mark.vllm

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def engine(*, has_sleep_mode: bool = False, uses_v2: bool = False) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=has_sleep_mode), use_v2_model_runner=uses_v2)


def cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(["layer"], spec) for spec in specs]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize("uses_v2", [False, True])
@pytest.mark.parametrize("spec", [FullAttentionSpec(**SHAPE), MLAAttentionSpec(**SHAPE)])
def test_plain_full_attention_is_validated_with_either_model_runner(spec: Any, *, uses_v2: bool) -> None:
    assert objection_to_validate(engine(uses_v2=uses_v2), cache(spec)) == ""


def test_an_engine_that_may_sleep_is_not_validated() -> None:
    objection = objection_to_validate(engine(has_sleep_mode=True), cache(FullAttentionSpec(**SHAPE)))
    assert "sleep mode" in objection


@pytest.mark.parametrize("spec", [SlidingWindowSpec(**SHAPE, sliding_window=64), SinkFullAttentionSpec(**SHAPE)])
def test_a_cache_whose_blocks_may_be_freed_in_mid_request_is_not_validated(spec: Any) -> None:
    objection = objection_to_validate(engine(), cache(FullAttentionSpec(**SHAPE), spec))
    assert type(spec).__name__ in objection


def test_a_model_runner_that_zeroes_blocks_before_it_calls_the_connector_is_not_validated() -> None:
    zeroed = SimpleNamespace(
        kv_cache_groups=cache(FullAttentionSpec(**SHAPE)).kv_cache_groups, needs_kv_cache_zeroing=True
    )
    assert "V2 model runner" in objection_to_validate(engine(uses_v2=True), zeroed)
    assert objection_to_validate(engine(uses_v2=False), zeroed) == ""


@pytest.mark.parametrize(
    ("setting", "objection", "device", "chosen"),
    [
        ("auto", "", "cpu", "auto"),
        ("auto", "it sleeps", "cpu", "auto"),
        ("checksum", "it sleeps", "cpu", "checksum"),
        ("validate", "", "cpu", "validate"),
        ("validate", "it sleeps", "cpu", "auto"),
        ("auto", "", "cuda", "auto"),
        ("validate", "", "cuda", "validate"),
    ],
)
def test_the_agent_validates_what_it_may(setting: str, objection: str, device: str, chosen: str) -> None:
    assert choose_integrity(setting, objection, device) == chosen


@pytest.mark.parametrize("setting", ["auto", "validate"])
def test_a_cache_on_a_device_that_cannot_be_validated_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="it sleeps"):
        choose_integrity(setting, "it sleeps", "cuda")


def test_checksums_of_a_cache_on_a_device_are_refused_with_the_line_to_write() -> None:
    with pytest.raises(ConfigError, match='write "integrity": "validate" or "auto"'):
        choose_integrity("checksum", "", "cuda")


def test_checksums_instead_of_validation_are_logged_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    logger = logging.getLogger("test.integrity")
    monkeypatch.setattr(integrity, "logger", logger)
    monkeypatch.setattr(logger, "warning", lambda text, *values: lines.append(text % values))
    choose_integrity("validate", "it sleeps", "cpu")
    assert lines == ["integrity.fallback checksums instead of validation: it sleeps"]


@pytest.mark.parametrize("value", ["none", "crc", ""])
def test_no_integrity_is_refused_with_the_line_to_write(value: str) -> None:
    with pytest.raises(ConfigError, match='write "integrity": "auto" into kv_connector_extra_config'):
        ConnectorConfig.parse({"integrity": value})


# --- the worker role


class Validated(Pair):
    """A pair whose producer validates."""

    def __init__(self, consumer: str = "auto", objection: str = "") -> None:
        self.consumer_setting, self.objection = consumer, objection
        super().__init__()

    def role(self, side: str, trace: str = "") -> WorkerRole:
        setting = self.consumer_setting if side == "consumer" else "validate"
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, use_ubatching=False),
            kv_transfer_config=SimpleNamespace(engine_id="engine", kv_role="kv_both"),
            speculative_config=None,
        )
        settings = ConnectorConfig(silence_s=5, trace=trace, integrity=setting)
        return WorkerRole(config, settings, objection_to_validate=self.objection)

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()


def outcome(pair: Validated) -> dict[str, Any]:
    assert received(pair.consumer) == {"consuming"}
    reports = pair.consumer.take_outcomes()
    assert reports is not None
    return reports.outcomes["consuming"]


def test_a_workers_load_is_validated_where_the_producer_validates() -> None:
    pair = Validated()
    pair.announce([2, 3])
    pair.load([5, 4])
    facts = outcome(pair)
    assert (facts["is_loaded"], facts["num_validated"], facts["num_compared"]) == (True, 6, 0)
    assert pair.arrived([2, 3], [5, 4])
    pair.close()


def test_a_producer_that_may_not_validate_announces_checksums() -> None:
    pair = Validated(objection="it sleeps")
    pair.announce([2, 3])
    pair.load([5, 4])
    facts = outcome(pair)
    assert (facts["is_loaded"], facts["num_validated"], facts["num_compared"]) == (True, 0, 6)
    pair.close()


def test_a_consumer_that_wants_checksums_names_both_values_and_the_remedy() -> None:
    pair = Validated("checksum")
    pair.announce([2, 3])
    pair.load([5, 4])
    facts = outcome(pair)
    assert not facts["is_loaded"]
    assert pair.consumer.take_invalid_block_ids() == {5, 4}
    for part in ("integrity=validate", "integrity=checksum", "set auto or validate here, or checksum there"):
        assert part in facts["reason"]
    pair.close()


@pytest.mark.parametrize("reason", ["preempted", "aborted", "its lease ended", "it was released"])
def test_a_handoff_is_marked_as_ended_before_the_step_writes_into_its_blocks(reason: str) -> None:
    pair = Validated()
    pair.announce([2, 3])
    # The last block is not ready, so that the load is under way when its handoff ends.
    pair.load([5, 4, 1])
    until(lambda: pair.arrived([2, 3], [5, 4]))
    pair.producer.end_handoffs(StepMetadata(ended=[(pair.handoff, reason)]))
    for layer in pair.source.values():
        layer[2:4] = 0
    facts = outcome(pair)
    assert (facts["num_received"], facts["num_missing"], facts["num_validated"]) == (0, 3, 0)
    assert pair.consumer.take_invalid_block_ids() == {5, 4, 1}
    pair.close()


def test_leased_blocks_are_sent_after_their_handoff_has_ended() -> None:
    pair = Validated()
    pair.hold()
    pair.announce([2, 3])
    pair.load([5, 4])
    assert outcome(pair)["is_loaded"]
    # vLLM frees the blocks now; the consumer's acknowledgement has ended the grant.
    assert sent(pair.producer) == {"producing"}
    again = pair.load([7, 8])
    assert again.block_ids == [7, 8]
    assert not outcome(pair)["is_loaded"]
    pair.close()
