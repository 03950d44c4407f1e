"""Models with several KV cache groups, in both roles: what is announced, loaded, given up and computed again."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvpipe import _kvpipe
from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.handoff.config import ConnectorConfig
from kvpipe.vllm.handoff.metadata import Cancel, Load, ReadyRange, StepMetadata
from kvpipe.vllm.handoff.scheduler import SchedulerRole
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.engine import BLOCK, SHAPE, Engine, engine_config, new_id, outcome
from tests.vllm.handoff.test_cache_groups import STATE, groups
from tests.vllm.handoff.test_rank_reports import FAILED, HANDOFF, LOADED
from tests.vllm.handoff.test_rank_reports import loading as one_rank
from tests.vllm.handoff.test_scheduler import consuming, loading, opened, prompt, reported, until
from tests.vllm.handoff.test_worker import BLOCKS, NAMES, Pair, Recorded, received, role

pytestmark = pytest.mark.vllm

FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=2 * BLOCK)
CHUNK = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=2 * BLOCK)
PLAIN_STATE = MambaSpec(block_size=2048, shapes=STATE.shapes, dtypes=STATE.dtypes)
# Beyond it the last token of a prompt of this length reads one block more than the next token.
UNREPEATABLE = 5 * BLOCK - 1


@pytest.fixture
def made(tiny_model: str) -> Iterator[Any]:
    """Makes engines whose cache has these groups."""
    engines: list[Engine] = []

    def make(*specs: Any, **extra: Any) -> Engine:
        arguments = {"enable_prefix_caching": PLAIN_STATE not in specs}
        engines.append(Engine(engine_config(tiny_model, arguments, **extra), specs=specs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def announced(metadata: list[StepMetadata], handoff: bytes) -> dict[int, list[tuple[int, int]]]:
    """For each group the first position and the number of blocks of each announcement of a handoff."""
    found: dict[int, list[tuple[int, int]]] = {}
    for each in (each for step in metadata for each in (*step.cached, *step.ready) if each.handoff == handoff):
        found.setdefault(each.group, []).append((each.first, len(each.block_ids)))
    return found


# --- producer


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(FULL, [(0, 8), (8, 2)]), (WINDOW, [(7, 1), (8, 2)]), (CHUNK, [(8, 2)]), (PLAIN_STATE, [(0, 1)])],
    ids=["full", "window", "chunk", "state"],
)
def test_of_each_group_those_blocks_are_announced_that_the_next_token_needs(
    made: Any, spec: Any, expected: list[tuple[int, int]]
) -> None:
    """The prompt takes two steps, of which the first computes eight blocks."""
    engine, handoff = made(FULL, spec), new_id()
    engine.add(prompt(9 * BLOCK + 10), max_tokens=1, params=produce(handoff))
    steps = [engine.step()[1] for _ in range(3)]
    assert announced(steps, bytes.fromhex(handoff)) == {0: [(0, 8), (8, 2)], 1: expected}


def test_what_is_announced_of_a_window_is_held_until_the_lease_ends(made: Any) -> None:
    engine, handoff = made(FULL, WINDOW), new_id()
    request = engine.add(prompt(9 * BLOCK + 10), max_tokens=1, params=produce(handoff))
    steps = [engine.step()[1] for _ in range(3)]
    assert request.is_finished()
    ready = {block_id for step in steps for each in (*step.cached, *step.ready) for block_id in each.block_ids}
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    assert len(ready) == 10 + 3
    assert all(blocks[block_id].ref_cnt == 1 for block_id in ready)
    assert engine.role._producing.num_leased_blocks == len(ready), "null blocks are not leased"


def test_a_cached_prefix_that_ends_within_a_block_delays_no_announcement(tiny_model: str) -> None:
    """vLLM copies that block for the request that goes on with it, which is no load of another connector."""
    config = engine_config(tiny_model, {"max_num_batched_tokens": 2 * BLOCK})
    config.cache_config.mamba_cache_mode = "align"
    state = MambaSpec(BLOCK, shapes=STATE.shapes, dtypes=STATE.dtypes, mamba_cache_mode="align")
    engine = Engine(config, specs=(FULL, state), match_unit=BLOCK // 4)
    first = engine.add(prompt(2 * BLOCK + 20), max_tokens=1)
    until(lambda: engine.step() and first.is_finished())
    handoff = new_id()
    request = engine.add(prompt(2 * BLOCK + 20) + prompt(6 * BLOCK, seed=3), max_tokens=1, params=produce(handoff))
    output, metadata = engine.step()
    assert output.kv_cache_block_copies
    assert announced([metadata], bytes.fromhex(handoff)) == {0: [(0, 2), (2, 1)]}
    engine.abort(request)
    engine.close()


def test_a_block_that_vllm_has_freed_is_never_lent(made: Any) -> None:
    engine, handoff = made(FULL, WINDOW), new_id()
    request = engine.add(prompt(100), max_tokens=1, params=produce(handoff))
    finished = engine.role.finished
    engine.role.finished = lambda request, tables: finished(request, (tables[0], [0] * len(tables[1])))
    produced = engine.role._producing._produced.get(request.request_id)
    output = engine.scheduler.schedule()
    produced.next_positions[1] -= 1  # it was not ready before the end
    engine.end(output)
    _, metadata = engine.step()
    assert [end.reason for end in metadata.ended] == ["vLLM freed a block of the prompt that the next token needs"]
    assert metadata.leased == []


def test_the_answer_names_the_blocks_of_each_group_as_nixl_does(made: Any) -> None:
    engine = made(FULL, WINDOW)
    request = engine.add(prompt(100), max_tokens=1, params=produce(new_id()))
    answers: list[Any] = []
    finished = engine.role.finished
    engine.role.finished = lambda *arguments: answers.append(finished(*arguments)) or answers[-1]
    until(lambda: engine.step() and request.is_finished())
    [(is_leased, params)] = answers
    assert is_leased
    assert [len(table) for table in params["remote_block_ids"]] == [4, 4]


# --- consumer


def parts(load: Load) -> list[tuple[int, int]]:
    """First position and number of blocks of each part."""
    return [(first, len(block_ids)) for first, block_ids in load.parts]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(FULL, (0, 10)), (WINDOW, (7, 3)), (CHUNK, (8, 2)), (PLAIN_STATE, (0, 1))],
    ids=["full", "window", "chunk", "state"],
)
def test_of_each_group_those_blocks_are_loaded_that_the_next_token_needs(
    made: Any, producer: _kvpipe.Control, spec: Any, expected: tuple[int, int]
) -> None:
    engine = made(FULL, spec)
    request, handoff = consuming(engine, producer, prompt(9 * BLOCK + 10))
    opened(producer, request, handoff)
    load = loading(engine, request)
    assert parts(load) == [(0, 10), expected]
    assert 0 not in load.block_ids, "nothing is loaded into the null block"


def test_what_the_own_prefix_cache_has_of_a_group_is_not_loaded(made: Any, producer: _kvpipe.Control) -> None:
    engine = made(FULL, WINDOW)
    first = engine.add(prompt(4 * BLOCK), max_tokens=1)
    until(lambda: engine.step() and first.is_finished())
    request, handoff = consuming(engine, producer, prompt(4 * BLOCK) + prompt(20, seed=2))
    opened(producer, request, handoff)
    assert parts(loading(engine, request)) == [(4, 1), (4, 1)]


def test_the_last_block_of_each_group_is_restored_after_a_load(made: Any, producer: _kvpipe.Control) -> None:
    engine = made(FULL, WINDOW)
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    _, _ = engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    _, metadata = engine.step()
    assert metadata.restores == [(index, block_ids[-1]) for index, (_, block_ids) in enumerate(load.parts)]


def test_a_resumed_request_does_not_read_what_a_step_computes_again(made: Any, producer: _kvpipe.Control) -> None:
    """It finds blocks of its outputs in the prefix cache, which are another's prompt."""
    engine = made(FULL, CHUNK)
    scheduler = engine.scheduler
    resumed = engine.add(prompt(2 * BLOCK), max_tokens=200)
    until(lambda: engine.step() and resumed.num_tokens > 4 * BLOCK + 3)
    scheduler.running.remove(resumed)
    scheduler._preempt_request(resumed, time.monotonic())
    scheduler.waiting.remove_request(resumed)
    # As others do that need its blocks.
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    loaded, handoff = consuming(engine, producer, list(resumed.all_token_ids[: 4 * BLOCK]))
    opened(producer, loaded, handoff)
    loading(engine, loaded)
    engine.step(finished_recving={loaded.request_id}, kv_connector_worker_meta=outcome(loaded))
    scheduler.waiting.add_request(resumed)
    computed = [engine.step()[0].num_scheduled_tokens for _ in range(2)]
    assert list(computed[0]) == [loaded.request_id]
    assert computed[1][resumed.request_id] < BLOCK, "now it reads them"


def test_a_failed_load_is_computed_from_the_first_token_on(made: Any, producer: _kvpipe.Control) -> None:
    engine = made(FULL, WINDOW)
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    failed = outcome(request, is_loaded=False, num_missing=1, reason="lost")
    engine.step(
        finished_recving={request.request_id},
        failed_recving={request.request_id},
        kv_connector_worker_meta=failed,
    )
    until(lambda: engine.step() and request.num_output_tokens)
    result = reported(engine, handoff.hex())
    assert (result["result"], result["computed_tokens"], result["reason"]) == ("missing", 100, "lost")


def test_an_engine_with_groups_refuses_one_without_by_name(made: Any) -> None:
    ours, theirs = (dict(made(*specs).role._fingerprint)["kv cache groups"] for specs in [(FULL, WINDOW), (FULL,)])
    assert ours != theirs
    assert "sliding window of 64 in blocks of 32" in ours


# --- a last token that cannot be computed again


@pytest.mark.parametrize(
    ("specs", "length"),
    [((FULL, WINDOW), UNREPEATABLE), ((FULL, CHUNK), 4 * BLOCK), ((FULL, PLAIN_STATE), 100)],
    ids=["window", "chunk", "state"],
)
@pytest.mark.parametrize("field", [{"logprobs": 1}, {"logprob_token_ids": [3, 4]}], ids=["best", "of tokens"])
def test_log_probabilities_have_a_prompt_computed_whose_last_token_cannot_be_repeated(
    made: Any, producer: _kvpipe.Control, specs: Any, length: int, field: dict[str, Any]
) -> None:
    engine, handoff = made(*specs), bytes.fromhex(new_id())
    request = engine.new_request(prompt(length), params=consume(handoff.hex(), producer.address))
    for name, value in field.items():
        setattr(request.sampling_params, name, value)
    engine.scheduler.add_request(request)
    opened(producer, request, handoff)
    until(lambda: engine.step() and request.num_output_tokens)
    result = reported(engine, handoff.hex())
    assert (result["result"], result["computed_tokens"]) == ("missing", length)
    assert "cannot be computed twice, nor the first token forced: log probabilities" in result["reason"]


def test_a_prompt_whose_last_token_can_be_repeated_is_loaded_with_log_probabilities(
    made: Any, producer: _kvpipe.Control
) -> None:
    engine, handoff = made(FULL, WINDOW), bytes.fromhex(new_id())
    request = engine.new_request(prompt(UNREPEATABLE + 1), params=consume(handoff.hex(), producer.address))
    request.sampling_params.logprobs = 1
    engine.scheduler.add_request(request)
    opened(producer, request, handoff)
    assert loading(engine, request)


def test_a_load_ends_without_use_when_the_producers_token_turns_out_to_be_of_none(
    made: Any, producer: _kvpipe.Control
) -> None:
    engine = made(FULL, WINDOW)
    request, handoff = consuming(engine, producer, prompt(UNREPEATABLE))
    producer.open(handoff, prompt_hash(request), request.num_prompt_tokens, [("127.0.0.1:1", bytes(16))])
    loading(engine, request)
    producer.finish(handoff, [7], "length", 0, bytes(32))
    cancels = until(lambda: engine.step()[1].cancels)
    reason = "the producer sampled with other parameters"
    reason = f"the last prompt token cannot be computed twice, nor the first token forced: {reason}"
    assert cancels == [Cancel(handoff, reason, is_withdrawn=True)]


@pytest.mark.parametrize(("role_name", "num_warnings"), [("kv_both", 1), ("kv_producer", 0)])
def test_an_engine_that_can_use_no_handed_over_state_says_so_at_its_start(
    tiny_model: str, log: pytest.LogCaptureFixture, role_name: str, num_warnings: int
) -> None:
    config = engine_config(tiny_model, {"enable_prefix_caching": False}, {"kv_role": role_name})
    config.speculative_config = SimpleNamespace()
    SchedulerRole(config, ConnectorConfig(), groups(FULL, PLAIN_STATE))
    assert log.text.count("handoff.local every prompt is computed here") == num_warnings


def test_a_state_that_the_v2_runner_moves_before_the_connector_is_called_is_not_loaded(
    tiny_model: str, producer: _kvpipe.Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(tiny_model, {"enable_prefix_caching": True})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config.cache_config.mamba_cache_mode = "align"
    aligned = MambaSpec(block_size=BLOCK, shapes=STATE.shapes, dtypes=STATE.dtypes, mamba_cache_mode="align")
    engine = Engine(config, specs=(FULL, aligned))
    for length, is_loaded in ((3 * BLOCK, True), (3 * BLOCK + 1, False)):
        request, handoff = consuming(engine, producer, prompt(length, seed=length))
        opened(producer, request, handoff)
        if is_loaded:
            assert loading(engine, request)
            engine.abort(request)
        else:
            until(lambda request=request: engine.step() and request.num_output_tokens)
            assert "moves the recurrent state" in reported(engine, handoff.hex())["reason"]
    engine.close()


# --- worker

GROUPS = (NAMES[:1], NAMES[1:])


class GroupedPair(Pair):
    """Workers whose first layer is a group of its own."""

    def role(self, side: str, trace: str = "") -> Any:
        return role(trace=trace, groups=GROUPS)


@pytest.fixture
def grouped() -> Iterator[GroupedPair]:
    pair = GroupedPair()
    yield pair
    pair.producer.close()
    pair.consumer.close()


def of_groups(handoff: bytes) -> list[ReadyRange]:
    """Two blocks of the first group, and one of the second."""
    return [ReadyRange(handoff, 0, [2, 3], 0), ReadyRange(handoff, 7, [4], 1)]


def load_of_groups(pair: Pair, second: tuple[int, list[int]] = (7, [10])) -> None:
    address = pair.producer.handshake()
    ranks = [(address.address, address.incarnation)]
    load = Load("consuming", pair.handoff, [(0, [8, 9]), second], ranks, has_state=True)
    pair.consumer.begin_step(StepMetadata(loads=[load]))


@pytest.mark.parametrize("is_cached", [True, False])
def test_blocks_of_a_group_go_from_its_layers_to_its_layers(grouped: GroupedPair, *, is_cached: bool) -> None:
    ready = of_groups(grouped.handoff)
    before = {name: cache.clone() for name, cache in grouped.target.items()}
    grouped.producer.begin_step(StepMetadata(cached=ready) if is_cached else StepMetadata(ready=ready))
    for name in NAMES:
        grouped.producer.save_layer(name)
    grouped.producer.end_forward()
    load_of_groups(grouped)
    assert received(grouped.consumer) == {"consuming"}
    assert grouped.consumer.drain_failed() == set()
    assert grouped.arrived([2, 3], [8, 9], range(1))
    assert grouped.arrived([4], [10], range(1, 3))
    for name, untouched in ((NAMES[0], [10]), (NAMES[1], [8, 9])):
        assert (grouped.target[name][untouched] == before[name][untouched]).all()


def test_a_group_of_which_the_next_token_needs_nothing_is_left_alone(grouped: GroupedPair) -> None:
    grouped.producer.begin_step(StepMetadata(cached=[ReadyRange(grouped.handoff, 0, [2, 3], 0)]))
    load_of_groups(grouped, (4, []))
    assert received(grouped.consumer) == {"consuming"}
    assert grouped.consumer.drain_failed() == set()
    assert grouped.arrived([2, 3], [8, 9], range(1))


def test_layers_of_a_group_without_ready_blocks_are_not_announced(grouped: GroupedPair) -> None:
    recorded = Recorded(grouped.producer)
    for _ in range(2):  # a layer of such a group is not taken for one that was computed twice
        grouped.producer.begin_step(StepMetadata(ready=[ReadyRange(grouped.handoff, 7, [4], 1)]))
        for name in NAMES:
            grouped.producer.save_layer(name)
        grouped.producer.end_forward()
    assert recorded.num_layers == [1, 1] * 2


def test_layers_without_a_hook_are_announced_after_the_forward_pass_each_with_its_group(grouped: GroupedPair) -> None:
    recorded = Recorded(grouped.producer)
    grouped.producer.begin_step(StepMetadata(ready=of_groups(grouped.handoff)))
    grouped.producer.save_layer(NAMES[1])
    grouped.producer.end_forward()
    assert recorded.num_layers == [1, 1, 1]
    load_of_groups(grouped)
    assert received(grouped.consumer) == {"consuming"}


def test_a_layer_of_no_group_is_refused_by_name_unless_its_cache_is_anothers() -> None:
    worker = role()
    storage = torch.zeros(3, BLOCKS, 4, 32, 64)
    caches = {name: storage[index] for index, name in enumerate(NAMES)}
    with pytest.raises(ConfigError, match="layer draft: it is in none of vLLM's 1 KV cache groups"):
        worker.register(caches | {"draft": torch.zeros(BLOCKS, 4, 32, 64)})
    other = role()
    other.register(caches | {"shared": storage[1]})
    assert sorted(other._regions) == NAMES
    other.close()


def test_a_rank_that_misses_a_block_of_several_groups_has_the_whole_prompt_computed() -> None:
    for outcome_of, missing, failed in ((LOADED, [], set()), (FAILED, [1], {"request"}), (FAILED, [], {"request"})):
        loads = one_rank(has_state=True, has_parts=False)
        loads.ended(HANDOFF, outcome_of, missing)
        assert (loads.drain_received(), loads.drain_failed()) == ({"request"}, failed)
        assert loads.drain_invalid_block_ids() == set(), "vLLM's engine ends at the sight of one"
        assert loads.drain_failed() == set()
