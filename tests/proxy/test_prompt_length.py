"""Short prompts go to decode alone: how long a prompt is, and what the proxy then does and says."""

import orjson
import pytest

from kvpipe.proxy.prompt_length import PromptLengths

from .harness import CHAT, COMPLETIONS, REQUEST, answers, run, stage
from .test_metrics import metrics
from .test_request_record import logged

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}


def answered(num_prompt_tokens):
    usage = {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens + 1, "completion_tokens": 1}
    return answers(body=orjson.dumps({"choices": [], "usage": usage}))


def text(length, model="m"):
    return {"model": model, "prompt": "x" * length, "max_tokens": 8}


def said(*contents):
    return {"model": "m", "messages": [{"role": "user", "content": content} for content in contents]}


@pytest.mark.parametrize("ids", [[7] * 9, [[7] * 9]])
def test_token_ids_are_counted_whatever_was_learned(ids):
    lengths = PromptLengths()
    lengths.learn(text(1000), COMPLETIONS, 10)
    assert lengths.tokens({"model": "m", "prompt": ids}, COMPLETIONS) == 9


def test_bytes_per_token_are_learned_for_each_model():
    lengths = PromptLengths()
    assert lengths.tokens(text(400), COMPLETIONS) == 100
    lengths.learn(text(400), COMPLETIONS, 200)
    assert lengths.tokens(text(400), COMPLETIONS) == pytest.approx(200)
    assert lengths.tokens(text(400, "another"), COMPLETIONS) == 100


def test_the_ratio_follows_a_change_of_the_prompts_and_one_odd_prompt_moves_it_little():
    lengths = PromptLengths()
    for _ in range(100):
        lengths.learn(text(400), COMPLETIONS, 100)
    lengths.learn(text(400), COMPLETIONS, 400)
    assert lengths.tokens(text(400), COMPLETIONS) == pytest.approx(100, rel=0.1)
    for _ in range(200):
        lengths.learn(text(400), COMPLETIONS, 400)
    assert lengths.tokens(text(400), COMPLETIONS) == pytest.approx(400, rel=0.1)


def test_the_bytes_are_those_of_utf_8():
    assert PromptLengths().tokens({"model": "m", "prompt": "日本"}, COMPLETIONS) == 1.5


def test_a_chat_grows_with_its_messages_and_tools():
    lengths = PromptLengths()
    one, two = lengths.tokens(said("hello"), CHAT), lengths.tokens(said("hello", "hello"), CHAT)
    assert one < two < lengths.tokens(said("hello", "hello") | {"tools": [{"type": "function"}]}, CHAT)
    assert lengths.tokens(said([{"type": "text", "text": "hello"}]), CHAT) > one


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, said([IMAGE])),
        (CHAT, {"messages": "hello"}),
        (CHAT, {"messages": ["hello"]}),
        (COMPLETIONS, text(400) | {"truncate_prompt_tokens": 5}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {}),
    ],
)
def test_a_prompt_whose_bytes_tell_nothing_has_no_length_and_teaches_none(path, body):
    lengths = PromptLengths()
    assert lengths.tokens(body, path) is None
    lengths.learn(body, path, 10)
    assert len(lengths) == 0


def test_only_the_models_used_last_are_remembered():
    lengths = PromptLengths(max_models=2)
    for model in ("a", "b", "a", "c"):
        lengths.learn(text(400, model), COMPLETIONS, 400)
    assert len(lengths) == 2
    known = [lengths.tokens(text(400, model), COMPLETIONS) for model in ("a", "b", "c")]
    assert known == [pytest.approx(400), 100, pytest.approx(400)]


@pytest.mark.parametrize(("num_ids", "is_split"), [(99, False), (100, True)])
def test_a_prompt_below_the_bound_goes_to_decode_alone(num_ids, is_split):
    async def scene():
        async with stage(split_from=100) as s:
            body = REQUEST | {"prompt": [7] * num_ids}
            status, _, headers = await s.post(body=body)
            assert status == 200
            assert ("x-kvpipe-handoff" in headers) == is_split
            assert len(s.prefill[0].bodies) == is_split
            if not is_split:
                assert s.decode[0].bodies == [body]

    run(scene)


def test_by_default_every_prompt_is_split():
    async def scene():
        async with stage() as s:
            await s.post(body=REQUEST | {"prompt": [7]})
            assert len(s.prefill[0].bodies) == 1

    run(scene)


def test_a_short_prompt_for_one_token_goes_to_decode_too():
    async def scene():
        async with stage(split_from=100) as s:
            await s.post(body=REQUEST | {"max_tokens": 1})
            assert (len(s.prefill[0].bodies), len(s.decode[0].bodies)) == (0, 1)

    run(scene)


@pytest.mark.parametrize("num_tokens", [40, 400])
def test_the_proxy_learns_from_the_usage_of_answers_of_both_roles(num_tokens):
    async def scene():
        async with stage([answered(num_tokens)], [answered(num_tokens)], split_from=100) as s:
            body = text(400)  # 100 tokens, until more is known
            await s.post(body=body)
            assert len(s.prefill[0].bodies) == 1
            await s.post(body=body)
            assert len(s.prefill[0].bodies) == (2 if num_tokens == 400 else 1)
            for _ in range(3):  # a decode that works alone teaches as well
                await s.post(body=body | {"n": 2})
            await s.post(body=body)
            assert len(s.prefill[0].bodies) == (3 if num_tokens == 400 else 1)

    run(scene)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "short"),
        ({"n": 2}, "no_handoff"),
        ({"min_tokens": 9}, "contradictory"),
    ],
)
def test_log_line_and_metric_say_why_a_request_went_to_decode_alone(caplog, change, reason):
    async def scene():
        async with stage(split_from=100) as s:
            await s.post(body=REQUEST | change)
            assert (await metrics(s))["kvpipe_decode_alone_total", reason] == 1

    line = logged(caplog, scene)
    assert line["alone"] == reason
    assert "prefill" not in line


def test_the_log_line_of_a_handoff_has_no_such_reason(caplog):
    async def scene():
        async with stage() as s:
            await s.post()

    assert "alone" not in logged(caplog, scene)


def test_the_log_line_says_that_no_prefill_was_left(caplog):
    async def scene():
        async with stage([answers(503)]) as s:
            await s.post()
            assert (await metrics(s))["kvpipe_prefill_fallbacks_total",] == 1

    assert logged(caplog, scene)["alone"] == "no_prefill"
