"""Handoffs between engines of different tensor parallel sizes: workers with real agents, each with its heads."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from kvpipe.vllm.handoff.consumer.rank_sources import rank_sources
from kvpipe.vllm.handoff.metadata import Cancel, HandoffEnd, HandoffLease
from kvpipe.vllm.handoff.worker import WorkerRole
from tests.vllm.handoff.engine import new_id
from tests.vllm.handoff.ranks import CacheShape, EngineOfRanks
from tests.vllm.handoff.test_rank_sources import SIZES
from tests.vllm.handoff.test_scheduler import until
from tests.vllm.handoff.test_worker import received

pytestmark = pytest.mark.vllm


@contextlib.contextmanager
def engines(num_theirs: int, num_ours: int, num_heads: int) -> Iterator[tuple[EngineOfRanks, EngineOfRanks, bytes]]:
    shape = CacheShape(num_heads=num_heads)
    producer = EngineOfRanks(num_theirs, shape, seed=1)
    consumer = EngineOfRanks(num_ours, shape, seed=2)
    yield producer, consumer, bytes.fromhex(new_id())
    consumer.close()
    producer.close()


@pytest.mark.parametrize("num_heads", [1, 2, 8])
@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(SIZES, SIZES)))
def test_each_rank_gets_its_heads(theirs: int, ours: int, num_heads: int) -> None:
    with engines(theirs, ours, num_heads) as (producer, consumer, handoff):
        producer.announce(handoff, [3, 5])
        consumer.load(producer, handoff, [1, 6, 2])
        producer.announce(handoff, [7], first=2)
        for worker in consumer.workers:
            assert received(worker) == {"consuming"}
            outcome = worker.drain_outcomes().outcomes["consuming"]
            assert (outcome.is_loaded, outcome.num_received, outcome.num_corrupt) == (True, 3, 0)
            assert outcome.num_compared >= 3 * producer.shape.num_layers
            assert worker.drain_invalid_block_ids() == set()
        assert consumer.has(producer, [1, 6, 2], [3, 5, 7])
        producer.step(leased=[HandoffLease(handoff, "producing")])
        producer.step(ended=[HandoffEnd(handoff, "its consumer acknowledged it")])
        for worker in producer.workers:
            until(lambda worker=worker: worker.finished()[0] == {"producing"})


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2)])
def test_a_load_is_verified_when_its_blocks_are_here_from_all_ranks_and_ends_with_the_state(
    theirs: int, ours: int
) -> None:
    with engines(theirs, ours, 4) as (producer, consumer, handoff):
        consumer.load(producer, handoff, [1, 6], has_state=False)
        producer.announce(handoff, [3, 5])
        for worker in consumer.workers:
            until(lambda worker=worker: received_nothing(worker) and worker.drain_outcomes().verified)
        consumer.step(states=[handoff])
        for worker in consumer.workers:
            assert received(worker) == {"consuming"}
        assert consumer.has(producer, [1, 6], [3, 5])


def received_nothing(worker: WorkerRole) -> bool:
    return worker.finished() == (set(), set())


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2)])
def test_a_flipped_bit_is_missing_on_the_ranks_that_have_its_head(theirs: int, ours: int) -> None:
    with engines(theirs, ours, 4) as (producer, consumer, handoff):
        producer.announce(handoff, [3, 5])
        for rank in range(theirs):
            until(lambda rank=rank: producer.workers[rank]._agent.num_leased == 1)
        holder = next(rank for rank, heads in enumerate(producer.heads) if 2 in heads)
        # The producer divides its blocks when it is asked, and reads their bytes again; these change later.
        consumer.load(producer, bytes.fromhex(new_id()), [1])
        consumer.load(producer, handoff, [1, 6, 2], has_state=False)
        for worker in consumer.workers:
            until(lambda worker=worker: received_nothing(worker) and (consumer.has(producer, [1, 6], [3, 5])))
        producer.announce(handoff, [7], first=2)
        for worker in consumer.workers:
            until(lambda worker=worker: received_nothing(worker) and worker.drain_outcomes().verified)
        again = bytes.fromhex(new_id())
        producer.announce(again, [4, 2])
        until(lambda: all(worker._agent.num_leased == 2 for worker in producer.workers))
        # Of the first layer: a handoff counts as leased when that is announced.
        producer.caches[holder][0, 2, producer.heads[holder].index(2), 0, 0] += 1
        consumer.load(producer, again, [4, 3])
        for worker, heads in zip(consumer.workers, consumer.heads, strict=True):
            assert received(worker) == {"consuming"}
            missing = worker.drain_invalid_block_ids()
            # It cancels what comes from other ranks, of which the block before it may lack a part by then.
            if theirs > ours and 2 in heads:
                missing.discard(4)
            assert missing == ({3} if 2 in heads else set())


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2)])
def test_a_rank_that_dies_ends_what_comes_from_it_and_the_rest_of_those_loads(theirs: int, ours: int) -> None:
    with engines(theirs, ours, 4) as (producer, consumer, handoff):
        producer.announce(handoff, [3])
        consumer.load(producer, handoff, [1, 6], has_state=False)
        for worker in consumer.workers:
            until(lambda worker=worker: received_nothing(worker) and consumer.has(producer, [1], [3]))
        producer.workers[0].close()
        for rank, worker in enumerate(consumer.workers):
            if 0 in {source.rank for source in rank_sources(rank, ours, theirs, 4)}:
                assert received(worker) == {"consuming"}
                assert worker.drain_invalid_block_ids() == {6}
            else:
                assert received_nothing(worker)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_a_cancelled_load_ends_on_all_ranks(theirs: int, ours: int) -> None:
    with engines(theirs, ours, 4) as (producer, consumer, handoff):
        consumer.load(producer, handoff, [1, 6])
        consumer.step(cancels=[Cancel(handoff, "by the test", is_withdrawn=True)])
        for worker in consumer.workers:
            assert received(worker) == {"consuming"}
            assert worker.drain_invalid_block_ids() == {1, 6}
