"""P's first token is D's: sampled answers, too, are those of one undivided instance."""

import json
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import pytest

from kvpipe import transfer_params
from tests.e2e.client import (
    CHAT,
    COMPLETIONS,
    Servers,
    chat,
    completion,
    kinds,
    new_handoff,
    post,
    prompt,
)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "is_old": {"type": "boolean"}},
    "required": ["name", "is_old"],
    "additionalProperties": False,
}
# Hot enough that another random number gives another token. Prompts of one step: vLLM on CPU dies of a seeded request
# that is computed in several.
HOT = {"temperature": 1.2, "top_p": 0.95, "max_tokens": 16}


def hot(seed: int, **more: Any) -> dict[str, Any]:
    return completion(prompt(60 + seed, seed=seed), seed=seed, **(HOT | more))


def hot_chat(text: str, seed: int, **more: Any) -> dict[str, Any]:
    return chat(text, seed=seed, **(HOT | more))


SAMPLED = {
    "hot": (COMPLETIONS, hot(1)),
    "hot, streamed": (COMPLETIONS, hot(2, stream=True)),
    "hot chat": (CHAT, hot_chat("What is a page table?", 3)),
    "hot chat, streamed": (CHAT, hot_chat("What is a page fault?", 4, stream=True)),
    "top k and min p": (COMPLETIONS, hot(5, top_k=40, min_p=0.02)),
    "penalties": (COMPLETIONS, hot(6, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)),
    "a bias": (COMPLETIONS, hot(7, logit_bias={"100": 8, "101": 8})),
    "a minimum of tokens": (COMPLETIONS, hot(8, min_tokens=6)),
    "a schema": (
        CHAT,
        hot_chat(
            "Who?",
            10,
            max_tokens=40,
            response_format={"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}},
        ),
    ),
    "log probabilities": (COMPLETIONS, hot(11, logprobs=2)),
    "four blocks": (COMPLETIONS, hot(12, prompt=prompt(128, seed=12))),
}


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """What an answer says, without what differs from run to run."""
    choice = answer["choices"][0]
    facts = {name: choice.get(name) for name in ("text", "message", "finish_reason", "stop_reason")}
    return facts | {
        "tokens": (choice.get("logprobs") or {}).get("tokens"),
        "usage": answer["usage"]["completion_tokens"],
    }


def answer(url: str, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    with post(url, path, body) as response:
        payload = response.read()
        assert response.status == HTTPStatus.OK, payload
        return json.loads(payload), response.headers["x-kvpipe-handoff"]


@pytest.mark.parametrize("kind", kinds(SAMPLED, "hot", "hot chat, streamed", "a schema"))
def test_a_sampled_answer_is_that_of_one_instance(servers: Servers, kind: str) -> None:
    path, body = SAMPLED[kind]
    if body.get("stream"):
        text, handoff = servers.answer(servers.url, path, body)
        assert text == servers.expected(path, body)
    else:
        found, handoff = answer(servers.url, path, body)
        expected = answer(servers.undivided.url, path, body)[0]
        assert said(found) == said(expected)
    result = servers.result(handoff)
    assert (result["first_token"], result["result"]) == ("exact", "full")


@pytest.mark.parametrize("more", [{"max_tokens": 1}, {"logit_bias": {"99": 100}, "stop_token_ids": [99]}])
def test_prefills_token_that_ends_the_request_is_the_answer(servers: Servers, more: dict[str, Any]) -> None:
    body = hot(9, **more)
    found, handoff = answer(servers.url, COMPLETIONS, body)
    expected = answer(servers.undivided.url, COMPLETIONS, body)[0]
    assert said(found) == said(expected)
    assert found.keys() == expected.keys()
    assert (handoff is None) == (more == {"max_tokens": 1})


def test_what_decode_refuses_for_its_length_is_refused_before_it_is_prefilled(servers: Servers) -> None:
    body = completion("word " * 4090, max_tokens=100)
    with post(servers.url, COMPLETIONS, body) as refused, post(servers.undivided.url, COMPLETIONS, body) as expected:
        assert (refused.status, refused.headers["x-kvpipe-handoff"]) == (HTTPStatus.BAD_REQUEST, None)
        assert json.loads(refused.read()) == json.loads(expected.read())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_cached_tokens_are_those_of_prefill(servers: Servers, *, is_streamed: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if is_streamed else {}
    body = completion(prompt(100, seed=23 + is_streamed), stream=is_streamed, **options)

    def usage(url: str) -> dict[str, Any]:
        with post(url, COMPLETIONS, body) as response:
            events = response.read().removesuffix(b"data: [DONE]\n\n").split(b"data: ")
        return json.loads(events[-1])["usage"]

    for _ in range(2):  # cold, then from the prefix cache
        assert usage(servers.url) == usage(servers.undivided.url)


def test_a_stop_string_may_begin_in_the_first_token(servers: Servers) -> None:
    body = completion(prompt(90, seed=21), max_tokens=6, return_token_ids=True)
    whole, first = (servers.expected(COMPLETIONS, body | {"max_tokens": num}) for num in (6, 1))
    stop = whole[len(first) - 1 : len(first) + 2]
    body |= {"stop": [stop]}
    found, handoff = answer(servers.url, COMPLETIONS, body)
    assert said(found) == said(answer(servers.undivided.url, COMPLETIONS, body)[0])
    assert found["choices"][0]["stop_reason"] == stop
    assert servers.result(handoff)["first_token"] == "exact"


@pytest.mark.parametrize("token", [17, 1500])
def test_decode_begins_with_the_token_that_it_is_given_and_goes_on_from_it(servers: Servers, token: int) -> None:
    """Any token at all, without a producer: what it would have sampled itself does not matter."""
    ids, handoff = prompt(70, seed=token), new_handoff()
    body = completion(ids, max_tokens=8, return_token_ids=True)
    params = {"kv_transfer_params": transfer_params.resume(handoff, token)}
    found = answer(servers.decode.url, COMPLETIONS, body | params)[0]["choices"][0]["token_ids"]
    assert found[0] == token
    rest = body | {"prompt": [*ids, token], "max_tokens": 7}
    assert found[1:] == answer(servers.undivided.url, COMPLETIONS, rest)[0]["choices"][0]["token_ids"]


@pytest.mark.smoke
def test_requests_of_one_batch_each_get_their_own_first_token(servers: Servers) -> None:
    tokens = [100 + 37 * number for number in range(8)]

    def first(token: int) -> int:
        params = {"kv_transfer_params": transfer_params.resume(new_handoff(), token)}
        body = completion(prompt(40 + token % 50, seed=token), max_tokens=4, temperature=1.2, return_token_ids=True)
        return answer(servers.decode.url, COMPLETIONS, body | params)[0]["choices"][0]["token_ids"][0]

    with ThreadPoolExecutor(len(tokens)) as threads:
        assert list(threads.map(first, tokens)) == tokens


@pytest.mark.smoke
@pytest.mark.parametrize("more", [{}, {"temperature": 1.2}, {"seed": 5, "temperature": 1.2}], ids=str)
def test_decode_continues_after_prefills_token_unless_a_seed_counts_tokens(
    servers: Servers, more: dict[str, Any]
) -> None:
    body = completion(prompt(4 * 32, seed=77), return_token_ids=True, **more)
    found, handoff = answer(servers.url, COMPLETIONS, body)
    if "seed" in more or not more:
        expected = answer(servers.undivided.url, COMPLETIONS, body)[0]
        assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert (len(found["choices"][0]["token_ids"]), found["usage"]["completion_tokens"]) == (12, 12)
    result = servers.result(handoff)
    assert (result["first_token"], result["computed_tokens"]) == ("exact", int("seed" in more))
