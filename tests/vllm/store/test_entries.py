"""Handoffs through the store: a consumer that finds everything goes on from the producer's first token."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from kvpipe.transfer_params import load, resume, save
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from kvpipe.vllm.store.chunk import HEADER_BYTES
from kvpipe.vllm.store.circuit_breaker import FIRST_OPEN_S, NUM_FAILURES
from kvpipe.vllm.store.entries import TokenReason
from kvpipe.vllm.store.saving import ENTRY_TTL_S
from tests.vllm.handoff.engine import BLOCK
from tests.vllm.store.engine import CHUNK, DEADLINE_S, Engine, answered
from tests.vllm.store.test_engine import adapter, prompt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("processor")]

LENGTHS = (1, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + BLOCK + 5)
# Offset of the tokens that the producer samples, so that they differ from the consumer's own.
OFFSET = 985


def entry_keys(engine: Engine, handoff: str) -> list[bytes]:
    return engine.role._names.entry_keys(bytes.fromhex(handoff))


def reported(engine: Engine) -> None:
    """Steps an engine until its workers have reported that they can force first tokens."""
    engine.until(engine.role._entries.support.is_supported)


def produced(engine: Engine, tokens: list[int], **more: Any) -> str:
    """Has an engine compute a prompt for another one, and returns the handoff once it is in the store."""
    handoff = secrets.token_hex(16)
    engine.sampled_offset = OFFSET
    request = engine.add(tokens, 1, save(handoff), **more)
    engine.until(request.is_finished)
    engine.step()  # the worker receives the end with the next step, as in vLLM
    engine.saved()
    return handoff


def consumed(
    engine: Engine, tokens: list[int], handoff: str, given: int | None = None, **more: Any
) -> tuple[list[int], int]:
    """Answer of a consumer, and the number of tokens that it has computed."""
    request = engine.add(tokens, 3, load(handoff, given), **more)
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
    tokens, consumer = prompt(CHUNK + 3), new_engine(lookup_timeout_s=4)
    handoff = produced(new_engine(), tokens)
    assert consumed(consumer, tokens, handoff)[0] == forced(tokens)
    assert consumed(consumer, tokens, handoff)[0] == answered(tokens)
    assert consumer.count("first_tokens", "missing") == 1


def test_an_entry_that_never_comes_is_not_waited_for(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine(lookup_timeout_s=4)
    assert consumed(consumer, tokens, secrets.token_hex(16)) == (answered(tokens), len(tokens) + 2)
    assert consumer.count("first_tokens", "missing") == 1


def test_a_token_that_the_request_brings_is_forced_where_the_entry_never_comes(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine(lookup_timeout_s=4)
    [given, *_] = answer = forced(tokens)
    request = consumer.add(tokens, 3, load(secrets.token_hex(16), given))
    consumer.until(request.is_finished)
    assert consumer.answers[request.request_id] == answer
    assert consumer.num_computed[request.request_id] == len(tokens) + 2
    assert consumer.count("first_tokens") == 1


def test_a_request_that_another_engine_has_begun_goes_on_from_its_token_and_waits_for_no_entry(
    new_engine: Any, store: Any
) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    [given, *_] = answer = forced(tokens)
    request = consumer.add(tokens, 3, resume(secrets.token_hex(16), [given]))
    consumer.until(request.is_finished)
    assert consumer.answers[request.request_id] == answer
    assert store.num_selects == 0
    assert "first_tokens" not in consumer.stats, "it is no handoff through the store"


GIVEN = [321, 654]


def resumed(tokens: list[int], given: list[int], num_tokens: int = 4) -> list[int]:
    """The answer that begins with the tokens that a request brings."""
    return [*given, *answered([*tokens, *given], num_tokens - len(given))]


@pytest.mark.parametrize("length", [1, CHUNK - 1, 3 * CHUNK + 5, 10 * CHUNK])  # the last one in three chunks of vLLM's
def test_a_request_that_another_engine_has_begun_goes_on_after_all_tokens_that_it_brings(
    new_engine: Any, length: int
) -> None:
    tokens, consumer = prompt(length), new_engine()
    assert consumer.answer(tokens, 4, params=resume(secrets.token_hex(16), GIVEN)) == resumed(tokens, GIVEN)


def test_a_resumed_request_loads_what_the_store_has_of_its_prompt(new_engine: Any) -> None:
    tokens, consumer = prompt(3 * CHUNK + 5), new_engine()
    produced(new_engine(), tokens)
    request = consumer.add(tokens, 4, resume(secrets.token_hex(16), GIVEN))
    consumer.until(request.is_finished)
    assert consumer.answers[request.request_id] == resumed(tokens, GIVEN)
    assert consumer.num_computed[request.request_id] == 5 + 3


def test_a_resumed_request_that_is_preempted_goes_on_where_it_was(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    request = consumer.add(tokens, 5, resume(secrets.token_hex(16), given := [*GIVEN, 987]))
    consumer.until(lambda: request.num_output_tokens == 2)
    consumer.scheduler._preempt_request(request, 0.0)
    consumer.scheduler.running.remove(request)
    consumer.until(request.is_finished)
    assert consumer.answers[request.request_id] == resumed(tokens, given, 5)


@pytest.mark.parametrize("given", [[*GIVEN, 1 << 40], [-1, *GIVEN]])
def test_none_of_a_requests_tokens_is_forced_where_one_is_outside_the_vocabulary(
    new_engine: Any, given: list[int]
) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    assert consumer.answer(tokens, 4, params=resume(secrets.token_hex(16), given)) == answered(tokens, 4)


def test_further_tokens_are_not_forced_after_a_first_one_that_was_not(new_engine: Any) -> None:
    """A request whose KV is neither loaded nor saved does not wait until the workers have reported."""
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    lost = LoRARequest("style", 1, "/no/such/adapter")
    params = resume(secrets.token_hex(16), GIVEN)
    assert consumer.answer(tokens, 4, params=params, lora_request=lost) == answered(tokens, 4)
    assert consumer.role._entries.support.is_supported()


def test_a_request_that_brings_more_tokens_than_the_engine_can_hold_is_an_ordinary_one(
    new_engine: Any, log: pytest.LogCaptureFixture
) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    assert consumer.answer(tokens, 4, params=resume(secrets.token_hex(16), GIVEN * 1025)) == answered(tokens, 4)
    assert "tokens of length 2050: expected 2048 at most" in log.text


def test_a_resumed_request_without_a_full_chunk_asks_nothing(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK - 1), new_engine()
    reported(consumer)
    now_s = time.monotonic()
    for _ in range(NUM_FAILURES):
        consumer.role._breaker.failed(now_s - FIRST_OPEN_S)
    answer = consumer.answer(tokens, params=resume(secrets.token_hex(16), forced(tokens)[:1]))
    assert answer == forced(tokens)
    assert not {"operations", "decisions"} & set(consumer.stats)
    assert consumer.role._breaker.state == "open", "the probe is left for a question"


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK + 3])
@pytest.mark.parametrize("params", [load, lambda handoff, token: resume(handoff, [token])], ids=["load", "resume"])
def test_a_token_that_the_request_brings_is_forced_with_an_adapter_that_cannot_be_compared(
    new_engine: Any, store: Any, params: Any, length: int
) -> None:
    tokens, consumer = prompt(length), new_engine()
    reported(consumer)
    [given, *_] = answer = forced(tokens)
    lost = LoRARequest("style", 1, "/no/such/adapter")
    assert consumer.answer(tokens, params=params(secrets.token_hex(16), given), lora_request=lost) == answer
    consumer.saved()
    assert (store.keys, store.num_selects) == ([], 0)


def test_a_token_that_the_request_brings_is_forced_where_nothing_may_be_loaded_or_saved(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine(role="kv_consumer")
    reported(consumer)
    [given, *_] = answer = forced(tokens)
    extra = {"kv_transfer_params": resume(secrets.token_hex(16), [given])}
    params = SamplingParams(max_tokens=3, extra_args=extra, ignore_eos=True, skip_reading_prefix_cache=True)
    assert consumer.answer(tokens, sampling_params=params) == answer


def test_a_token_that_the_request_brings_is_forced_after_a_reset_too(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    consumer.scheduler.connector.reset_cache()
    [given, *_] = answer = forced(tokens)
    request = consumer.add(tokens, 3, load(secrets.token_hex(16), given))
    consumer.until(request.is_finished)
    assert consumer.answers[request.request_id] == answer


def test_an_entry_with_another_token_than_the_request_brings_is_not_used(new_engine: Any, store: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    given = forced(tokens)[0] + 1
    request = consumer.add(tokens, 3, load(handoff, given))
    consumer.until(request.is_finished)
    assert consumer.answers[request.request_id] == [given, *answered([*tokens, given], 2)]
    assert consumer.num_computed[request.request_id] == 3 + 2
    consumer.until(lambda: len(store.keys) == 1)


def test_a_token_outside_the_vocabulary_is_not_forced(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine(lookup_timeout_s=4)
    request = consumer.add(tokens, 3, load(secrets.token_hex(16), 1 << 40))
    consumer.until(request.is_finished)
    assert consumer.answers[request.request_id] == answered(tokens)
    assert consumer.count("first_tokens", "unsupported") == 1


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


@pytest.mark.parametrize("is_given", [False, True])
def test_the_entry_of_another_prompt_is_not_used(new_engine: Any, *, is_given: bool) -> None:
    producer, consumer = new_engine(), new_engine()
    handoff = produced(producer, others := prompt(CHUNK + 3, seed=1))
    tokens = prompt(CHUNK + 3, seed=2)
    given = forced(others)[0] if is_given else None
    assert consumed(consumer, tokens, handoff, given) == (answered(tokens), len(tokens) + 2)
    assert consumer.count("first_tokens", "other_prompt") == 1


def test_the_token_of_another_prompt_is_not_forced_after_a_reset(new_engine: Any) -> None:
    producer, consumer = new_engine(), new_engine()
    handoff = produced(producer, others := prompt(CHUNK + 3, seed=1))
    reported(consumer)
    tokens = prompt(CHUNK + 3, seed=2)
    request = consumer.add(tokens, 3, load(handoff, forced(others)[0]))
    entry = consumer.role._prompts[request.request_id].entry
    deadline_s = time.monotonic() + DEADLINE_S
    while entry.reason != TokenReason.OTHER_PROMPT:  # without a step, which would compute the prompt
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
        consumer.role._receive(time.monotonic())
    consumer.scheduler.connector.reset_cache()
    consumer.until(request.is_finished)
    assert consumer.answers[request.request_id] == answered(tokens)


@pytest.mark.parametrize("is_given", [False, True])
def test_the_entry_of_another_adapter_is_not_used(new_engine: Any, tmp_path: Path, *, is_given: bool) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    given = forced(tokens)[0] if is_given else None
    used = adapter(tmp_path / "style", "{}")
    assert consumed(consumer, tokens, handoff, given, lora_request=used) == (answered(tokens), len(tokens) + 2)
    assert consumer.count("first_tokens", "other_adapter") == 1


def sampled_otherwise(handoff: str, given: int | None = None) -> SamplingParams:
    """Parameters of a consumer whose producer has sampled with others."""
    extra = {"kv_transfer_params": load(handoff, given)}
    return SamplingParams(max_tokens=3, temperature=0.5, extra_args=extra, ignore_eos=True)


def test_a_token_that_was_sampled_otherwise_is_not_forced_and_the_kv_is_used(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    params = sampled_otherwise(handoff)
    assert consumed(consumer, tokens, handoff, sampling_params=params) == (answered(tokens), 1 + 2)
    assert consumer.count("first_tokens", "other_sampling") == 1


def test_a_token_that_was_sampled_otherwise_is_forced_if_the_request_brings_it(new_engine: Any) -> None:
    tokens, consumer = prompt(CHUNK + 3), new_engine()
    handoff = produced(new_engine(), tokens)
    params = sampled_otherwise(handoff, forced(tokens)[0])
    assert consumed(consumer, tokens, handoff, sampling_params=params) == (forced(tokens), 1 + 2)
    assert consumer.count("first_tokens") == 1


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
