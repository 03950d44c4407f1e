"""P's first token is D's, and a D goes on after another one's tokens: answers are those of one undivided instance."""

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
END = "2"  # the tiny model's token for the end of a sequence
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
    "a choice": (CHAT, hot_chat("Which?", 13, structured_outputs={"choice": ["a block", "a page", "a table"]})),
    "a regular expression": (COMPLETIONS, hot(14, structured_outputs={"regex": "[a-f]{3,9}(-[0-9]{2})+"})),
    "log probabilities": (COMPLETIONS, hot(11, logprobs=2)),
    "four blocks": (COMPLETIONS, hot(12, prompt=prompt(128, seed=12))),
}


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """Content of an answer, without the fields that differ from run to run."""
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


@pytest.mark.parametrize(
    "more",
    [{"max_tokens": 1}, {"logit_bias": {"99": 100}, "stop_token_ids": [99]}, {"logit_bias": {END: 100}}],
    ids=str,
)
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
    goes_on_after(servers, prompt(70, seed=token), [token])


def resuming(tokens: list[int]) -> dict[str, Any]:
    """Parameters of a request that another instance has begun to answer with these tokens."""
    return {"kv_transfer_params": transfer_params.resume(new_handoff(), tokens)}


def token_ids(url: str, path: str, body: dict[str, Any]) -> list[int]:
    ids: list[int] = answer(url, path, body | {"return_token_ids": True})[0]["choices"][0]["token_ids"]
    return ids


def goes_on_after(servers: Servers, ids: list[int], tokens: list[int]) -> None:
    body = completion(ids, max_tokens=len(tokens) + 7)
    found = token_ids(servers.decode.url, COMPLETIONS, body | resuming(tokens))
    assert found[: len(tokens)] == tokens
    rest = body | {"prompt": [*ids, *tokens], "max_tokens": 7}
    assert found[len(tokens) :] == token_ids(servers.undivided.url, COMPLETIONS, rest)


RESUMED = {kind: SAMPLED[kind] for kind in SAMPLED if kind != "hot, streamed"} | {
    "greedy": (COMPLETIONS, completion(prompt(300, seed=31), max_tokens=16)),  # in two chunks
    "one token of prompt": (COMPLETIONS, hot(32, prompt=prompt(1, seed=32))),
}


@pytest.mark.parametrize("kind", kinds(RESUMED, "penalties", "hot chat", "greedy"))
def test_a_request_that_was_cut_off_goes_on_at_decode_as_on_one_instance(servers: Servers, kind: str) -> None:
    path, body = RESUMED[kind]
    plain = {name: value for name, value in body.items() if name != "stream"}
    whole = token_ids(servers.undivided.url, path, plain)
    assert len(whole) > 3
    for num_tokens in (1, len(whole) // 2, len(whole) - 1, len(whole)):
        params = resuming(whole[:num_tokens])
        if body.get("stream"):
            assert servers.answer(servers.decode.url, path, body | params)[0] == servers.expected(path, body)
        else:
            found = answer(servers.decode.url, path, body | params)[0]
            assert said(found) == said(answer(servers.undivided.url, path, body)[0])
        result = servers.result(params["kv_transfer_params"]["kvpipe"]["handoff"])
        assert result["first_token"] == "exact"


def test_decode_goes_on_after_the_tokens_of_another_answer(servers: Servers) -> None:
    others = token_ids(servers.undivided.url, COMPLETIONS, hot(33))
    goes_on_after(servers, prompt(70, seed=34), others)


def test_what_ends_an_answer_among_the_tokens_that_a_request_brings_ends_it(servers: Servers) -> None:
    body = completion(prompt(90, seed=35), max_tokens=12)
    tokens = token_ids(servers.undivided.url, COMPLETIONS, body)
    whole, four = (servers.expected(COMPLETIONS, body | {"max_tokens": num}) for num in (12, 4))
    for more in (
        {"max_tokens": 5},
        {"stop_token_ids": [tokens[4]]},
        {"stop": [whole[len(four) - 1 : len(four) + 2]]},
        {"stop": [whole[len(four) - 1 : len(four) + 2]], "include_stop_str_in_output": True},
    ):
        expected = answer(servers.undivided.url, COMPLETIONS, body | more)[0]
        assert expected["usage"]["completion_tokens"] < 10
        found = answer(servers.decode.url, COMPLETIONS, body | more | resuming(tokens[:10]))[0]
        assert said(found) == said(expected)


def test_a_token_outside_the_vocabulary_has_decode_sample_its_own_answer(servers: Servers) -> None:
    body = completion(prompt(50, seed=36))
    tokens = token_ids(servers.undivided.url, COMPLETIONS, body)
    for given in ([17, 1 << 31], [17, -1]):
        params = resuming(given)
        assert token_ids(servers.decode.url, COMPLETIONS, body | params) == tokens
        result = servers.result(params["kv_transfer_params"]["kvpipe"]["handoff"])
        assert "outside the vocabulary" in result["first_token_reason"]


@pytest.mark.smoke
def test_requests_of_one_batch_each_get_their_own_tokens(servers: Servers) -> None:
    given = [prompt(1 + number, seed=number) for number in range(8)]

    def first(tokens: list[int]) -> list[int]:
        body = completion(prompt(40 + len(tokens), seed=37), max_tokens=12, temperature=1.2, ignore_eos=True)
        return token_ids(servers.decode.url, COMPLETIONS, body | resuming(tokens))[: len(tokens)]

    with ThreadPoolExecutor(len(given)) as threads:
        assert list(threads.map(first, given)) == given


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
