"""Integrity of a worker's agent: validation only where blocks change after their handoff is marked as ended."""

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvpipe.connector import KVPipeConnector
from kvpipe.control import ControlClient
from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import produce
from kvpipe.vllm.handoff import integrity
from kvpipe.vllm.handoff.config import ConnectorConfig
from kvpipe.vllm.handoff.integrity import choose_integrity, objection_to_validate
from kvpipe.vllm.handoff.metadata import Cancel, HandoffEnd, Load, LoadOutcome, StepMetadata
from kvpipe.vllm.handoff.worker import WorkerRole
from tests.vllm.handoff.engine import Engine, cache_config, engine_config, new_id
from tests.vllm.handoff.test_worker import BLOCKS, Pair, caches, received, role, sent, until

pytestmark = pytest.mark.vllm

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def engine(*, uses_v2: bool = False) -> Any:
    return SimpleNamespace(use_v2_model_runner=uses_v2)


def cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(["layer"], spec) for spec in specs]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize("uses_v2", [False, True])
@pytest.mark.parametrize(
    "spec", [FullAttentionSpec(**SHAPE), MLAAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=64)]
)
def test_attention_is_validated_with_either_model_runner(spec: Any, *, uses_v2: bool) -> None:
    assert objection_to_validate(engine(uses_v2=uses_v2), cache(spec)) == ""


def test_a_model_runner_that_zeroes_blocks_before_it_calls_the_connector_is_not_validated() -> None:
    zeroed = SimpleNamespace(needs_kv_cache_zeroing=True)
    assert "V2 model runner" in objection_to_validate(engine(uses_v2=True), zeroed)
    assert objection_to_validate(engine(uses_v2=False), zeroed) == ""


@pytest.mark.parametrize(
    ("setting", "objection", "device", "chosen"),
    [
        ("auto", "", "cpu", "auto"),
        ("auto", "it zeroes blocks", "cpu", "auto"),
        ("checksum", "it zeroes blocks", "cpu", "checksum"),
        ("validate", "", "cpu", "validate"),
        ("validate", "it zeroes blocks", "cpu", "prefer-checksum"),
        ("auto", "", "cuda", "auto"),
        ("checksum", "", "cuda", "checksum"),
        ("validate", "", "cuda", "validate"),
        ("auto", "it zeroes blocks", "cuda", "prefer-checksum"),
        ("validate", "it zeroes blocks", "cuda", "prefer-checksum"),
    ],
)
def test_the_agent_validates_what_it_may(setting: str, objection: str, device: str, chosen: str) -> None:
    assert choose_integrity(setting, objection, device) == chosen


def test_checksums_instead_of_validation_are_logged_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    logger = logging.getLogger("test.integrity")
    monkeypatch.setattr(integrity, "logger", logger)
    monkeypatch.setattr(logger, "warning", lambda text, *values: lines.append(text % values))
    choose_integrity("validate", "it zeroes blocks", "cpu")
    assert lines == ["integrity.fallback checksums instead of validation: it zeroes blocks"]


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
        return role(trace=trace, integrity=setting, objection_to_validate=self.objection)

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()


def outcome(pair: Validated) -> LoadOutcome:
    assert received(pair.consumer) == {"consuming"}
    reports = pair.consumer.drain_outcomes()
    assert reports is not None
    return reports.outcomes["consuming"]


def test_a_workers_load_is_validated_where_the_producer_validates() -> None:
    pair = Validated()
    pair.announce([2, 3])
    pair.load([5, 4])
    facts = outcome(pair)
    assert (facts.is_loaded, facts.num_validated, facts.num_compared) == (True, 6, 0)
    assert pair.arrived([2, 3], [5, 4])
    pair.close()


def test_a_producer_that_may_not_validate_announces_checksums() -> None:
    pair = Validated(objection="it zeroes blocks")
    pair.announce([2, 3])
    pair.load([5, 4])
    facts = outcome(pair)
    assert (facts.is_loaded, facts.num_validated, facts.num_compared) == (True, 0, 6)
    pair.close()


def test_a_consumer_that_wants_checksums_names_both_values_and_the_remedy() -> None:
    pair = Validated("checksum")
    pair.announce([2, 3])
    pair.load([5, 4])
    facts = outcome(pair)
    assert not facts.is_loaded
    assert pair.consumer.drain_invalid_block_ids() == {5, 4}
    for part in ("integrity=validate", "integrity=checksum", "set auto or validate here, or checksum there"):
        assert part in facts.reason
    pair.close()


class Producing(Validated):
    """A pair whose producer is an engine: vLLM's real scheduler, and the connector with the hooks of a worker."""

    def __init__(self, model: str, lease_s: float = 30.0) -> None:
        config = engine_config(model, integrity="validate", silence_s=5, lease_s=lease_s)
        self.engine = Engine(config, BLOCKS)
        self.connector = KVPipeConnector(config, KVConnectorRole.WORKER, cache_config(BLOCKS))
        super().__init__()
        self.invalid_block_ids: set[int] = set()
        self.num_requests = 0

    def role(self, side: str, trace: str = "") -> WorkerRole:
        return self.connector._worker if side == "producer" else super().role(side, trace)

    def add(self, length: int) -> Request:
        """Adds a request of this handoff. No prompt begins as one before, so that nothing is in the prefix cache."""
        self.num_requests += 1
        tokens = [self.num_requests] * length
        return self.engine.add(tokens, max_tokens=1, params=produce(self.handoff.hex()))

    def produce(self, length: int) -> tuple[Request, list[int]]:
        """Adds a request of a new handoff and computes its first step; the blocks that are announced then."""
        self.handoff = bytes.fromhex(new_id())
        request = self.add(length)
        [ready] = self.run(self.schedule()).ready
        return request, ready.block_ids

    def schedule(self) -> SchedulerOutput:
        return self.engine.scheduler.schedule()

    def run(self, output: SchedulerOutput) -> StepMetadata:
        """A step as vLLM's worker runs it, and its report."""
        metadata: StepMetadata = output.kv_connector_metadata
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        self.connector.wait_for_save()
        sending, invalid = self.connector.get_finished(output.finished_req_ids)[0], self.invalid_block_ids
        self.connector.clear_connector_metadata()
        self.invalid_block_ids = set()
        self.engine.end(output, finished_sending=sending or None, invalid_block_ids=invalid)
        return metadata

    def schedule_end(self) -> SchedulerOutput:
        """The step that begins with the end of a handoff, before a worker has run it."""
        deadline = time.monotonic() + 10
        while not (output := self.schedule()).kv_connector_metadata.ended:
            assert time.monotonic() < deadline, "the scheduler role has not ended the handoff"
            self.run(output)
        return output

    def close(self) -> None:
        super().close()
        self.engine.close()

    def settle(self) -> None:
        """Ends what is left, so that all blocks are free for the next handoff."""
        self.engine.finish_all()
        client = ControlClient("")
        client.release(self.engine.role.address, self.handoff.hex()).wait(10)
        client.close()
        until(lambda: self.run(self.schedule()) and self.engine.num_free_blocks == BLOCKS - 1)


def aborted(pair: Producing, request: Request, block_ids: list[int]) -> None:
    pair.engine.abort(request)


def preempted(pair: Producing, request: Request, block_ids: list[int]) -> None:
    assert pair.engine.scheduler.reset_prefix_cache(reset_running_requests=True)


def released(pair: Producing, request: Request, block_ids: list[int]) -> None:
    client = ControlClient("")
    client.release(pair.engine.role.address, pair.handoff.hex()).wait(10)
    client.close()


def lease_ended(pair: Producing, request: Request, block_ids: list[int]) -> None:
    assert request.is_finished()
    time.sleep(2 * LEASE_S)


def computed_again(pair: Producing, request: Request, block_ids: list[int]) -> None:
    # Another connector of a MultiConnector has not loaded a block of this request.
    pair.invalid_block_ids = {block_ids[0]}
    pair.run(pair.schedule())


LEASE_S = 0.05
# Events that end a handoff: the reason, and the length of a prompt that it ends. One of 300 tokens has two steps, one
# of 100 one.
ENDS = {
    aborted: ("the producer ended the request: FINISHED_ABORTED", 300),
    preempted: ("the producer preempted the request", 300),
    computed_again: ("the producer has to compute its blocks again", 300),
    released: ("it was released", 100),
    lease_ended: ("its lease ended before a consumer came", 100),
}
NUM_OF_EACH_OUTCOME = 10


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_handoff_is_marked_as_ended_before_the_step_writes_into_its_blocks(
    end: Callable[[Producing, Request, list[int]], None], tiny_model: str
) -> None:
    pair = Producing(tiny_model, lease_s=LEASE_S if end is lease_ended else 30)
    num_loaded, num_ended = 0, 0
    # It approaches the moment at which the producer's answer and the end of the handoff cross, from both sides.
    delay_s, deadline = 200e-6, time.monotonic() + 60
    while min(num_loaded, num_ended) < NUM_OF_EACH_OUTCOME:
        assert time.monotonic() < deadline, (num_loaded, num_ended, delay_s)
        reason, length = ENDS[end]
        request, block_ids = pair.produce(length)
        announced = {name: layer[block_ids].clone() for name, layer in pair.source.items()}
        end(pair, request, block_ids)
        output = pair.schedule_end()
        assert output.kv_connector_metadata.ended == [HandoffEnd(pair.handoff, reason)]
        target = list(range(len(block_ids)))
        pair.load(target)
        spin(delay_s)
        pair.connector.handle_preemptions(output.kv_connector_metadata)
        for layer in pair.source.values():
            layer[block_ids] = torch.rand(())
        facts = outcome(pair)
        if facts.is_loaded:
            num_loaded, delay_s = num_loaded + 1, delay_s * 0.9
            assert all(torch.equal(announced[name], pair.target[name][target]) for name in announced)
        else:
            num_ended, delay_s = num_ended + 1, delay_s + 50e-6
            assert (facts.num_received, facts.num_validated) == (0, 0)
            assert pair.consumer.drain_invalid_block_ids() == set(target)
        pair.run(output)
        pair.settle()
    pair.close()


def test_a_block_that_is_freed_after_another_consumers_load_is_invalid_to_a_slow_one(tiny_model: str) -> None:
    pair = Producing(tiny_model)
    _, block_ids = pair.produce(100)
    slow, target = pair.role("slow"), caches()
    slow.register(target)
    there = pair.producer.handshake()
    ranks = [(there.address, there.incarnation)]
    # It waits for one block more than there is, with all the others read.
    load = Load("slow", pair.handoff, [(0, list(range(len(block_ids) + 1)))], ranks, has_state=True)
    slow.begin_step(StepMetadata(loads=[load]))
    until(lambda: all(torch.equal(target[name][: len(block_ids)], pair.source[name][block_ids]) for name in target))
    pair.load(list(range(len(block_ids))))
    assert outcome(pair).is_loaded
    until(lambda: pair.run(pair.schedule()) and pair.engine.num_free_blocks == BLOCKS - 1)
    # Any step may write into them now, and the slow consumer knows of nothing.
    slow.begin_step(StepMetadata(cancels=[Cancel(pair.handoff, "late", is_withdrawn=False)]))
    assert received(slow) == {"slow"}
    assert slow.drain_invalid_block_ids() == set(load.block_ids)
    facts = slow.drain_outcomes().outcomes["slow"]
    assert (facts.num_received, facts.num_validated) == (0, 0)
    slow.close()
    pair.close()


def test_of_the_children_of_one_request_the_first_has_the_handoff(tiny_model: str) -> None:
    pair = Producing(tiny_model)
    first, block_ids = pair.produce(100)
    extra = {"kv_transfer_params": first.kv_transfer_params}
    sampling = SamplingParams(n=2, max_tokens=1, extra_args=extra)
    parent = ParentRequest(SimpleNamespace(request_id="parent", external_req_id="parent", params=sampling))
    assert parent.get_child_info(1)[1].extra_args == extra, "vLLM gives each child the same handoff"
    child = pair.add(150)
    assert pair.run(pair.schedule()).ready == [], "the blocks of another child have no owner"
    assert child.is_finished()
    target = list(range(len(block_ids)))
    pair.load([*target, len(block_ids)])
    until(lambda: pair.arrived(block_ids, target))
    released(pair, first, block_ids)
    pair.run(pair.schedule_end())
    assert outcome(pair).reason == "it was released"
    assert pair.consumer.drain_invalid_block_ids() == {*target, len(block_ids)}
    pair.close()


def test_a_handoff_id_that_is_used_again_grants_nothing(tiny_model: str) -> None:
    pair = Producing(tiny_model)
    _, block_ids = pair.produce(100)
    target = list(range(len(block_ids)))
    pair.load(target)
    assert outcome(pair).is_loaded
    until(lambda: pair.run(pair.schedule()) and pair.engine.num_free_blocks == BLOCKS - 1)
    pair.add(100)
    pair.run(pair.schedule())
    pair.load(target)
    facts = outcome(pair)
    assert (facts.is_loaded, facts.reason) == (False, "its consumer acknowledged it")
    assert pair.consumer.drain_invalid_block_ids() == set(target)
    pair.settle()
    pair.close()


def spin(seconds: float) -> None:
    """Waits for less than a thread sleeps."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def test_leased_blocks_are_sent_after_their_handoff_has_ended() -> None:
    pair = Validated()
    pair.hold()
    pair.announce([2, 3])
    pair.load([5, 4])
    assert outcome(pair).is_loaded
    # vLLM frees the blocks now; the consumer's acknowledgement has ended the grant.
    assert sent(pair.producer) == {"producing"}
    again = pair.load([7, 8])
    assert again.block_ids == [7, 8]
    assert not outcome(pair).is_loaded
    pair.close()
