"""bfloat16, where a token that is computed alone rounds differently than within a prompt: the answers of one instance.

One request runs at a time. All instances compute with the same settings, and none has a prefix cache.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import COMPLETIONS, Servers, completion, prompt
from tests.e2e.identity import ask

BLOCK = 32
LENGTHS = [
    *(num * BLOCK + more for num in (1, 2, 3, 4, 8, 16) for more in (-1, 0, 1)),
    *(5 * BLOCK + 7, 20 * BLOCK + 20),
]
GREEDY = {"temperature": 0}
HOT = {"temperature": 1.2}
# On a CPU without bfloat16 instructions KV of a token that is computed alone differs in 1 of 30 prompts.
NUM_SHORT, NUM_DIFFERING = 150, 3
SHORT = HOT | {"logprobs": 1, "max_tokens": 4}


def said(url: str, length: int, more: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A choice of 48 tokens, or of as many as asked for."""
    plain = {"max_tokens": 48, "ignore_eos": True, "return_token_ids": True, "seed": length}
    answer, handoff = ask(url, COMPLETIONS, completion(prompt(length, seed=160), **plain | more))
    return answer["choices"][0], handoff


@cache
def expected(url: str, length: int, temperature: float) -> dict[str, Any]:
    """Answer of one instance, with log probabilities; asked once for each prompt."""
    return said(url, length, {"temperature": temperature, "logprobs": 1})[0]


def later_logprobs(choice: dict[str, Any]) -> list[float]:
    """Log probabilities of all tokens but the first one, whose row decode computes from its own last prompt token."""
    return choice["logprobs"]["token_logprobs"][1:]


@pytest.mark.parametrize(
    ("sampling", "more"),
    [(GREEDY, {}), (GREEDY, {"logprobs": 1}), (HOT, {"logprobs": 1})],
    ids=["greedy", "greedy, logprobs", "sampled, logprobs"],
)
def test_every_token_in_bfloat16_is_that_of_one_instance(
    bfloat16: Servers, sampling: dict[str, Any], more: dict[str, Any]
) -> None:
    others = []
    for length in LENGTHS:
        found, handoff = said(bfloat16.url, length, sampling | more)
        result = bfloat16.result(handoff)
        is_continued = sampling == GREEDY and not more
        assert (result["result"], result["first_token"]) == ("full", "exact")
        assert result["computed_tokens"] == (not is_continued)
        theirs = expected(bfloat16.undivided.url, length, sampling["temperature"])
        is_same = found["token_ids"] == theirs["token_ids"]
        if more:  # to the last bit
            is_same = is_same and later_logprobs(found) == later_logprobs(theirs)
        if not is_same:
            others.append(length)
    assert not others


def differing(servers: Servers, lengths: Iterable[int]) -> Iterator[int]:
    """Lengths of prompts whose log probabilities are not those of one instance."""
    for length in lengths:
        found, theirs = (said(url, length, SHORT)[0] for url in (servers.url, servers.undivided.url))
        if later_logprobs(found) != later_logprobs(theirs):
            yield length


def test_answers_differ_where_decode_keeps_its_own_kv_of_the_last_token(bfloat16: Servers, flip: Path) -> None:
    """In the tiny model that KV differs in few prompts; another bit of it shows in all tokens after it."""
    flip.write_text("recomputed")
    lengths = range(BLOCK + 1, BLOCK + 1 + NUM_SHORT)
    without = list(islice(differing(bfloat16, lengths), NUM_DIFFERING))
    flip.unlink()
    print(f"without restoring, the answers to prompts of {without} tokens differ")
    assert without
    assert not list(differing(bfloat16, without))
