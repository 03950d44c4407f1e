"""What the soak reads a late detection beside."""

import random
import time

from tests.faults.forked import Forked
from tests.peers import wait_until
from tests.soak.clock import Clock


def test_the_clock_measures_a_threads_wait_within_the_requested_time():
    clock = Clock()
    numbers = [random.random() for _ in range(500_000)]
    since = time.monotonic()
    numbers.sort()  # nobody else gets Python meanwhile
    until = time.monotonic()
    time.sleep(0.1)
    waits = clock.waits(since, until)
    assert waits.total_s >= waits.longest_s > (until - since) / 2
    assert clock.waits(0, since - 10).longest_s == 0
    assert f"{waits.longest_s * 1e3:.0f} at once" in str(waits)


def test_a_killed_peer_reports_when_the_kernel_was_done_with_it_also_if_it_had_ended_before():
    child = Forked("receive_nothing")
    child.read()
    child.kill_after(0)
    wait_until(lambda: len(child.killed_at) == 2)
    assert child.process.wait() == -9
    child.kill_after(0)
    wait_until(lambda: len(child.killed_at) == 4)
    assert child.killed_at == sorted(child.killed_at)
    child.end()
