"""Whatever is asked and however it is dispatched, the answer is that of one instance, token by token."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.client import CHAT, COMPLETIONS, Servers, chat, completion, kinds, post, prompt
from tests.e2e.identity import BY_ID, Said, ask, differences
from tests.e2e.test_answers import BLOCK, REQUESTS
from tests.e2e.test_first_token import HOT, SAMPLED, SCHEMA, hot, hot_chat, said

# Just-in-time, the default, is that of test_answers.py and test_first_token.py.
OTHERS = ("sequential",)
KINDS = REQUESTS | SAMPLED
TOOL = {"type": "function", "function": {"name": "remember", "parameters": SCHEMA}}
CHARACTERS = "é日本🙂"
TOLERANCE = 1e-3


@pytest.mark.parametrize("dispatch", OTHERS)
@pytest.mark.parametrize("kind", kinds(KINDS, "hot"))
def test_the_answer_is_that_of_one_instance_by_every_dispatch(servers: Servers, kind: str, dispatch: str) -> None:
    path, body = KINDS[kind]
    url = servers.through(dispatch)
    if body.get("stream"):
        text, handoff = servers.answer(url, path, body)
        assert text == servers.expected(path, body)
    else:
        found, handoff = ask(url, path, body)
        assert said(found) == said(ask(servers.undivided.url, path, body)[0])
    result = servers.result(handoff)
    assert result["first_token"] == "exact"
    is_loaded = result["result"] == "full"
    # Nothing is moved for the last token alone: where a prompt has no other, or decode's own cache has all others.
    expected = "missing" if result["prompt_tokens"] == 1 else "local"
    assert is_loaded or (result["result"], result["prompt_tokens"] % BLOCK) == (expected, 1)
    assert result["computed_tokens"] == (not is_loaded or "seed" in body)


SEVERAL = {
    "prompts": (COMPLETIONS, completion([prompt(40, seed=47), prompt(70, seed=48)])),
    "n": (COMPLETIONS, completion(prompt(70, seed=49), n=2, temperature=1.2, seed=9)),
    "chat": (CHAT, chat("Which ones were they?", n=2, temperature=1.2, seed=9)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", SEVERAL)
def test_a_stream_of_several_choices_has_all_of_them(servers: Servers, kind: str) -> None:
    path, body = SEVERAL[kind]
    expected = {choice["index"]: said_by(choice) for choice in ask(servers.undivided.url, path, body)[0]["choices"]}
    with post(servers.url, path, body | {"stream": True}) as response:
        *events, last = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line]
    assert (last, len(expected)) == (b"[DONE]", 2)
    found = dict.fromkeys(expected, "")
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        found[choice["index"]] += said_by(choice)
    assert found == expected


def said_by(choice: dict[str, Any]) -> str:
    """The text of a choice, or of its next part in a stream."""
    return choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"] or ""


@pytest.mark.parametrize("body", [completion(prompt(80, seed=41)), hot(42)], ids=["greedy", "hot"])
def test_log_probabilities_are_those_of_one_instance(servers: Servers, body: dict[str, Any]) -> None:
    body = body | BY_ID
    found = ask(servers.url, COMPLETIONS, body)[0]["choices"][0]["logprobs"]
    expected = ask(servers.undivided.url, COMPLETIONS, body)[0]["choices"][0]["logprobs"]
    assert found["tokens"] == expected["tokens"]
    assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=TOLERANCE)
    for theirs, ours in zip(expected["top_logprobs"], found["top_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_call_is_that_of_one_instance(servers: Servers, *, is_streamed: bool) -> None:
    choice = {"type": "function", "function": {"name": "remember"}}
    body = hot_chat("Who was it?", 43, max_tokens=48, tools=[TOOL], tool_choice=choice, stream=is_streamed)
    found, handoff = called(servers.url, body)
    assert found == called(servers.undivided.url, body)[0]
    if is_streamed:  # a whole answer has no call whose arguments were cut by max_tokens, but their text
        assert found["name"] == "remember"
    assert found["arguments"] or found["content"]
    assert servers.result(handoff)["first_token"] == "exact"


def called(url: str, body: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    """Text, name and arguments of an answer with one tool call, whole or streamed."""
    with post(url, CHAT, body) as response:
        payload, handoff = response.read(), response.headers["x-kvpipe-handoff"]
    events = [line.removeprefix(b"data: ") for line in payload.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events or [payload] for choice in json.loads(event)["choices"]]
    messages = [choice["delta"] if body["stream"] else choice["message"] for choice in choices]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    found = {key: "".join(call.get(key) or "" for call in calls) for key in ("name", "arguments")}
    return found | {"content": "".join(message.get("content") or "" for message in messages)}, handoff


@pytest.fixture
def pieces(servers: Servers) -> list[int]:
    """Tokens each of which is a piece of a character."""
    with post(servers.undivided.url, "/tokenize", {"model": "tiny", "prompt": CHARACTERS}) as response:
        ids = json.loads(response.read())["tokens"]
    assert len(ids) == len(CHARACTERS.encode())
    return ids


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dispatch", ["just-in-time", *OTHERS])
def test_tokens_that_are_pieces_of_characters_come_as_from_one_instance(
    servers: Servers, pieces: list[int], dispatch: str, *, is_streamed: bool
) -> None:
    for seed in range(44, 50):
        # The prompt ends inside a character, and every token of the answer is a piece, the first one too.
        ids = prompt(BLOCK - 3 + seed % 5, seed=seed) + pieces[: 1 + seed % 3]
        body = completion(ids, seed=seed, allowed_token_ids=pieces, stream=is_streamed, **HOT)
        url = servers.url if dispatch == "just-in-time" else servers.through(dispatch)
        text, handoff = servers.answer(url, COMPLETIONS, body)
        assert text == servers.expected(COMPLETIONS, body)
        assert servers.result(handoff)["first_token"] == "exact"


def test_fifty_requests_at_once_are_answered_as_by_one_instance(servers: Servers) -> None:
    short = [BLOCK * (1 + number % 6) + (-1, 0, 1, 9)[number % 4] for number in range(40)]
    lengths = [20, *short, *range(400, 2001, 200)]
    bodies = [completion(prompt(length, seed=60 + seed), **BY_ID) for seed, length in enumerate(lengths)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: ask(servers.url, COMPLETIONS, body), bodies))
    expected = [Said.of(ask(servers.undivided.url, COMPLETIONS, body)[0]) for body in bodies]
    assert not differences(expected, [Said.of(answer) for answer, _ in answers])
    results = [servers.result(handoff) for _, handoff in answers]
    assert {(result["result"], result["first_token"]) for result in results} == {("full", "exact")}


def test_a_margin_is_that_of_the_token_where_answers_part() -> None:
    alternatives = [{"token_id:5": -0.1, "token_id:6": -2.5}, {"token_id:7": -0.5, "token_id:8": -0.75}]
    mine = Said([5, 7], alternatives, "", "length")
    assert mine.margin(mine) is None
    assert mine.margin(Said([5, 8], [], "", "length")) == 0.25
    assert mine.margin(Said([9, 8], [], "", "length")) == float("inf")
    assert mine.margin(Said([5], [], "", "stop")) == float("inf")
