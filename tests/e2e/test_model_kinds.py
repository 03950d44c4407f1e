"""Models whose layers keep different KV: windows, experts, latent attention, recurrent states. Answers of one instance.

Prompts are several windows long, end at and beside the ends of blocks, and take several steps of P.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import COMPLETIONS, Servers, completion, consume, new_handoff, post, produce, prompt
from tests.e2e.groups import Groups
from tests.e2e.identity import ask
from tests.e2e.model_kinds import BLOCK, WINDOW

# vLLM makes the attention blocks of Qwen3-Next as large as a state.
LARGE_BLOCK = 544
PLAIN_LENGTHS = [5, BLOCK, *(num * BLOCK + more for num in (2, 3, 8) for more in (-1, 0, 1)), 300, 700]
HYBRID_LENGTHS = [5, 100, *(num * LARGE_BLOCK + more for num in (1, 2) for more in (-1, 0, 1)), 700]
# Kind of model with more arguments, groups of its cache, lengths of prompts, and whether requests can continue.
KINDS = [
    pytest.param(("gemma3", 2, PLAIN_LENGTHS, True), id="sliding and full"),
    pytest.param(("gpt-oss", 2, PLAIN_LENGTHS, False), id="sliding and full, experts"),
    pytest.param(("deepseek-v2", 1, PLAIN_LENGTHS, True), id="latent attention"),
    pytest.param(("mamba2", 1, PLAIN_LENGTHS, True), id="state"),
    pytest.param(("qwen3-next", 2, HYBRID_LENGTHS, True), id="state and full, states at the ends of blocks"),
    pytest.param(("qwen3-next --no-enable-prefix-caching", 2, HYBRID_LENGTHS, True), id="state and full"),
]
HAS_STATE = ("mamba2", "qwen3-next")
# Forced, because a request that has to be of some length does not continue after P's token.
FORCED = {"min_tokens": 2}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, groups: Groups) -> tuple[Servers, str, int, list[int], bool]:
    """The servers of a kind of model, and what is known of it."""
    name, num_groups, lengths, continues = request.param
    return groups.show(name), name, num_groups, lengths, continues


def body(length: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    return completion(prompt(length, seed=seed), max_tokens=24, ignore_eos=True, return_token_ids=True, **more)


def said(servers: Servers, wanted: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """The token ids of an answer through P and D, and the result of its handoff."""
    answer, handoff = ask(servers.url, COMPLETIONS, wanted)
    return answer["choices"][0]["token_ids"], servers.result(handoff)


def expected(servers: Servers, wanted: dict[str, Any]) -> list[int]:
    return ask(servers.undivided.url, COMPLETIONS, wanted)[0]["choices"][0]["token_ids"]


def test_every_answer_is_that_of_one_instance(kind: tuple[Servers, str, int, list[int], bool]) -> None:
    servers, _, _, lengths, continues = kind
    others = []
    for length in lengths:
        for seed, more in enumerate(({}, FORCED)):
            wanted = body(length, seed, **more)
            found, result = said(servers, wanted)
            assert (result["result"], result["first_token"], result["local_tokens"]) == ("full", "exact", 0)
            assert result["computed_tokens"] == (0 if continues and not more else 1)
            if found != expected(servers, wanted):
                others.append((length, more))
    assert not others


def test_answers_of_requests_that_run_together_are_handed_over_whole(
    kind: tuple[Servers, str, int, list[int], bool],
) -> None:
    servers, _, _, lengths, _ = kind
    wanted = [body(length, seed) for seed in (10, 11, 12) for length in lengths]
    with ThreadPoolExecutor(12) as pool:
        results = [result for _, result in pool.map(lambda each: said(servers, each), wanted)]
    assert Counter((result["result"], result["first_token"]) for result in results) == {("full", "exact"): len(wanted)}
    servers.come_to_rest()


def test_a_wrong_block_of_any_group_changes_the_answer(
    kind: tuple[Servers, str, int, list[int], bool], flip: Path
) -> None:
    """Of a window it is the oldest block that is needed: the one that vLLM frees next."""
    servers, _, num_groups, _, _ = kind
    for group in range(num_groups):
        wanted = body(WINDOW * 3 + 10, seed=20 + group)
        flip.write_text(str(group))
        found, result = said(servers, wanted)
        flip.unlink()
        assert (result["result"], result["checksums_differed"]) == ("full", 0)
        assert found != expected(servers, wanted), f"a wrong block of group {group} is not seen"


def test_a_prompt_whose_last_token_counts_twice_changes_the_answer(
    kind: tuple[Servers, str, int, list[int], bool], flip: Path
) -> None:
    servers, name, _, _, _ = kind
    if not name.startswith(HAS_STATE):
        pytest.skip("attention does not count tokens twice")
    wanted = body(100, seed=30, **FORCED)
    flip.write_text("recomputed")
    found, result = said(servers, wanted)
    flip.unlink()
    assert result["result"] == "full"
    assert found != expected(servers, wanted)


def test_a_block_that_is_lost_has_the_whole_prompt_computed(
    kind: tuple[Servers, str, int, list[int], bool], flip: Path
) -> None:
    servers, _, num_groups, _, _ = kind
    if num_groups == 1:
        pytest.skip("the blocks before it are kept, or there is one only")
    wanted = body(WINDOW * 3 + 10, seed=40)
    handoff = new_handoff()
    flip.write_text("source")
    with post(servers.prefill.url, COMPLETIONS, wanted | produce(handoff)) as response:
        response.read()
    assert not flip.exists()
    answer, _ = ask(servers.decode.url, COMPLETIONS, wanted | consume(handoff, str(servers.prefill.control)))
    result = servers.result(handoff)
    assert (result["result"], result["computed_tokens"]) == ("missing", len(wanted["prompt"]))
    assert (result["checksums_differed"], result["first_token"]) == (2, "exact")
    assert "differs from its checksum" in result["reason"]
    assert answer["choices"][0]["token_ids"] == expected(servers, wanted)
    servers.come_to_rest()


def test_log_probabilities_are_those_of_one_instance(kind: tuple[Servers, str, int, list[int], bool]) -> None:
    """Where D cannot compute the last prompt token again, it computes all of them."""
    servers, name, _, _, _ = kind
    wanted = body(100, seed=50, logprobs=1)
    answer, handoff = ask(servers.url, COMPLETIONS, wanted)
    theirs, _ = ask(servers.undivided.url, COMPLETIONS, wanted)
    result = servers.result(handoff)
    found, logprobs = answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]["token_logprobs"]
    assert found == theirs["choices"][0]["token_ids"]
    assert logprobs == pytest.approx(theirs["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3)
    assert result["result"] == ("missing" if name.startswith(HAS_STATE) else "full")


def test_vllm_keeps_its_hybrid_kv_cache_manager(kind: tuple[Servers, str, int, list[int], bool]) -> None:
    servers, _, _, _, _ = kind
    logs = [instance.child.log_path.read_text() for instance in (servers.prefill, servers.decode)]
    assert not any("Turning off hybrid kv cache manager" in log for log in logs)
