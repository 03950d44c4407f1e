"""Engines whose device is behind the hooks, as a GPU is: what is saved and loaded is copied when it is computed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpipe.store_connector import KVStoreConnector
from kvpipe.transfer_params import load, save
from kvpipe.vllm.store.chunk import HEADER_BYTES
from tests.vllm.handoff.engine import BLOCK, cache_config
from tests.vllm.store import late
from tests.vllm.store.engine import CHUNK, LAYERS, answered, store_config
from tests.vllm.store.test_engine import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("processor")]

# A prompt of three chunks, and room for little more.
LENGTH, NUM_BLOCKS = 3 * CHUNK + 1, 10


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch, new_engine: Any) -> Iterator[late.LateOrder]:
    order = late.LateOrder()
    late.use(monkeypatch, order)
    yield order
    # The threads of engines that are closed wait for nothing.
    order.complete()


def saved_late(engine: Any, order: late.LateOrder, other: list[int]) -> int:
    """Answers a prompt, and another one in the blocks that are free then; copies only afterwards.

    Returns the number of blocks that were free between the two.
    """
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    num_free = engine.num_free_blocks
    assert engine.answer(other, 1) == answered(other, 1)
    order.complete()
    engine.saved()
    return int(num_free)


def test_blocks_are_given_to_no_other_request_before_they_are_copied(new_engine: Any, order: late.LateOrder) -> None:
    engine, reader = new_engine(num_blocks=NUM_BLOCKS), new_engine()
    # One is the null block.
    assert saved_late(engine, order, prompt(CHUNK, 2)) == NUM_BLOCKS - 1 - 3 * CHUNK // BLOCK
    engine.until(engine.is_at_rest)
    assert not engine.scheduler.has_requests()
    request = reader.add(prompt(LENGTH, 1), 3)
    reader.until(lambda: bool(order.events))
    order.complete()
    reader.until(request.is_finished)
    assert reader.answers[request.request_id] == answered(prompt(LENGTH, 1))
    assert reader.count("loaded") == 3


def test_without_holds_the_kv_of_another_request_would_be_saved(
    new_engine: Any, order: late.LateOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    late.use(monkeypatch, order, are_held=False)
    engine, reader = new_engine(num_blocks=NUM_BLOCKS), new_engine(is_checked=False)
    assert saved_late(engine, order, prompt(LENGTH, 2)) == NUM_BLOCKS - 1
    request = reader.add(prompt(LENGTH, 1), 3)
    reader.until(lambda: bool(order.events))
    order.complete()
    reader.until(request.is_finished)
    assert reader.answers[request.request_id] != answered(prompt(LENGTH, 1))


def test_a_request_waits_for_blocks_that_are_being_copied_and_gets_them_then(
    new_engine: Any, order: late.LateOrder
) -> None:
    engine = new_engine(num_blocks=NUM_BLOCKS)
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    request = engine.add(prompt(LENGTH, 2), 1)
    for _ in range(5):
        engine.step()
    assert (request.is_finished(), request.num_preemptions) == (False, 0)
    order.complete()
    engine.until(request.is_finished)
    assert engine.answers[request.request_id] == answered(prompt(LENGTH, 2), 1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_entry_is_saved_behind_the_copy_of_its_kv_and_after_its_chunks(
    new_engine: Any, order: late.LateOrder, num_ranks: int
) -> None:
    producer, consumer = new_engine(num_ranks=num_ranks), new_engine(num_ranks=num_ranks)
    tokens, handoff = prompt(LENGTH + 5, 1), "ab" * 16
    request = producer.add(tokens, 1, save(handoff))
    producer.until(request.is_finished)
    for _ in range(3):
        producer.step()
    order.complete()
    producer.saved()
    producer.until(producer.is_at_rest)
    loading = consumer.add(tokens, 3, load(handoff))
    consumer.until(lambda: len(order.events) == num_ranks)
    order.complete()
    consumer.until(loading.is_finished)
    assert consumer.answers[loading.request_id] == answered(tokens, num_ranks=num_ranks)
    assert consumer.count("first_tokens") == 1


def test_nothing_is_loaded_into_blocks_before_the_device_is_done_with_them(
    new_engine: Any, order: late.LateOrder
) -> None:
    engine, reader = new_engine(), new_engine()
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    order.complete()
    engine.saved()
    before = {name: cache.clone() for name, cache in reader.caches.items()}
    request = reader.add(prompt(LENGTH, 1), 3)
    reader.until(lambda: bool(order.events))
    for _ in range(5):
        reader.step()
    assert all(before[name].equal(cache) for name, cache in reader.caches.items())
    order.complete()
    reader.until(request.is_finished)
    assert reader.answers[request.request_id] == answered(prompt(LENGTH, 1))


def test_an_engine_without_requests_goes_on_until_its_blocks_are_copied(new_engine: Any, order: late.LateOrder) -> None:
    engine = new_engine()
    request = engine.add(prompt(LENGTH, 1), 1)
    engine.until(request.is_finished)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.has_requests()
    assert not engine.is_at_rest()
    order.complete()
    engine.until(engine.is_at_rest)
    assert not engine.scheduler.has_requests()


def test_chunks_without_space_hold_no_blocks(new_engine: Any, order: late.LateOrder) -> None:
    of_one_chunk = HEADER_BYTES + 8 * CHUNK * len(LAYERS)
    engine = new_engine(staging_bytes=of_one_chunk)
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    for _ in range(3):
        engine.step()
    assert engine.count("skipped", "staging_full") == 2
    # One is the null block.
    assert engine.num_free_blocks == engine.num_blocks - 1 - CHUNK // BLOCK
    order.complete()
    engine.until(engine.is_at_rest)


def test_blocks_are_held_until_every_rank_has_copied_them(new_engine: Any, order: late.LateOrder) -> None:
    engine = new_engine(num_ranks=2)
    request = engine.add(prompt(LENGTH, 1), 1)
    engine.until(request.is_finished)
    of_one, *others = order.events
    of_one.complete()
    engine.until(lambda: bool(engine.workers[0]._worker._saver._ended) or engine.count("saved"))
    for _ in range(3):
        engine.step()
    assert not engine.is_at_rest()
    for event in others:
        event.complete()
    engine.until(engine.is_at_rest)


def test_blocks_are_held_by_engines_on_gpus_and_by_no_others(tiny_model: str) -> None:
    config = store_config(tiny_model, "unused")
    for device in ("cpu", "cuda"):
        config.device_config.device_type = device
        role = KVStoreConnector(config, KVConnectorRole.SCHEDULER, cache_config())._scheduler
        assert role._held._is_async == (device != "cpu")
        role.close()


def test_a_device_of_which_no_event_can_be_recorded_saves_and_loads_nothing(
    new_engine: Any, order: late.LateOrder
) -> None:
    engine, reader = new_engine(), new_engine()
    order.error = "the driver refuses"
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    engine.saved()
    engine.until(engine.is_at_rest)
    assert engine.count("skipped", "device") == 3
    order.error = ""
    assert engine.answer(prompt(LENGTH, 1)[::-1], 1) == answered(prompt(LENGTH, 1)[::-1], 1)
    order.complete()
    engine.saved()
    order.error = "the driver refuses"
    assert reader.answer(prompt(LENGTH, 1)[::-1], 1) == answered(prompt(LENGTH, 1)[::-1], 1)
    assert reader.count("missed", "device") == 3


def test_an_entry_waits_for_no_copy_of_a_later_step(new_engine: Any, order: late.LateOrder) -> None:
    engine = new_engine()
    handoff = "ab" * 16
    request = engine.add(prompt(LENGTH + 5, 1), 1, save(handoff))
    engine.until(request.is_finished)
    order.complete()
    later = engine.add(prompt(LENGTH, 2), 1)
    engine.until(lambda: bool(order.events))
    engine.until(lambda: engine.count("saved") == 4)
    assert order.events
    order.complete()
    engine.until(later.is_finished)


def test_a_forward_pass_that_raised_saves_nothing_and_holds_nothing(
    new_engine: Any, order: late.LateOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    end = engine.workers[0].wait_for_save

    def end_of_a_failed_pass() -> None:
        # As V1's model runner: in a `finally`.
        with contextlib.suppress(ZeroDivisionError):
            try:
                _ = 1 // 0
            finally:
                end()

    monkeypatch.setattr(engine.workers[0], "wait_for_save", end_of_a_failed_pass)
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    engine.until(engine.is_at_rest)
    assert (order.events, engine.count("saved")) == ([], 0)


def test_a_forward_pass_that_vllm_does_not_end_holds_nothing(
    new_engine: Any, order: late.LateOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    monkeypatch.setattr(engine.workers[0], "wait_for_save", lambda: None)
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    engine.until(engine.is_at_rest)


def test_a_device_that_fails_saves_nothing_and_its_blocks_are_free(new_engine: Any, order: late.LateOrder) -> None:
    engine = new_engine()
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    order.complete("the device has failed")
    engine.saved()
    engine.until(engine.is_at_rest)
    assert (engine.count("saved"), engine.count("skipped", "device")) == (0, 3)


def test_a_load_whose_device_fails_ends_and_its_prompt_is_computed(new_engine: Any, order: late.LateOrder) -> None:
    engine, reader = new_engine(), new_engine()
    assert engine.answer(prompt(LENGTH, 1), 1) == answered(prompt(LENGTH, 1), 1)
    order.complete()
    engine.saved()
    request = reader.add(prompt(LENGTH, 1), 3)
    reader.until(lambda: bool(order.events))
    order.complete("the device has failed")
    reader.until(request.is_finished)
    assert reader.answers[request.request_id] == answered(prompt(LENGTH, 1))
    assert (reader.count("loaded"), reader.count("missed", "device")) == (0, 3)
