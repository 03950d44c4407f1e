"""Probes of an instance whose ports are functions; `test_frozen.py` has real ones."""

import asyncio
import time

import pytest
import uvloop

import kvpipe.proxy.probes
from kvpipe.proxy.health import Health
from kvpipe.proxy.probes import Probes
from kvpipe.proxy.silence import wait_awake
from kvpipe.proxy.tasks import OwnedTasks


async def silent():
    await asyncio.Event().wait()


def half_open():
    health = Health(1.0)
    health.silent(1.0)
    assert health.freeze()
    health.answered(is_http=True)
    return health, Probes("role=prefill", health, silent, silent, OwnedTasks())


def nothing():
    """Called when the instance freezes."""


def test_a_trial_is_ended_by_itself_alone():
    async def scene():
        health, probes = half_open()
        with probes.owing(nothing, is_generation=True):  # the trial
            with pytest.raises(asyncio.CancelledError), probes.owing(nothing, is_generation=True):
                raise asyncio.CancelledError
            assert not health.takes_requests
        assert health.takes_requests

    asyncio.run(scene())


@pytest.mark.parametrize("error", [asyncio.CancelledError, ValueError])
def test_a_trial_that_has_no_answer_is_followed_by_another(error):
    async def scene():
        health, probes = half_open()
        with pytest.raises(error), probes.owing(nothing, is_generation=True):
            raise error
        assert health.takes_requests

    asyncio.run(scene())


def test_a_question_about_an_instance_is_no_trial():
    async def scene():
        health, probes = half_open()
        with probes.owing(nothing, is_generation=False):
            assert health.takes_requests
        with probes.owing(nothing, is_generation=True):
            with probes.owing(nothing, is_generation=False):
                pass
            assert not health.takes_requests

    asyncio.run(scene())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_time_without_cpu_counts_as_one_slice(new_loop):
    timeout_s = 0.5

    async def scene():
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        loop.call_soon(time.sleep, 2 * timeout_s)
        loop.call_soon(answered.set)
        return await wait_awake({asyncio.ensure_future(answered.wait())}, timeout_s)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(scene()) <= timeout_s / 2


def test_a_proxy_that_gets_no_cpu_freezes_no_instance(monkeypatch):
    frozen_after_s = 1.0
    has_probed = asyncio.Event()
    monkeypatch.setattr(kvpipe.proxy.probes, "_INTERVAL_S", 0.0)

    async def answers_in_some_steps():
        if not has_probed.is_set():
            asyncio.get_running_loop().call_soon(time.sleep, 2 * frozen_after_s)
        for _ in range(5):
            await asyncio.sleep(0)
        has_probed.set()
        return True

    async def scene():
        freezes = []
        probes = Probes("role=prefill", Health(frozen_after_s), answers_in_some_steps, silent, OwnedTasks())
        with probes.owing(lambda: freezes.append(1), is_generation=True):
            await has_probed.wait()
        return len(freezes)

    assert asyncio.run(scene()) == 0


def test_a_wait_for_nothing_takes_its_timeout():
    async def scene():
        return await wait_awake({asyncio.ensure_future(silent())}, 0.1)

    assert asyncio.run(scene()) == 0.1
