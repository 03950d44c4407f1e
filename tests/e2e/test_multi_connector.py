"""kvpipe beside another connector under vLLM's MultiConnector, with both failure policies.

The instance that is called decode recomputes what is missing; the one that is called prefill fails such requests, and
decodes where the two change places.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import COMPLETIONS, Servers, completion, consume, new_handoff, prompt
from tests.e2e.test_load_failures import BLOCK, ERROR, ask, assert_failed, produced, result_of, through

NUM_TOKENS = 5 * BLOCK - 10


@pytest.fixture
def servers(multi: Servers) -> Iterator[Servers]:
    """The servers; after the test they hold no block."""
    yield multi
    multi.come_to_rest()


@pytest.mark.parametrize("is_reversed", [False, True], ids=["recompute", "fail"])
def test_all_kv_comes_from_prefill_beside_another_connector(servers: Servers, *, is_reversed: bool) -> None:
    body = completion(prompt(NUM_TOKENS, seed=151 + is_reversed))
    text, handoff = servers.answer(servers.through("sequential", is_reversed=is_reversed), COMPLETIONS, body)
    assert text == servers.expected(COMPLETIONS, body)
    result = servers.result(handoff) if not is_reversed else result_of(servers, handoff)
    assert (result["result"], result["computed_tokens"], result["first_token"]) == ("full", is_reversed, "exact")


def test_with_recompute_a_corrupt_block_is_computed_and_the_answer_is_right(servers: Servers, flip: Path) -> None:
    body = completion(prompt(NUM_TOKENS, seed=153))
    flip.write_text("source")
    text, handoff = servers.answer(servers.through("sequential"), COMPLETIONS, body)
    assert not flip.exists()
    assert text == servers.expected(COMPLETIONS, body)
    result = servers.result(handoff)
    assert (result["result"], result["blocks_missing"]) == ("partial", 1)
    assert "differs from its checksum" in result["reason"]


def test_with_fail_a_corrupt_block_fails_its_request_and_no_other(servers: Servers, flip: Path) -> None:
    body = completion(prompt(NUM_TOKENS, seed=154))
    flip.write_text("source")
    handoff = produced(servers, body)
    assert not flip.exists()
    asked = ask(servers.prefill.url, COMPLETIONS, body | consume(handoff, str(servers.decode.control)))
    assert asked[:2] == (500, [{"error": ERROR}])
    assert_failed(servers, handoff, "differs from its checksum")
    again = completion(prompt(NUM_TOKENS, seed=155))
    assert servers.answer(through(servers), COMPLETIONS, again)[0] == servers.expected(COMPLETIONS, again)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_kv_that_cannot_come_is_computed_or_fails_its_request(servers: Servers, policy: str) -> None:
    body = completion(prompt(NUM_TOKENS, seed=156))
    handoff = new_handoff()
    unreachable = body | consume(handoff, "127.0.0.1:1")
    if policy == "recompute":
        assert servers.answer(servers.decode.url, COMPLETIONS, unreachable)[0] == servers.expected(COMPLETIONS, body)
        assert servers.result(handoff)["result"] == "missing"
    else:
        assert ask(servers.prefill.url, COMPLETIONS, unreachable)[:2] == (500, [{"error": ERROR}])
        assert_failed(servers, handoff, "cannot reach")
