"""Costs of a failure: the engines of one request, the next instance, and the released handoffs."""

import asyncio

import orjson
import pytest

from .harness import (
    COMPLETIONS,
    DEAD,
    REQUEST,
    SILENCE_S,
    RecordingControl,
    answers,
    breaks_off,
    never_ends,
    run,
    stage,
    streams,
)
from .test_dispatch import DISPATCHES
from .test_early_streams import STREAMED, held, prefilled
from .test_early_token import DONE, chunk, parsed, text_of
from .test_metrics import counted, metrics, replaced

ERROR_EVENT = b'data: {"error": {"message": "no", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
BUSY = answers(503, b"busy")
KILLED = [breaks_off, streams(then=breaks_off), answers(500, b"EngineCore encountered an issue")]


def num_asked(pool):
    return len([instance for instance in pool if instance.bodies])


async def status_of(s, handoff):
    async with s.client.get(f"{s.url}/status/{handoff}") as response:
        return orjson.loads(await response.read())


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("killed", KILLED)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_that_kills_every_engine_which_computes_it_takes_two_at_most(role, killed, dispatch):
    async def scene():
        async def waits(request):
            await s.prefill[0].asked.wait()
            return await answers()(request)

        pools = {"decode": [waits]} | {role: [killed] * 4}
        async with stage(**pools, dispatch=dispatch) as s:
            status, _, _ = await s.post(body=STREAMED)
            if role == "prefill" and s.decode[0].bodies:
                # Decode was asked before prefill broke, and is the second engine.
                assert (status, num_asked(s.prefill), num_asked(s.decode)) == (200, 1, 1)
            else:
                assert status == (500 if killed is KILLED[2] and role == "decode" else 502)
                assert num_asked(getattr(s, role)) == 2

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("killed", KILLED)
def test_a_request_that_kills_engines_of_both_roles_takes_two_at_most(killed, dispatch):
    async def scene():
        async def dies_a_step_later(request):
            await s.prefill[0].asked.wait()
            await asyncio.sleep(0.1)
            return await killed(request)

        async with stage([killed] * 4, [dies_a_step_later] * 4, dispatch=dispatch) as s:
            await s.post(body=STREAMED)
            assert sum(len(instance.bodies) for instance in (*s.prefill, *s.decode)) == 2

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_without_a_decode_left_the_failure_of_prefill_is_the_answer(dispatch):
    async def scene():
        for _ in range(8):  # both fail in one tick, in either order
            async with stage([DEAD, answers()], [DEAD], dispatch=dispatch) as s:
                assert (await s.post())[0] == 502

    run(scene)


def test_a_request_that_kills_a_prefill_and_a_decode_takes_no_third_engine():
    async def scene():
        async with stage(prefill=[breaks_off, answers(), answers()], decode=[breaks_off, answers()]) as s:
            assert (await s.post())[0] == 502
            assert (num_asked(s.prefill), num_asked(s.decode)) == (2, 1)
            assert (await counted(s, "kvpipe_denied_retries_total", "limit"))["kvpipe_requests_total", "failed"] == 1

    run(scene)


def test_a_request_that_kills_decodes_after_a_shown_token_takes_two_at_most():
    async def scene():
        first, go = held(then=breaks_off)
        async with (
            stage(prefill=[prefilled()], decode=[first] + [streams(then=breaks_off)] * 3) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            shown = await response.content.readany()
            go.set()
            error = parsed(shown + await response.content.read())[-1]["error"]
            assert (error["code"], num_asked(s.decode)) == (502, 2)

    run(scene)


def test_two_prefills_that_broke_are_not_followed_by_decode_alone():
    async def scene():
        async with stage(prefill=[breaks_off] * 2) as s:
            assert (await s.post())[0] == 502
            assert s.decode[0].bodies == []

    run(scene)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_at_most_two_instances_of_a_role_are_tried(role):
    async def scene():
        async with stage(**{role: [BUSY, BUSY, answers()]}, on_prefill_failure="fail") as s:
            assert (await s.post())[0] == (502 if role == "prefill" else 503)
            assert num_asked(getattr(s, role)) == 2

    run(scene)


def test_a_fleet_that_is_half_down_answers_every_request():
    async def scene():
        half_down = [DEAD, DEAD, DEAD, answers()]
        async with stage(prefill=half_down, decode=half_down) as s:
            for _ in range(16):  # more than the budget allows
                assert (await s.post())[0] == 200
            assert [key for key in await metrics(s) if key[0] == "kvpipe_denied_retries_total"] == []

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_silent_prefill_ends_the_request_with_504_and_is_released(dispatch):
    async def scene():
        decode = None if dispatch == "sequential" else [never_ends]
        async with stage([never_ends, answers()], decode, dispatch=dispatch, silence_timeout_s=SILENCE_S) as s:
            status, body, _ = await s.post()
            assert (status, orjson.loads(body)["error"]["type"]) == (504, "GatewayTimeoutError")
            await s.prefill[0].aborted.wait()
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, s.prefill[0].handoffs[0])]
            assert s.prefill[1].bodies == []
            assert (await metrics(s))["kvpipe_denied_retries_total", "timeout"] == 1
            if s.decode[0].asked.is_set():
                await s.decode[0].aborted.wait()

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_silent_decode_is_not_followed_by_another(dispatch):
    async def scene():
        async with stage(decode=[never_ends, answers()], dispatch=dispatch, silence_timeout_s=SILENCE_S) as s:
            assert (await s.post())[0] == 504
            await s.decode[0].aborted.wait()
            await s.control.until_released()
            assert s.decode[1].bodies == []

    run(scene)


def test_a_decode_that_is_silent_after_a_shown_token_ends_the_stream_with_504():
    async def scene():
        decode = [streams(then=never_ends), answers()]
        async with stage(prefill=[prefilled()], decode=decode, silence_timeout_s=SILENCE_S) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert parsed(body)[-1]["error"]["code"] == 504
            assert s.decode[1].bodies == []

    run(scene)


def test_one_failing_instance_does_not_use_up_the_retries_of_the_others(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.health._AVOIDED_S", 1000.0)

    async def scene():
        async with stage(prefill=[BUSY, answers()], decode=[answers(), BUSY]) as s:
            statuses = [(await s.post())[0] for _ in range(60)]
            assert statuses == [200] * 60
            assert len(s.prefill[0].bodies) == len(s.decode[1].bodies) == 1

    run(scene)


@pytest.mark.parametrize("result", [{"result": "partial", "bytes": None}, []])
def test_blocks_are_released_where_decodes_result_cannot_be_read(result):
    async def scene():
        async with stage() as s:
            s.control.results = {s.decode[0].control: result}
            assert (await s.post())[0] == 200
            await s.control.until_released()

    run(scene)


async def writes_an_error_in_pieces(request):
    response = await streams(ERROR_EVENT[:9])(request)
    for piece in (ERROR_EVENT[9:20], ERROR_EVENT[20:], DONE):
        await asyncio.sleep(0.02)  # so that they arrive apart
        await response.write(piece)
    return response


@pytest.mark.parametrize("stream", [writes_an_error_in_pieces, streams()])
def test_a_stream_that_begins_with_a_part_of_an_error_or_with_nothing_goes_to_another_decode(stream):
    async def scene():
        async with stage(decode=[stream, streams(chunk("abcd"), DONE)]) as s:
            status, body, _ = await s.post(body=STREAMED)
            assert (status, text_of(body)) == (200, "abcd")

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_prefill_that_answers_with_a_stream_is_replaced_and_its_request_ends(dispatch):
    async def scene():
        endless = streams(chunk("a"), then=never_ends)
        async with stage([endless, answers()], on_prefill_failure="fail", dispatch=dispatch) as s:
            assert (await s.post())[0] == 200
            await s.prefill[0].aborted.wait()

    run(scene)


def test_retries_are_bounded_to_a_share_of_all_requests():
    async def scene():
        num_requests, num_saved, share = 60, 10, 0.2
        async with stage(prefill=[BUSY, BUSY], on_prefill_failure="fail") as s:
            statuses = [(await s.post())[0] for _ in range(num_requests)]
            num_asked_again = sum(len(p.bodies) for p in s.prefill) - num_requests
            assert statuses == [502] * num_requests
            assert 0 < num_asked_again <= num_saved + share * num_requests + 1e-6
            assert (await metrics(s))["kvpipe_denied_retries_total", "budget"] == num_requests - num_asked_again

    run(scene)


def test_when_the_budget_is_used_up_decode_answers_alone_and_no_other_prefill_is_asked():
    async def scene():
        num_requests, num_saved, share = 60, 10, 0.2
        async with stage(prefill=[BUSY, BUSY]) as s:
            assert [(await s.post())[0] for _ in range(num_requests)] == [200] * num_requests
            num_asked_again = sum(len(p.bodies) for p in s.prefill) - num_requests
            assert 0 < num_asked_again <= num_saved + share * num_requests + 1e-6

    run(scene)


def test_decode_answers_every_request_alone_when_the_only_prefill_fails():
    async def scene():
        async with stage(prefill=[BUSY]) as s:
            assert [(await s.post())[0] for _ in range(60)] == [200] * 60  # more than the budget of retries

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_decode_that_refuses_the_connection_costs_no_second_prefill(dispatch):
    async def scene():
        async with stage(decode=[DEAD, DEAD, answers(body=b"3")], dispatch=dispatch) as s:
            s.control.results = {s.decode[2].control: {"result": "full"}}
            status, body, headers = await s.post()
            await s.prefill[0].asked.wait()  # decode may have answered before
            assert (status, body) == (200, b"3")
            assert s.prefill[0].handoffs == s.decode[2].handoffs == [headers["x-kvpipe-handoff"]]
            assert replaced(await metrics(s)) == {("kvpipe_replaced_instances_total", "failed", "decode"): 2}
            told = await status_of(s, headers["x-kvpipe-handoff"])
            assert [attempt["decode"] for attempt in told["attempts"]] == [d.url for d in s.decode]
            assert "cannot connect" in told["attempts"][0]["reason"]
            assert "reason" not in told["attempts"][2]
        assert s.control.released == []

    run(scene)


def test_a_decode_that_refuses_the_connection_while_prefill_computes_leaves_prefill_alone():
    async def scene():
        async def prefill(request):
            await s.decode[1].asked.wait()
            return await answers()(request)

        async def decode(request):
            await s.prefill[0].asked.wait()  # no decode answers before
            return await answers()(request)

        async with stage([prefill], [DEAD, decode], dispatch="just-in-time") as s:
            assert (await s.post())[0] == 200
            assert len(s.prefill[0].bodies) == 1
            assert not s.prefill[0].aborted.is_set()

    run(scene)


@pytest.mark.parametrize("result", [{"result": "missing"}, {"result": "local"}, {"result": "partial"}, None])
def test_blocks_are_released_after_an_answer_without_all_of_them(monkeypatch, result):
    monkeypatch.setattr("kvpipe.proxy.results._ABORTED_AFTER_S", 0.0)

    async def scene():
        async with stage() as s:
            s.control.results = {s.decode[0].control: result}
            assert (await s.post())[0] == 200
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, s.prefill[0].handoffs[0])]
            assert s.control.asked.count(s.decode[0].control) == (2 if result is None else 1)

    run(scene)


def test_blocks_are_released_as_soon_as_decode_has_died_after_a_shown_token():
    async def scene():
        second, go = held(chunk("abcd"), DONE)
        async with (
            stage(prefill=[prefilled()], decode=[streams(then=breaks_off), second]) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, s.prefill[0].handoffs[0])]
            go.set()
            assert text_of(await response.content.read()) == "abcd"

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("prefill", [answers(), prefilled()])
def test_a_stream_whose_first_event_is_an_error_goes_to_another_decode(prefill, dispatch):
    async def scene():
        decode = [streams(ERROR_EVENT, DONE), streams(chunk("abcd"), DONE)]
        async with stage([prefill], decode, dispatch=dispatch) as s:
            status, body, _ = await s.post(body=STREAMED)
            assert (status, text_of(body)) == (200, "abcd")

    run(scene)


def test_a_decode_alone_whose_stream_begins_with_an_error_is_replaced():
    async def scene():
        choices = [chunk(text, finish_reason="length") for text in ("ab", "cd")]
        async with stage(decode=[streams(ERROR_EVENT, DONE), streams(*choices, DONE)]) as s:
            status, body, _ = await s.post(body=STREAMED | {"n": 2})
            assert (status, text_of(body)) == (200, "abcd")

    run(scene)


def test_the_last_decodes_error_event_becomes_the_status_when_nothing_was_shown():
    async def scene():
        async with stage(decode=[streams(ERROR_EVENT, DONE)]) as s:
            status, body, headers = await s.post(body=STREAMED)
            assert (status, headers["Content-Type"]) == (500, "application/json")
            assert b"data: " + body == ERROR_EVENT.strip()
            assert headers["x-kvpipe-handoff"] == s.decode[0].handoffs[0]

    run(scene)


def test_a_client_error_as_first_event_reaches_the_client_with_its_status():
    async def scene():
        event = ERROR_EVENT.replace(b"500", b"400")
        async with stage(decode=[streams(event, DONE), answers()]) as s:
            assert (await s.post(body=STREAMED))[0] == 400
            assert s.decode[1].bodies == []
            await s.control.until_released()

    run(scene)


@pytest.mark.parametrize("failure", [DEAD, BUSY])
def test_decode_answers_alone_when_no_prefill_is_left(failure):
    async def scene():
        async with stage(prefill=[failure] * 3) as s:
            status, _, headers = await s.post()
            assert status == 200
            assert "x-kvpipe-handoff" not in headers
            assert s.decode[0].bodies == [REQUEST]
            assert (await metrics(s))["kvpipe_prefill_fallbacks_total",] == 1

    run(scene)


def test_after_a_shown_token_every_remaining_decode_may_be_asked_and_status_tells_of_the_one_that_answered():
    async def scene():
        first, go = held(chunk("xb"), DONE)
        last = streams(chunk("a"), chunk("bcd", finish_reason="length"), DONE)
        control = RecordingControl()
        async with (
            stage(prefill=[prefilled()], decode=[first, BUSY, BUSY, DEAD, BUSY, last], control=control) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            control.results = {s.decode[5].control: {"result": "missing", "reason": "no producer was named"}}
            shown = await response.content.readany()
            go.set()
            assert text_of(shown + await response.content.read()) == "abcd"
            [answered] = s.decode[5].handoffs
            told = await status_of(s, response.headers["x-kvpipe-handoff"])
            assert told["result"] == "missing"
            assert told["attempts"][-1] == {"handoff": answered, "decode": s.decode[5].url}
            assert [attempt["decode"] for attempt in told["attempts"]] == [d.url for d in s.decode]
            reasons = [attempt["reason"] for attempt in told["attempts"][:-1]]
            assert "prefill had sampled" in reasons[0]
            assert ["busy" in reason for reason in reasons[1:]] == [True, True, False, True]
            await counted(s, "kvpipe_handoffs_total", "missing")
            assert await status_of(s, answered) == told

    run(scene)


def test_a_lone_decode_that_contradicts_gets_one_second_chance():
    async def scene():
        first, go = held(chunk("x"))
        async with (
            stage(prefill=[prefilled()], decode=[first]) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            shown = await response.content.readany()
            go.set()
            assert parsed(shown + await response.content.read())[-1]["error"]["code"] == 502
            assert len(s.decode[0].bodies) == 2

    run(scene)


def test_a_prefill_that_fails_beside_a_decode_that_is_not_reached_leaves_no_task_waiting():
    async def scene():
        async with stage([DEAD], [DEAD], dispatch="just-in-time") as s:
            assert (await s.post())[0] == 502

    run(scene)


def test_a_client_that_leaves_a_resumed_stream_ends_it():
    async def scene():
        second, _ = held()
        async with stage(prefill=[prefilled()], decode=[streams(then=breaks_off), second]) as s:
            posting = asyncio.create_task(s.post(body=STREAMED))
            await s.decode[1].asked.wait()
            posting.cancel()
            await s.decode[1].aborted.wait()

    run(scene)
