"""Caches so small that requests are preempted, chunks on one side only, a prefix cache on one side only: same answers.

The instance that is called prefill has chunks of 512 tokens and a prefix cache, decode has neither; reversed, they
change places.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvpipe.launch.deployment import Instance
from kvpipe.transfer_params import resume
from tests.e2e.client import COMPLETIONS, Servers, completion, new_handoff, prompt, until
from tests.e2e.identity import BY_ID, Said, ask, differences
from tests.e2e.test_answers import BLOCK, REQUESTS

SHORT = {kind: (path, body) for kind, (path, body) in REQUESTS.items() if kind != "several steps"} | {
    "two steps": (COMPLETIONS, completion(prompt(900)))
}
HOT = {"temperature": 1.2, "top_p": 0.95, "max_tokens": 180}


def preemptions(servers: Servers, instance: Instance) -> float:
    return servers.metric(instance, "vllm:num_preemptions_total")


@pytest.mark.parametrize("is_reversed", [False, True], ids=["chunks at prefill", "chunks at decode"])
@pytest.mark.parametrize("kind", SHORT)
def test_chunks_and_a_prefix_cache_on_one_side_change_no_answer(
    tight: Servers, kind: str, *, is_reversed: bool
) -> None:
    path, body = SHORT[kind]
    for _ in range(2):  # the second time the prompt is in the prefix cache of the side that has one
        text, handoff = tight.answer(tight.through("just-in-time", is_reversed=is_reversed), path, body)
        assert text == tight.expected(path, body)
        result = tight.result(handoff)
        assert result["first_token"] == "exact"
        # Only the instance that is called decode has the scheduler by which requests continue.
        is_continued = not is_reversed and result["prompt_tokens"] > 1
        assert result["computed_tokens"] == (not is_continued)


def test_blocks_count_by_checksums_or_by_the_answer_of_prefill_as_it_was_set(
    tight: Servers, *, is_validated: bool
) -> None:
    body = completion(prompt(5 * BLOCK, seed=70))
    text, handoff = tight.answer(tight.url, COMPLETIONS, body)
    assert text == tight.expected(COMPLETIONS, body)
    result = tight.result(handoff)
    assert (result["result"], result["blocks_validated"] > 0) == ("full", is_validated)
    assert (result["checksums_compared"] > 0) is not is_validated


@pytest.mark.parametrize("is_reversed", [False, True], ids=["without chunks", "with chunks"])
def test_requests_that_decode_preempts_are_answered_as_by_one_instance(tight: Servers, *, is_reversed: bool) -> None:
    decode = tight.prefill if is_reversed else tight.decode
    before = preemptions(tight, decode)
    bodies = [
        completion(prompt(4 * BLOCK + seed, seed=80 + seed), **BY_ID | {"max_tokens": 120}, ignore_eos=True)
        for seed in range(7)
    ]
    url = tight.through("just-in-time", is_reversed=is_reversed)
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: ask(url, COMPLETIONS, body), bodies))
    assert preemptions(tight, decode) > before
    expected = [Said.of(ask(tight.undivided.url, COMPLETIONS, body)[0]) for body in bodies]
    assert not differences(expected, [Said.of(answer) for answer, _ in answers])
    assert {tight.result(handoff)["first_token"] for _, handoff in answers} == {"exact"}


def test_sampled_answers_that_decode_preempts_are_those_of_one_instance(tight: Servers) -> None:
    before = preemptions(tight, tight.decode)
    bodies = [
        completion(prompt(50 + seed, seed=90 + seed), **BY_ID | HOT | {"seed": seed}, ignore_eos=True)
        for seed in range(7)
    ]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: ask(tight.url, COMPLETIONS, body), bodies))
    assert preemptions(tight, tight.decode) > before
    for body, (found, _) in zip(bodies, answers, strict=True):
        assert Said.of(found).token_ids == Said.of(ask(tight.undivided.url, COMPLETIONS, body)[0]).token_ids


def test_resumed_requests_that_decode_preempts_go_on_where_they_were(tight: Servers) -> None:
    before = preemptions(tight, tight.decode)
    bodies = [
        completion(prompt(50 + seed, seed=130 + seed), **BY_ID | HOT | {"seed": seed}, ignore_eos=True)
        for seed in range(7)
    ]
    expected = [Said.of(ask(tight.undivided.url, COMPLETIONS, body)[0]).token_ids for body in bodies]
    resumed = [
        body | {"kv_transfer_params": resume(new_handoff(), tokens[:160])}
        for body, tokens in zip(bodies, expected, strict=True)
    ]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: ask(tight.decode.url, COMPLETIONS, body), resumed))
    assert preemptions(tight, tight.decode) > before
    assert [Said.of(found).token_ids for found, _ in answers] == expected


@contextmanager
def crowded(servers: Servers, instance: Instance) -> Iterator[None]:
    """Plain requests that fill the cache of an instance as they decode, so that later ones are preempted."""
    bodies: list[dict[str, Any]] = [
        completion(prompt(60, seed=100 + seed), max_tokens=150, ignore_eos=True) for seed in range(6)
    ]
    with ThreadPoolExecutor(len(bodies)) as threads:
        others = [threads.submit(ask, instance.url, COMPLETIONS, body) for body in bodies]
        until(lambda: servers.metric(instance, "vllm:num_requests_running") == len(bodies))
        yield
        for other in others:
            other.result()


def test_a_request_that_prefill_preempts_is_answered_as_by_one_instance(tight: Servers) -> None:
    for seed in range(110, 120):  # one that comes late, on a busy machine, waits until the others have ended
        before = preemptions(tight, tight.prefill)
        body = completion(prompt(900, seed=seed), **BY_ID)
        with crowded(tight, tight.prefill):
            found, handoff = ask(tight.url, COMPLETIONS, body)
        expected = Said.of(ask(tight.undivided.url, COMPLETIONS, body)[0])
        assert not differences([expected], [Said.of(found)])
        result = tight.result(handoff)
        if result["result"] != "full":
            break
    assert preemptions(tight, tight.prefill) > before
    assert (result["result"], result["computed_tokens"]) == ("missing", 900)
    assert "preempted" in result["reason"]


def test_every_block_is_free_again(tight: Servers) -> None:
    tight.come_to_rest()
