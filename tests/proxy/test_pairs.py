"""A D that cannot use a P is told of early: in the log once, in `/health`, and never on the way of a request."""

import asyncio
import logging

import pytest

from kvpipe import AuthenticationError, ConnectError, _kvpipe
from kvpipe.control import ControlClient
from kvpipe.proxy import Instance, ProxyConfig, pairs
from kvpipe.proxy.pairs import Pairs
from tests.proxy.harness import RecordingControl, answers, run, stage
from tests.proxy.test_app import get

PREFILL = tuple(Instance(f"http://p{n}:1", f"p{n}:7") for n in range(2))
DECODE = tuple(Instance(f"http://d{n}:1", f"d{n}:7") for n in range(2))
UP = {"prefill": {p.url: "ok" for p in PREFILL}, "decode": {d.url: "ok" for d in DECODE}}
MISMATCH = 'incompatible peer p0:7: dtype is "float32" here and "bfloat16" there'


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """The next round follows at once."""
    monkeypatch.setattr(pairs, "_CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(pairs, "_RETRY_INTERVAL_S", 0.001)


def config(prefill=PREFILL, decode=DECODE, **settings):
    return ProxyConfig(prefill=prefill, decode=decode, **settings)


def control_with(reasons):
    control = RecordingControl()
    control.reasons = {(d.control, p.control): reason for (d, p), reason in reasons.items()}
    return control


def test_every_pair_is_checked_at_start_up_and_again():
    async def scene():
        control = RecordingControl()
        async with Pairs(config(), control) as checked:
            await control.until_checked(8)
        assert set(control.checks) == {(d.control, p.control) for d in DECODE for p in PREFILL}
        assert checked.failures() == {}
        assert checked.report(**UP) == (True, {"status": "ok", **UP})

    run(scene)


def test_a_mismatch_is_logged_once_and_named_in_health_and_the_rest_works_on(caplog):
    async def scene():
        control = control_with({(DECODE[0], PREFILL[0]): MISMATCH})
        async with Pairs(config(), control) as checked:
            await control.until_checked(16)
        is_up, report = checked.report(**UP)
        assert (is_up, report["pairs"]) == (True, {DECODE[0].url: {PREFILL[0].url: MISMATCH}})
        assert report["decode"] == UP["decode"]

    with caplog.at_level(logging.INFO, "kvpipe.proxy.pairs"):
        run(scene)
    assert [record.message for record in caplog.records] == [
        f"pair.unusable decode={DECODE[0].url} prefill={PREFILL[0].url} reason={MISMATCH!r}"
    ]


def test_an_instance_without_a_partner_is_not_usable():
    async def scene():
        control = control_with({(DECODE[0], p): MISMATCH for p in PREFILL})
        async with Pairs(config(on_prefill_failure="fail"), control) as checked:
            await control.until_checked(8)
        is_up, report = checked.report(**UP)
        assert is_up
        assert report["decode"] == {DECODE[0].url: f"no partner: {MISMATCH}", DECODE[1].url: "ok"}
        assert report["prefill"] == UP["prefill"]
        only = {"prefill": UP["prefill"], "decode": {DECODE[0].url: "ok", DECODE[1].url: "answered 503"}}
        assert checked.report(**only)[0] is False

    run(scene)


def test_a_prefill_that_no_decode_can_use_is_not_usable():
    async def scene():
        control = control_with({(d, PREFILL[0]): MISMATCH for d in DECODE})
        async with Pairs(config(), control) as checked:
            await control.until_checked(8)
        _, report = checked.report(**UP)
        assert report["prefill"] == {PREFILL[0].url: f"no partner: {MISMATCH}", PREFILL[1].url: "ok"}

    run(scene)


def test_a_pair_that_is_repaired_is_usable_again_and_said_so(caplog):
    async def scene():
        control = control_with({(DECODE[0], PREFILL[0]): MISMATCH})
        async with Pairs(config(), control) as checked:
            await control.until_checked(4)
            control.reasons.clear()
            await control.until_checked(len(control.checks) + 8)
            assert checked.failures() == {}

    with caplog.at_level(logging.INFO, "kvpipe.proxy.pairs"):
        run(scene)
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["pair.unusable", "pair.usable"]


@pytest.mark.parametrize(
    ("error", "is_usable"), [(AuthenticationError("another token"), False), (ConnectError("cannot reach d0:7"), True)]
)
def test_a_decode_that_refuses_the_token_is_not_usable_and_one_that_is_not_reached_may_be(error, *, is_usable):
    async def scene():
        control = control_with({(d, p): error for d in DECODE for p in PREFILL})
        async with Pairs(config(), control) as checked:
            await control.until_checked(8)
        _, report = checked.report(**UP)
        assert report["status"] == ("ok" if is_usable else "degraded")
        assert report["pairs"][DECODE[0].url][PREFILL[0].url] == f"control port of decode: {error}"

    run(scene)


def test_what_is_not_known_yet_counts_as_usable():
    async def scene():
        checked = Pairs(config(), RecordingControl())
        assert checked.report(**UP) == (True, {"status": "ok", **UP})

    run(scene)


def test_a_decode_without_a_control_address_and_an_instance_in_both_roles_are_not_asked():
    async def scene():
        control = RecordingControl()
        decode = Instance("http://d9:1"), Instance("http://p0:1", PREFILL[0].control)
        async with Pairs(config(decode=decode), control) as checked:
            await control.until_checked(2)
        assert set(control.checks) == {(PREFILL[0].control, PREFILL[1].control)}
        states = {decode[0].url: "ok", decode[1].url: "ok"}
        assert checked.report(UP["prefill"], states)[0]

    run(scene)


def test_only_some_checks_run_at_a_time():
    async def scene():
        running, most = 0, 0

        class Slow(RecordingControl):
            async def check(self, *arguments):
                nonlocal running, most
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1
                return await super().check(*arguments)

        control = Slow()
        many = [tuple(Instance(f"http://{r}{n}:1", f"{r}{n}:7") for n in range(9)) for r in "pd"]
        async with Pairs(config(*many), control):
            await control.until_checked(81)
        assert most == pairs._NUM_CONCURRENT

    run(scene)


def test_health_tells_of_pairs_and_requests_do_not_wait_for_checks():
    class Stuck(RecordingControl):
        async def check(self, *arguments):
            await super().check(*arguments)
            if self.is_stuck:
                await asyncio.Event().wait()
            return MISMATCH

    async def scene():
        control = Stuck()
        control.is_stuck = True
        async with stage([answers()], [answers()], control) as s:
            await control.until_checked()
            status, _, _ = await s.post()
            assert status == 200
            assert (await get(s, "/health"))[0] == 200
        control.is_stuck = False
        async with stage([answers()], [answers()], control) as s:
            await control.until_checked(2)
            status, report = await get(s, "/health")
            assert (status, report["status"]) == (200, "degraded")  # decode computes prompts too
            assert report["pairs"] == {s.decode[0].url: {s.prefill[0].url: MISMATCH}}

    run(scene)


@pytest.mark.parametrize(("token", "said"), [("", 'dtype is "a" here and "b" there'), ("other", "KVPIPE_TOKEN")])
def test_real_control_ports_tell_of_another_fingerprint_and_of_another_token(token, said):
    class Told(ControlClient):
        def __init__(self):
            super().__init__("")
            self.is_told = asyncio.Event()

        async def check(self, *arguments):
            reason = await super().check(*arguments)
            self.is_told.set()
            return reason

    async def scene():
        decode = _kvpipe.Control("127.0.0.1:0", b"", "d", [("dtype", "a")])
        decode.allow_checks([], [])
        prefill = _kvpipe.Control("127.0.0.1:0", token.encode(), "p", [("dtype", "b")])
        client = Told()
        try:
            async with Pairs(
                config((Instance("http://p:1", prefill.address),), (Instance("http://d:1", decode.address),)), client
            ) as checked:
                await client.is_told.wait()
            assert said in checked.failures()["http://d:1"]["http://p:1"]
            assert not checked.is_usable("http://d:1", "http://p:1")
        finally:
            for port in (client, decode, prefill):
                port.close()

    run(scene)
