"""The proxy before real instances with other limits than each other, and what it passes on to one of them alone."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.client import COMPLETIONS, TIMEOUT_S, Servers, completion, post, prompt
from tests.e2e.groups import LENGTHS

SHORT = LENGTHS["prefill"]
MESSAGES = [{"role": "user", "content": "hello"}]
ENDPOINTS = {
    "/tokenize": {"model": "tiny", "prompt": "hello world"},
    "/detokenize": {"model": "tiny", "tokens": [20, 30]},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    # The model has no embeddings, so the answer is vLLM's refusal.
    "/v1/embeddings": {"model": "tiny", "input": "hello"},
    "/v1/score": {"model": "tiny", "text_1": "a", "text_2": "b"},
}
OWN = ("id", "created", "created_at", "request_id", "completed_at")


def asked(url: str, path: str, body: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    """Status, handoff and answer."""
    with post(url, path, body) as response:
        return response.status, response.headers["x-kvpipe-handoff"], json.loads(response.read())


def answered(url: str, raw: bytes, headers: dict[str, str]) -> tuple[int, str]:
    """Status and message for bytes that a client has sent."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST", COMPLETIONS, raw, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("max_tokens", [1, 12])
@pytest.mark.parametrize("num_tokens", [SHORT, SHORT + 100])
def test_a_prompt_that_prefill_refuses_is_answered_as_by_one_instance(
    lengths: Servers, num_tokens: int, max_tokens: int
) -> None:
    body = completion(prompt(num_tokens), max_tokens=max_tokens)
    text, handoff = lengths.answer(lengths.url, COMPLETIONS, body)
    assert handoff is None
    assert text == lengths.expected(COMPLETIONS, body)


def test_a_prompt_that_just_fits_prefill_is_handed_off(lengths: Servers) -> None:
    body = completion(prompt(SHORT - 1))
    text, handoff = lengths.answer(lengths.url, COMPLETIONS, body)
    assert handoff is not None
    assert text == lengths.expected(COMPLETIONS, body)


@pytest.mark.parametrize("max_tokens", [1, 12, None])
def test_a_prompt_that_decode_refuses_is_refused_although_prefill_would_compute_it(
    lengths: Servers, max_tokens: int | None
) -> None:
    body = completion(prompt(SHORT + 100), max_tokens=max_tokens)
    status, _, answer = asked(lengths.through("just-in-time", is_reversed=True), COMPLETIONS, body)
    assert (status, answer["error"]) == (400, asked(lengths.prefill.url, COMPLETIONS, body)[2]["error"])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_endpoint_that_is_not_handed_off_answers_as_decode_does(lengths: Servers, path: str) -> None:
    answers = [asked(url, path, ENDPOINTS[path]) for url in (lengths.url, lengths.decode.url)]
    for _, handoff, answer in answers:
        assert handoff is None
        for name in OWN:
            answer.pop(name, None)
    (status, _, ours), (expected_status, _, expected) = answers
    assert status == expected_status
    assert ours.keys() == expected.keys()
    assert ours.get("error") == expected.get("error")
    assert ours.get("usage") == expected.get("usage")


@pytest.mark.parametrize("field", [b'"temperature":NaN', b'"seed":18446744073709551616', b'"temperature":1e400'])
def test_a_number_that_json_has_not_gets_vllms_own_refusal(lengths: Servers, field: bytes) -> None:
    raw = b'{"model":"tiny","prompt":"hello","max_tokens":4,' + field + b"}"
    ours, expected = (answered(url, raw, {}) for url in (lengths.url, lengths.decode.url))
    assert ours[0] == 400
    assert ours == expected


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_text_in_another_encoding_is_answered_as_by_one_instance(lengths: Servers, encoding: str) -> None:
    raw = json.dumps(completion("h\u00e9llo"), ensure_ascii=False).encode(encoding)
    (status, ours), (_, expected) = (answered(url, raw, {}) for url in (lengths.url, lengths.decode.url))
    assert status == 200
    assert json.loads(ours)["choices"][0]["text"] == json.loads(expected)["choices"][0]["text"]


def test_a_large_header_is_taken_as_by_one_instance(lengths: Servers) -> None:
    raw = json.dumps(completion("hello")).encode()
    for url in (lengths.url, lengths.decode.url):
        assert answered(url, raw, {"Cookie": "x" * 60_000})[0] == 200
