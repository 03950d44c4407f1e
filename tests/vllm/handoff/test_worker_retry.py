"""The worker role's word on loads that were asked for again, refused, or had their blocks in the producer's cache."""

import time
from collections.abc import Iterator

import pytest

from kvpipe.vllm.handoff.metadata import Load, ReadyRange, StepMetadata
from tests.vllm.handoff.test_worker import LAYERS, Pair, received, until

pytestmark = pytest.mark.vllm


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.producer.close()
    pair.consumer.close()


def test_the_outcome_counts_blocks_and_comparisons_and_what_was_asked_for_again(pair: Pair) -> None:
    pair.announce([2, 3])
    until(lambda: pair.producer._agent.num_leased == 1)
    pair.source["layer.1"][3].neg_()
    pair.load([5, 4])
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {4}
    facts = pair.consumer.drain_outcomes().outcomes["consuming"]
    counts = ("num_received", "num_missing", "num_retried", "num_compared", "num_corrupt")
    assert [getattr(facts, name) for name in counts] == [1, 1, 1, 2 * LAYERS + 1, 2]
    assert facts.transport
    assert facts.num_bytes > 0


def test_a_load_that_failed_may_be_begun_again_while_its_blocks_are_leased(pair: Pair) -> None:
    pair.announce([2, 3])
    until(lambda: pair.producer._agent.num_leased == 1)
    right = pair.source["layer.1"][3].clone()
    pair.source["layer.1"][3].neg_()
    pair.load([5, 4])
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == {4}
    pair.source["layer.1"][3] = right
    pair.load([7, 8])
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == set()
    assert pair.arrived([2, 3], [7, 8])


def test_a_load_that_is_refused_ends_at_once_with_the_reason(pair: Pair) -> None:
    load = Load("refused", pair.handoff, [(0, [5, 4])], [], has_state=False, refusal="its lease ended")
    pair.consumer.begin_step(StepMetadata(loads=[load]))
    assert pair.consumer.finished() == (set(), {"refused"})
    assert pair.consumer.drain_invalid_block_ids() == {4, 5}
    facts = pair.consumer.drain_outcomes().outcomes["refused"]
    assert (facts.is_loaded, facts.num_missing, facts.reason) == (False, 2, "its lease ended")


def test_cached_blocks_move_before_the_forward_pass(pair: Pair) -> None:
    pair.load([5, 4, 1])
    finals = [ReadyRange(pair.handoff, 2, [9])]
    pair.producer.begin_step(StepMetadata(cached=[ReadyRange(pair.handoff, 0, [2, 3])], ready=finals))
    until(lambda: pair.arrived([2, 3], [5, 4]))
    time.sleep(0.05)
    assert not pair.arrived([9], [1])
    assert pair.consumer.finished() == (set(), set())
    pair.producer.end_forward()
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2, 3, 9], [5, 4, 1])
