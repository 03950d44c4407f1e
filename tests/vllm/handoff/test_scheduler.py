"""The scheduler role under vLLM's real scheduler: its assertions hold, and no block stays held."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm
from vllm.v1.request import Request

import kvpipe
from kvpipe import _kvpipe
from kvpipe.control import ControlClient
from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.first_token.logits_processor import ForcedOutputs
from kvpipe.vllm.handoff.consumer.state_machine import Phase
from kvpipe.vllm.handoff.metadata import Cancel, HandoffEnd, HandoffLease
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.engine import BLOCK, NUM_BLOCKS, SAMPLING, Engine, new_id, outcome

pytestmark = pytest.mark.vllm

FREE = NUM_BLOCKS - 1  # block 0 is vLLM's null block
RANKS = [("127.0.0.1:1", bytes(16))]


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * 31) % 1900 + 10 for i in range(length)]


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 10
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not come in time"
        time.sleep(0.005)
    return value


def consuming(
    engine: Engine, producer: _kvpipe.Control, tokens: list[int], max_tokens: int = 4
) -> tuple[Request, bytes]:
    handoff = new_id()
    request = engine.add(tokens, max_tokens, params=consume(handoff, producer.address))
    return request, bytes.fromhex(handoff)


def opened(producer: _kvpipe.Control, request: Request, handoff: bytes, token: int = 7) -> None:
    producer.open(handoff, prompt_hash(request), request.num_prompt_tokens, RANKS)
    producer.finish(handoff, [token], "length", 0, SAMPLING.hash(request))


def loading(engine: Engine, request: Request) -> Any:
    """Steps until the load of a request is in the metadata."""

    def load() -> Any:
        _, metadata = engine.step()
        return next((load for load in metadata.loads if load.request_id == request.request_id), None)

    return until(load)


def scheduled(engine: Engine, request: Request) -> int:
    """Steps until a request is scheduled; its tokens in that step."""
    return until(lambda: engine.step()[0].num_scheduled_tokens.get(request.request_id))


def reported(engine: Engine, handoff: str) -> dict[str, Any]:
    """The result of a handoff, as the proxy gets it."""
    client = ControlClient("")
    try:
        return until(lambda: client.result(engine.role.address, handoff).wait(5))
    finally:
        client.close()


# --- consumer


def test_a_request_holds_no_block_until_its_producer_has_opened(engine: Engine, producer: _kvpipe.Control) -> None:
    request, _ = consuming(engine, producer, prompt(100))
    for _ in range(20):
        output, metadata = engine.step()
        assert not output.num_scheduled_tokens
        assert not metadata.loads
    assert engine.num_free_blocks == FREE
    engine.abort(request)


def test_all_remaining_tokens_are_claimed_and_one_is_computed(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    assert (load.parts[0][0], len(load.block_ids), load.ranks) == (0, 4, RANKS)
    assert load.block_ids == engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    assert scheduled(engine, request) == 1
    until(lambda: engine.step() and request.is_finished())
    assert engine.num_free_blocks == FREE


def test_the_result_counts_what_was_computed(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    scheduled(engine, request)
    result = reported(engine, handoff.hex())
    assert (result["result"], result["prompt_tokens"], result["computed_tokens"]) == ("full", 100, 1)


def test_the_result_says_why_its_transport_is_slow_and_the_log_does_not_repeat_it(
    engine: Engine, producer: _kvpipe.Control, log: pytest.LogCaptureFixture
) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    slow = outcome(request, transport="tcp", transport_reason="process_vm_readv is refused")
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=slow)
    scheduled(engine, request)
    result = reported(engine, handoff.hex())
    assert (result["transport"], result["transport_reason"]) == ("tcp", "process_vm_readv is refused")
    (line,) = [text for text in log.messages if text.startswith("handoff.end")]
    assert "transport=tcp" in line
    assert "process_vm_readv" not in line


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1])
def test_no_claim_breaks_an_assertion_at_any_length(engine: Engine, producer: _kvpipe.Control, length: int) -> None:
    request, handoff = consuming(engine, producer, prompt(length))
    opened(producer, request, handoff)
    if length > 1:
        loading(engine, request)
        engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    assert scheduled(engine, request) == 1


def test_what_the_own_cache_holds_is_not_claimed(engine: Engine, producer: _kvpipe.Control) -> None:
    tokens = prompt(3 * BLOCK + 5)
    first = engine.add(tokens)
    until(lambda: engine.step() and first.is_finished())
    request, handoff = consuming(engine, producer, tokens)
    opened(producer, request, handoff)
    load = loading(engine, request)
    assert (load.parts[0][0], len(load.block_ids)) == (3, 1)
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    assert scheduled(engine, request) == 1


def test_a_prompt_that_is_cached_but_for_its_last_token_loads_nothing(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    tokens = prompt(2 * BLOCK + 1)
    first = engine.add(tokens)
    until(lambda: engine.step() and first.is_finished())
    request, handoff = consuming(engine, producer, tokens)
    opened(producer, request, handoff)
    assert scheduled(engine, request) == 1
    released = until(lambda: [event for event in producer.drain() if event["event"] == "released"])
    assert released[0]["handoff"] == handoff


def test_a_load_without_any_block_is_not_claimed_again(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    engine.step(
        finished_recving={request.request_id},
        invalid_block_ids=set(load.block_ids),
        kv_connector_worker_meta=outcome(request, is_loaded=False),
    )
    assert scheduled(engine, request) == 100


def test_a_load_with_a_hole_is_computed_from_the_hole(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    engine.step(
        finished_recving={request.request_id},
        invalid_block_ids={load.block_ids[2]},
        kv_connector_worker_meta=outcome(request, is_loaded=False),
    )
    assert scheduled(engine, request) == 100 - 2 * BLOCK


def test_a_failed_load_disturbs_no_running_request(engine: Engine, producer: _kvpipe.Control) -> None:
    other = engine.add(prompt(50, seed=9), max_tokens=50)
    engine.step()
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    before = other.num_computed_tokens
    engine.step(
        finished_recving={request.request_id},
        invalid_block_ids=set(load.block_ids),
        kv_connector_worker_meta=outcome(request, is_loaded=False),
    )
    assert other.num_computed_tokens > before


def test_the_policy_of_vllm_follows_the_setting(new_engine: Callable[..., Engine]) -> None:
    assert new_engine().scheduler.recompute_kv_load_failures
    assert not new_engine(on_load_failure="fail").scheduler.recompute_kv_load_failures


def test_a_handoff_of_another_prompt_is_not_claimed(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    producer.open(handoff, bytes(32), 100, RANKS)
    assert scheduled(engine, request) == 100


def test_a_producer_that_withdraws_is_not_waited_for(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    producer.withdraw(handoff, "aborted")
    assert scheduled(engine, request) == 100


def test_a_producer_that_is_not_there_is_not_waited_for(engine: Engine) -> None:
    request = engine.add(prompt(100), params=consume(new_id(), "127.0.0.1:1"))
    assert scheduled(engine, request) == 100


def test_an_abort_while_waiting_ends_the_watch(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    # The producer logs the session before it takes the watch, which came with it.
    until(lambda: engine.step() and [event for event in producer.drain() if event["event"] == "log"])
    time.sleep(0.1)
    engine.abort(request)
    time.sleep(0.1)
    producer.open(handoff, prompt_hash(request), 100, RANKS)
    released = until(lambda: [event for event in producer.drain() if event["event"] == "released"])
    assert released[0]["handoff"] == handoff


def test_an_abort_during_a_load_frees_its_blocks_only_when_the_worker_has_ended_it(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    engine.abort(request)
    _, metadata = engine.step()
    assert metadata.cancels == [Cancel(handoff, "the request was aborted", is_withdrawn=True)]
    assert engine.num_free_blocks == FREE - 4
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request, is_loaded=False))
    assert engine.num_free_blocks == FREE
    assert len(engine.role._consuming) == 0


def test_an_abort_after_a_load_frees_its_blocks(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    engine.abort(request)
    engine.step()
    assert engine.num_free_blocks == FREE
    assert len(engine.role._consuming) == 0


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "kvpipe": {"handoff": "short"}},
        {"do_remote_decode": True, "kvpipe": [new_id()]},
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"do_remote_prefill": True},
        consume("short", "127.0.0.1:1"),
        consume("cmpl-1f-0", "127.0.0.1:1"),  # another connector's request
        consume(new_id(), "127.0.0.1:1") | {"remote_host": None},
        consume(new_id(), "127.0.0.1:1") | {"remote_host": "x" * 10_000},
        consume(new_id(), "127.0.0.1:1") | {"remote_port": 65536},
        consume(new_id(), "127.0.0.1:1") | {"remote_port": "a"},
        {"kvpipe": {"handoff": 7}},
    ],
)
def test_bad_parameters_are_ignored(engine: Engine, params: dict[str, Any]) -> None:
    request = engine.add(prompt(40), params=params)
    assert len(engine.role._consuming) == len(engine.role._producing) == 0
    assert scheduled(engine, request) == 40


def test_a_producer_that_is_not_allowed_is_not_connected_to_and_its_request_is_computed(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine(allowed_producers="10.0.0.0/8")
    request = engine.add(prompt(40), params=consume(new_id(), "127.0.0.1:1"))
    assert len(engine.role._consuming) == 0
    assert scheduled(engine, request) == 40
    engine.add(prompt(40), params=consume(new_id(), "10.1.2.3:1"))
    assert len(engine.role._consuming) == 1


def test_a_producer_chooses_the_handoff_where_the_router_did_not(engine: Engine) -> None:
    """As NixlConnector's routers ask, and two requests have two handoffs."""
    answers = []
    for seed in range(2):
        params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
        request = engine.add(prompt(100 + seed), max_tokens=1, params=params)
        engine.step()
        finished = [one for one in engine.role._producing._produced.values() if one.num_prompt_tokens == 100 + seed]
        answers.append((request, finished[0].handoff))
    assert answers[0][1] != answers[1][1]
    assert all(len(handoff) == 16 for _, handoff in answers)


def test_parameters_that_are_no_object_are_ignored(engine: Engine) -> None:
    request = engine.add(prompt(40))
    request.kv_transfer_params = {"kvpipe": "nonsense"}
    engine.role.on_new_request(request)
    assert scheduled(engine, request) == 40


def test_a_handoff_belongs_to_one_request(engine: Engine, producer: _kvpipe.Control) -> None:
    first, handoff = consuming(engine, producer, prompt(100))
    second = engine.add(prompt(100), params=consume(handoff.hex(), producer.address))
    assert scheduled(engine, second) == 100
    opened(producer, first, handoff)
    assert loading(engine, first).request_id == first.request_id


def test_a_request_that_is_ignored_gets_no_token_of_the_handoffs_own_request(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    """As do the prompts of one request, which share one handoff's parameters."""
    first, handoff = consuming(engine, producer, prompt(100))
    second = engine.add(prompt(40), params=consume(handoff.hex(), producer.address))
    assert ForcedOutputs.of(first.sampling_params).handoff == handoff
    assert ForcedOutputs.of(second.sampling_params) is None


def test_a_request_that_the_api_server_refused_releases_its_handoff_at_a_producer_never_met(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    handoff = bytes.fromhex(new_id())
    producer.expect(handoff)
    producer.open(handoff, bytes(32), 40, RANKS)
    producer.finish(handoff, [7], "length", 0, bytes(32))
    request = engine.add([0], max_tokens=1, params=consume(handoff.hex(), producer.address), abort_immediately=True)
    engine.abort(request)
    until(lambda: any(event["event"] == "released" for event in producer.drain()))


def test_the_notice_of_a_refusal_leaves_a_request_alone_that_the_engine_has(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    """vLLM notifies of every answer that is an error, also of one that comes after the engine had the request."""
    first, handoff = consuming(engine, producer, prompt(100))
    notice = engine.add([0], max_tokens=1, params=consume(handoff.hex(), producer.address), abort_immediately=True)
    engine.abort(notice)
    opened(producer, first, handoff)
    assert loading(engine, first).request_id == first.request_id


def test_parameters_that_are_no_object_do_not_end_the_engine(engine: Engine) -> None:
    request = engine.add(prompt(40))
    for nonsense in ("x", 7, [1], {"kvpipe": []}):
        request.kv_transfer_params = nonsense
        engine.role.on_new_request(request)
    assert scheduled(engine, request) == 40


def test_ranks_that_report_in_different_steps_count_together(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    engine.step(kv_connector_worker_meta=outcome(request, is_loaded=False))
    engine.step(
        finished_recving={request.request_id},
        invalid_block_ids=set(load.block_ids),
        kv_connector_worker_meta=outcome(request),
    )
    assert scheduled(engine, request) == 100
    assert reported(engine, handoff.hex())["result"] == "missing"


def test_a_loaded_request_runs_while_one_that_came_before_it_waits_for_blocks(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    large, lost = consuming(engine, producer, prompt(60 * BLOCK, 1))
    engine.step()
    loaded, handoff = consuming(engine, producer, prompt(59 * BLOCK + 1, 2))
    opened(producer, loaded, handoff)
    loading(engine, loaded)
    producer.withdraw(lost, "aborted")
    until(lambda: engine.step() and engine.role._consuming._consumed.get(large.request_id).load.phase is Phase.LOST)
    late = engine.add(prompt(60 * BLOCK, 3))
    for _ in range(5):
        assert not engine.step()[0].num_scheduled_tokens, "there are blocks for neither"
    engine.step(finished_recving={loaded.request_id}, kv_connector_worker_meta=outcome(loaded))
    until(lambda: engine.step() and loaded.is_finished())
    until(lambda: engine.step() and large.is_finished() and late.is_finished())
    assert engine.num_free_blocks == FREE


def test_a_request_that_is_scheduled_without_a_claim_ends_its_watch(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    request.skip_reading_prefix_cache = True
    assert scheduled(engine, request) == 100
    until(lambda: engine.step() and request.is_finished())
    assert reported(engine, handoff.hex())["result"] == "missing"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_prompt_that_is_cached_has_a_local_result_with_its_cached_tokens(
    engine: Engine, producer: _kvpipe.Control, *, is_lost: bool
) -> None:
    tokens = prompt(3 * BLOCK + 1)
    before = engine.add(tokens, 1)
    until(lambda: engine.step() and before.is_finished())
    request, handoff = consuming(engine, producer, tokens)
    if is_lost:
        producer.withdraw(handoff, "aborted")
    else:
        opened(producer, request, handoff)
    assert scheduled(engine, request) == 1
    until(lambda: engine.step() and request.is_finished())
    result = reported(engine, handoff.hex())
    found = [result[name] for name in ("result", "local_tokens", "computed_tokens", "recomputed_tokens")]
    assert found == ["local", 3 * BLOCK, 1, 0]


def test_an_aborted_request_has_a_result(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    engine.step()
    engine.abort(request)
    assert reported(engine, handoff.hex())["result"] == "aborted"


# --- producer


def produced(engine: Engine, tokens: list[int]) -> tuple[Request, bytes]:
    handoff = new_id()
    return engine.add(tokens, max_tokens=1, params=produce(handoff)), bytes.fromhex(handoff)


def test_blocks_are_announced_in_the_step_that_completes_them(engine: Engine) -> None:
    request, handoff = produced(engine, prompt(300))
    _, first = engine.step()
    _, second = engine.step()
    assert [(final.handoff, final.first, len(final.block_ids)) for final in first.ready + second.ready] == [
        (handoff, 0, 8),
        (handoff, 8, 2),
    ]
    assert len({*first.ready[0].block_ids, *second.ready[0].block_ids}) == 10
    assert request.is_finished()


def test_blocks_are_leased_until_the_worker_has_sent_them(engine: Engine) -> None:
    request, handoff = produced(engine, prompt(100))
    engine.step()
    assert request.is_finished()
    assert engine.num_free_blocks == FREE - 4
    _, metadata = engine.step()
    assert metadata.leased == [HandoffLease(handoff, request.request_id)]
    engine.step(finished_sending={request.request_id})
    assert engine.num_free_blocks == FREE
    assert len(engine.role._producing) == 0


def test_a_release_ends_the_loan(engine: Engine) -> None:
    _, handoff = produced(engine, prompt(100))
    engine.step()
    client = ControlClient("")
    assert client.release(engine.role.address, handoff.hex()).wait(5) is True
    client.close()
    ended = until(lambda: engine.step()[1].ended)
    assert ended == [HandoffEnd(handoff, "it was released")]


def test_a_release_before_the_request_is_remembered(engine: Engine) -> None:
    handoff = new_id()
    client = ControlClient("")
    assert client.release(engine.role.address, handoff).wait(5) is False
    client.close()
    engine.add(prompt(300), max_tokens=1, params=produce(handoff))
    ended = until(lambda: engine.step()[1].ended)
    assert ended == [HandoffEnd(bytes.fromhex(handoff), "it was released")]


def test_a_lease_ends_without_a_consumer(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(lease_s=0.2)
    _, handoff = produced(engine, prompt(100))
    engine.step()
    assert until(lambda: engine.step()[1].ended)[0].handoff == handoff


def test_an_aborted_prefill_leases_nothing_and_its_consumer_is_notified(engine: Engine) -> None:
    request, handoff = produced(engine, prompt(600))
    engine.step()
    consumer = _kvpipe.Control(None, b"", "consumer")
    consumer.watch(handoff, engine.role.address)
    until(lambda: [event for event in consumer.drain() if event["event"] == "opened"])
    engine.abort(request)
    _, metadata = engine.step()
    assert [ended.handoff for ended in metadata.ended] == [handoff]
    assert engine.num_free_blocks == FREE
    gone = until(lambda: [event for event in consumer.drain() if event["event"] == "ended"])
    assert "FINISHED_ABORTED" in gone[0]["reason"]
    assert gone[0]["is_withdrawn"]
    consumer.close()


def test_a_preempted_prefill_is_withdrawn_before_its_blocks_change(engine: Engine) -> None:
    request, handoff = produced(engine, prompt(600))
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    _, metadata = engine.step()
    assert [ended.handoff for ended in metadata.ended] == [handoff]
    until(lambda: engine.step() and request.is_finished())
    assert engine.num_free_blocks == FREE


def test_a_producing_request_that_would_decode_on_is_an_ordinary_one(engine: Engine) -> None:
    request = engine.add(prompt(40), max_tokens=3, params=produce(new_id()))
    until(lambda: engine.step() and request.is_finished())
    assert engine.num_free_blocks == FREE


def test_the_description_names_engine_and_fingerprint(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    engine, client = new_engine(), ControlClient("")
    description = client.describe(engine.role.address).wait(5)
    client.close()
    assert description["fingerprint"]["block size"] == str(BLOCK)
    assert description["max_model_len"] > 0
    assert description["data_parallel_rank"] is None
    assert description["address"] == engine.role.address
    assert description["versions"] == {"kvpipe": kvpipe.__version__, "vllm": vllm.__version__}
    assert description["prefix_hash_seed"] == "7"
    json.dumps(description)


@pytest.mark.parametrize(
    ("field", "theirs", "message"),
    [
        ("dtype", "bfloat16", 'dtype is "torch.float32" here and "bfloat16" there; start both with the same --dtype'),
        (
            "block size",
            "16",
            (
                f'block size is "{BLOCK}" here and "16" there; '
                "start both with the same --block-size, large enough for models with recurrent states"
            ),
        ),
    ],
)
def test_a_foreign_fingerprint_is_refused_by_name_with_the_remedy_and_the_request_computed(
    engine: Engine, field: str, theirs: str, message: str
) -> None:
    fingerprint = [(name, theirs if name == field else value) for name, value in engine.role._fingerprint]
    foreign = _kvpipe.Control("127.0.0.1:0", b"", "foreign", fingerprint)
    handoff = new_id()
    request = engine.add(prompt(100), params=consume(handoff, foreign.address))
    assert scheduled(engine, request) == 100
    reason = reported(engine, handoff)["reason"]
    assert reason.endswith(message)
    foreign.close()


def test_a_wrong_token_is_refused_and_the_request_computed(engine: Engine) -> None:
    foreign = _kvpipe.Control("127.0.0.1:0", b"another token", "foreign", engine.role._fingerprint)
    handoff = new_id()
    request = engine.add(prompt(100), params=consume(handoff, foreign.address))
    assert scheduled(engine, request) == 100
    assert "KVPIPE_TOKEN" in reported(engine, handoff)["reason"]
    foreign.close()


def test_a_watch_waits_for_a_request_that_queues_at_its_producer(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(open_timeout_s=0.2)
    _, handoff = produced(engine, prompt(100))
    consumer = _kvpipe.Control(None, b"", "consumer", engine.role._fingerprint)
    consumer.watch(handoff, engine.role.address)
    time.sleep(0.6)
    engine.step()
    until(lambda: [event for event in consumer.drain() if event["event"] == "opened"])
    consumer.close()


def test_a_watch_of_an_unknown_handoff_ends_in_time(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(open_timeout_s=0.2)
    consumer = _kvpipe.Control(None, b"", "consumer", engine.role._fingerprint)
    consumer.watch(bytes(16), engine.role.address)
    until(lambda: [event for event in consumer.drain() if event["event"] == "ended"])
    consumer.close()


# --- prediction


@pytest.fixture
def client() -> Iterator[ControlClient]:
    client = ControlClient("")
    yield client
    client.close()


def subscribed(client: ControlClient, engine: Engine, handoff: bytes, lead_s: float = 1e6) -> Any:
    """A subscription that the engine's control port has seen."""
    work = client.subscribe(engine.role.address, handoff.hex(), lead_s)
    client.describe(engine.role.address).wait(5)
    return work


def test_the_end_of_a_prefill_is_predicted_once_a_step_has_been_measured(engine: Engine, client: ControlClient) -> None:
    request, handoff = produced(engine, prompt(600))
    work = subscribed(client, engine, handoff)
    engine.step()
    client.describe(engine.role.address).wait(5)
    assert not work.is_completed()
    engine.step()
    assert not request.is_finished()
    moment = work.wait(5)
    assert moment.kind == "due"
    assert moment.remaining_s is not None


def test_a_later_request_is_predicted_from_its_first_step(engine: Engine, client: ControlClient) -> None:
    first = engine.add(prompt(600), max_tokens=1)
    until(lambda: engine.step() and first.is_finished())
    request, handoff = produced(engine, prompt(600, seed=2))
    work = subscribed(client, engine, handoff)
    engine.step()
    assert work.wait(5).kind == "due"
    assert not request.is_finished()


def test_a_prefill_of_one_step_without_a_known_speed_is_reported_as_finished(
    engine: Engine, client: ControlClient
) -> None:
    _, handoff = produced(engine, prompt(100))
    work = subscribed(client, engine, handoff)
    engine.step()
    assert work.wait(5).kind == "finished"


def test_the_prediction_follows_the_measured_speed_and_the_tokens_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told = [0.0], []
    monkeypatch.setattr("kvpipe.vllm.handoff.scheduler.time.monotonic", lambda: now[0])
    monkeypatch.setattr(engine.role._out, "control", Told(engine.role._out.control, told))
    update = engine.role.update

    def slowly(output: Any) -> None:
        now[0] += 2.0
        update(output)

    monkeypatch.setattr(engine.role, "update", slowly)
    _, handoff = produced(engine, prompt(3 * 256 + 64))
    for _ in range(4):
        engine.step()
    assert told == [(handoff, pytest.approx(seconds)) for seconds in (4.5, 2.5, 0.5)]


class Told:
    """A control port that notes predictions."""

    def __init__(self, control: _kvpipe.Control, told: list[tuple[bytes, float]]) -> None:
        self._control = control
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def progress(self, handoff: bytes, remaining: float) -> None:
        self._told.append((handoff, remaining))
