"""Descriptions of the engines, which the proxy has before a request waits for them."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from kvpipe.exceptions import ConnectError
from kvpipe.proxy.control import FailureLog
from kvpipe.proxy.descriptions import Descriptions, StoreDescriber
from kvpipe.proxy.upstream import Upstream, open_session

from .harness import RecordingControl, StandIn, answers, describes, never_ends, run, stage, streams
from .test_early_streams import STREAMED, prefilled
from .test_early_token import DONE, chunk, text_of


class CountingControl(RecordingControl):
    """Counts questions, and answers them when it may."""

    def __init__(self, *, is_silent=False):
        super().__init__()
        self.is_silent = is_silent
        self.described = []

    async def describe(self, address, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        self.described.append(address)
        self._changed.set()
        if self.is_silent:
            await never_ends(None)
        return await super().describe(address, timeout)

    async def until_described(self, num):
        while len(self.described) < num:
            self._changed.clear()
            await self._changed.wait()


async def described(control, *addresses):
    descriptions = Descriptions(control, addresses, FailureLog(), 5.0)
    await descriptions.start()
    return descriptions


def test_no_request_waits_for_a_silent_control_port(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.descriptions._START_S", 0.01)

    async def scene():
        control = CountingControl(is_silent=True)
        decode = [streams(chunk("abcd"), DONE)]
        async with stage([prefilled()], decode, control=control, control_timeout_s=1000.0) as s:
            _, body, _ = await s.post(body=STREAMED)
            assert body == chunk("abcd") + DONE  # no early token

    run(scene)


class HangingControl(RecordingControl):
    """Answers neither when a prefill is due nor when a consumer has come."""

    def __init__(self):
        super().__init__()
        self.hanging = set()

    async def subscribe(self, *_):
        self.hanging.add("subscribe")
        return await never_ends(None)

    async def watched(self, *_):
        self.hanging.add("watched")
        return await never_ends(None)


def test_no_request_waits_for_a_control_port_that_never_says_when_to_ask_decode():
    async def scene():
        control = HangingControl()
        decode = [streams(chunk("ab"), chunk("cd"), DONE)]
        async with stage([prefilled()], decode, control=control, dispatch="just-in-time") as s:
            _, body, _ = await s.post(body=STREAMED)
            assert text_of(body) == "abcd"
        assert control.hanging == {"subscribe", "watched"}

    run(scene)


def test_requests_ask_no_control_port_for_a_description():
    async def scene():
        control = CountingControl()
        async with stage([prefilled()], [streams(chunk("abcd"), DONE)], control=control) as s:
            for _ in range(5):
                _, body, _ = await s.post(body=STREAMED)
                assert text_of(body) == "abcd"
            assert sorted(control.described) == [s.decode[0].control, s.prefill[0].control]

    run(scene)


def test_descriptions_are_read_again_after_an_interval(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.descriptions._REFRESH_S", 0.02)
    monkeypatch.setattr("kvpipe.proxy.descriptions._MIN_INTERVAL_S", 0.01)

    async def scene():
        control = CountingControl()
        descriptions = await described(control, "d:1")
        control.description = {"engine_id": "new"}
        while descriptions.of("d:1") != {"engine_id": "new"}:
            await control.until_described(len(control.described) + 1)
            await asyncio.sleep(0)
        await descriptions.close()

    run(scene)


def test_the_description_of_an_instance_that_failed_is_read_again(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.descriptions._REFRESH_S", 1000.0)
    monkeypatch.setattr("kvpipe.proxy.descriptions._MIN_INTERVAL_S", 0.01)

    async def scene():
        control = CountingControl()
        async with stage(decode=[answers(503)], control=control) as s:
            await s.post()
            await control.until_described(3)
            assert control.described[2] == s.decode[0].control

    run(scene)


def test_an_address_that_does_not_answer_is_asked_again_before_the_interval_is_over(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.descriptions._REFRESH_S", 1000.0)
    monkeypatch.setattr("kvpipe.proxy.descriptions._MIN_INTERVAL_S", 0.01)

    async def scene():
        control = CountingControl()
        working, control.description = control.description, ConnectError("refused")
        descriptions = await described(control, "d:1")
        control.description = working  # its engine has started
        await control.until_described(2)
        await asyncio.sleep(0)
        assert (descriptions.of("d:1"), descriptions.error("d:1")) == (working, "")
        await descriptions.close()

    run(scene)


def test_an_instance_that_does_not_answer_has_an_error_and_no_description():
    async def scene():
        control = CountingControl()
        control.description = ConnectError("refused")
        descriptions = await described(control, "d:1", "")
        assert (descriptions.of("d:1"), descriptions.error("d:1")) == (None, "refused")
        assert (descriptions.of(""), descriptions.error("")) == (None, "")
        assert control.described == ["d:1"]
        await descriptions.close()

    run(scene)


# --- from vLLM's metrics

FORCES = {"forces_first_tokens": True, "reasoning_parser": ""}
WORKING = describes(answers())


def metrics(*lines):
    """A D with these lines in its metrics."""

    async def behaviour(_):
        return web.Response(text="\n".join(lines))

    return behaviour


def sample(labels, value):
    return f"vllm:kvpipe_store_forces_first_tokens{{{labels}}} {value}"


ONE, OTHER = (sample(f'engine="{engine}",reasoning_parser=""', "1.0") for engine in "01")


@asynccontextmanager
async def described_from_metrics(behaviour):
    """A D, and its descriptions."""
    decode = StandIn("d", behaviour)
    async with AsyncExitStack() as stack:
        stack.push_async_callback((await decode.serve()).cleanup)
        session = await stack.enter_async_context(open_session(5.0, 5.0))
        descriptions = await described(StoreDescriber(Upstream(session, 5.0)), decode.url)
        stack.push_async_callback(descriptions.close)
        yield decode, descriptions


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (WORKING, FORCES),
        (metrics(ONE, OTHER), FORCES),
        (metrics(ONE, OTHER.replace("1.0", "0.0")), FORCES | {"forces_first_tokens": False}),
        (metrics(sample('reasoning_parser="olmo3",tail="x"', "1")), FORCES | {"reasoning_parser": "olmo3"}),
        (metrics("vllm:something_else 1.0"), FORCES | {"forces_first_tokens": False}),
    ],
)
def test_an_engine_is_described_by_its_metrics(behaviour, expected):
    async def scene():
        async with described_from_metrics(behaviour) as (decode, descriptions):
            assert descriptions.of(decode.url) == expected

    run(scene)


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        (answers(503, ONE.encode()), "answered 503"),
        (answers(404, ONE.encode()), "answered 404"),
        (metrics(ONE, sample('reasoning_parser=""', "one")), "expected a reasoning_parser, and 0 or 1"),
        (metrics(sample('reasoning_parser=""', "1.0 x")), "expected a reasoning_parser, and 0 or 1"),
        (metrics(sample('reasoning_parser=""', "0.5")), "expected a reasoning_parser, and 0 or 1"),
        (metrics(sample('engine="0"', "1.0")), "expected a reasoning_parser, and 0 or 1"),
    ],
)
def test_an_engine_whose_metrics_fail_has_no_description_until_they_work(monkeypatch, failing, reason):
    monkeypatch.setattr("kvpipe.proxy.descriptions._REFRESH_S", 1000.0)
    monkeypatch.setattr("kvpipe.proxy.descriptions._MIN_INTERVAL_S", 0.01)

    async def scene():
        async with described_from_metrics(failing) as (decode, descriptions):
            assert descriptions.of(decode.url) is None
            assert reason in descriptions.error(decode.url)
            decode.behaviour = WORKING
            for _ in range(2):  # the second question follows the answer to the first
                decode.asked.clear()
                descriptions.refresh(decode.url)
                await decode.asked.wait()
            assert (descriptions.of(decode.url), descriptions.error(decode.url)) == (FORCES, "")

    run(scene)


def test_an_address_that_is_forgotten_is_asked_no_more_not_even_the_question_that_is_on_its_way():
    class Hanging(RecordingControl):
        def __init__(self):
            super().__init__()
            self.begun, self.ended = asyncio.Event(), asyncio.Event()

        async def describe(self, address, timeout=5.0):  # noqa: ASYNC109 - the real one has it
            self.begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()

    async def scene():
        control = Hanging()
        descriptions = await described(control)
        descriptions.follow("a:1")
        await control.begun.wait()
        descriptions.forget("a:1")
        await control.ended.wait()
        await descriptions.close()

    run(scene)
