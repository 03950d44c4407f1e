"""Handoffs through the store: a consumer that finds everything goes on from the producer's first token."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from kvpipe.connector.first_token import PENDING_FIRST_TOKENS
from kvpipe.store_connector.chunk import HEADER_BYTES
from kvpipe.store_connector.saving import ENTRY_TTL_S
from kvpipe.transfer_params import load, save
from tests.connector.engine import BLOCK
from tests.store_connector.engine import CHUNK, Engine, answered
from tests.store_connector.test_engine import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("processor")]

LENGTHS = (1, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + BLOCK + 5)
# What the producer adds to the tokens that it samples, so that they are told from the consumer's own.
OFFSET = 985


def entry_keys(engine: Engine, handoff: str) -> list[bytes]:
    return engine.role._names.entry_keys(bytes.fromhex(handoff))


def produced(engine: Engine, tokens: list[int], **more: Any) -> str:
    """Has an engine compute a prompt for another one, and returns the handoff once it is in the store."""
    handoff = secrets.token_hex(16)
    engine.sampled_offset = OFFSET
    request = engine.add(tokens, 1, save(handoff), **more)
    engine.until(request.is_finished)
    engine.step()  # the worker hears of the end with the next step, as in vLLM
    engine.saved()
    return handoff


def consumed(engine: Engine, tokens: list[int], handoff: str, **more: Any) -> tuple[list[int], int]:
    """What a consumer answers, and how many tokens it has computed."""
    request = engine.add(tokens, 3, load(handoff), **more)
    engine.until(request.is_finished)
    return engine.answers[request.request_id], engine.num_computed[request.request_id]


def forced(tokens: list[int], num_ranks: int = 1) -> list[int]:
    """The answer that begins with the producer's token."""
    first = answered(tokens, 1, num_ranks)[0] + OFFSET
    return [first, *answered([*tokens, first], 2, num_ranks)]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_consumer_that_finds_all_computes_one_token_and_goes_on_from_the_producers(
    new_engine: Any, store: Any, length: int
) -> None:
    tokens, consumer = prompt(length), new_engine()
    handoff = produced(new_engine(), tokens)
    assert len(store.keys) == length // CHUNK + 1
    assert consumed(consumer, tokens, handoff) == (forced(tokens), 1 + 2)
    assert consumer.count("first_tokens") == 1
    consumer.until(lambda: consumer.is_at_rest() and len(store.keys) == length // CHUNK)


def test_each_rank_takes_its_own_entry(new_engine: Any, store: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine(num_ranks=2)
    handoff = produced(new_engine(num_ranks=2), tokens)
    assert len(store.keys) == 4
    assert consumed(consumer, tokens, handoff) == (forced(tokens, 2), 1 + 2)
    assert len(store.keys) == 2


def test_an_entry_is_of_one_request(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine(lookup_timeout_s=0.2)
    handoff = produced(new_engine(), tokens)
    assert consumed(consumer, tokens, handoff)[0] == forced(tokens)
    assert consumed(consumer, tokens, handoff)[0] == answered(tokens)
    assert consumer.count("first_tokens", "missing") == 1


def test_an_entry_that_never_comes_is_not_waited_for(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine(lookup_timeout_s=0.2)
    assert consumed(consumer, tokens, secrets.token_hex(16)) == (answered(tokens), len(tokens) + 2)
    assert consumer.count("first_tokens", "missing") == 1


@pytest.mark.parametrize("at", [8, HEADER_BYTES + 3])
def test_an_entry_whose_kv_was_changed_is_a_miss_and_its_token_is_the_producers(
    new_engine: Any, store: Any, at: int
) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    consumer.step()  # it knows the names of its entries once its workers have reported
    [key] = entry_keys(consumer, handoff)
    with store.select(key) as value:
        data, record = bytearray(value.read()), value.record
    data[at] ^= 1
    store.delete([key])
    assert store.put(key, data, record)
    answer, num_computed = consumed(consumer, tokens, handoff)
    assert answer == forced(tokens)
    assert num_computed == 3 + 2
    assert sum(consumer.count("missed", reason) for reason in ("corrupt", "foreign")) == 1
    assert key not in store.keys


def test_a_record_that_was_changed_is_not_used(new_engine: Any, store: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    consumer.step()
    [key] = entry_keys(consumer, handoff)
    with store.select(key) as value:
        data, record = value.read(), bytearray(value.record)
    record[30] ^= 1  # the first token
    store.delete([key])
    assert store.put(key, data, bytes(record))
    assert consumed(consumer, tokens, handoff) == (answered(tokens), 3 + 2)
    assert consumer.count("first_tokens", "corrupt") == 1


def test_the_entry_of_another_prompt_is_not_used(new_engine: Any) -> None:
    producer, consumer = new_engine(), new_engine()
    handoff = produced(producer, prompt(CHUNK + 3, seed=1))
    tokens = prompt(CHUNK + 3, seed=2)
    assert consumed(consumer, tokens, handoff) == (answered(tokens), len(tokens) + 2)
    assert consumer.count("first_tokens", "other_prompt") == 1


def test_a_token_that_was_sampled_otherwise_is_not_forced_and_the_kv_is_used(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    params = SamplingParams(
        max_tokens=3, temperature=0.5, extra_args={"kv_transfer_params": load(handoff)}, ignore_eos=True
    )
    assert consumed(consumer, tokens, handoff, sampling_params=params) == (answered(tokens), 1 + 2)
    assert consumer.count("first_tokens", "other_sampling") == 1


def test_without_the_logits_processor_the_consumer_samples_and_uses_the_kv(
    new_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PENDING_FIRST_TOKENS, "has_processor", False)
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    assert consumed(consumer, tokens, handoff) == (answered(tokens), 1 + 2)
    assert consumer.count("first_tokens", "unsupported") == 1


def test_a_producer_that_is_aborted_leaves_no_entry(new_engine: Any, store: Any) -> None:
    producer = new_engine()
    for length in (CHUNK + 3, 3 * CHUNK):
        request = producer.add(prompt(length), 1, save(secrets.token_hex(16)))
        producer.abort(request)
        producer.until(producer.is_at_rest)
        producer.step()
        producer.saved()
    assert store.keys == []
    assert producer.workers[0]._worker._saver._copies == {}


def test_a_producer_that_is_aborted_in_its_last_step_leaves_no_entry_and_no_staging_memory(
    new_engine: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = new_engine()
    request, compute = producer.add(prompt(CHUNK + 3), 1, save(secrets.token_hex(16))), producer._compute

    def leaves(output: Any) -> dict[str, list[int]]:
        sampled = compute(output)
        if request.request_id in output.num_scheduled_tokens:
            producer.abort(request)
        return sampled

    monkeypatch.setattr(producer, "_compute", leaves)
    producer.until(producer.is_at_rest)
    saver = producer.workers[0]._worker._saver
    assert list(saver._copies) == [request.request_id]
    producer.step()
    producer.saved()
    assert saver._copies == {}
    assert len(store.keys) == 1


def test_a_consumer_that_is_aborted_leaves_no_entry(new_engine: Any, store: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    consumer.step()
    [key] = entry_keys(consumer, handoff)
    request = consumer.add(tokens, 3, load(handoff))
    consumer.abort(request)
    consumer.until(lambda: consumer.is_at_rest() and key not in store.keys)


def test_an_entry_ends_by_itself(new_engine: Any, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {}
    put = store.put
    monkeypatch.setattr(
        store, "put", lambda key, *a, **more: times.update({key: more["ttl_s"]}) or put(key, *a, **more)
    )
    producer = new_engine()
    handoff = produced(producer, prompt(CHUNK + 3))
    [key] = entry_keys(producer, handoff)
    assert times.pop(key) == ENTRY_TTL_S
    assert list(times.values()) == [None]


def test_a_pure_consumer_saves_no_entry_and_a_producer_of_several_tokens_neither(new_engine: Any, store: Any) -> None:
    handoff = secrets.token_hex(16)
    new_engine(role="kv_consumer").answer(prompt(5), 1, params=save(handoff))
    new_engine().answer(prompt(5), 2, params=save(handoff))
    assert store.keys == []
