import asyncio

import orjson
import pytest

from kvpipe.transfer_params import consume, produce

from .harness import CHAT, COMPLETIONS, DEAD, EVENTS, REQUEST, answers, breaks_off, never_ends, run, stage, streams

DISPATCHES = ["just-in-time", "sequential"]
BAD_REQUEST = (422, b'{"error":"no"}', "application/problem+json")


def is_same(answer, expected):
    status, body, headers = answer
    return (status, body, headers["Content-Type"]) == expected


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_prefill_and_decode_get_one_handoff_and_the_client_gets_decodes_answer(dispatch):
    async def scene():
        async with stage(decode=[answers(body=b'{"id":"d"}')], dispatch=dispatch) as s:
            status, body, headers = await s.post()
            await s.prefill[0].asked.wait()  # decode may have answered before
            [p], [d] = s.prefill[0].bodies, s.decode[0].bodies
            handoff = headers["x-kvpipe-handoff"]
            assert (status, body) == (200, b'{"id":"d"}')
            assert len(bytes.fromhex(handoff)) == 16
            assert p == REQUEST | {
                "max_tokens": 1,
                "n": 1,
                "stream": False,
                "kv_transfer_params": produce(handoff),
            }
            assert d == REQUEST | {"kv_transfer_params": consume(handoff, s.prefill[0].control)}
            assert s.control.released == []

    run(scene)


def test_sequential_dispatch_asks_decode_only_when_prefill_has_answered():
    async def scene():
        may_answer = asyncio.Event()

        async def waits(request):
            await may_answer.wait()
            return await answers()(request)

        async with stage([waits]) as s:
            posting = asyncio.create_task(s.post())
            await s.prefill[0].asked.wait()
            await asyncio.sleep(0.05)
            assert not s.decode[0].asked.is_set()
            may_answer.set()
            assert (await posting)[0] == 200

    run(scene)


def test_just_in_time_dispatch_asks_decode_before_prefill_has_answered():
    async def scene():
        p_asked, d_asked = asyncio.Event(), asyncio.Event()

        async def prefill(request):
            p_asked.set()
            await d_asked.wait()
            return await answers()(request)

        async def decode(request):
            d_asked.set()
            await p_asked.wait()
            return await answers()(request)

        async with stage([prefill], [decode], dispatch="just-in-time") as s:
            assert (await s.post())[0] == 200

    run(scene)


def test_clients_transfer_parameters_never_reach_an_instance():
    async def scene():
        mine = {"kv_transfer_params": {"remote_block_ids": [1]}}
        async with stage() as s:
            await s.post(body=REQUEST | mine)
            await s.post(body=REQUEST | mine | {"n": 2})
            bodies = s.prefill[0].bodies + s.decode[0].bodies
            assert len(bodies) == 3
            assert all(b"remote_block_ids" not in orjson.dumps(body) for body in bodies)

    run(scene)


def test_requests_for_decode_alone_do_not_touch_prefill():
    async def scene():
        async with stage(decode=[answers(500), answers(body=b"2")]) as s:
            status, body, headers = await s.post(body=REQUEST | {"n": 2})
            assert (status, body) == (200, b"2")
            assert "x-kvpipe-handoff" not in headers
            assert s.prefill[0].bodies == []
            assert s.decode[1].bodies == [REQUEST | {"n": 2}]

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_prefills_4xx_reaches_the_client_as_it_is(dispatch):
    async def scene():
        async with stage([answers(*BAD_REQUEST), answers()], [never_ends], dispatch=dispatch) as s:
            assert is_same(await s.post(CHAT), BAD_REQUEST)
            assert s.prefill[1].bodies == []
            if dispatch == "sequential":
                assert s.decode[0].bodies == []

    run(scene)


def test_prefills_4xx_aborts_decode_beside_it():
    async def scene():
        d_asked = asyncio.Event()

        async def refuses(request):
            await d_asked.wait()
            return await answers(*BAD_REQUEST)(request)

        async def decode(request):
            d_asked.set()
            return await never_ends(request)

        async with stage([refuses], [decode], dispatch="just-in-time") as s:
            assert is_same(await s.post(), BAD_REQUEST)
            await s.decode[0].aborted.wait()

    run(scene)


def test_decodes_4xx_reaches_the_client_as_it_is_and_the_handoff_is_released():
    async def scene():
        async with stage(decode=[answers(*BAD_REQUEST), answers()]) as s:
            assert is_same(await s.post(), BAD_REQUEST)
            assert s.decode[1].bodies == []
            await s.control.until_released()
            assert s.control.released == [(s.prefill[0].control, s.prefill[0].handoffs[0])]

    run(scene)


@pytest.mark.parametrize("failure", [answers(500), DEAD, breaks_off])
def test_a_failing_prefill_is_followed_by_the_next_with_a_new_handoff(failure):
    async def scene():
        async with stage([failure, answers()]) as s:
            status, _, headers = await s.post()
            assert status == 200
            assert s.prefill[1].handoffs == [headers["x-kvpipe-handoff"]]
            assert headers["x-kvpipe-handoff"] not in s.prefill[0].handoffs
            assert len(s.decode[0].bodies) == 1

    run(scene)


@pytest.mark.parametrize("failure", [answers(500), breaks_off])
def test_decode_that_was_asked_goes_on_alone_when_prefill_breaks(failure):
    """Decode computes then what prefill broke on: another prefill could be a third engine that the request ends."""

    async def scene():
        async def fails(request):
            await s.decode[0].asked.wait()
            return await failure(request)

        async def decode(request):
            await s.prefill[0].asked.wait()
            return await answers()(request)

        async with stage([fails, answers()], [decode], dispatch="just-in-time") as s:
            assert (await s.post())[0] == 200
            assert (len(s.decode[0].bodies), s.prefill[1].bodies) == (1, [])

    run(scene)


def test_a_failing_prefill_aborts_decode_beside_it_which_is_asked_anew():
    async def scene():
        d_asked, p_done = asyncio.Event(), asyncio.Event()

        async def fails(request):
            await d_asked.wait()
            return await answers(503)(request)

        async def works(request):
            p_done.set()
            return await answers()(request)

        async def decode(request):
            d_asked.set()
            if len(s.decode[0].bodies) == 1:
                return await never_ends(request)
            await p_done.wait()  # as the connector waits for P's KV
            return await answers()(request)

        async with stage([fails, works], [decode], dispatch="just-in-time") as s:
            status, _, headers = await s.post()
            assert status == 200
            assert s.prefill[1].handoffs == [headers["x-kvpipe-handoff"]]
            assert s.decode[0].handoffs == s.prefill[0].handoffs + s.prefill[1].handoffs
            await s.decode[0].aborted.wait()

    run(scene)


def test_an_unreachable_prefill_is_replaced_beside_decode():
    async def scene():
        p_done = asyncio.Event()

        async def works(request):
            p_done.set()
            return await answers()(request)

        async def decode(request):
            await p_done.wait()
            return await answers()(request)

        async with stage([DEAD, works], [decode], dispatch="just-in-time") as s:
            status, _, headers = await s.post()
            assert status == 200
            assert s.prefill[1].handoffs == [headers["x-kvpipe-handoff"]]

    run(scene)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(answers(503, b"full"), "answered 503: full"), (DEAD, "cannot connect")],
)
def test_when_every_prefill_fails_and_decode_may_not_work_alone_502_names_instance_and_reason(failure, reason):
    async def scene():
        async with stage([failure, failure], on_prefill_failure="fail") as s:
            status, body, _ = await s.post()
            error = orjson.loads(body)["error"]
            assert (status, error["code"], error["type"]) == (502, 502, "BadGatewayError")
            assert f"prefill instance {s.prefill[1].url}: {reason}" in error["message"]
            assert s.decode[0].bodies == []

    run(scene)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("failure", [answers(500), breaks_off, streams(then=breaks_off)])
def test_a_decode_failing_before_its_first_byte_is_replaced_and_its_handoff_released(failure, dispatch):
    async def scene():
        async with stage(decode=[failure, answers(body=b"2")], dispatch=dispatch) as s:
            status, body, headers = await s.post()
            assert (status, body) == (200, b"2")
            await s.control.until_released()
            [(address, released)] = s.control.released
            assert address == s.prefill[0].control
            assert s.decode[1].handoffs == [headers["x-kvpipe-handoff"]] != [released]
            if dispatch == "sequential":  # else decode may answer before prefill is asked
                assert s.prefill[0].handoffs == [released, *s.decode[1].handoffs]

    run(scene)


def test_the_last_decodes_5xx_reaches_the_client_as_it_is_with_the_handoffs_id():
    async def scene():
        failure = (503, b'{"error":"later"}', "application/json")
        async with stage(decode=[answers(500), answers(*failure)]) as s:
            answer = await s.post()
            assert is_same(answer, failure)
            assert answer[2]["x-kvpipe-handoff"] == s.decode[1].handoffs[0]
            await s.control.until_released(2)

    run(scene)


def test_when_no_decode_can_be_reached_502_names_instance_and_reason():
    async def scene():
        async with stage(decode=[DEAD]) as s:
            status, body, _ = await s.post()
            assert status == 502
            assert f"decode instance {s.decode[0].url}: cannot connect".encode() in body
            await s.control.until_released()

    run(scene)


def test_prefill_and_decode_take_turns_and_requests_for_decode_alone_count_too():
    async def scene():
        async with stage([answers()] * 2, [answers()] * 3) as s:
            for _ in range(6):
                await s.post()
            await s.post(body=REQUEST | {"n": 2})
            assert [len(i.bodies) for i in s.prefill] == [3, 3]
            assert sorted(len(i.bodies) for i in s.decode) == [2, 2, 3]

    run(scene)


def test_a_prefill_that_fails_after_decode_beside_it_has_begun_does_not_disturb_the_answer():
    async def scene():
        begun, failed = asyncio.Event(), asyncio.Event()

        async def prefill(request):
            await begun.wait()
            failed.set()
            return await answers(500)(request)

        async def decode(request):
            return await streams(EVENTS[0], then=_continue)(request)

        async def _continue(request):
            begun.set()
            await failed.wait()
            await asyncio.sleep(0.05)

        async with stage([prefill, answers()], [decode], dispatch="just-in-time") as s:
            status, body, _ = await s.post(COMPLETIONS, REQUEST | {"stream": True})
            assert (status, body) == (200, EVENTS[0])
            assert s.prefill[1].bodies == []

    run(scene)
