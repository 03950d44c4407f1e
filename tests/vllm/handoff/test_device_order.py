"""The worker role's order with a device that runs what is launched later. A test completes its events."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvpipe import _kvpipe
from kvpipe.exceptions import TransportUnavailableError
from kvpipe.vllm.device import HostOrder
from kvpipe.vllm.handoff.metadata import Cancel, Load, PrefillRest, ReadyRange, StepMetadata
from kvpipe.vllm.handoff.producer.progress import Progress
from tests.vllm.handoff.engine import new_id
from tests.vllm.handoff.test_worker import LAYERS, Pair, received, until

pytestmark = pytest.mark.vllm


class LateOrder(HostOrder):
    """The order of a device whose events the test completes."""

    is_async = True

    def __init__(self) -> None:
        self.events: list[_kvpipe.ManualEvent] = []
        self.is_in_graph = self.is_broken = False

    def record(self) -> Any:
        if self.is_broken:
            message = "cuEventRecord: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
            raise TransportUnavailableError(message)
        self.events.append(_kvpipe.ManualEvent())
        return self.events[-1]

    def is_capturing(self) -> bool:
        return self.is_in_graph

    def complete(self) -> None:
        for event in self.events:
            event.complete()


class LatePair(Pair):
    """A pair whose producer and consumer compute on such devices."""

    def __init__(self) -> None:
        super().__init__()
        self.there = self.producer._order = LateOrder()
        self.here = self.consumer._order = LateOrder()

    def nothing_arrives(self, source: list[int], target: list[int]) -> None:
        for _ in range(10):
            assert self.consumer.finished() == (set(), set())
            assert not self.arrived(source, target)
            time.sleep(0.01)


@pytest.fixture
def pair() -> Iterator[LatePair]:
    pair = LatePair()
    yield pair
    for order in (pair.there, pair.here):
        order.complete()
    pair.producer.close()
    pair.consumer.close()


def test_a_layer_is_announced_when_the_device_has_computed_it_and_not_when_it_is_launched(pair: LatePair) -> None:
    pair.load([5, 4])
    pair.here.complete()
    pair.begin_step([2, 3])
    for layer in range(LAYERS):
        pair.producer.save_layer(f"layer.{layer}")
    pair.producer.end_forward()
    assert len(pair.there.events) == LAYERS
    for layer in range(LAYERS):
        assert pair.consumer.finished() == (set(), set())
        pair.source[f"layer.{layer}"][[2, 3]] = float(layer)
        pair.there.events[layer].complete()
        until(lambda done=layer + 1: pair.arrived([2, 3], [5, 4], range(done)))
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_outcomes().outcomes["consuming"].is_loaded


def test_a_layer_whose_event_is_completed_waits_for_the_layers_before_it(pair: LatePair) -> None:
    pair.load([5])
    pair.here.complete()
    pair.begin_step([2])
    pair.producer.save_layer("layer.0")
    pair.producer.save_layer("layer.1")
    pair.there.events[1].complete()
    pair.nothing_arrives([2], [5])
    pair.there.events[0].complete()
    until(lambda: pair.arrived([2], [5], range(2)))
    pair.producer.end_forward()


def test_cached_blocks_wait_for_the_steps_that_were_launched_before(pair: LatePair) -> None:
    pair.load([5])
    pair.here.complete()
    pair.producer.begin_step(StepMetadata(cached=[ReadyRange(pair.handoff, 0, [2])]))
    pair.nothing_arrives([2], [5])
    pair.there.complete()
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2], [5])


def test_a_load_writes_nothing_before_the_steps_that_were_launched_before_it_are_done(pair: LatePair) -> None:
    pair.announce([2])
    pair.there.complete()
    pair.load([5])
    pair.nothing_arrives([2], [5])
    pair.here.complete()
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2], [5])


def test_a_load_that_waits_for_the_device_can_be_cancelled(pair: LatePair) -> None:
    pair.announce([2])
    pair.there.complete()
    pair.load([5])
    pair.consumer.begin_step(StepMetadata(cancels=[Cancel(pair.handoff, "aborted", is_withdrawn=False)]))
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {5}
    pair.here.complete()
    pair.nothing_arrives([2], [5])


def test_a_handoff_that_ends_before_its_event_is_completed_is_not_announced(pair: LatePair) -> None:
    pair.load([5])
    pair.here.complete()
    pair.announce([2])
    pair.end("preempted")
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {5}
    pair.there.complete()
    pair.nothing_arrives([2], [5])


def test_while_a_graph_is_captured_layers_record_nothing_and_the_end_of_the_step_announces_them(pair: LatePair) -> None:
    pair.load([5])
    pair.here.complete()
    pair.begin_step([2])
    pair.there.is_in_graph = True
    pair.producer.save_layer("layer.0")
    pair.there.is_in_graph = False
    assert pair.there.events == []
    pair.producer.end_forward()
    pair.there.complete()
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2], [5])


@pytest.mark.parametrize("is_by_layer", [True, False])
def test_a_device_that_records_no_event_ends_the_handoffs_of_the_step_with_the_reason(
    pair: LatePair, *, is_by_layer: bool
) -> None:
    pair.load([5])
    pair.here.complete()
    pair.begin_step([2])
    pair.there.is_broken = True
    if is_by_layer:
        pair.producer.save_layer("layer.0")
    pair.producer.end_forward()
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {5}
    assert "ILLEGAL_ADDRESS" in pair.consumer.drain_outcomes().outcomes["consuming"].reason


def test_cached_blocks_of_a_device_that_records_no_event_end_their_handoff(pair: LatePair) -> None:
    pair.load([5])
    pair.here.complete()
    pair.there.is_broken = True
    pair.producer.begin_step(StepMetadata(cached=[ReadyRange(pair.handoff, 0, [2])]))
    assert received(pair.consumer) == {"consuming"}
    assert "ILLEGAL_ADDRESS" in pair.consumer.drain_outcomes().outcomes["consuming"].reason


def test_a_load_of_a_device_that_records_no_event_fails_with_the_reason(pair: LatePair) -> None:
    pair.here.is_broken = True
    pair.load([5, 4])
    assert pair.consumer.finished() == (set(), {"consuming"})
    assert pair.consumer.drain_invalid_block_ids() == {5, 4}
    assert "ILLEGAL_ADDRESS" in pair.consumer.drain_outcomes().outcomes["consuming"].reason


def test_a_load_that_the_scheduler_role_has_refused_ends_with_that_reason_whatever_the_device_does(
    pair: LatePair,
) -> None:
    pair.here.is_broken = True
    load = Load("consuming", pair.handoff, [(0, [5])], [], has_state=True, refusal="weights differ")
    pair.consumer.begin_step(StepMetadata(loads=[load]))
    assert received(pair.consumer) == {"consuming"}
    outcome = pair.consumer.drain_outcomes().outcomes["consuming"]
    assert (outcome.reason, outcome.cause) == ("weights differ", "")


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_work_of_the_device_that_fails_ends_the_load_with_the_reason_and_no_block_counts(
    pair: LatePair, side: str
) -> None:
    pair.load([5])
    pair.announce([2])
    failing, other = (pair.there, pair.here) if side == "producer" else (pair.here, pair.there)
    other.complete()
    for event in failing.events:
        event.complete("cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {5}
    assert "ILLEGAL_ADDRESS" in pair.consumer.drain_outcomes().outcomes["consuming"].reason


def test_launched_layers_predict_nothing(pair: LatePair, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[float] = []
    monkeypatch.setattr(Progress, "layer_saved", lambda _, now_s: saved.append(now_s))
    rest = PrefillRest(pair.handoff, 0.0)
    pair.producer.begin_step(StepMetadata(ready=[ReadyRange(pair.handoff, 0, [2])], progress=[rest]))
    for layer in range(LAYERS):
        pair.producer.save_layer(f"layer.{layer}")
    pair.producer.end_forward()
    assert saved == []


def test_steps_without_handoffs_record_nothing(pair: LatePair) -> None:
    pair.producer.begin_step(StepMetadata(states=[bytes.fromhex(new_id())]))
    for layer in range(LAYERS):
        pair.producer.save_layer(f"layer.{layer}")
    pair.producer.end_forward()
    assert pair.there.events == []
