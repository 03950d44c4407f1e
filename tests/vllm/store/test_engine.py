"""The store connector in vLLM's scheduler: what is saved, what is loaded, and that no other KV is computed on."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path  # noqa: TC003 - as in the other tests
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from kvpipe.transfer_params import consume
from kvpipe.vllm.store.cache_bytes import CacheBytes
from kvpipe.vllm.store.chunk import HEADER_BYTES
from tests.vllm.handoff.engine import BLOCK
from tests.vllm.store.engine import CHUNK, LAYERS, Engine, answered
from tests.vllm.store.stores import WAIT_S

pytestmark = pytest.mark.vllm


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed} {length}").choices(range(10, 2000), k=length)


def stored(engine: Engine, tokens: list[int]) -> None:
    """Has an engine compute a prompt, and waits until its chunks are in the store."""
    assert engine.answer(tokens, 1) == answered(tokens, 1)
    engine.saved()


def test_the_full_chunks_of_a_prompt_are_saved_and_nothing_else(engine: Engine, store: Any) -> None:
    stored(engine, prompt(3 * CHUNK + 5))
    assert len(store.keys) == engine.count("saved") == 3
    stored(engine, prompt(CHUNK - 1))
    assert len(store.keys) == 3


def test_another_engine_loads_what_the_first_has_stored(new_engine: Any, store: Any) -> None:
    first, second = new_engine(), new_engine()
    tokens = prompt(5 * CHUNK + 7)
    stored(first, tokens)
    request = second.add(tokens)
    second.until(request.is_finished)
    assert second.answers[request.request_id] == answered(tokens)
    assert second.num_computed[request.request_id] == 7 + 2
    assert second.count("loaded") == 5
    assert second.count("saved") == 0


def test_a_prompt_that_is_stored_to_its_end_computes_its_last_token_only(new_engine: Any) -> None:
    tokens = prompt(3 * CHUNK)
    stored(new_engine(), tokens)
    engine = new_engine()
    request = engine.add(tokens, max_tokens=1)
    engine.until(request.is_finished)
    assert engine.num_computed[request.request_id] == 1
    assert engine.answers[request.request_id] == answered(tokens, 1)


def test_chunks_that_exist_are_not_saved_again(new_engine: Any, store: Any) -> None:
    tokens = prompt(4 * CHUNK)
    stored(new_engine(), tokens)
    assert store.num_puts == 4
    longer = tokens + prompt(2 * CHUNK, seed=1)
    stored(new_engine(role="kv_producer"), longer)
    assert store.num_puts == 6


def test_one_question_is_asked_for_all_chunks_of_a_prompt(engine: Engine, store: Any) -> None:
    engine.answer(prompt(6 * CHUNK + 1))
    assert [len(keys) for keys in store.lookups] == [6]


def test_only_the_blocks_that_are_not_here_are_loaded_when_the_own_cache_ends_within_a_chunk(new_engine: Any) -> None:
    tokens = prompt(4 * CHUNK)
    stored(new_engine(), tokens)
    engine = new_engine()
    engine.answer(tokens[: CHUNK + BLOCK + 2], 1)  # a chunk and a half
    table = engine.add(tokens, 1)
    engine.until(table.is_finished)
    assert engine.num_computed[table.request_id] == 1
    assert engine.answers[table.request_id] == answered(tokens, 1)


def test_a_longer_prefix_of_another_prompt_is_shared(new_engine: Any) -> None:
    tokens = prompt(4 * CHUNK)
    stored(new_engine(), tokens)
    engine = new_engine()
    other = tokens[: 2 * CHUNK] + prompt(2 * CHUNK, seed=3)
    assert engine.answer(other) == answered(other)
    assert engine.count("loaded") == 2


def test_a_load_that_fails_within_a_chunk_that_is_here_in_part_is_computed_from_there(
    new_engine: Any, store: Any
) -> None:
    tokens = prompt(4 * CHUNK)
    stored(new_engine(), tokens)
    _, second, third, _ = store.lookups[0]
    for gone in (third, second):
        engine = new_engine()
        engine.answer(tokens[: CHUNK + BLOCK + 2], 1)
        store.on_select = lambda _, gone=gone: store.delete([gone])
        assert engine.answer(tokens) == answered(tokens)
        engine.saved()


def test_a_step_with_synchronous_loads_of_another_connector_saves_nothing(
    engine: Engine, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = engine.role.build_metadata

    def beside_others(output: Any) -> Any:
        output.has_sync_kv_loads = True
        return build(output)

    monkeypatch.setattr(engine.role, "build_metadata", beside_others)
    request = engine.add(prompt(2 * CHUNK), 3)
    engine.until(lambda: request.num_output_tokens)
    engine.saved()
    assert store.num_puts == 0
    monkeypatch.undo()
    engine.until(request.is_finished)
    engine.saved()
    assert store.num_puts == 2


def test_a_consumer_saves_nothing(new_engine: Any, store: Any) -> None:
    engine = new_engine(role="kv_consumer")
    tokens = prompt(3 * CHUNK)
    assert engine.answer(tokens) == answered(tokens)
    assert store.num_puts == 0


def test_a_request_waits_for_the_answer_and_no_step_does(engine: Engine, store: Any) -> None:
    engine.answer(prompt(BLOCK))  # the workers have reported
    store.is_open.clear()
    began = time.monotonic()
    request = engine.add(prompt(2 * CHUNK))
    for _ in range(5):
        assert engine.step().total_num_scheduled_tokens == 0
    assert time.monotonic() - began < 1
    store.is_open.set()
    engine.until(request.is_finished)


def test_a_request_is_computed_when_the_answer_does_not_come_in_time(new_engine: Any, store: Any) -> None:
    engine = new_engine(lookup_timeout_s=0.05)
    store.is_open.clear()
    tokens = prompt(2 * CHUNK)
    assert engine.answer(tokens) == answered(tokens)
    assert engine.count("decisions", "lookup_timeout") == 1


def test_a_store_that_fails_is_left_alone_after_three_failures(engine: Engine, store: Any) -> None:
    store.failure = ConnectionResetError("by the test")
    for seed in range(6):
        tokens = prompt(2 * CHUNK, seed)
        assert engine.answer(tokens) == answered(tokens)
    assert len(store.lookups) == 3
    assert engine.count("decisions", "breaker") == 3
    assert engine.stats["breakers"]["load"] == "open"


def test_a_chunk_that_is_gone_is_computed_and_saved_again(new_engine: Any, store: Any) -> None:
    tokens = prompt(4 * CHUNK + 1)
    stored(new_engine(), tokens)
    gone = store.lookups[0][2]
    store.on_select = lambda key: store.delete([gone])
    engine = new_engine()
    assert engine.answer(tokens) == answered(tokens)
    assert (engine.count("loaded"), engine.count("missed", "missing")) == (2, 2)
    engine.saved()
    assert gone in store.keys


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


WRONG = {
    "corrupt": lambda data, other: flipped(data, len(data) // 2),
    "short": lambda data, other: data[:-1],
    "foreign": lambda data, other: other,
}


@pytest.mark.parametrize("has_parts", [True, False])
@pytest.mark.parametrize("reason", WRONG)
def test_a_chunk_that_is_not_what_its_name_says_is_a_miss_and_replaced(
    new_engine: Any, store: Any, reason: str, *, has_parts: bool
) -> None:
    store.has_parts = has_parts
    tokens = prompt(4 * CHUNK)
    stored(new_engine(), tokens)
    _, second, third, _ = store.lookups[0]
    right = store.read(second)
    store.replace(second, WRONG[reason](right, store.read(third)))
    engine = new_engine()
    assert engine.answer(tokens) == answered(tokens)
    assert (engine.count("loaded"), engine.count("missed", reason)) == (1, 3)
    engine.saved()
    assert store.read(second) == right


def test_without_the_check_a_corrupt_chunk_would_change_the_answer(
    new_engine: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(4 * CHUNK)
    stored(new_engine(), tokens)
    last = store.lookups[0][-1]
    store.replace(last, flipped(store.read(last), HEADER_BYTES + 8 * CHUNK - 8))  # the first layer's last slot
    monkeypatch.setattr("kvpipe.vllm.store.values.fault", lambda *_: "")
    engine = new_engine(is_checked=False)
    assert engine.answer([*tokens, 10]) != answered([*tokens, 10])


def test_a_load_that_takes_too_long_ends_with_what_it_has_and_writes_nothing_later(new_engine: Any, store: Any) -> None:
    tokens = prompt(3 * CHUNK)
    stored(new_engine(), tokens)
    engine = new_engine(load_timeout_s=0.1)
    slow = store.lookups[0][1]
    store.on_select = lambda key: key == slow and store.is_open.clear()
    assert engine.answer(tokens) == answered(tokens)
    assert engine.count("missed", "timeout") + engine.count("loaded") == 3
    assert engine.count("loaded") < 2
    others = [engine.add(prompt(3 * CHUNK, seed), 1) for seed in range(1, 9)]
    store.is_open.set()
    engine.until(lambda: all(other.is_finished() for other in others))


def test_the_pages_of_all_layers_are_made_when_an_engine_starts(
    new_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(CacheBytes, "make_pages", lambda _, layer: made.append(layer))
    engine = new_engine()
    engine.until(lambda: len(made) == len(LAYERS))
    assert made == list(range(len(LAYERS)))


@pytest.mark.parametrize("has_parts", [True, False])
def test_blocks_of_an_aborted_load_are_kept_until_nothing_writes_into_them(
    new_engine: Any, store: Any, monkeypatch: pytest.MonkeyPatch, *, has_parts: bool
) -> None:
    tokens = prompt(3 * CHUNK)
    stored(new_engine(), tokens)
    engine = new_engine()
    store.has_parts = has_parts
    loader, begun, held = engine.workers[0]._worker._loader, [], threading.Event()
    owner, name = (loader._values, "is_whole") if has_parts else (loader._cache, "scatter")
    last = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *chunk: (begun.append(None), held.wait(20), last(*chunk))[-1])
    request = engine.add(tokens)
    engine.until(lambda: begun)
    engine.abort(request)
    for _ in range(20):
        engine.step()
    assert engine.num_free_blocks < engine.num_blocks - 1
    held.set()
    engine.until(engine.is_at_rest)


def test_chunks_without_space_on_their_way_are_not_saved_and_counted(new_engine: Any, store: Any) -> None:
    chunk_bytes = 2 * CHUNK * 8 + 128
    engine = new_engine(staging_bytes=2 * chunk_bytes)
    may_put = threading.Event()
    store.on_put = lambda key: may_put.wait(WAIT_S)
    assert engine.answer(prompt(4 * CHUNK), 1) == answered(prompt(4 * CHUNK), 1)
    may_put.set()
    engine.saved()
    assert (engine.count("saved"), engine.count("skipped", "staging_full")) == (2, 2)


def test_a_request_with_a_handoff_is_left_to_the_pipe(new_engine: Any, store: Any) -> None:
    tokens = prompt(3 * CHUNK)
    stored(new_engine(), tokens)
    engine = new_engine()
    assert engine.answer(tokens, params=consume("ab" * 16, "127.0.0.1:7")) == answered(tokens)
    assert engine.count("loaded") == 0


def test_preempted_requests_are_answered_right(new_engine: Any, store: Any) -> None:
    tokens = [prompt(2 * CHUNK, seed) for seed in range(4)]
    for each in tokens[:2]:
        stored(new_engine(), each)
    engine = new_engine(num_blocks=14)
    requests = [engine.add(each, 3 * BLOCK) for each in tokens]
    engine.until(lambda: all(request.is_finished() for request in requests))
    assert sum(request.num_preemptions for request in requests) > 0
    for each, request in zip(tokens, requests, strict=True):
        assert engine.answers[request.request_id] == answered(each, 3 * BLOCK)
    engine.until(engine.is_at_rest)


def test_a_store_that_is_slower_than_prefill_is_tried_once_and_not_used_then(new_engine: Any, store: Any) -> None:
    prompts = [prompt(2 * CHUNK, seed) for seed in range(5)]
    first = new_engine()
    for tokens in prompts:
        stored(first, tokens)
    store.on_select = lambda key: time.sleep(0.1)
    engine = new_engine(always_load=False)
    engine.answer(prompt(8 * CHUNK, seed=9))  # the speed of prefill is known
    for tokens in prompts:
        assert engine.answer(tokens) == answered(tokens)
    assert engine.count("decisions", "unmeasured") == 1
    assert engine.count("decisions", "slower") == 4


def test_with_fail_a_chunk_that_is_gone_fails_its_request_and_frees_its_blocks(new_engine: Any, store: Any) -> None:
    tokens = prompt(3 * CHUNK)
    stored(new_engine(), tokens)
    store.on_select = lambda key: store.delete([key])
    engine = new_engine(on_load_failure="fail")
    request = engine.add(tokens)
    engine.until(request.is_finished)
    assert request.status == RequestStatus.FINISHED_ERROR
    engine.until(engine.is_at_rest)


def adapter(folder: Path, content: str) -> LoRARequest:
    """An adapter with these settings, instead of the one that was there."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(content)
    save_file({"a": torch.zeros(2)}, folder / "adapter_model.safetensors")
    return LoRARequest(folder.name, 1, str(folder))


def test_the_chunks_of_an_adapter_are_its_contents_own(new_engine: Any, store: Any, tmp_path: Path) -> None:
    # vLLM's hashes have an adapter's name and path, not its content.
    tokens = prompt(3 * CHUNK)
    for folder, content, num_loaded in (
        *(("style", "{}", 0), ("style", "{}", 3), ("moved", "{}", 3)),
        *(("style", '{"r": 8}', 0), ("style", None, 0)),
    ):
        used = None if content is None else adapter(tmp_path / folder, content)
        engine = new_engine()
        assert engine.answer(tokens, lora_request=used) == answered(tokens)
        assert engine.count("loaded") == num_loaded
        engine.saved()
    assert len(store.keys) == 9


def test_an_adapter_whose_files_cannot_be_compared_does_not_use_the_store_and_is_named_once(
    engine: Engine, store: Any, log: pytest.LogCaptureFixture
) -> None:
    lost = LoRARequest("lost style", 1, "/no/such/adapter")
    for seed in range(2):
        assert engine.answer(prompt(3 * CHUNK, seed), lora_request=lost) == answered(prompt(3 * CHUNK, seed))
    assert engine.count("decisions", "adapter") == 2
    assert (store.num_puts, store.lookups) == (0, [])
    assert log.text.count("store.unnamed requests with the LoRA adapter lost style share no KV") == 1
