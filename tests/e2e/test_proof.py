"""A block that is not what the producer announced never leads to a token; what did arrive is kept."""

from pathlib import Path

import pytest

from tests.e2e.client import COMPLETIONS, Servers, completion, consume, new_handoff, post, produce, prompt
from tests.e2e.faulty_connector import SPOILT

BLOCK = 32


@pytest.mark.smoke
def test_a_flipped_block_is_detected_and_only_what_follows_it_is_recomputed(servers: Servers, flip: Path) -> None:
    body = completion(prompt(5 * BLOCK - 10, seed=41))
    expected = servers.expected(COMPLETIONS, body)
    handoff = new_handoff()
    flip.write_text("source")
    with post(servers.prefill.url, COMPLETIONS, body | produce(handoff)) as response:
        response.read()
    assert not flip.exists()
    params = consume(handoff, str(servers.prefill.control))
    text, _ = servers.answer(servers.decode.url, COMPLETIONS, body | params)
    assert text == expected
    result = servers.result(handoff)
    computed = len(body["prompt"]) - SPOILT * BLOCK
    wanted = {
        "result": "partial",
        "blocks_received": 4,
        "blocks_missing": 1,
        "blocks_retried": 1,
        "checksums_differed": 2,
        "computed_tokens": computed,
        "recomputed_tokens": computed - 1,
        "first_token": "exact",
    }
    assert {name: result[name] for name in wanted} == wanted
    assert "differs from its checksum" in result["reason"]


@pytest.mark.smoke
def test_the_same_flip_behind_the_checksum_changes_the_answer(servers: Servers, flip: Path) -> None:
    body = completion(prompt(150, seed=5))
    expected = servers.expected(COMPLETIONS, body)
    flip.touch()
    spoiled, handoff = servers.answer(servers.url, COMPLETIONS, body)
    result = servers.result(handoff)
    assert (result["result"], result["checksums_differed"]) == ("full", 0)
    assert result["checksums_compared"] > 0
    assert spoiled != expected
