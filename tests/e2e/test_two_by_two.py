"""`kvpipe up --prefill 2 --decode 2`: every pair is used, answers are those of one instance, deaths lose no request.

One command serves all tests. Those that kill an instance come last, and leave one of its role.
"""

import http.client
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from tests.e2e.client import CHAT, COMPLETIONS, chat, completion, get, post, prompt, streamed_text, text_of, until
from tests.e2e.groups import Groups
from tests.e2e.two_by_two import TwoByTwo, two_by_two

BLOCK = 32
PAIR = re.compile(r"request\.end handoff=(\w+) .* prefill=(\S+) decode=(\S+)")
COUNT = re.compile(r"^vllm:num_requests_(?:running|waiting){.*} (\S+)$", re.MULTILINE)
# At most half of them are in flight at one instance: fewer than the retries that the proxy has saved.
NUM_CLIENTS = 10
REQUESTS_EACH = 2


@pytest.fixture(scope="module")
def up(groups: Groups) -> Iterator[TwoByTwo]:
    """The command, healthy."""
    groups.end()
    with two_by_two() as up:
        yield up


@dataclass(frozen=True)
class Outcome:
    """A client's outcome: a whole answer, or a part of one and an error."""

    text: str
    is_whole: bool
    error: str
    has_begun: bool
    """True if the client had a part of the answer; a token that is a piece of a character has no text."""


def asked(url: str, path: str, body: dict[str, Any]) -> Outcome:
    """Sends a request, and reads as much of the answer as comes."""
    with post(url, path, body) as response:
        payload = response.read()
    if response.status != http.HTTPStatus.OK:
        return Outcome("", is_whole=False, error=payload.decode(), has_begun=False)
    if not body.get("stream"):
        return Outcome(text_of(json.loads(payload)), is_whole=True, error="", has_begun=True)
    lines = payload.splitlines(keepends=True)
    errors = [line.decode() for line in lines if line.startswith(b'data: {"error"')]
    answer = b"".join(line for line in lines if not line.startswith((b'data: {"error"', b"data: [DONE]")))
    is_whole = b"data: [DONE]\n" in lines and not errors
    text = streamed_text(answer + b"data: [DONE]\n")
    return Outcome(text, is_whole=is_whole, error="".join(errors), has_begun=bool(answer.strip()))


def at_once(url: str, requests: list[tuple[str, dict[str, Any]]]) -> list[Outcome]:
    """The outcomes of requests that are sent at the same time."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: asked(url, *request), requests))


def expected(up: TwoByTwo, requests: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Answers of the undivided instance."""
    outcomes = at_once(up["undivided-0"].url, requests)
    assert all(outcome.is_whole for outcome in outcomes)
    return [outcome.text for outcome in outcomes]


def is_busy(up: TwoByTwo, name: str) -> bool:
    """True if an instance has requests."""
    metrics = get(up[name].url, "/metrics").decode()
    return any(float(count) > 0 for count in COUNT.findall(metrics))


def under_load(up: TwoByTwo, victim: str, requests: list[tuple[str, dict[str, Any]]]) -> list[Outcome]:
    """Kills an instance while it has requests of clients that send one after the other."""
    results: list[Future[Outcome]] = []
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        results = [clients.submit(asked, up.url, *request) for request in requests]
        until(lambda: is_busy(up, victim))
        up.kill(victim)
        outcomes = [result.result() for result in results]
    assert had_requests(up, victim)
    return outcomes


def had_requests(up: TwoByTwo, victim: str) -> bool:
    """True if a killed instance had requests in flight: a connection of the proxy broke, or a stream that had begun.

    Of several failures the proxy logs the first one, which may be a refused connection.
    """
    role, url, control = victim.partition("-")[0], re.escape(up[victim].url), re.escape(str(up[victim].control))
    evidence = (
        rf"instance\.failed role={role} url={url} reason=.(?!cannot connect)",
        rf"instance\.failed role=control url={control} reason='subscribe: lost peer",
        rf'request\.end .*error="{role} instance {url}: failed in mid-stream',
    )
    return any(re.search(each, up.log) for each in evidence)


def load(seed: int, length: int, max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Different requests, every other one streamed."""
    return [
        (
            COMPLETIONS,
            completion(
                prompt(length + number, seed=seed + number),
                max_tokens=max_tokens,
                ignore_eos=True,
                stream=number % 2 == 1,
            ),
        )
        for number in range(NUM_CLIENTS * REQUESTS_EACH)
    ]


def test_every_pair_is_used_and_answers_are_those_of_one_instance(up: TwoByTwo) -> None:
    lengths = [1, 11, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 7, 1500]
    requests = [(COMPLETIONS, completion(prompt(length, seed=70), stream=length % 2 == 0)) for length in lengths]
    requests += [(CHAT, chat(f"What is a block table, {number}?", stream=number % 2 == 0)) for number in range(4)]
    texts, handoffs = [], []
    for path, body in requests:
        with post(up.url, path, body) as response:
            payload = response.read()
            handoffs.append(response.headers["x-kvpipe-handoff"])
        texts.append(streamed_text(payload) if body.get("stream") else text_of(json.loads(payload)))
    assert texts == expected(up, requests)

    lines = until(lambda: (found := dict(ended(up))).keys() >= set(handoffs) and found)
    pairs = Counter(lines[handoff] for handoff in handoffs)
    assert pairs == dict.fromkeys(product(("prefill-0", "prefill-1"), ("decode-0", "decode-1")), len(requests) // 4)
    for handoff, (_, body) in zip(handoffs, requests, strict=True):
        status = json.loads(until(lambda handoff=handoff: get(up.url, f"/status/{handoff}")))
        is_short = body.get("prompt") and len(body["prompt"]) == 1  # nothing to move
        assert (status["result"], status["computed_tokens"]) == (("missing", 1) if is_short else ("full", 0))


def ended(up: TwoByTwo) -> Iterator[tuple[str, tuple[str, str]]]:
    """The handoffs of requests that have ended, with the names of their instances."""
    names = {up[name].url: name for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")}
    for handoff, prefill, decode in PAIR.findall(up.log):
        yield handoff, (names[prefill], names[decode])


def test_a_killed_prefill_instance_loses_no_request(up: TwoByTwo) -> None:
    requests = load(seed=200, length=1400, max_tokens=24)
    texts = expected(up, requests)
    outcomes = under_load(up, "prefill-0", requests)
    assert [(outcome.text, outcome.error) for outcome in outcomes] == [(text, "") for text in texts]
    assert up.states("prefill-1") == up.states("decode-0") == ["starting", "healthy"]


def test_a_killed_decode_instance_loses_no_request_that_has_not_begun_to_answer(up: TwoByTwo) -> None:
    requests = load(seed=300, length=300, max_tokens=120)
    texts = expected(up, requests)
    outcomes = under_load(up, "decode-0", requests)
    for (_, body), text, outcome in zip(requests, texts, outcomes, strict=True):
        if outcome.is_whole:
            assert outcome.text == text
        else:
            assert body["stream"], outcome.error
            assert outcome.has_begun, outcome.error
            assert outcome.error
            assert text.startswith(outcome.text)


def test_the_command_ends_all_that_it_has_started(up: TwoByTwo) -> None:
    assert up.end() == 0
