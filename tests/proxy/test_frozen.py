"""Instances that are stopped (SIGSTOP), as a hung host looks: real processes with HTTP and a real control port."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvpipe import ConnectError, _kvpipe

from .harness import COMPLETIONS, REQUEST, RecordingControl, answers, never_ends, run, stage, streams
from .stoppable import DESCRIPTION, FROZEN_AFTER_S, real_control, stoppable
from .test_early_streams import STREAMED, prefilled
from .test_early_token import DONE, chunk, text_of
from .test_metrics import metrics, replaced

LIMIT_S = 90.0


@asynccontextmanager
async def frozen_stage(prefill=None, decode=None, **settings):
    with real_control() as (control, port):
        options = {
            "control": control,
            "ports": (port, port),
            "frozen_after_s": FROZEN_AFTER_S,
            "control_timeout_s": 1.0,
        }
        async with stage(prefill, decode, **options | settings) as s:
            yield s


def scene(play):
    """Runs a scene that gets a stoppable instance."""

    async def bounded():
        async with stoppable() as instance:
            await play(instance)

    run(bounded, LIMIT_S)


@pytest.mark.parametrize("dispatch", ["just-in-time", "sequential"])
def test_requests_at_a_frozen_prefill_are_answered_by_decode_and_released_at_its_thaw(dispatch):
    @scene
    async def _(p):
        async with frozen_stage([p], dispatch=dispatch) as s:
            posting = [asyncio.create_task(s.post()) for _ in range(7)]
            state = await p.until_state(s, lambda state: len(state["handoffs"]) == 7)
            p.stop()
            assert [status for status, _, _ in await asyncio.gather(*posting)] == [200] * 7
            # It gets nothing new.
            assert (await s.post())[0] == 200
            assert replaced(await metrics(s)) == {}
            assert (await metrics(s))["kvpipe_prefill_fallbacks_total",] == 8
            p.go_on()
            await p.until_state(s, lambda now: set(now["released"]) >= set(state["handoffs"]))
            assert len((await p.until_state(s, bool))["handoffs"]) == 7
            # After its trial it is one as before.
            async with s.client.post(p.url + "/go"):
                pass
            while len((await p.until_state(s, bool))["handoffs"]) < 9:
                assert (await s.post())[0] == 200


def test_a_release_that_fails_at_the_thaw_is_tried_again(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.handoff._RELEASE_INTERVAL_S", 0.01)

    class Failing(RecordingControl):
        num_tries = 0

        async def describe(self, address, timeout=5.0):  # noqa: ASYNC109 - the real one has it
            raise ConnectError("silent")

        async def release(self, address, handoff, timeout=5.0):  # noqa: ASYNC109 - the real one has it
            self.num_tries += 1
            if self.num_tries < 3:
                raise ConnectError("no session yet")
            return await super().release(address, handoff)

    @scene
    async def _(p):
        async with stage([p], control=Failing(), frozen_after_s=FROZEN_AFTER_S) as s:
            posting = asyncio.create_task(s.post())
            await p.until_state(s, lambda state: len(state["handoffs"]) == 1)
            p.stop()
            assert (await posting)[0] == 200
            assert s.control.num_tries == 0
            p.go_on()
            await s.control.until_released()
            assert s.control.num_tries == 3


@pytest.mark.parametrize("dispatch", ["just-in-time", "sequential", "store"])
def test_requests_at_a_frozen_prefill_go_to_another(dispatch):
    @scene
    async def _(p):
        async with frozen_stage([p, answers()], dispatch=dispatch) as s:
            posting = [asyncio.create_task(s.post()) for _ in range(4)]
            await p.until_state(s, lambda state: len(state["handoffs"]) == 2)
            p.stop()
            assert [status for status, _, _ in await asyncio.gather(*posting)] == [200] * 4
            assert len(s.prefill[1].bodies) == 4
            assert replaced(await metrics(s)) == {("kvpipe_replaced_instances_total", "frozen", "prefill"): 2}


@pytest.mark.parametrize("dispatch", ["just-in-time", "sequential", "store"])
@pytest.mark.parametrize("body", [REQUEST, STREAMED])
def test_a_request_at_a_frozen_decode_goes_to_another(body, dispatch):
    @scene
    async def _(d):
        other = streams(chunk("abcd"), DONE) if body is STREAMED else answers()
        async with frozen_stage(None, [d, other], dispatch=dispatch) as s:
            posting = asyncio.create_task(s.post(body=body))
            await d.until_state(s, lambda state: len(state["handoffs"]) == 1)
            d.stop()
            assert (await posting)[0] == 200
            assert (await s.post(body=body))[0] == 200
            assert len(s.decode[1].bodies) == 2


def test_a_stream_that_has_prefills_token_leaves_a_frozen_decode():
    @scene
    async def _(d):
        async with (
            frozen_stage([prefilled()], [d, streams(chunk("abcd"), DONE)]) as s,
            s.client.post(s.url + COMPLETIONS, json=STREAMED) as response,
        ):
            assert text_of(await response.content.readany()) == "ab"
            d.stop()
            assert text_of(await response.content.read()) == "cd"


def test_a_decode_that_froze_during_the_prefill_is_not_waited_for():
    @scene
    async def _(d):
        may_answer = asyncio.Event()

        async def waits(request):
            await may_answer.wait()
            return await answers()(request)

        async with frozen_stage([waits], [d, answers()]) as s:
            first = asyncio.create_task(s.post())
            await s.prefill[0].asked.wait()
            alone = [asyncio.create_task(s.post(body=REQUEST | {"n": 2})) for _ in range(4)]
            await d.until_state(s, lambda state: len(state["handoffs"]) >= 1)
            d.stop()
            assert [status for status, _, _ in await asyncio.gather(*alone)] == [200] * 4
            may_answer.set()
            assert (await first)[0] == 200


def test_models_are_those_of_a_decode_that_is_not_frozen():
    @scene
    async def _(d):
        async with frozen_stage(None, [d, answers()]) as s:
            d.stop()
            for _ in range(2):
                async with s.client.get(s.url + "/v1/models") as response:
                    assert response.status == 200


def test_health_reports_a_frozen_instance_without_asking_it():
    @scene
    async def _(d):
        async with frozen_stage(None, [d, answers()], connect_timeout_s=LIMIT_S) as s:
            posting = asyncio.create_task(s.post(body=REQUEST | {"n": 2}))
            await d.until_state(s, lambda state: len(state["handoffs"]) == 1)
            d.stop()
            assert (await posting)[0] == 200
            async with asyncio.timeout(LIMIT_S / 4), s.client.get(s.url + "/health") as response:
                assert (response.status, (await response.json())["status"]) == (200, "ok")
                states = (await response.json())["decode"]
            assert states == {d.url: "is frozen: neither HTTP nor its control port answers", s.decode[1].url: "ok"}
            d.go_on()
            async with asyncio.timeout(LIMIT_S / 4):
                while "is frozen" in states[d.url]:
                    await asyncio.sleep(0.05)
                    async with s.client.get(s.url + "/health") as response:
                        states = (await response.json())["decode"]


def test_the_only_decode_keeps_its_requests_while_it_is_frozen_and_new_ones_get_503():
    @scene
    async def _(d):
        async with frozen_stage(None, [d]) as s:
            posting = asyncio.create_task(s.post())
            await d.until_state(s, lambda state: len(state["handoffs"]) == 1)
            async with s.client.post(d.url + "/go"):
                d.stop()
            late = []
            while not late:
                status, answer, _ = await refused_or_none(s)
                late += [answer] if status == 503 else []
            assert b"is frozen: neither HTTP nor its control port answers" in late[0]
            d.go_on()
            assert (await posting)[0] == 200
            while (await s.post())[0] != 200:  # noqa: ASYNC110 - what is awaited is the proxy's
                await asyncio.sleep(0.05)


def test_a_request_at_a_frozen_decode_goes_to_another_one_that_goes_on_before_it():
    @scene
    async def _(first):
        async with stoppable() as second, frozen_stage(None, [first, second]) as s:
            posting = [asyncio.create_task(s.post()) for _ in range(2)]
            for each in (first, second):
                await each.until_state(s, lambda state: len(state["handoffs"]) == 1)
            first.stop()
            # It reads that it may answer when it thaws.
            going = asyncio.create_task(s.client.post(first.url + "/go"))
            await second.until_state(s, lambda state: len(state["handoffs"]) == 2)
            second.stop()
            while (await refused_or_none(s))[0] != 503:
                pass
            first.go_on()
            done, _ = await asyncio.wait(posting, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result()[0] for task in done] == [200]
            (await going).close()
            second.go_on()
            async with s.client.post(second.url + "/go"):
                pass
            assert [status for status, _, _ in await asyncio.gather(*posting)] == [200, 200]


async def refused_or_none(s):
    """The proxy's refusal; a request that is accepted waits, and is given up."""
    try:
        async with asyncio.timeout(0.5):
            return await s.post()
    except TimeoutError:
        return 0, b"", {}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_at_an_instance_whose_engine_ended_before_its_api_server_goes_to_another(role):
    """vLLM's API server keeps the connections of such requests open, and answers nothing."""

    async def plays():
        engine = _kvpipe.Control("127.0.0.1:0", b"", "engine")
        engine.describe_as(DESCRIPTION)

        async def ends(request):
            if request.method == "POST":
                return await never_ends(request)
            response = web.Response()
            response.force_close()  # as uvicorn, which closes those that are idle
            return response

        with real_control() as (client, of_others):
            ports = (engine.address, of_others) if role == "prefill" else (of_others, engine.address)
            settings = {"frozen_after_s": FROZEN_AFTER_S, "control_timeout_s": 1.0, "silence_timeout_s": LIMIT_S}
            async with stage(**{role: [ends, answers()]}, control=client, ports=ports, **settings) as s:
                first, second = getattr(s, role)
                posting = asyncio.create_task(s.post())
                while not first.bodies:
                    await first.asked.wait()
                    first.asked.clear()
                first.stop_listening()
                # While its engine goes on, it may answer.
                await asyncio.sleep(2 * FROZEN_AFTER_S)
                assert second.bodies == []
                engine.close()
                assert (await posting)[0] == 200
                assert len(second.bodies) == 1

    run(plays, LIMIT_S)


def test_a_silent_prefill_whose_http_port_answers_is_not_frozen():
    async def plays():
        async def computes_long(request):
            return await (answers() if request.method == "GET" else never_ends)(request)

        async with frozen_stage([computes_long], frozen_after_s=0.1, silence_timeout_s=3.0) as s:
            assert (await s.post())[0] == 504

    run(plays)
