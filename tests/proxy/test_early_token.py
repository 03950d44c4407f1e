import orjson
import pytest

from kvpipe.proxy.early_token import Continuation, ContradictionError, EarlyToken, allows_early_token

from .harness import CHAT, COMPLETIONS, REQUEST

HEAD = {"id": "cmpl-1", "created": 5, "model": "m"}


def prefilled(path=COMPLETIONS, text="ab", token=7, finish_reason="length", **message):
    said = {"message": {"content": text, **message}} if path == CHAT else {"text": text}
    choice = {"index": 0, "finish_reason": finish_reason, **said}
    params = {"kvpipe": {"first_token": token}}
    return EarlyToken.of(path, HEAD | {"choices": [choice], "kv_transfer_params": params})


def chunk(text, path=COMPLETIONS, finish_reason=None, **more):
    said = {"delta": {"content": text, **more}} if path == CHAT else {"text": text, **more}
    choice = {"index": 0, **said, "finish_reason": finish_reason}
    return b"data: " + orjson.dumps({"id": "other", "created": 6, "model": "m", "choices": [choice]}) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def parsed(events):
    return [
        orjson.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n") if event and event != DONE[:-2]
    ]


def text_of(events):
    choices = [choice for event in parsed(events) for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("cut", [(), (1,), (1, 2), (3,), (2, 4)])
@pytest.mark.parametrize("piece_len", [1, 7, 1000])
def test_the_client_gets_each_character_once_however_the_stream_is_cut(path, cut, piece_len):
    first, whole = prefilled(path), "abcdef"
    ends = [*cut, len(whole)]
    texts = [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    stream = b"".join(chunk(text, path) for text in texts) + chunk("", path, "length") + DONE
    if path == CHAT:
        stream = chunk("", path, role="assistant") + stream
    reconciled = Continuation(first)
    pieces = [stream[at : at + piece_len] for at in range(0, len(stream), piece_len)]
    events = first.events() + b"".join(event for piece in pieces for event in reconciled.feed(piece)) + reconciled.end()
    assert text_of(events) == whole
    assert events.endswith(DONE)
    assert {(event["id"], event["created"]) for event in parsed(events)} == {("cmpl-1", 5)}
    roles = [choice["delta"].get("role") for event in parsed(events) for choice in event["choices"] if path == CHAT]
    assert roles.count("assistant") == (path == CHAT)
    finishes = [choice["finish_reason"] for event in parsed(events) for choice in event["choices"]]
    assert [finish for finish in finishes if finish] == ["length"]


@pytest.mark.parametrize(
    "said",
    [
        [chunk("xb")],
        [chunk("a"), chunk("x")],
        [chunk("a"), DONE],
        [DONE],
        [b'data: {"error":{"code":500}}\n\n', DONE],
        [chunk("", finish_reason="stop"), DONE],
        [b'data: {"choices":[],"usage":{}}\n\n'],
        [chunk("", reasoning="so")],
    ],
)
def test_a_stream_that_contradicts_the_early_token_is_no_answer(said):
    reconciled = Continuation(prefilled())
    with pytest.raises(ContradictionError):
        list(reconciled.feed(b"".join(said)))
    assert not reconciled.has_sent


def test_a_stream_that_ends_before_the_end_of_the_early_token_is_no_answer():
    reconciled = Continuation(prefilled())
    assert list(reconciled.feed(chunk("a"))) == []
    with pytest.raises(ContradictionError):
        reconciled.end()


@pytest.mark.parametrize("said", [[], [chunk("ab"), chunk("c")]], ids=["before", "after"])
def test_an_event_without_an_end_is_given_up_before_it_fills_the_memory(said):
    reconciled = Continuation(prefilled())
    for piece in said:
        list(reconciled.feed(piece))
    assert not [found for _ in range(16) for found in reconciled.feed(b"x" * (1 << 20))]
    with pytest.raises(ContradictionError, match="more than 16777216 bytes"):
        list(reconciled.feed(b"x"))


def test_usage_and_errors_pass():
    reconciled = Continuation(prefilled())
    usage = b'data: {"id":"other","created":6,"choices":[],"usage":{"prompt_tokens":3}}\n\n'
    error = b'data: {"error":{"code":500}}\n\n'
    passed = list(reconciled.feed(chunk("ab") + usage + error))
    assert [orjson.loads(event.removeprefix(b"data: ")) for event in passed] == [
        {"id": "cmpl-1", "created": 5, "choices": [], "usage": {"prompt_tokens": 3}},
        {"error": {"code": 500}},
    ]


@pytest.mark.parametrize(
    "answer",
    [
        prefilled(text="a\ufffd"),
        prefilled(finish_reason="stop"),
        prefilled(token=None),
        prefilled(token="1"),
        prefilled(text=""),
        prefilled(text=None),
        prefilled(CHAT, reasoning="so"),
        prefilled(CHAT, tool_calls=[{}]),
        EarlyToken.of(COMPLETIONS, {"choices": [{"text": "a"}], "kv_transfer_params": None}),
        EarlyToken.of(COMPLETIONS, {}),
        EarlyToken.of(COMPLETIONS, {"choices": []}),
        EarlyToken.of(COMPLETIONS, {"choices": "a", "kv_transfer_params": 1}),
    ],
)
def test_a_token_that_is_incomplete_or_ends_the_request_is_not_sent_early(answer):
    assert answer is None


@pytest.mark.parametrize(
    ("more", "is_shown"),
    [
        ({}, True),
        ({"stream": False}, False),
        ({"stop": ["x"]}, False),
        ({"logprobs": 1}, False),
        ({"logprobs": 0}, False),
        ({"logprobs": False}, True),
        ({"tools": [{}]}, False),
        ({"return_token_ids": True}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"continuous_usage_stats": True}}, False),
        ({"stop": [], "tools": None}, True),
    ],
)
def test_only_plain_streams_get_an_early_token(more, is_shown):
    assert allows_early_token(REQUEST | {"stream": True} | more) == is_shown


def test_a_token_without_text_sends_the_role_alone():
    (event,) = parsed(prefilled(CHAT, text="").events())
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}
