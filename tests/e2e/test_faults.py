"""Peers that die and clients that leave: the answer is still right, and no block stays held."""

import http
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.processes import clock_s
from kvpipe.control import ControlClient
from kvpipe.launch.watchdog import group_members
from tests.e2e.client import (
    COMPLETIONS,
    LEASE_S,
    TOKEN,
    Servers,
    completion,
    consume,
    new_handoff,
    post,
    produce,
    prompt,
    sent,
    until,
)


def stays_whole(servers: Servers) -> None:
    """Both instances come to rest with all their blocks, and go on working."""
    servers.come_to_rest()
    body = completion(prompt(90, seed=time.monotonic_ns()))
    assert servers.answer(servers.url, COMPLETIONS, body)[0] == servers.expected(COMPLETIONS, body)


@pytest.mark.smoke
def test_a_client_that_leaves_during_decode_leaves_no_block_held(servers: Servers) -> None:
    body = completion(prompt(200, seed=21), stream=True, max_tokens=2000, ignore_eos=True)
    with post(servers.url, COMPLETIONS, body) as response:
        assert response.read1(64)
    stays_whole(servers)


@pytest.mark.smoke
def test_a_client_that_leaves_during_prefill_leaves_no_block_held(servers: Servers) -> None:
    body = completion(prompt(3900, seed=22))

    with sent(servers.url, COMPLETIONS, body):
        until(lambda: not servers.is_idle(servers.prefill))
    stays_whole(servers)


def test_clients_that_leave_at_any_moment_leave_no_block_held(servers: Servers) -> None:
    moments = random.Random(30)

    def leave(number: int) -> None:
        length, num_bytes = moments.randrange(1, 600), moments.choice([0, 1, 300, 3000])
        body = completion(prompt(length, seed=1000 + number), stream=True, max_tokens=64, ignore_eos=True)
        with sent(servers.url, COMPLETIONS, body) as connection:
            if num_bytes:
                connection.getresponse().read(num_bytes)

    with ThreadPoolExecutor(16) as clients:
        list(clients.map(leave, range(400)))
    stays_whole(servers)


def test_unfetched_kv_is_freed_when_its_lease_ends(servers: Servers) -> None:
    with post(servers.prefill.url, COMPLETIONS, completion(prompt(300, seed=23)) | produce(new_handoff())) as response:
        assert response.status == http.HTTPStatus.OK
        response.read()
    assert not servers.holds_no_block(servers.prefill)
    stays_whole(servers)


def test_prefill_sleeps_while_it_has_nothing_but_a_lease(servers: Servers) -> None:
    with post(servers.prefill.url, COMPLETIONS, completion(prompt(300, seed=20)) | produce(new_handoff())) as response:
        response.read()
    before_s = {pid: clock_s(pid) for pid in group_members(servers.prefill.child.pid)}
    until(lambda: servers.holds_no_block(servers.prefill))
    # vLLM's worker spins for a second after each step.
    assert max(clock_s(pid) - used_s for pid, used_s in before_s.items()) < LEASE_S / 2


@pytest.mark.smoke
def test_released_kv_is_freed_before_its_lease_ends(servers: Servers) -> None:
    handoff = new_handoff()
    with post(servers.prefill.url, COMPLETIONS, completion(prompt(300, seed=24)) | produce(handoff)) as response:
        response.read()
    client = ControlClient(TOKEN)
    assert client.release(servers.prefill.control, handoff).wait(5) is True
    client.close()
    until(lambda: servers.holds_no_block(servers.prefill), LEASE_S - 3)


def test_instances_that_were_sent_to_sleep_hand_over_when_they_are_awake(servers: Servers) -> None:
    """Without sleep mode vLLM pauses and resets its caches; their memory stays."""
    servers.come_to_rest()  # vLLM falls asleep when no block is leased
    body = completion(prompt(100, seed=31))
    expected = servers.expected(COMPLETIONS, body)
    for paths in ((), ("/sleep", "/wake_up")):
        for path in paths:
            for instance in (servers.prefill, servers.decode):
                with post(instance.url, path, {}) as response:
                    assert response.status == http.HTTPStatus.OK
        text, handoff = servers.answer(servers.url, COMPLETIONS, body)
        result = servers.result(handoff)
        assert (text, result["result"], result["local_tokens"]) == (expected, "full", 0)
        servers.come_to_rest()


def test_a_handoff_that_its_producer_does_not_know_is_recomputed(servers: Servers) -> None:
    body = completion(prompt(70, seed=25))
    # There is no listener: the first port is privileged and unused.
    params = consume(new_handoff(), "127.0.0.1:1")
    assert servers.answer(servers.decode.url, COMPLETIONS, body | params)[0] == servers.expected(COMPLETIONS, body)


@pytest.mark.smoke
def test_a_handoff_of_another_prompt_is_recomputed(servers: Servers) -> None:
    handoff, body = new_handoff(), completion(prompt(70, seed=26))
    with post(servers.prefill.url, COMPLETIONS, completion(prompt(70, seed=27)) | produce(handoff)) as response:
        response.read()
    params = consume(handoff, str(servers.prefill.control))
    assert servers.answer(servers.decode.url, COMPLETIONS, body | params)[0] == servers.expected(COMPLETIONS, body)


@pytest.mark.smoke
def test_decode_that_waits_answers_rightly_when_prefill_is_killed(servers: Servers) -> None:
    body = completion(prompt(150, seed=28))
    expected = servers.expected(COMPLETIONS, body)
    waiting = body | consume(new_handoff(), str(servers.prefill.control))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(servers.answer, servers.decode.url, COMPLETIONS, waiting)
        until(lambda: not servers.is_idle(servers.decode))
        servers.kill(servers.prefill)
        assert answer.result()[0] == expected
    servers.restart(servers.prefill)
    stays_whole(servers)


def test_a_prefill_instance_that_is_killed_and_restarted_twice_under_load_loses_no_request(servers: Servers) -> None:
    bodies = [completion(prompt(50 + number, seed=400 + number), max_tokens=16) for number in range(150)]
    expected = [servers.expected(COMPLETIONS, body) for body in bodies]
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(servers.answer, servers.url, COMPLETIONS, body) for body in bodies]
        for num_answered in (30, 90):
            answers[num_answered].result()
            servers.kill(servers.prefill)
            servers.restart(servers.prefill)
        assert [answer.result()[0] for answer in answers] == expected
    stays_whole(servers)


@pytest.mark.smoke
def test_a_killed_decode_leaves_no_block_held_at_prefill(servers: Servers) -> None:
    body: dict[str, Any] = completion(prompt(600, seed=29), stream=True, max_tokens=500, ignore_eos=True)
    handoff = new_handoff()
    with post(servers.prefill.url, COMPLETIONS, body | {"stream": False} | produce(handoff)) as response:
        response.read()
    params = consume(handoff, str(servers.prefill.control))
    with post(servers.decode.url, COMPLETIONS, body | params):
        servers.kill(servers.decode)
    until(lambda: servers.holds_no_block(servers.prefill) and servers.is_idle(servers.prefill))
    servers.restart(servers.decode)
    stays_whole(servers)
