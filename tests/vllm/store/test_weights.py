"""Resets: an engine goes on sharing while its weights are the same, and uses no KV of other weights after them."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from kvpipe.store import StoreServer
from kvpipe.transfer_params import load, save
from kvpipe.vllm.model_files import NOT_COMPARED
from kvpipe.vllm.store.weights import AS_LOADED, PROPERTY, Weights
from tests.store import valkey_servers
from tests.vllm.store.engine import CHUNK, Engine, Model, answered
from tests.vllm.store.test_engine import prompt, stored
from tests.vllm.store.test_entries import produced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.vllm

TOKENS = prompt(3 * CHUNK)


def reset(engine: Engine) -> None:
    """As `/pause`, and `/reset_prefix_cache?reset_external=true`."""
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def update(engine: Engine, value: float = 1.0) -> None:
    """Changes one weight in memory, as an update does."""
    with torch.no_grad():
        engine.weights.embedding[0, 0] += value


def loads(engine: Engine, tokens: list[int]) -> float:
    """Has an engine answer a prompt, and returns the number of chunks that it has loaded for it."""
    before = engine.count("loaded")
    assert engine.answer(tokens) == answered(tokens)
    return engine.count("loaded") - before


@pytest.fixture(params=["kvpipe", *valkey_servers.PROGRAMS])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a real store."""
    with ExitStack() as running:
        if request.param == "kvpipe":
            monkeypatch.setenv("KVPIPE_TOKEN", "t")
            yield running.enter_context(StoreServer(token="t")).url
        else:
            yield running.enter_context(valkey_servers.running(valkey_servers.PROGRAMS[request.param], tmp_path)).url()


def test_engines_that_were_both_reset_share_what_they_stored_before_and_after(new_engine: Any, url: str) -> None:
    first, second = (new_engine(url=url, lookup_timeout_s=20) for _ in range(2))
    after = prompt(3 * CHUNK, seed=1)
    stored(first, TOKENS)
    for engine in (first, second):
        reset(engine)
    stored(first, after)
    assert [loads(second, tokens) for tokens in (TOKENS, after)] == [3, 3]


def test_engines_whose_weights_were_changed_alike_share_what_they_store_after_it(new_engine: Any, url: str) -> None:
    first, second = (new_engine(url=url, lookup_timeout_s=20) for _ in range(2))
    after = prompt(3 * CHUNK, seed=1)
    stored(first, TOKENS)
    for engine in (first, second):
        reset(engine)
        update(engine)
    stored(first, after)
    assert [loads(second, tokens) for tokens in (TOKENS, after)] == [0, 3]


@pytest.mark.parametrize("is_reset_first", [True, False])
def test_an_engine_with_other_weights_and_those_with_the_old_ones_load_nothing_of_each_other(
    new_engine: Any, *, is_reset_first: bool
) -> None:
    old, reset_alone, updated, other = (new_engine() for _ in range(4))
    stored(old, TOKENS)
    reset(reset_alone)
    for engine, value in ((updated, 1.0), (other, 2.0)):
        if is_reset_first:
            reset(engine)
            engine.step()  # while vLLM is paused, it may finish what was aborted
            update(engine, value)
        else:
            update(engine, value)
            reset(engine)
    assert [loads(engine, TOKENS) for engine in (updated, other, reset_alone)] == [0, 0, 3]
    tokens = prompt(3 * CHUNK, seed=1)
    stored(updated, tokens)
    assert [loads(engine, tokens) for engine in (old, other, reset_alone)] == [0, 0, 3]


def test_kv_that_a_prefix_cache_keeps_over_a_reset_is_shared_with_none_once_the_weights_have_changed(
    new_engine: Any,
) -> None:
    engine = new_engine()
    running = engine.add(TOKENS, 200)
    engine.until(lambda: running.num_output_tokens > 2)
    assert not engine.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    update(engine)
    longer = [*TOKENS, *prompt(CHUNK, seed=1)]
    stored(engine, longer)
    other = new_engine()
    reset(other)
    update(other)
    assert loads(other, longer) == 0
    reset(engine)  # which preempts what runs
    shared = prompt(3 * CHUNK, seed=2)
    stored(engine, shared)
    assert loads(other, shared) == 3


def test_a_block_that_was_not_full_at_a_failed_reset_is_shared_with_none_once_the_weights_have_changed(
    new_engine: Any,
) -> None:
    engine = new_engine()
    running = engine.add(prompt(2), 2 * CHUNK + 4)
    engine.until(lambda: running.num_output_tokens > 0)
    assert not engine.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    update(engine)
    engine.until(lambda: running.num_output_tokens >= 2 * CHUNK + 2)
    longer = [*list(running.all_token_ids)[: 2 * CHUNK], 5, 6, 7]
    stored(engine, longer)
    other = new_engine()
    reset(other)
    update(other)
    assert loads(other, longer) == 0


def test_weights_that_are_changed_back_are_those_of_the_start(new_engine: Any) -> None:
    engine = new_engine()
    stored(engine, TOKENS)
    for value, num_loaded in ((1.0, 0), (-1.0, 3)):
        update(engine, value)
        reset(engine)
        assert loads(engine, TOKENS) == num_loaded
        engine.saved()


def test_an_engine_that_is_reset_before_its_first_step_has_the_weights_of_after_it(new_engine: Any) -> None:
    stored(new_engine(), TOKENS)
    engine = new_engine()
    update(engine)
    reset(engine)
    assert loads(engine, TOKENS) == 0


def test_what_a_worker_has_said_before_a_reset_does_not_count_after_it(new_engine: Any) -> None:
    stored(new_engine(), TOKENS)
    engine = new_engine()
    step = engine.begin_step()
    update(engine)
    reset(engine)
    engine.scheduler.update_from_output(*step)
    assert loads(engine, TOKENS) == 0


def test_one_rank_with_other_weights_is_enough(new_engine: Any) -> None:
    first, second = (new_engine(num_ranks=2) for _ in range(2))
    assert first.answer(TOKENS) == answered(TOKENS, num_ranks=2)
    first.saved()
    reset(second)
    second.workers[1]._worker._weights = Weights([Model().attention], None)
    update(second)
    assert second.answer(TOKENS) == answered(TOKENS, num_ranks=2)
    assert second.count("loaded") == 0


def test_a_request_that_was_begun_before_a_reset_stores_nothing_after_it(new_engine: Any, store: Any) -> None:
    engine = new_engine()
    request = engine.add(prompt(12 * CHUNK))  # 256 tokens a step
    engine.until(lambda: request.num_computed_tokens > 0)
    num_before = request.num_computed_tokens // CHUNK
    engine.scheduler.connector.reset_cache()  # without a preemption
    update(engine)
    other = engine.add(prompt(CHUNK, seed=1))
    engine.until(lambda: request.is_finished() and other.is_finished())
    engine.saved()
    assert engine.count("saved") == num_before + 1 < 12


def test_a_request_that_a_reset_preempts_is_stored_with_the_weights_of_after_it(new_engine: Any, store: Any) -> None:
    first, second = new_engine(), new_engine()
    request = first.add(prompt(8 * CHUNK))
    first.until(lambda: request.num_computed_tokens > 0)
    for engine in (first, second):
        reset(engine)
        update(engine)
    first.until(request.is_finished)
    first.saved()
    assert loads(second, prompt(8 * CHUNK)) == 8


def test_the_entry_of_a_handoff_that_was_copied_before_a_reset_is_not_saved(new_engine: Any, store: Any) -> None:
    producer = new_engine()
    assert loads(producer, prompt(CHUNK)) == 0
    request = producer.add(prompt(5), 1, save(secrets.token_hex(16)))
    while not request.num_computed_tokens:
        output, result = producer.begin_step()
        if request.num_computed_tokens:
            producer.scheduler.connector.reset_cache()
        producer.scheduler.update_from_output(output, result)
    assert request.is_finished()
    producer.step()
    producer.saved()
    assert len(store.keys) == 1
    assert not producer.workers[0]._worker._saver._copies


def test_a_handoff_through_the_store_goes_on_after_both_were_reset(new_engine: Any) -> None:
    producer, consumer = new_engine(), new_engine()
    for engine in (producer, consumer):
        reset(engine)
        assert loads(engine, prompt(5)) == 0
    request = consumer.add(tokens := prompt(CHUNK + 3), 3, load(produced(producer, tokens)))
    consumer.until(request.is_finished)
    assert consumer.num_computed[request.request_id] == 1 + 2


class Packed(Model):
    """Weights of a layer that vLLM has packed on a CPU, as it does."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.linear.requires_grad_(requires_grad=False)
        self.linear.input_size_per_partition = 8
        self.linear.weight += offset
        dispatch_cpu_unquantized_gemm(self.linear, remove_weight=True)
        assert not self.linear.weight.numel()

    def pack(self, weight: torch.Tensor) -> None:
        """Packs another weight."""
        self.linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(self.linear, remove_weight=True)


def test_packed_weights_are_compared_by_what_they_do() -> None:
    model = Packed()
    weights = Weights([model.attention], None)
    assert weights.identify() == AS_LOADED
    model.pack(changed := Model().linear.weight.detach() + torch.eye(4, 8) * 0.01)
    found = weights.identify()
    assert found not in ("", AS_LOADED)
    model.pack(Model().linear.weight.detach().clone())
    assert weights.identify() == AS_LOADED
    other = Packed(1.0)
    weights_of_another = Weights([other.attention], None)
    other.pack(changed)
    assert weights_of_another.identify() == found


def test_the_order_in_which_models_were_made_does_not_matter() -> None:
    # As a model and its draft model.
    found = []
    for is_reversed in (False, True):
        models = [Model(), Model()]
        weights = Weights([model.attention for model in models], None)
        for model, value in zip(reversed(models) if is_reversed else models, (1.0, 2.0), strict=True):
            with torch.no_grad():
                model.embedding[0, 0] += value
        found.append(weights.identify())
    assert found[0] == found[1] != AS_LOADED


def test_after_a_reset_all_ranks_have_to_report(new_engine: Any) -> None:
    engine = new_engine(num_ranks=2)
    names, report = engine.role._names, [(PROPERTY, AS_LOADED)]
    assert names.introduce({0: report, 1: report})
    names.reset(is_cache_empty=True)
    assert not names.introduce({1: report})
    assert not names.is_shared
    assert names.introduce({0: report})
    assert names.is_shared


@pytest.mark.parametrize("case", ["quantization", "packed elsewhere", "packed for others", "no model"])
def test_weights_that_cannot_be_read_are_others_each_time(case: str) -> None:
    model = Packed() if case == "packed for others" else Model()
    if case == "packed for others":
        model.linear.input_size_per_partition = 9
    if case == "packed elsewhere":
        model.linear.input_size_per_partition = 8
        model.linear.weight = torch.nn.Parameter(torch.empty(0))
    weights = Weights([] if case == "no model" else [model.attention], "fp8" if case == "quantization" else None)
    found = [weights.identify() for _ in range(2)]
    assert all(each.startswith(NOT_COMPARED) for each in found)
    assert found[0] != found[1]


def test_an_engine_whose_weights_cannot_be_read_shares_nothing_after_a_reset_and_says_so_once(
    new_engine: Any, log: pytest.LogCaptureFixture
) -> None:
    stored(new_engine(), TOKENS)
    weights = Model()
    weights.linear.weight = torch.nn.Parameter(torch.empty(0))
    engine = new_engine(weights=weights)
    assert log.text.count("store.weights after a reset this instance shares no KV until it is restarted") == 1
    assert loads(engine, TOKENS) == 3
    assert list(engine.stats["namespaces"].values()) == [1]
    reset(engine)
    assert [loads(engine, prompt(3 * CHUNK, seed)) for seed in (0, 1)] == [0, 0]
    assert list(engine.stats["namespaces"].values()) == [0, 0]
    assert log.text.count("store.private") == 1
    assert "linear.weight (0,) torch.float32 is kept elsewhere" in log.text


def test_a_producer_that_shares_nothing_gives_no_handoff_through_the_store(new_engine: Any, store: Any) -> None:
    weights = Model()
    weights.linear.weight = torch.nn.Parameter(torch.empty(0))
    producer = new_engine(weights=weights)
    reset(producer)
    for _ in range(2):
        request = producer.add(prompt(5), 1, save(secrets.token_hex(16)))
        producer.until(request.is_finished)
    producer.step()
    assert not store.keys
