"""`on_load_failure: fail`: a request whose KV does not come is failed, its client is told, and the engine goes on.

The instance that is called prefill is set so, and decodes here; the one that is called decode prefills.
"""

import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import (
    CHAT,
    COMPLETIONS,
    Servers,
    chat,
    completion,
    consume,
    new_handoff,
    post,
    produce,
    prompt,
)
from tests.e2e.faulty_connector import SPOILT

BLOCK = 32
NUM_TOKENS = 5 * BLOCK - 10
# vLLM's error for every request that fails within the engine.
ERROR = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
LONG_TEXT = "What becomes of a block whose bytes are not those that were announced? " * 3


@pytest.fixture
def strict(servers: Servers) -> Iterator[Servers]:
    """The servers; after the test the strict one still answers requests, also those of handoffs, and holds no block."""
    yield servers
    body = completion(prompt(NUM_TOKENS, seed=130))
    text, handoff = servers.answer(through(servers), COMPLETIONS, body)
    assert text == servers.expected(COMPLETIONS, body)
    assert result_of(servers, handoff)["result"] in ("full", "local")
    servers.come_to_rest()


def through(servers: Servers) -> str:
    return servers.through("sequential", is_reversed=True)


def result_of(servers: Servers, handoff: str) -> dict[str, Any]:
    """The handoff's result as the strict instance's control port tells it."""
    return servers.result(handoff, servers.prefill)


def assert_failed(servers: Servers, handoff: str, reason: str) -> None:
    result = result_of(servers, handoff)
    wanted = {"result": "failed", "computed_tokens": 0, "recomputed_tokens": 0}
    assert {name: result[name] for name in wanted} == wanted
    assert reason in result["reason"]


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]], str | None]:
    """Status, the objects of an answer (of a stream those of its events) and the handoff's id."""
    with post(url, path, body) as response:
        payload, handoff = response.read(), response.headers["x-kvpipe-handoff"]
    events = [line.removeprefix(b"data: ") for line in payload.splitlines() if line.startswith(b"data: {")]
    return response.status, [json.loads(event) for event in events or [payload]], handoff


def produced(servers: Servers, body: dict[str, Any]) -> str:
    """A handoff that the other instance has answered and holds."""
    handoff = new_handoff()
    with post(servers.decode.url, COMPLETIONS, body | produce(handoff)) as response:
        response.read()
        assert response.status == HTTPStatus.OK
    return handoff


@pytest.mark.smoke
def test_a_request_whose_block_is_corrupt_is_failed_and_the_result_says_why(strict: Servers, flip: Path) -> None:
    body = completion(prompt(NUM_TOKENS, seed=131))
    flip.write_text("source")
    handoff = produced(strict, body)
    assert not flip.exists()
    params = consume(handoff, str(strict.decode.control))
    assert ask(strict.prefill.url, COMPLETIONS, body | params)[:2] == (500, [{"error": ERROR}])
    assert_failed(strict, handoff, f"block {SPOILT} of region 0 differs from its checksum")
    result = result_of(strict, handoff)
    assert (result["blocks_missing"], result["blocks_retried"], result["checksums_differed"]) == (1, 1, 2)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_client_of_the_proxy_gets_the_same_error_and_the_handoffs_id(
    strict: Servers, flip: Path, kind: str
) -> None:
    path, body = COMPLETIONS, completion(prompt(NUM_TOKENS, seed=132))
    if kind == "chat":
        path, body = CHAT, chat(LONG_TEXT)
    flip.write_text("source")
    status, answer, handoff = ask(through(strict), path, body)
    assert not flip.exists()
    assert (status, answer) == (500, [{"error": ERROR}])
    assert_failed(strict, handoff, "differs from its checksum")


def test_a_stream_of_which_nothing_was_shown_becomes_the_error(strict: Servers, flip: Path) -> None:
    # Log probabilities only D can tell: nothing is shown early.
    body = completion(prompt(NUM_TOKENS, seed=133), stream=True, logprobs=1)
    flip.write_text("source")
    status, events, handoff = ask(through(strict), COMPLETIONS, body)
    assert not flip.exists()
    assert (status, events) == (500, [{"error": ERROR}])
    assert_failed(strict, handoff, "differs from its checksum")


def test_a_stream_whose_first_token_was_shown_is_gone_on_with(strict: Servers, flip: Path) -> None:
    body = completion(prompt(NUM_TOKENS, seed=134), stream=True)
    expected = strict.expected(COMPLETIONS, body)
    flip.write_text("source")
    text, handoff = strict.answer(through(strict), COMPLETIONS, body)
    assert not flip.exists()
    assert text == expected
    assert_failed(strict, handoff, "differs from its checksum")


def test_requests_whose_producer_died_after_its_answer_are_failed(strict: Servers) -> None:
    bodies = [
        completion(prompt(NUM_TOKENS, seed=135 + is_streamed), stream=is_streamed) for is_streamed in (False, True)
    ]
    handoffs = [produced(strict, body | {"stream": False}) for body in bodies]
    strict.kill(strict.decode)
    params = [consume(handoff, str(strict.decode.control)) for handoff in handoffs]
    answers = [ask(strict.prefill.url, COMPLETIONS, body | mine) for body, mine in zip(bodies, params, strict=True)]
    strict.restart(strict.decode)
    assert [answer[:2] for answer in answers] == [(500, [{"error": ERROR}]), (200, [{"error": ERROR}])]
    for handoff in handoffs:
        assert_failed(strict, handoff, "cannot reach")
