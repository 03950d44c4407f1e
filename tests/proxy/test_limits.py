"""Requests that only D would refuse, and those that P answers."""

import logging

import orjson
import pytest
from aiohttp import web

from kvpipe.proxy.limits import exceeds, is_contradictory

from .harness import CHAT, COMPLETIONS, DEAD, REQUEST, RecordingControl, answers, breaks_off, run, stage, streams
from .test_dispatch import DISPATCHES
from .test_early_streams import STREAMED, prefilled

MAX_MODEL_LEN = 1000
REFUSAL = (400, b'{"error":"too long"}', "application/json")


def counting(num_tokens, then):
    """A D that answers `/tokenize` with a number of tokens, and anything else as `then`."""

    async def behaviour(request):
        if request.path == "/tokenize":
            tokens = {"count": num_tokens, "max_model_len": MAX_MODEL_LEN, "tokens": [0] * num_tokens}
            return web.json_response(tokens)
        return await then(request)

    return behaviour


def limited():
    control = RecordingControl()
    control.description = control.description | {"max_model_len": MAX_MODEL_LEN}
    return control


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"max_tokens": 0}),
        (COMPLETIONS, {"max_tokens": "8"}),
        (COMPLETIONS, {"min_tokens": 9}),
        (COMPLETIONS, {"min_tokens": -1}),
        (COMPLETIONS, {"stream": "yes"}),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}),
        (CHAT, {"max_completion_tokens": 5, "min_tokens": 6}),
    ],
)
def test_a_request_that_contradicts_itself_costs_no_prefill_and_is_refused_by_decode(path, body):
    async def scene():
        async with stage(decode=[answers(*REFUSAL)]) as s:
            status, answer, _ = await s.post(path, REQUEST | body)
            assert (status, answer) == REFUSAL[:2]
            assert s.prefill[0].bodies == []
            assert s.decode[0].bodies == [REQUEST | body]

    run(scene)


@pytest.mark.parametrize(
    "body", [{}, {"max_tokens": None}, {"min_tokens": 8}, {"stream": True, "stream_options": {"include_usage": True}}]
)
def test_an_ordinary_request_contradicts_nothing(body):
    assert not is_contradictory(REQUEST | body, COMPLETIONS)


@pytest.mark.parametrize(
    ("num_tokens", "num_prefills"), [(MAX_MODEL_LEN - 8, 1), (MAX_MODEL_LEN - 7, 0), (MAX_MODEL_LEN + 1, 0)]
)
def test_a_text_that_may_be_too_long_is_tokenized_by_decode_before_a_prefill_is_paid_for(num_tokens, num_prefills):
    async def scene():
        decode = counting(num_tokens, answers())
        body = REQUEST | {"prompt": "x" * MAX_MODEL_LEN}
        async with stage(decode=[decode], control=limited()) as s:
            assert (await s.post(body=body))[0] == 200
            assert len(s.prefill[0].bodies) == num_prefills
            assert s.decode[0].bodies[0] == {"model": "m", "prompt": body["prompt"]}

    run(scene)


def test_a_normal_request_asks_nothing_before_its_prefill():
    async def scene():
        async with stage(control=limited()) as s:
            await s.post()
            assert len(s.decode[0].bodies) == 1

    run(scene)


@pytest.mark.parametrize("decode", [answers(404), answers(body=b"[]"), answers(body=b"no JSON"), breaks_off])
def test_a_decode_that_cannot_tokenize_gets_an_ordinary_handoff(decode):
    async def scene():
        async def behaviour(request):
            return await (decode if request.path == "/tokenize" else answers())(request)

        async with stage(decode=[behaviour], control=limited()) as s:
            assert (await s.post(body=REQUEST | {"prompt": "x" * MAX_MODEL_LEN}))[0] == 200
            assert len(s.prefill[0].bodies) == 1

    run(scene)


@pytest.mark.parametrize(
    ("body", "is_too_long"),
    [
        ({"prompt": [1] * 992, "max_tokens": 8}, False),
        ({"prompt": [[1] * 993], "max_tokens": 8}, True),
        ({"prompt": "x", "max_tokens": 1000}, True),
        ({"prompt": "x" * 100, "max_tokens": 8}, False),
        ({"prompt": "x" * 1000, "max_tokens": 8}, None),
        ({"prompt": "x" * 1000, "max_tokens": 8, "truncate_prompt_tokens": 100}, False),
    ],
)
def test_only_a_text_near_the_limit_needs_a_tokenizer(body, is_too_long):
    assert exceeds(body, len(orjson.dumps(body)), body["max_tokens"], MAX_MODEL_LEN) is is_too_long


def limited_to(*, prefill=(None,), decode=(None,)):
    """A control client of instances with these limits; None is one that does not tell."""
    control = RecordingControl()
    pools = (("p", prefill), ("d", decode))
    limits = {f"{role}{index}.control:7100": limit for role, pool in pools for index, limit in enumerate(pool)}
    control.max_model_lens = limits
    return control


def ids(num_tokens, max_tokens=8):
    return REQUEST | {"prompt": [1] * num_tokens, "max_tokens": max_tokens}


SHORT, LONG = 512, 2048


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(
    "body", [ids(SHORT), ids(SHORT, None), ids(SHORT, 1), REQUEST | {"prompt": "x" * SHORT}], ids=["8", "", "1", "text"]
)
def test_a_prompt_that_is_too_long_for_prefill_is_served_by_decode_alone(caplog, body, dispatch):
    caplog.set_level(logging.INFO, "kvpipe")

    async def scene():
        control = limited_to(prefill=[SHORT], decode=[LONG])
        decode = counting(SHORT, answers(body=b"whole"))
        async with stage([answers(*REFUSAL)], [decode], control=control, dispatch=dispatch) as s:
            assert (await s.post(body=body))[:2] == (200, b"whole")
            assert s.prefill[0].bodies == []
            assert s.decode[0].bodies[-1] == body
            assert "alone=exceeds_prefill" in caplog.text

    run(scene)


@pytest.mark.parametrize("body", [ids(SHORT - 1), ids(SHORT - 1, None), ids(SHORT - 1, 1)])
def test_a_prompt_that_just_fits_prefill_is_computed_by_it(body):
    async def scene():
        async with stage(control=limited_to(prefill=[SHORT], decode=[LONG])) as s:
            assert (await s.post(body=body))[0] == 200
            assert len(s.prefill[0].bodies) == 1

    run(scene)


@pytest.mark.parametrize("max_tokens", [1, 8, None])
def test_a_prompt_that_is_too_long_for_decode_is_refused_by_it_and_not_answered_by_prefill(max_tokens):
    async def scene():
        control = limited_to(prefill=[LONG], decode=[SHORT])
        async with stage(decode=[answers(*REFUSAL)], control=control) as s:
            assert (await s.post(body=ids(SHORT, max_tokens)))[:2] == REFUSAL[:2]
            assert s.prefill[0].bodies == []

    run(scene)


def test_a_request_goes_to_the_instances_that_it_fits():
    async def scene():
        control = limited_to(prefill=[SHORT, LONG], decode=[SHORT, LONG])
        async with stage([answers()] * 2, [answers()] * 2, control=control) as s:
            for _ in range(4):
                assert (await s.post(body=ids(SHORT)))[0] == 200
            assert [len(each.bodies) for each in (*s.prefill, *s.decode)] == [0, 4, 0, 4]
            for _ in range(4):
                assert (await s.post(body=ids(8)))[0] == 200
            assert [len(each.bodies) for each in (*s.prefill, *s.decode)] == [2, 6, 2, 6]

    run(scene)


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True},
        {"n": 2},
        {"prompt_logprobs": 1},
        {"min_tokens": 9},
        {"prompt": "x" * SHORT, "use_beam_search": True},
    ],
)
def test_a_request_without_a_handoff_goes_to_a_decode_that_it_fits(more):
    async def scene():
        decode = [counting(SHORT, answers())] * 2
        async with stage(decode=decode, control=limited_to(prefill=[LONG], decode=[SHORT, LONG])) as s:
            for _ in range(3):
                assert (await s.post(body=ids(SHORT) | more))[0] == 200
            assert [each.paths.count(COMPLETIONS) for each in (*s.prefill, *s.decode)] == [0, 0, 3]

    run(scene)


def test_decodes_with_one_limit_are_not_asked_for_the_length_of_a_request_without_a_handoff():
    async def scene():
        control = limited_to(prefill=[LONG], decode=[SHORT, SHORT])
        async with stage(decode=[answers(*REFUSAL)] * 2, control=control) as s:
            assert (await s.post(body=REQUEST | {"prompt": "x" * SHORT, "echo": True}))[0] == 400
            assert [each.paths.count("/tokenize") for each in s.decode] == [0, 0]

    run(scene)


def listing(limit, then):
    """An instance whose list of models has this limit."""

    async def behaviour(request):
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": limit}]})
        return await then(request)

    return behaviour


def test_without_control_ports_limits_are_those_of_the_lists_of_models():
    async def scene():
        prefill, decode = listing(SHORT, answers(*REFUSAL)), listing(LONG, answers())
        async with stage([prefill], [decode], has_control=False, dispatch="store") as s:
            assert (await s.post(body=ids(SHORT)))[0] == 200
            assert s.prefill[0].bodies == []
            assert s.decode[0].bodies == [ids(SHORT)]

    run(scene)


@pytest.mark.parametrize("models", [answers(401, b'{"error":"key"}'), answers(body=b'{"data":[]}'), answers(body=b"x")])
def test_an_instance_that_tells_no_limit_gets_every_request(models):
    async def scene():
        async def behaviour(request):
            return await (models if request.path == "/v1/models" else answers())(request)

        async with stage([behaviour], [behaviour], has_control=False, dispatch="store") as s:
            assert (await s.post(body=ids(SHORT)))[0] == 200
            assert len(s.prefill[0].bodies) == 1

    run(scene)


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_a_request_for_one_token_is_answered_by_prefill_alone(more):
    async def scene():
        body = REQUEST | {"max_tokens": 1} | more
        async with stage([answers(body=b"first")]) as s:
            status, answer, headers = await s.post(body=body)
            assert (status, answer) == (200, b"first")
            assert "x-kvpipe-handoff" not in headers
            assert s.prefill[0].bodies == [body]
            assert s.decode[0].bodies == s.control.released == []

    run(scene)


def test_a_request_for_one_token_goes_to_decode_when_no_prefill_is_left():
    async def scene():
        async with stage([DEAD]) as s:
            assert (await s.post(body=REQUEST | {"max_tokens": 1}))[0] == 200
            assert len(s.decode[0].bodies) == 1

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prefills_token_that_ends_the_request_is_the_answer_and_its_blocks_are_released(monkeypatch, path, dispatch):
    monkeypatch.setattr("kvpipe.proxy.results._ABORTED_AFTER_S", 1000.0)  # no wait for a result

    async def scene():
        said = {"message": {"role": "assistant", "content": ""}} if path == CHAT else {"text": ""}
        full = {
            "id": "cmpl-1",
            "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": None, **said}],
            "usage": {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1},
            "kv_transfer_params": {"kvpipe": {"first_token": 2}},
        }

        async def waits(request):
            await s.decode[0].aborted.wait()
            raise AssertionError

        async with stage([answers(body=orjson.dumps(full))], [waits], dispatch=dispatch) as s:
            status, answer, headers = await s.post(path)
            assert (status, orjson.loads(answer)) == (200, full | {"kv_transfer_params": None})
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, headers["x-kvpipe-handoff"])]
            if dispatch == "sequential":
                assert s.decode[0].bodies == []

    run(scene)


def test_the_end_of_a_stream_is_written_by_decode():
    async def scene():
        events = [b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"]
        full = {"choices": [{"text": "", "finish_reason": "stop"}]}
        async with stage([answers(body=orjson.dumps(full))], [streams(*events)]) as s:
            assert (await s.post(body=STREAMED))[1] == b"".join(events)

    run(scene)


def test_a_token_that_ends_nothing_is_followed_by_decode():
    async def scene():
        async with stage([prefilled()], [answers(body=b"whole")]) as s:
            assert (await s.post())[1] == b"whole"

    run(scene)
