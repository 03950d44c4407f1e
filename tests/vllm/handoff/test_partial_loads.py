"""Requests whose KV comes in part, or not, under vLLM's real scheduler."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvpipe import _kvpipe
from kvpipe.transfer_params import consume, resume
from kvpipe.vllm.handoff.consumer.state_machine import Phase
from kvpipe.vllm.handoff.metadata import Load, WorkerOutcomes
from tests.vllm.handoff.engine import BLOCK, STEP_TOKENS, Engine, new_id, outcome
from tests.vllm.handoff.test_scheduler import (
    FREE,
    RANKS,
    consuming,
    loading,
    opened,
    prompt,
    reported,
    scheduled,
    until,
)

pytestmark = pytest.mark.vllm


def loads(engine: Engine, requests: list[Request]) -> dict[str, Load]:
    """Steps until the loads of all these requests have begun."""
    begun: dict[str, Load] = {}

    def are_all_begun() -> bool:
        begun.update({load.request_id: load for load in engine.step()[1].loads})
        return all(request.request_id in begun for request in requests)

    until(are_all_begun)
    return begun


def lost(load: Load, holes: list[int], **facts: Any) -> dict[str, Any]:
    """A worker's word on a load some blocks of which have not come."""
    known = {"is_loaded": False, "num_missing": len(holes), "num_received": len(load.block_ids) - len(holes)}
    word = outcome(load, **known | facts)
    return {
        "finished_recving": {load.request_id},
        "invalid_block_ids": {load.block_ids[hole] for hole in holes},
        "kv_connector_worker_meta": word,
    }


def loaded(request: Request) -> dict[str, Any]:
    """A worker's word on a load that is complete."""
    return {"finished_recving": {request.request_id}, "kv_connector_worker_meta": outcome(request)}


def together(*words: dict[str, Any]) -> dict[str, Any]:
    """A worker's report of several loads in one step."""
    outcomes: dict[str, Any] = {}
    for word in words:
        outcomes.update(word["kv_connector_worker_meta"].outcomes)
    return {
        "finished_recving": set().union(*(word["finished_recving"] for word in words)),
        "invalid_block_ids": set().union(*(word.get("invalid_block_ids", set()) for word in words)),
        "kv_connector_worker_meta": WorkerOutcomes(outcomes),
    }


def preempt_all(engine: Engine) -> None:
    """As vLLM does when blocks run out, and without its prefix cache to help."""
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)


# --- only what is missing, of each request for itself


def test_only_the_tokens_without_kv_are_prefilled_of_each_request(engine: Engine, producer: _kvpipe.Control) -> None:
    pairs = [consuming(engine, producer, prompt(100, seed)) for seed in range(3)]
    requests = [request for request, _ in pairs]
    for request, handoff in pairs:
        opened(producer, request, handoff)
    begun = loads(engine, requests)
    has_all, has_two, has_none = requests
    word = together(
        loaded(has_all), lost(begun[has_two.request_id], [2]), lost(begun[has_none.request_id], [0, 1, 2, 3])
    )
    engine.step(**word)
    output, _ = engine.step()
    assert output.num_scheduled_tokens == {
        has_all.request_id: 1,
        has_two.request_id: 100 - 2 * BLOCK,
        has_none.request_id: 100,
    }
    recomputed = [reported(engine, handoff.hex())["recomputed_tokens"] for _, handoff in pairs]
    assert recomputed == [0, 100 - 2 * BLOCK - 1, 99]


def test_a_request_that_lost_its_kv_neither_delays_nor_recomputes_another(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    running = engine.add(prompt(50, seed=9), max_tokens=50)
    engine.step()
    # The order counts where the tokens of a step do not suffice: vLLM gives them to who came first.
    (before, _), (loser, _), (after, _) = pairs = [
        consuming(engine, producer, prompt(length, seed)) for seed, length in enumerate((600, 200, 600))
    ]
    for request, handoff in pairs:
        opened(producer, request, handoff)
    begun = loads(engine, [request for request, _ in pairs])
    engine.step(**together(loaded(before), lost(begun[loser.request_id], [0]), loaded(after)))
    output, _ = engine.step()
    ids = [request.request_id for request in (running, before, loser, after)]
    assert [output.num_scheduled_tokens[request_id] for request_id in ids] == [1, 1, 200, 1]
    assert all(request.num_output_tokens for request in (before, loser, after))
    recomputed = [reported(engine, handoff.hex())["recomputed_tokens"] for _, handoff in pairs]
    assert recomputed == [0, 199, 0]


def test_the_result_counts_blocks_tokens_and_comparisons(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    reason = "block 2 of region 0 differs from its checksum"
    engine.step(**lost(load, [2], num_retried=1, num_compared=13, num_corrupt=2, reason=reason))
    scheduled(engine, request)
    result = reported(engine, handoff.hex())
    wanted = {
        "result": "partial",
        "blocks_received": 3,
        "blocks_missing": 1,
        "blocks_retried": 1,
        "checksums_compared": 13,
        "checksums_differed": 2,
        "computed_tokens": 100 - 2 * BLOCK,
        "recomputed_tokens": 100 - 2 * BLOCK - 1,
        "reason": reason,
    }
    assert {name: result[name] for name in wanted} == wanted


def test_ranks_count_a_block_as_received_that_all_of_them_have(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    first = outcome(request, num_received=4, num_compared=8)
    second = outcome(request, num_received=3, num_missing=1, num_retried=1, num_compared=9, num_corrupt=2)
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=first.aggregate(second))
    scheduled(engine, request)
    result = reported(engine, handoff.hex())
    names = ("blocks_received", "blocks_missing", "blocks_retried", "checksums_compared", "checksums_differed", "bytes")
    assert [result[name] for name in names] == [3, 1, 1, 17, 2, 2]


# --- on_load_failure: fail


@pytest.fixture
def strict(new_engine: Callable[..., Engine]) -> Engine:
    """An engine that fails requests where it would otherwise recompute."""
    return new_engine(on_load_failure="fail")


def failed(engine: Engine, request: Request, handoff: bytes) -> dict[str, Any]:
    """The result of a handoff whose request has failed, and left nothing behind."""
    assert request.status == RequestStatus.FINISHED_ERROR
    assert request.num_output_tokens == 0
    engine.step()
    assert engine.num_free_blocks == FREE
    assert len(engine.role._consuming) == 0
    result = reported(engine, handoff.hex())
    assert (result["result"], result["computed_tokens"]) == ("failed", 0)
    return result


def test_a_load_that_fails_fails_its_request_and_the_result_has_the_reason(
    strict: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(strict, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(strict, request)
    strict.step(**lost(load, [2], reason="lost peer 127.0.0.1:1"))
    assert failed(strict, request, handoff)["reason"] == "lost peer 127.0.0.1:1"
    assert until(lambda: [event for event in producer.drain() if event["event"] == "released"])


def test_a_request_that_fails_fails_no_other(strict: Engine, producer: _kvpipe.Control) -> None:
    (loser, handoff), (other, kept) = (consuming(strict, producer, prompt(100, seed)) for seed in (1, 2))
    for request, of in ((loser, handoff), (other, kept)):
        opened(producer, request, of)
    begun = loads(strict, [loser, other])
    strict.step(**together(lost(begun[loser.request_id], [0]), loaded(other)))
    assert loser.status == RequestStatus.FINISHED_ERROR
    assert scheduled(strict, other) == 1
    until(lambda: strict.step() and other.is_finished())
    assert other.status == RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize("cause", ["withdrawn", "not reached", "another prompt"])
def test_a_request_whose_kv_cannot_arrive_fails_and_the_result_has_the_reason(
    strict: Engine, producer: _kvpipe.Control, cause: str
) -> None:
    handoff = new_id()
    address = "127.0.0.1:1" if cause == "not reached" else producer.address
    request = strict.add(prompt(100), params=consume(handoff, address))
    if cause == "withdrawn":
        producer.withdraw(bytes.fromhex(handoff), "it was aborted")
    elif cause == "another prompt":
        producer.open(bytes.fromhex(handoff), bytes(32), 100, RANKS)
    load = loading(strict, request)
    assert (load.ranks, len(load.block_ids)) == ([], 4)
    strict.step(**lost(load, [0, 1, 2, 3], reason=load.refusal))
    reason = failed(strict, request, bytes.fromhex(handoff))["reason"]
    words = {"withdrawn": "it was aborted", "not reached": "cannot reach", "another prompt": "another prompt"}
    assert words[cause] in reason


def test_a_request_that_needs_no_kv_does_not_fail(strict: Engine, producer: _kvpipe.Control) -> None:
    tokens = prompt(2 * BLOCK + 1)
    first = strict.add(tokens)
    until(lambda: strict.step() and first.is_finished())
    request, handoff = consuming(strict, producer, tokens)
    producer.withdraw(handoff, "aborted")
    assert scheduled(strict, request) == 1
    until(lambda: strict.step() and request.is_finished())
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED


def test_a_request_that_is_preempted_after_its_prompt_was_computed_does_not_fail(
    strict: Engine, producer: _kvpipe.Control
) -> None:
    """Its result has been reported."""
    tokens = prompt(2 * BLOCK + 1)
    first = strict.add(tokens)
    until(lambda: strict.step() and first.is_finished())
    request, handoff = consuming(strict, producer, tokens)
    producer.withdraw(handoff, "aborted")

    def computing() -> SchedulerOutput | None:
        output = strict.scheduler.schedule()
        if not output.num_scheduled_tokens:
            strict.end(output)
            return None
        return output

    output = until(computing)  # its first step, whose token is lost with it
    strict.scheduler._preempt_request(request, 0.0)
    strict.scheduler.running.remove(request)
    strict.end(output)
    assert strict.scheduler.reset_prefix_cache()
    assert scheduled(strict, request) == len(tokens)
    until(lambda: strict.step() and request.is_finished())
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED


def test_a_request_that_names_no_producer_is_computed(strict: Engine) -> None:
    request = strict.add(prompt(100), params=resume(new_id(), [7]))
    assert scheduled(strict, request) == 100


# --- preemption


def test_a_preempted_request_is_loaded_again_while_its_producer_holds_the_blocks(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(600))
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), [1]))
    assert scheduled(engine, request) == STEP_TOKENS
    preempt_all(engine)
    load = loading(engine, request)
    assert (load.parts[0][0], len(load.block_ids), load.ranks) == (0, 19, RANKS)
    # No worker ends a load before the sequence state is known here.
    until(
        lambda: (
            engine.role._drain_events() or engine.role._consuming._consumed.of(handoff).load.phase is Phase.FINISHING
        )
    )
    engine.step(**loaded(request))
    assert scheduled(engine, request) == 1
    result = reported(engine, handoff.hex())
    assert (result["result"], result["computed_tokens"], result["first_token"]) == ("full", 1, "exact")
    until(lambda: engine.step() and request.is_finished())
    assert engine.num_free_blocks == FREE


def test_a_producer_is_let_go_when_the_prompt_is_computed(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(600))
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), [0]))
    assert scheduled(engine, request) == STEP_TOKENS
    assert not [event for event in producer.drain() if event["event"] == "released"]
    until(lambda: engine.step() and request.num_output_tokens)
    released = until(lambda: [event for event in producer.drain() if event["event"] == "released"])
    assert released[0]["handoff"] == handoff


def test_a_preempted_request_whose_producer_is_lost_is_computed(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(600))
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), [1]))
    assert scheduled(engine, request) == STEP_TOKENS
    producer.withdraw(handoff, "its lease ended")
    until(lambda: engine.role._drain_events() or engine.role._consuming._consumed.of(handoff).load.phase is Phase.LOCAL)
    preempt_all(engine)
    output, metadata = engine.step()
    assert (output.num_scheduled_tokens, metadata.loads) == ({request.request_id: STEP_TOKENS}, [])
    until(lambda: engine.step() and request.is_finished())
    assert engine.num_free_blocks == FREE


def test_a_load_that_failed_again_after_a_preemption_is_not_repeated(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(600))
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), [1]))
    scheduled(engine, request)
    preempt_all(engine)
    load = loading(engine, request)
    engine.step(**lost(load, list(range(len(load.block_ids)))))
    assert scheduled(engine, request) == STEP_TOKENS


def test_a_request_that_is_preempted_after_its_first_output_is_computed(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(100), max_tokens=9)
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), [1]))
    until(lambda: engine.step() and request.num_output_tokens)
    preempt_all(engine)
    output, metadata = engine.step()
    assert output.num_scheduled_tokens[request.request_id] > 100
    assert metadata.loads == []


def test_an_abort_after_a_failed_load_lets_the_producer_go(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(600))
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), [1]))
    scheduled(engine, request)
    engine.abort(request)
    released = until(lambda: [event for event in producer.drain() if event["event"] == "released"])
    assert released[0]["handoff"] == handoff
    assert reported(engine, handoff.hex())["result"] == "aborted"
    engine.step()
    assert engine.num_free_blocks == FREE
