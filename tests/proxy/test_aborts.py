"""vLLM that is shut down ends its answers in order, with `finish_reason: abort`: no client takes one for complete."""

import orjson
import pytest

from kvpipe.proxy.aborts import AbortCheck, ChoiceCheck, is_aborted
from kvpipe.proxy.routing import num_choices

from .harness import CHAT, COMPLETIONS, REQUEST, answers, describes, run, stage, streams
from .test_attempts import ERROR_EVENT
from .test_dispatch import DISPATCHES
from .test_early_streams import STREAMED, held, prefilled
from .test_early_token import DONE, chunk, parsed, text_of
from .test_metrics import counted

ABORTED = chunk("", finish_reason="abort")
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}}\n\n'


def whole(text, finish_reason="length"):
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return answers(body=orjson.dumps({"id": "x", "choices": [choice]}))


@pytest.mark.parametrize("dispatch", [*DISPATCHES, "store"])
def test_an_answer_that_decode_aborts_is_given_by_another_decode(dispatch):
    async def scene():
        async with stage(decode=[whole("a", "abort"), whole("abcd")], dispatch=dispatch) as s:
            status, body, _ = await s.post()
            assert (status, orjson.loads(body)["choices"][0]["text"]) == (200, "abcd")

    run(scene)


@pytest.mark.parametrize("aborted", [(ABORTED, DONE), (DONE,), (USAGE, DONE), (USAGE + DONE,), (DONE[:7], DONE[7:])])
@pytest.mark.parametrize("dispatch", [*DISPATCHES, "store"])
def test_a_stream_that_decode_aborts_before_its_first_token_is_given_by_another_decode(dispatch, aborted):
    async def scene():
        async with stage(decode=[streams(*aborted), streams(chunk("abcd"), DONE)], dispatch=dispatch) as s:
            status, body, _ = await s.post(body=STREAMED)
            assert (status, text_of(body)) == (200, "abcd")

    run(scene)


@pytest.mark.parametrize("aborted", [(ABORTED, DONE), (DONE,), (USAGE, DONE)])
@pytest.mark.parametrize("dispatch", [*DISPATCHES, "store"])
def test_a_stream_that_decode_aborts_after_prefills_token_goes_on_at_another_decode(dispatch, aborted):
    async def scene():
        first, go = held(*aborted)
        decode = [first, streams(chunk("ab"), chunk("cd", finish_reason="length"), DONE)]
        async with (
            stage(prefill=[prefilled()], decode=[describes(each) for each in decode], dispatch=dispatch) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            shown = await response.content.readany()
            go.set()
            answer = shown + await response.content.read()
            assert text_of(answer) == "abcd"
            assert answer.count(DONE) == 1
            assert len(s.decode[1].bodies) == 1

    run(scene)


@pytest.mark.parametrize("body", [STREAMED, STREAMED | {"n": 2}])
def test_a_stream_that_decode_aborts_in_the_middle_ends_with_an_error_event_and_no_done(body):
    async def scene():
        async with stage(decode=[streams(chunk("a"), chunk("b") + ABORTED + DONE), answers()]) as s:
            status, answer, _ = await s.post(body=body)
            *shown, last = parsed(answer)
            assert (status, [each["choices"][0]["text"] for each in shown]) == (200, ["a", "b"])
            assert last["error"]["code"] == 502
            assert f"decode instance {s.decode[0].url}: has aborted the request" in last["error"]["message"]
            assert b"[DONE]" not in answer
            assert s.decode[1].bodies == []
            await counted(s, "kvpipe_requests_total", "broken_off")

    run(scene)


@pytest.mark.parametrize("more", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_a_stream_of_two_choices_that_ends_with_one_ends_with_an_error_event_and_no_done(more):
    async def scene():
        async with stage(decode=[streams(chunk("a"), chunk("b", finish_reason="stop") + DONE)]) as s:
            status, answer, _ = await s.post(body=STREAMED | more)
            *shown, last = parsed(answer)
            assert (status, [each["choices"][0]["text"] for each in shown]) == (200, ["a", "b"])
            assert f"decode instance {s.decode[0].url}: has aborted the request" in last["error"]["message"]
            assert b"[DONE]" not in answer

    run(scene)


def test_a_stream_of_two_choices_that_have_both_ended_is_complete():
    async def scene():
        ended = [chunk("a", finish_reason="stop"), chunk("b", finish_reason="length")]
        async with stage(decode=[streams(*ended, DONE)]) as s:
            assert (await s.post(body=STREAMED | {"n": 2}))[1] == b"".join([*ended, DONE])

    run(scene)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_missing_choice_is_found_however_the_stream_is_cut(size):
    quoted = chunk('"finish_reason":"stop"\n\ndata: [DONE]')
    for num_ended, num_expected, is_short in ((2, 3, True), (3, 3, False), (0, 2, False), (0, 1, False), (1, 0, False)):
        before = quoted + chunk("a", finish_reason="stop") * num_ended
        check, shown = ChoiceCheck(num_expected), b""
        for start in range(0, len(before + DONE), size):
            shown += check.feed((before + DONE)[start : start + size])
            if check.has_found:
                break
        assert check.has_found == is_short
        assert shown == (before if is_short else before + DONE)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_choice_that_an_error_explains_is_not_missing(size):
    stream = chunk("a", finish_reason="stop") + ERROR_EVENT + DONE
    check = ChoiceCheck(2)
    assert b"".join(check.feed(stream[start : start + size]) for start in range(0, len(stream), size)) == stream
    assert not check.has_found


def test_bytes_that_were_held_back_are_sent_when_the_stream_ends():
    check = ChoiceCheck(2)
    assert check.feed(chunk("a", finish_reason="stop") + DONE[:7]) == chunk("a", finish_reason="stop")
    assert (check.end(), check.has_found) == (DONE[:7], False)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({}, 1),
        ({"n": 0}, 1),
        ({"prompt": [1, 2, 3], "n": None}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1, 2], [3]], "n": 3}, 6),
        ({"prompt": ["a"], "n": 2}, 2),
        ({"n": "2"}, 0),
        ({"n": 2, "use_beam_search": True}, 0),
        ({"n": 1, "best_of": 2}, 0),
        ({"prompt_embeds": []}, 0),
    ],
)
def test_the_number_of_choices_is_known_or_is_vllms_alone(body, number):
    assert num_choices(body, COMPLETIONS) == number


def test_a_prompt_in_a_chat_is_no_choice():
    assert num_choices({"prompt": ["a", "b"], "n": 2}, CHAT) == 2


def test_a_prefill_that_aborts_is_replaced():
    async def scene():
        async with stage(prefill=[whole("", "abort"), answers()]) as s:
            assert (await s.post())[0] == 200
            assert [len(each.bodies) for each in s.prefill] == [1, 1]

    run(scene)


def test_an_answer_for_one_token_that_prefill_aborts_is_given_by_another_prefill():
    async def scene():
        async with stage(prefill=[whole("", "abort"), whole("a")]) as s:
            status, body, _ = await s.post(body=REQUEST | {"max_tokens": 1})
            assert (status, orjson.loads(body)["choices"][0]["text"]) == (200, "a")

    run(scene)


def test_an_answer_whose_text_quotes_an_abort_is_complete():
    quoted = chunk('"finish_reason":"abort"', finish_reason="stop")
    assert not is_aborted(quoted)
    check = AbortCheck()
    assert check.feed(quoted) == quoted
    assert not check.has_found


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_abort_is_found_however_the_stream_is_cut(size):
    stream = chunk("a") + chunk("b") + ABORTED + DONE
    check = AbortCheck()
    shown = b""
    for start in range(0, len(stream), size):
        shown += check.feed(stream[start : start + size])
        if check.has_found:
            break
    assert check.has_found
    assert shown.startswith(chunk("a") + chunk("b"))
    assert ABORTED not in shown
