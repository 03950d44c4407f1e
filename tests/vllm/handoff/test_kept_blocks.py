"""Blocks that workers restore for the scheduler role, under vLLM's real scheduler."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpipe import _kvpipe
from kvpipe.transfer_params import resume
from kvpipe.vllm.handoff.metadata import HandshakeMetadata, ReadyRange, StepMetadata
from kvpipe.vllm.handoff.worker import WorkerRole
from kvpipe.vllm.kept_blocks import KeptBlocks
from tests.vllm.handoff.engine import BLOCK, Engine, engine_config, new_id
from tests.vllm.handoff.test_cached_blocks import announced, produce
from tests.vllm.handoff.test_commits import Scene
from tests.vllm.handoff.test_partial_loads import loaded, loads, lost, preempt_all, together
from tests.vllm.handoff.test_scheduler import consuming, loading, opened, prompt, until
from tests.vllm.handoff.test_worker import Pair, Recorded, caches, received, role

pytestmark = pytest.mark.vllm


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.producer.close()
    pair.consumer.close()


def first_step(engine: Engine, request: Request) -> tuple[int, list[int]]:
    """Steps until a request is scheduled; its tokens in that step, and the blocks restored after it."""

    def step() -> tuple[SchedulerOutput, StepMetadata] | None:
        output, metadata = engine.step()
        return (output, metadata) if request.request_id in output.num_scheduled_tokens else None

    output, metadata = until(step)
    return output.num_scheduled_tokens[request.request_id], [block_id for _, block_id in metadata.restores]


def computed(layers: dict[str, torch.Tensor], block_ids: list[int]) -> None:
    """A forward pass writes into blocks."""
    for cache in layers.values():
        cache[block_ids] += 1


# --- which blocks


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4, 4 * BLOCK])
def test_the_last_block_of_a_loaded_prompt_is_restored_once(
    engine: Engine, producer: _kvpipe.Control, length: int
) -> None:
    request, handoff = consuming(engine, producer, prompt(length))
    opened(producer, request, handoff)
    load = loading(engine, request)
    engine.step(**loaded(request))
    assert first_step(engine, request) == (1, [load.block_ids[-1]])
    assert engine.step()[1].restores == []


def test_several_prompts_of_a_step_are_restored_each_in_its_own_block(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    pairs = [consuming(engine, producer, prompt(100, seed)) for seed in range(3)]
    for request, handoff in pairs:
        opened(producer, request, handoff)
    requests = [request for request, _ in pairs]
    begun = loads(engine, requests)
    whole, hole, also_whole = requests
    engine.step(**together(loaded(whole), lost(begun[hole.request_id], [1]), loaded(also_whole)))
    output, metadata = engine.step()
    assert len(output.num_scheduled_tokens) == 3
    # vLLM schedules them in the order in which their handoffs were opened, which the producer's thread decides.
    assert sorted(metadata.restores) == sorted(
        (0, begun[each.request_id].block_ids[-1]) for each in (whole, also_whole)
    )


def test_a_load_beyond_the_own_cache_has_its_last_block_restored(engine: Engine, producer: _kvpipe.Control) -> None:
    tokens = prompt(3 * BLOCK + 5)
    first = engine.add(tokens)
    until(lambda: engine.step() and first.is_finished())
    request, handoff = consuming(engine, producer, tokens)
    opened(producer, request, handoff)
    [last] = loading(engine, request).block_ids
    engine.step(**loaded(request))
    assert first_step(engine, request) == (1, [last])


def test_a_load_that_the_scheduler_role_commits_has_its_last_block_restored(engine: Engine) -> None:
    """Its blocks were verified before the producer's token came."""
    scene = Scene(engine)
    scene.blocks_verified()
    scene.send_finished()
    scene.step()
    last = engine.scheduler.kv_cache_manager.get_block_ids(scene.request.request_id)[0][-1]
    num_tokens, metadata = scene.step()
    assert (num_tokens, metadata.restores) == (1, [(0, last)])


def test_a_load_whose_producer_died_with_all_blocks_here_has_its_last_block_restored(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    engine.step(**lost(load, [], reason="lost peer 127.0.0.1:1"))
    assert first_step(engine, request) == (1, [load.block_ids[-1]])


def test_a_first_token_that_is_not_forced_changes_nothing(tiny_model: str, producer: _kvpipe.Control) -> None:
    engine = Engine(engine_config(tiny_model))
    engine.role.set_workers({(0, 0): HandshakeMetadata("127.0.0.1:1", bytes(16), forces_first_tokens=False)})
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    load = loading(engine, request)
    engine.step(**loaded(request))
    assert first_step(engine, request) == (1, [load.block_ids[-1]])
    engine.close()


@pytest.mark.parametrize("holes", [[0], [2], [3]], ids=["the first", "the last but one", "the last"])
def test_a_prompt_with_a_hole_is_not_restored_even_where_one_token_is_computed(
    engine: Engine, producer: _kvpipe.Control, holes: list[int]
) -> None:
    request, handoff = consuming(engine, producer, prompt(3 * BLOCK + 1))
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), holes))
    assert first_step(engine, request) == (3 * BLOCK + 1 - holes[0] * BLOCK, [])


def test_a_recomputed_prompt_whose_last_chunk_is_one_token_is_not_restored(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    length = 8 * BLOCK + 1  # a step has 8 blocks of tokens
    request, handoff = consuming(engine, producer, prompt(length))
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), [0]))
    assert first_step(engine, request) == (8 * BLOCK, [])
    assert first_step(engine, request) == (1, [])


def test_a_prompt_that_the_own_cache_has_but_for_one_token_is_not_restored(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    tokens = prompt(2 * BLOCK + 1)
    first = engine.add(tokens)
    until(lambda: engine.step() and first.is_finished())
    request, handoff = consuming(engine, producer, tokens)
    opened(producer, request, handoff)
    assert first_step(engine, request) == (1, [])


def test_a_request_that_is_preempted_after_its_load_is_not_restored_again(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    """Its full blocks stay in the own cache, and one token is left to compute."""
    request, handoff = consuming(engine, producer, prompt(2 * BLOCK + 1))
    opened(producer, request, handoff)
    loading(engine, request)
    engine.step(**loaded(request))
    output = engine.scheduler.schedule()  # its first step, whose token is lost with it
    assert output.kv_connector_metadata.restores
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.running.remove(request)
    engine.end(output)
    assert first_step(engine, request) == (1, [])


def test_a_request_that_is_loaded_again_after_a_preemption_is_restored(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(600))
    opened(producer, request, handoff)
    engine.step(**lost(loading(engine, request), [1]))
    assert first_step(engine, request) == (8 * BLOCK, [])
    preempt_all(engine)
    load = loading(engine, request)
    engine.step(**loaded(request))
    assert first_step(engine, request) == (1, [load.block_ids[-1]])


def test_requests_that_load_nothing_are_not_restored(engine: Engine) -> None:
    for seed, params in enumerate((None, resume(new_id(), [9]))):
        request = engine.add(prompt(2 * BLOCK, seed), params=params)
        assert first_step(engine, request) == (2 * BLOCK, [])
        until(lambda request=request: engine.step() and request.is_finished())


def test_a_request_that_is_aborted_after_its_load_is_not_restored(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    engine.step(**loaded(request))
    engine.abort(request)
    output, metadata = engine.step()
    assert (output.num_scheduled_tokens, metadata.restores) == ({}, [])


def test_nothing_is_restored_with_speculative_decoding(tiny_model: str, producer: _kvpipe.Control) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    engine = Engine(engine_config(tiny_model, {"speculative_config": speculative}))
    # vLLM has no room for speculative tokens behind this prompt, so that the step computes one token.
    request, handoff = consuming(engine, producer, prompt(2046))
    opened(producer, request, handoff)
    loading(engine, request)
    engine.step(**loaded(request))
    assert first_step(engine, request) == (1, [])
    engine.finish_all()
    engine.close()


def test_a_step_that_computes_more_than_the_last_token_restores_nothing(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    engine.step(**loaded(request))
    request.num_computed_tokens = 98  # vLLM 0.32 schedules one token
    engine.role._consuming.scheduled(SimpleNamespace(num_scheduled_tokens={request.request_id: 2}), 0.0)
    assert engine.role._out.step.restores == []


def test_a_restored_block_that_another_request_shares_is_announced_after_the_forward_pass(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    tokens = prompt(2 * BLOCK)
    request, handoff = consuming(engine, producer, tokens)
    opened(producer, request, handoff)
    load = loading(engine, request)
    engine.step(**loaded(request))
    other = produce(engine, [*tokens, *prompt(10, seed=2)])
    _, metadata = engine.step()
    assert metadata.restores == [(0, load.block_ids[-1])]
    assert announced(metadata.cached, other) == [(0, 1)]
    assert announced(metadata.ready, other) == [(1, 2)]
    assert metadata.ready[0].block_ids[0] == metadata.restores[0][1]


# --- how


def begin(worker: WorkerRole, step: StepMetadata) -> None:
    """The first two hooks of a step."""
    worker.prepare_step(step)
    worker.begin_step(step)


def test_a_restored_block_has_the_bytes_of_before_the_forward_pass_in_every_layer_and_no_other_has() -> None:
    layers = caches()
    before = {name: cache.clone() for name, cache in layers.items()}
    worker = role()
    worker.register(layers)
    begin(worker, StepMetadata(restores=[(0, 5), (0, 9)]))
    computed(layers, [4, 5, 9])
    worker.end_forward()
    worker.close()
    for name, cache in layers.items():
        assert torch.equal(cache[[5, 9]], before[name][[5, 9]])
        assert torch.equal(cache[4], before[name][4] + 1)


def test_a_restored_block_has_the_bytes_of_before_vllm_prepares_the_step() -> None:
    """VLLM's V1 runner moves recurrent states before it calls the hook in which loads begin."""
    layers = caches()
    before = {name: cache[5].clone() for name, cache in layers.items()}
    worker = role()
    worker.register(layers)
    step = StepMetadata(restores=[(0, 5)])
    worker.prepare_step(step)
    computed(layers, [5])
    worker.begin_step(step)
    worker.end_forward()
    worker.close()
    assert all(torch.equal(cache[5], before[name]) for name, cache in layers.items())


def test_the_next_step_restores_nothing_of_the_one_before() -> None:
    layers = caches()
    worker = role()
    worker.register(layers)
    begin(worker, StepMetadata(restores=[(0, 5)]))
    worker.end_forward()
    computed(layers, [5])
    after = {name: cache.clone() for name, cache in layers.items()}
    begin(worker, StepMetadata())
    worker.end_forward()
    worker.close()
    assert all(torch.equal(cache, after[name]) for name, cache in layers.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_of_any_dtype_and_layout_are_restored(dtype: torch.dtype) -> None:
    """K and V side by side: a block is not one piece of memory."""
    cache = torch.randn(2, 6, 4, 8).to(dtype).transpose(0, 1)
    before = cache.clone()
    kept = KeptBlocks([[cache]])
    kept.keep([(0, 3)])
    cache.view(torch.uint8).zero_()
    kept.put_back()
    assert torch.equal(cache[3].view(torch.uint8), before[3].view(torch.uint8))
    assert not cache[2].view(torch.uint8).any()
    cache.view(torch.uint8).zero_()
    kept.put_back()  # the copies are gone
    assert not cache.view(torch.uint8).any()


def test_a_restored_block_is_announced_to_others_with_its_restored_bytes(pair: Pair) -> None:
    recorded = Recorded(pair.producer)
    before = pair.source["layer.0"][2].clone()
    pair.load([7, 8])
    begin(pair.producer, StepMetadata(ready=[ReadyRange(pair.handoff, 0, [2, 3])], restores=[(0, 2)]))
    for name, cache in pair.source.items():
        computed({name: cache}, [2, 3])
        pair.producer.save_layer(name)
    assert recorded.num_layers == []  # no layer is announced on its own
    pair.producer.end_forward()
    assert received(pair.consumer) == {"consuming"}
    assert pair.consumer.drain_invalid_block_ids() == set()
    assert torch.equal(pair.target["layer.0"][7], before)
    assert pair.arrived([2, 3], [7, 8])


def test_other_blocks_of_a_step_that_restores_are_announced_by_layer(pair: Pair) -> None:
    recorded = Recorded(pair.producer)
    begin(pair.producer, StepMetadata(ready=[ReadyRange(pair.handoff, 0, [2, 3])], restores=[(0, 4)]))
    pair.producer.save_layer("layer.0")
    assert recorded.num_layers == [1]
    pair.producer.end_forward()
