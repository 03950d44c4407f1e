"""Reports of one rank on loads and leases, when two steps are under way."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvpipe.vllm.handoff.consumer.rank_loads import RankLoads
from kvpipe.vllm.handoff.metadata import (
    Cancel,
    HandoffEnd,
    HandoffLease,
    Load,
    LoadOutcome,
    StepMetadata,
    WorkerOutcomes,
)
from kvpipe.vllm.handoff.producer.rank_leases import RankLeases

pytestmark = pytest.mark.vllm

HANDOFF = bytes(16)
LOADED, FAILED = LoadOutcome(is_loaded=True), LoadOutcome(is_loaded=False, num_missing=3, cause="ended")


def loading(*, has_state: bool = False, has_parts: bool = True) -> RankLoads:
    """A rank that loads three blocks."""
    loads = RankLoads(has_parts=has_parts)
    loads.begin(Load("request", HANDOFF, [(0, [4, 5, 6])], [], has_state=has_state))
    return loads


def verified() -> RankLoads:
    """A rank that has reported all of its blocks as verified."""
    loads = loading()
    loads.blocks_verified(HANDOFF, LOADED)
    report = loads.drain_outcomes()
    assert report is not None
    assert report.verified == {"request": [LOADED]}
    return loads


def reported(loads: RankLoads) -> tuple[set[str], set[int]]:
    """Requests whose end is reported, and their missing blocks."""
    return loads.drain_received(), loads.drain_invalid_block_ids()


def test_no_end_is_reported_of_a_verified_load_that_may_be_committed() -> None:
    loads = verified()
    loads.ended(HANDOFF, FAILED, [0, 1, 2])
    assert reported(loads) == (set(), set())
    assert loads.drain_outcomes() == WorkerOutcomes(broken={"request"})
    assert loads.drain_outcomes() == WorkerOutcomes(), "it is reported once"


def test_a_load_that_was_committed_while_its_rank_failed_is_never_reported() -> None:
    loads = verified()
    loads.ended(HANDOFF, FAILED, [0, 1, 2])
    loads.begin_step(StepMetadata(committed=[HANDOFF]))
    loads.ended(HANDOFF, FAILED, [0, 1, 2])
    assert reported(loads) == (set(), set())
    assert loads.drain_outcomes() == WorkerOutcomes(acknowledged=[HANDOFF], broken={"request"})
    assert loads.drain_outcomes() is None, "there is no load"


def test_a_withheld_end_is_reported_once_the_scheduler_role_commits_no_more() -> None:
    for answer in (StepMetadata(cancels=[Cancel(HANDOFF, "", is_withdrawn=False)]), StepMetadata(states=[HANDOFF])):
        loads = verified()
        loads.ended(HANDOFF, FAILED, [1])
        loads.begin_step(answer)
        assert reported(loads) == ({"request"}, {5})
        assert loads.drain_outcomes() == WorkerOutcomes({"request": FAILED}, broken={"request"})
        assert loads.drain_outcomes() is None, "there is no load"


def test_no_block_of_a_withheld_load_counts_whose_producer_has_withdrawn_it() -> None:
    loads = verified()
    loads.ended(HANDOFF, FAILED, [])
    loads.begin_step(StepMetadata(cancels=[Cancel(HANDOFF, "", is_withdrawn=True)]))
    assert reported(loads) == ({"request"}, {4, 5, 6})


def test_a_load_that_cannot_be_committed_any_more_ends_at_once() -> None:
    answered = verified()
    answered.begin_step(StepMetadata(states=[HANDOFF]))
    for loads in (loading(), loading(has_state=True), answered):
        loads.ended(HANDOFF, FAILED, [2])
        assert reported(loads) == ({"request"}, {6})


def test_vllms_counters_of_ranks_are_even_after_a_commit_that_met_a_failed_rank() -> None:
    """vLLM counts the ranks of a load by request id, and would take another load's end for this one's."""
    aggregator, ranks = KVOutputAggregator(2), [verified(), verified()]
    ranks[1].ended(HANDOFF, FAILED, [0, 1, 2])
    for step in (StepMetadata(), StepMetadata(committed=[HANDOFF])):
        results = []
        for loads in ranks:
            loads.begin_step(step)
            received, invalid = reported(loads)
            report = KVConnectorOutput(finished_recving=received, invalid_block_ids=invalid)
            results.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report))
        aggregated = aggregator.aggregate(results).kv_connector_output
        assert (aggregated.finished_recving, aggregated.invalid_block_ids) == (None, set())
    assert aggregator._recv_remaining_count == {}


def test_a_lease_ends_whose_consumer_had_all_blocks_before_the_rank_knew_of_the_lease() -> None:
    leases = RankLeases()
    leases.acknowledged(HANDOFF)
    assert leases.drain_sent() == set()
    leases.add(HandoffLease(HANDOFF, "request"))
    assert (leases.drain_sent(), len(leases), leases.drain_sent()) == ({"request"}, 0, set())


def test_a_handoff_that_ends_before_its_request_has_finished_is_forgotten() -> None:
    leases = RankLeases()
    leases.acknowledged(HANDOFF)
    leases.ended(HandoffEnd(HANDOFF, "").handoff)
    assert leases.drain_sent() == set()
    leases.add(HandoffLease(HANDOFF, "another"))
    assert (leases.drain_sent(), len(leases)) == (set(), 1)


def test_blocks_that_a_source_lacks_are_counted_among_those_that_come_from_it() -> None:
    loads = RankLoads()
    load = Load("request", HANDOFF, [(0, [4, 5]), (0, [6])], [], has_state=True)
    loads.begin(load, [[4, 5, 6], [6]])
    assert not loads.ended(HANDOFF, LOADED, [], source=0)
    loads.ended(HANDOFF, FAILED, [0], source=1)
    assert reported(loads) == ({"request"}, {6})
    outcome = loads.drain_outcomes().outcomes["request"]
    assert (outcome.is_loaded, outcome.num_received, outcome.num_missing) == (False, 2, 1)
