"""KV caches of other types and sizes than elsewhere: fp8, float16, more blocks on one side. Answers of one instance."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.client import COMPLETIONS, Servers, completion, prompt, until
from tests.e2e.groups import STORE_CHUNK, Groups
from tests.e2e.identity import ask
from tests.e2e.test_store import chunks, is_right, stored

BLOCK = 32
LENGTHS = [5, 2 * BLOCK, 2 * BLOCK + 1, 300, 700]
# Forced, because a request that has to be of some length does not continue after P's token.
FORCED = {"min_tokens": 2}

# K and V of 4 heads of 32 in 4 layers.
TOKEN_VALUES = 4 * 4 * 2 * 32
# One instance takes the ids of all its blocks in turn: after a few prompts the other one has none of these ids.
MANY, FEW = 200, 40
needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM computes fp8 KV on CPUs with AVX-512 only"
)
# What differs from float32 on both sides, and the bytes of a value.
ALIKE = [
    pytest.param(("--kv-cache-dtype fp8_e4m3 | --kv-cache-dtype fp8", 1), id="fp8", marks=needs_avx512),
    pytest.param(("--kv-cache-dtype fp8_e5m2", 1), id="fp8_e5m2", marks=needs_avx512),
    pytest.param(("--dtype float16", 2), id="float16"),
    pytest.param(
        (f"--max-model-len 1024 --num-gpu-blocks-override {MANY} | --num-gpu-blocks-override {FEW}", 4),
        id="unequal numbers of blocks",
    ),
]


@pytest.fixture(scope="module", params=ALIKE)
def alike(request: pytest.FixtureRequest, groups: Groups) -> tuple[Servers, int]:
    """Instances whose KV is of one type, and the bytes of a value."""
    more, itemsize = request.param
    return groups.show(f"roomy {more}"), itemsize


def body(length: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    return completion(prompt(length, seed=seed), max_tokens=24, ignore_eos=True, return_token_ids=True, **more)


def said(servers: Servers, url: str, wanted: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """The token ids of an answer through P and D, and the result of its handoff."""
    answer, handoff = ask(url, COMPLETIONS, wanted)
    return answer["choices"][0]["token_ids"], servers.result(handoff)


def expected(servers: Servers, wanted: dict[str, Any]) -> list[int]:
    return ask(servers.undivided.url, COMPLETIONS, wanted)[0]["choices"][0]["token_ids"]


def others(
    servers: Servers, token_bytes: int, *, is_reversed: bool, block: int = BLOCK
) -> list[tuple[int, dict[str, Any]]]:
    """Prompts whose answers through P and D are not those of one instance; all are handed over whole."""
    url = servers.through("just-in-time", is_reversed=is_reversed)
    found_others = []
    for length in LENGTHS:
        for seed, more in enumerate(({}, FORCED), start=2 * is_reversed):
            wanted = body(length, seed, **more)
            found, result = said(servers, url, wanted)
            assert (result["result"], result["first_token"], result["local_tokens"]) == ("full", "exact", 0)
            assert result["bytes"] == -(-length // block) * block * token_bytes
            if found != expected(servers, wanted):
                found_others.append((length, more))
    return found_others


@pytest.mark.parametrize("is_reversed", [False, True], ids=["to decode", "to prefill"])
def test_answers_in_fp8_and_float16_and_between_unequal_numbers_of_blocks_are_those_of_one_instance(
    alike: tuple[Servers, int], *, is_reversed: bool
) -> None:
    servers, itemsize = alike
    assert not others(servers, TOKEN_VALUES * itemsize, is_reversed=is_reversed)


def test_a_wrong_block_changes_the_answer(alike: tuple[Servers, int], flip: Path) -> None:
    servers, _ = alike
    wanted = body(3 * BLOCK + 10, seed=20)
    flip.touch()
    found, result = said(servers, servers.url, wanted)
    assert (result["result"], result["checksums_differed"]) == ("full", 0)
    assert found != expected(servers, wanted)


@needs_avx512
def test_kv_of_another_dtype_is_refused_by_name_and_decode_computes(groups: Groups) -> None:
    servers = groups.show("roomy --kv-cache-dtype fp8 | --kv-cache-dtype auto")
    wanted = body(100)
    found, result = said(servers, servers.url, wanted)
    assert (result["result"], result["computed_tokens"], result["bytes"]) == ("missing", 100, 0)
    assert 'kv cache dtype is "float32" here and "fp8_e4m3" there' in result["reason"]
    assert found == expected(servers, wanted)


@needs_avx512
def test_fp8_kv_that_prefill_has_stored_is_loaded_by_decode(groups: Groups, folder: Path) -> None:
    servers = groups.show("store --kv-cache-dtype fp8")
    wanted = completion(prompt(5 * STORE_CHUNK, seed=500))
    stored(servers.prefill, folder, wanted)
    assert is_right(servers, servers.decode, wanted)
    until(lambda: chunks(servers.decode, "loaded") == 5)
