"""The worker role: two of them with real agents, caches in plain tensors; every report exactly once."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpipe.exceptions import ConfigError
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from kvpipe.vllm.handoff.config import ConnectorConfig
from kvpipe.vllm.handoff.connector import KVPipeConnector, calls_each_layer_once
from kvpipe.vllm.handoff.metadata import (
    Cancel,
    HandoffEnd,
    HandoffLease,
    Load,
    ReadyRange,
    StepMetadata,
    WorkerOutcomes,
)
from kvpipe.vllm.handoff.worker import WorkerEngine, WorkerRole
from tests.vllm.handoff.engine import new_id

pytestmark = pytest.mark.vllm

LAYERS, BLOCKS, SHAPE = 3, 16, (4, 32, 64)
NAMES = [f"layer.{index}" for index in range(LAYERS)]


def role(
    *,
    speculative: object = None,
    use_ubatching: bool = False,
    objection_to_validate: str = "",
    num_blocks: int = BLOCKS,
    groups: Sequence[Sequence[str]] = (NAMES,),
    rank: int = 0,
    num_ranks: int = 1,
    num_stages: int = 1,
    **settings: Any,
) -> WorkerRole:
    """A worker role. `settings` are the connector's."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=use_ubatching), speculative_config=speculative
    )
    engine = WorkerEngine(
        rank=rank,
        num_ranks=num_ranks,
        num_stages=num_stages,
        engine_id="engine",
        kv_role="kv_both",
        num_blocks=num_blocks,
        groups=groups,
        num_hooked_layers=sum(map(len, groups)),
        has_parts=len(groups) == 1,
        is_by_layer=calls_each_layer_once(config),
        objection_to_validate=objection_to_validate,
    )
    return WorkerRole(engine, ConnectorConfig(silence_s=5, **settings))


def caches() -> dict[str, torch.Tensor]:
    """KV caches as vLLM's CPU backend makes them: one allocation, layer after layer."""
    storage = torch.randn(LAYERS, BLOCKS, *SHAPE)
    return {f"layer.{index}": storage[index] for index in range(LAYERS)}


class Pair:
    """A producer's and a consumer's worker."""

    def __init__(self, trace: str = "") -> None:
        self.producer, self.consumer = self.role("producer", trace), self.role("consumer", trace)
        self.source, self.target = caches(), caches()
        self.producer.register(self.source)
        self.consumer.register(self.target)
        self.handoff = bytes.fromhex(new_id())

    def role(self, side: str, trace: str = "") -> WorkerRole:
        return role(trace=trace)

    def load(self, block_ids: list[int], *, has_state: bool = True, incarnation: bytes | None = None) -> Load:
        address = self.producer.handshake()
        rank = (address.address, incarnation or address.incarnation)
        load = Load("consuming", self.handoff, [(0, block_ids)], [rank], has_state)
        self.consumer.begin_step(StepMetadata(loads=[load]))
        return load

    def begin_step(self, block_ids: list[int], first: int = 0) -> None:
        self.producer.begin_step(StepMetadata(ready=[ReadyRange(self.handoff, first, block_ids)]))

    def announce(self, block_ids: list[int], first: int = 0) -> None:
        self.begin_step(block_ids, first)
        self.producer.end_forward()

    def end(self, reason: str) -> None:
        self.producer.prepare_step(StepMetadata(ended=[HandoffEnd(self.handoff, reason)]))

    def settle(self) -> None:
        """Waits until the consumer's agent has handled what UCX had received: bytes can be here before it knows."""
        for name in ("answered", "answered again"):
            self.consumer._agent.register(name, bytearray(64), 64, 64).wait(None)

    def hold(self) -> None:
        self.producer.begin_step(StepMetadata(leased=[HandoffLease(self.handoff, "producing")]))

    def arrived(self, source: list[int], target: list[int], layers: range = range(LAYERS)) -> bool:
        names = [f"layer.{index}" for index in layers]
        return all(torch.equal(self.source[name][source], self.target[name][target]) for name in names)


class Recorded:
    """A producer's agent, which does what it is told, and the numbers of layers that it was told of."""

    def __init__(self, worker: WorkerRole) -> None:
        self.num_layers: list[int] = []
        self._agent, worker._agent = worker._agent, self

    def mark_ready(self, ready: Any, regions: list[Any], event: Any) -> None:
        self.num_layers.append(len(regions))
        self._agent.mark_ready(ready, regions, event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.producer.close()
    pair.consumer.close()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 10
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not come in time"
        time.sleep(0.005)
    return value


def received(worker: WorkerRole) -> set[str]:
    return until(lambda: worker.finished()[1])


def sent(worker: WorkerRole) -> set[str]:
    return until(lambda: worker.finished()[0])


def test_blocks_arrive_in_every_layer_and_both_sides_report_once(pair: Pair) -> None:
    pair.announce([2, 3, 9])
    pair.load([5, 4, 1])
    pair.hold()
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2, 3, 9], [5, 4, 1])
    assert pair.consumer.drain_invalid_block_ids() == set()
    facts = pair.consumer.drain_outcomes().outcomes["consuming"]
    assert facts.is_loaded
    assert facts.num_bytes == LAYERS * 3 * 4 * 32 * 64 * 4
    assert sent(pair.producer) == {"producing"}
    for _ in range(20):
        assert pair.producer.finished() == (set(), set())
        assert pair.consumer.finished() == (set(), set())
        time.sleep(0.005)


def test_other_blocks_are_not_touched(pair: Pair) -> None:
    before = {name: cache.clone() for name, cache in pair.target.items()}
    pair.announce([2])
    pair.load([5])
    received(pair.consumer)
    others = [block for block in range(BLOCKS) if block != 5]
    assert all(torch.equal(before[name][others], pair.target[name][others]) for name in before)


def test_blocks_move_while_prefill_goes_on(pair: Pair) -> None:
    pair.load([5, 4, 1])
    pair.announce([2])
    until(lambda: pair.consumer.finished() == (set(), set()) and pair.arrived([2], [5]))
    pair.announce([3, 9], first=1)
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2, 3, 9], [5, 4, 1])


def test_a_layer_moves_while_the_next_ones_are_computed(pair: Pair) -> None:
    pair.load([5, 4])
    pair.begin_step([2, 3])
    for layer in range(LAYERS):
        for later in range(layer, LAYERS):
            pair.source[f"layer.{later}"][[2, 3]] = float(LAYERS * layer + later)
        assert pair.consumer.finished() == (set(), set())
        pair.producer.save_layer(f"layer.{layer}")
        until(lambda done=layer + 1: pair.arrived([2, 3], [5, 4], range(done)))
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_outcomes().outcomes["consuming"].is_loaded
    pair.producer.end_forward()


def test_the_end_of_a_step_announces_the_layers_that_were_not_saved_and_no_others(pair: Pair) -> None:
    recorded = Recorded(pair.producer)
    pair.load([5, 4])
    pair.begin_step([2, 3])
    pair.producer.save_layer("layer.1")
    pair.producer.save_layer("a layer without a cache")
    until(lambda: pair.arrived([2, 3], [5, 4], range(1, 2)))
    assert pair.consumer.finished() == (set(), set())
    pair.producer.end_forward()
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2, 3], [5, 4])
    pair.producer.end_forward()
    assert recorded.num_layers == [1, LAYERS - 1]


def test_a_step_whose_layers_were_all_saved_announces_nothing_at_its_end(pair: Pair) -> None:
    recorded = Recorded(pair.producer)
    for first, block in enumerate([2, 3]):
        pair.begin_step([block], first)
        for layer in range(LAYERS):
            pair.producer.save_layer(f"layer.{layer}")
        pair.producer.end_forward()
    assert recorded.num_layers == [1] * (2 * LAYERS)
    pair.load([5, 4])
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2, 3], [5, 4])


def test_a_forward_pass_that_raised_announces_no_layer_that_it_has_not_computed(pair: Pair) -> None:
    connector = KVPipeConnector.__new__(KVPipeConnector)
    connector._worker = pair.producer
    recorded = Recorded(pair.producer)
    pair.begin_step([2, 3])
    pair.producer.save_layer("layer.1")
    # As V1's model runner: in a `finally`.
    with suppress(ZeroDivisionError):
        try:
            _ = 1 // 0
        finally:
            connector.wait_for_save()
    assert recorded.num_layers == [1]
    pair.begin_step([4], 2)
    connector.wait_for_save()
    assert recorded.num_layers == [1, LAYERS]


def test_a_step_without_ready_blocks_sends_nothing(pair: Pair) -> None:
    recorded = Recorded(pair.producer)
    for finals in ([], [ReadyRange(pair.handoff, 0, [2])], [], []):
        pair.producer.begin_step(StepMetadata(ready=finals))
        for layer in range(LAYERS):
            pair.producer.save_layer(f"layer.{layer}")
        pair.producer.end_forward()
        assert recorded.num_layers == ([1] * LAYERS if finals else []), finals
        recorded.num_layers.clear()


def test_a_layer_that_is_computed_twice_in_a_step_is_never_used(pair: Pair) -> None:
    recorded = Recorded(pair.producer)
    pair.load([5])
    pair.begin_step([2])
    pair.producer.save_layer("layer.0")
    pair.producer.save_layer("layer.1")
    pair.producer.save_layer("layer.0")
    pair.producer.save_layer("layer.2")
    pair.producer.end_forward()
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {5}
    assert "layer.0 was computed twice" in pair.consumer.drain_outcomes().outcomes["consuming"].reason
    assert recorded.num_layers == [1, 1]
    # From then on at the end of steps, when it has been computed for the last time.
    pair.handoff = bytes.fromhex(new_id())
    pair.load([5])
    pair.begin_step([2])
    for _ in range(2):
        pair.producer.save_layer("layer.0")
    pair.producer.end_forward()
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_outcomes().outcomes["consuming"].is_loaded
    assert recorded.num_layers == [1, 1, LAYERS]


@pytest.mark.parametrize("setting", [{"speculative": object()}, {"use_ubatching": True}])
def test_layers_that_are_called_before_all_is_written_are_announced_at_the_end(setting: dict[str, Any]) -> None:
    worker = role(**setting)
    worker.register(caches())
    recorded = Recorded(worker)
    worker.begin_step(StepMetadata(ready=[ReadyRange(bytes.fromhex(new_id()), 0, [2])]))
    for _ in range(2):
        worker.save_layer("layer.0")
    assert recorded.num_layers == []
    worker.end_forward()
    assert recorded.num_layers == [LAYERS]
    worker.close()


def test_a_handoff_that_ends_between_steps_is_announced_no_further(pair: Pair) -> None:
    pair.load([5, 4])
    pair.begin_step([2])
    pair.producer.save_layer("layer.0")
    pair.producer.end_forward()
    until(lambda: pair.arrived([2], [5]))
    pair.end("preempted")
    before = pair.target["layer.0"][4].clone()
    pair.announce([3], first=1)
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {4, 5}
    assert torch.equal(pair.target["layer.0"][4], before)


def test_a_load_ends_only_with_the_sequence_state(pair: Pair) -> None:
    pair.announce([2])
    pair.load([5], has_state=False)
    until(lambda: pair.arrived([2], [5]))
    time.sleep(0.05)
    assert pair.consumer.finished() == (set(), set())
    pair.consumer.begin_step(StepMetadata(states=[pair.handoff]))
    assert received(pair.consumer) == {"consuming"}


def verified(worker: WorkerRole) -> dict[str, Any]:
    """A worker's report of loads that lack the sequence state only."""

    def said() -> WorkerOutcomes | None:
        worker.finished()
        words = worker.drain_outcomes()
        return words if words is not None and words.verified else None

    words = until(said)
    assert words.outcomes == {}
    return words.verified


def test_verified_blocks_are_reported_before_the_sequence_state_arrives(pair: Pair) -> None:
    pair.announce([2, 3])
    pair.load([5, 4], has_state=False)
    (facts,) = verified(pair.consumer)["consuming"]
    assert (facts.is_loaded, facts.num_received, facts.num_missing) == (True, 2, 0)
    assert pair.arrived([2, 3], [5, 4])


def test_vllm_calls_the_scheduler_role_after_every_step_while_a_load_runs_and_not_after_it(pair: Pair) -> None:
    pair.announce([2])
    pair.load([5], has_state=False)
    assert verified(pair.consumer).keys() == {"consuming"}
    pair.consumer.begin_step(StepMetadata())
    assert pair.consumer.finished() == (set(), set())
    assert pair.consumer.drain_outcomes() == WorkerOutcomes(), "nothing at all is dropped by vLLM's worker"
    pair.consumer.begin_step(StepMetadata(states=[pair.handoff]))
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_outcomes().outcomes.keys() == {"consuming"}
    assert pair.consumer.drain_outcomes() is None


def test_a_load_that_the_scheduler_has_committed_is_acknowledged_and_not_reported(pair: Pair) -> None:
    pair.hold()
    pair.announce([2])
    pair.load([5], has_state=False)
    assert verified(pair.consumer).keys() == {"consuming"}
    pair.consumer.begin_step(StepMetadata(committed=[pair.handoff]))
    assert pair.consumer.drain_outcomes().acknowledged == [pair.handoff]
    assert sent(pair.producer) == {"producing"}
    assert pair.consumer.finished() == (set(), set())
    pair.consumer.begin_step(StepMetadata())
    assert pair.consumer.drain_outcomes() is None


def test_a_load_that_fails_after_its_blocks_came_is_reported_as_failed_only(pair: Pair) -> None:
    pair.announce([2])
    pair.load([5], has_state=False)
    until(lambda: pair.arrived([2], [5]))
    time.sleep(0.05)
    pair.consumer.begin_step(
        StepMetadata(cancels=[Cancel(pair.handoff, "the request was aborted", is_withdrawn=False)])
    )
    time.sleep(0.05)
    assert received(pair.consumer) == {"consuming"}
    words = pair.consumer.drain_outcomes()
    assert (words.verified, words.outcomes["consuming"].is_loaded) == ({}, False)


def test_a_block_that_changes_after_its_checksum_is_reported_as_invalid(pair: Pair) -> None:
    pair.announce([2, 3])
    until(lambda: pair.producer._agent.num_leased == 1)
    pair.source["layer.1"][3].neg_()
    pair.load([5, 4])
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {4}
    facts = pair.consumer.drain_outcomes().outcomes["consuming"]
    assert not facts.is_loaded
    assert "checksum" in facts.reason
    assert pair.consumer.drain_invalid_block_ids() == set()


@pytest.mark.parametrize("block_ids", [[5, 4], [5]])
def test_no_block_of_a_withdrawn_handoff_is_used(pair: Pair, block_ids: list[int]) -> None:
    # With one block it is verified, and lacks the sequence state only.
    pair.announce([2])
    pair.load(block_ids, has_state=len(block_ids) > 1)
    until(lambda: pair.arrived([2], [5]))
    pair.end("aborted")
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == set(block_ids)
    assert pair.consumer.drain_outcomes().outcomes["consuming"].reason == "aborted"


def test_a_cancelled_load_is_reported_once_with_its_missing_blocks(pair: Pair) -> None:
    pair.load([5, 4])
    pair.consumer.begin_step(
        StepMetadata(cancels=[Cancel(pair.handoff, "the request was aborted", is_withdrawn=False)])
    )
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {4, 5}
    pair.announce([2, 3])
    time.sleep(0.1)
    assert not pair.arrived([2], [5])


@pytest.mark.parametrize(("is_withdrawn", "invalid"), [(True, {4, 5}), (False, {4})])
def test_of_a_cancelled_load_blocks_that_are_here_count_unless_they_were_withdrawn(
    pair: Pair, *, is_withdrawn: bool, invalid: set[int]
) -> None:
    pair.announce([2])
    pair.load([5, 4])
    until(lambda: pair.arrived([2], [5]))
    pair.settle()
    pair.consumer.begin_step(StepMetadata(cancels=[Cancel(pair.handoff, "withdrawn", is_withdrawn)]))
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == invalid


def test_a_load_and_its_cancel_in_one_step_end_it(pair: Pair) -> None:
    address = pair.producer.handshake()
    load = Load("consuming", pair.handoff, [(0, [5])], [(address.address, address.incarnation)], has_state=True)
    pair.consumer.begin_step(StepMetadata(loads=[load], cancels=[Cancel(pair.handoff, "aborted", is_withdrawn=False)]))
    assert received(pair.consumer) == {"consuming"}


def test_a_producer_of_another_life_is_refused(pair: Pair) -> None:
    pair.announce([2])
    pair.load([5], incarnation=bytes(16))
    assert received(pair.consumer) == {"consuming"}
    assert "restarted" in pair.consumer.drain_outcomes().outcomes["consuming"].reason


def test_a_producer_that_goes_away_ends_the_load(pair: Pair) -> None:
    pair.announce([2])
    pair.load([5, 4])
    until(lambda: pair.arrived([2], [5]))
    pair.producer.close()
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {4}


def test_a_producer_with_fewer_workers_fails_the_load(pair: Pair) -> None:
    load = Load("consuming", pair.handoff, [(0, [5])], [], has_state=True)
    pair.consumer.begin_step(StepMetadata(loads=[load]))
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {5}


def test_a_release_frees_leased_blocks_once(pair: Pair) -> None:
    pair.announce([2])
    pair.hold()
    pair.end("released")
    assert pair.producer.finished()[0] == {"producing"}
    pair.end("released again")
    assert pair.producer.finished()[0] == set()


def test_consumers_of_different_handoffs_do_not_disturb_each_other(pair: Pair) -> None:
    pair.announce([2])
    lost = Load("lost", bytes.fromhex(new_id()), [(0, [7])], [("127.0.0.1:1", bytes(16))], has_state=True)
    pair.consumer.begin_step(StepMetadata(loads=[lost]))
    pair.load([5])
    ended: set[str] = set()
    until(lambda: ended.update(pair.consumer.finished()[1]) or ended >= {"lost", "consuming"})
    assert pair.consumer.drain_invalid_block_ids() == {7}
    assert pair.arrived([2], [5])


def test_two_requests_of_one_handoff_are_distinguished(pair: Pair) -> None:
    load = pair.load([5])
    again = Load("again", pair.handoff, [(0, [7])], load.ranks, has_state=True)
    pair.consumer.begin_step(StepMetadata(loads=[again]))
    assert received(pair.consumer) == {"again"}
    assert pair.consumer.drain_invalid_block_ids() == {7}
    pair.announce([2])
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2], [5])


def test_blocks_with_gaps_are_an_error_that_names_the_layer() -> None:
    worker = role()
    with pytest.raises(ConfigError, match=r"layer\.0.*not dense"):
        worker.register({name: torch.zeros(BLOCKS, 4, 64, 32)[..., :16] for name in NAMES})
    worker.close()


def test_a_layer_without_a_cache_is_refused_by_name() -> None:
    worker = role()
    with pytest.raises(ConfigError, match=r"layer layer\.1: .* vLLM gives it no cache"):
        worker.register({"layer.0": torch.zeros(BLOCKS, *SHAPE)})
    worker.close()


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'lissten'.*listen"):
        ConnectorConfig.parse({"lissten": "x"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lease_s": -1}, "lease_s=-1"),
        ({"lease_s": "soon"}, "lease_s='soon'"),
        ({"on_load_failure": "retry"}, "recompute, fail"),
        ({"listen": "here"}, "HOST:PORT"),
        ({"listen": 7}, "listen=7"),
        ({"listen": "0.0.0.0:7100"}, "cannot be advertised"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConnectorConfig.parse(setting)


def test_settings_come_from_the_environment_below_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPIPE_LEASE_S", "7")
    assert ConnectorConfig.parse({}).lease_s == 7
    assert ConnectorConfig.parse({"lease_s": 9}).lease_s == 9


def test_tokens_of_a_step_are_not_forced_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = type(PENDING_FIRST_TOKENS)()
    monkeypatch.setattr("kvpipe.vllm.handoff.worker.PENDING_FIRST_TOKENS", pending)
    worker = role()
    worker.register(caches())
    worker.begin_step(StepMetadata(first_tokens={b"handoff": 7}))
    assert pending.of("engine") == {b"handoff": 7}
    worker.begin_step(StepMetadata())
    assert pending.of("engine") == {}
    worker.close()
