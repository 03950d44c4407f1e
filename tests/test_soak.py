"""What the soak reads a late detection beside."""

import random
import time
from collections import Counter

from kvpipe.testing import memory_transport
from tests.faults.forked import Forked
from tests.peers import wait_until
from tests.soak import healthy
from tests.soak.actors import Round, begin
from tests.soak.clock import Clock
from tests.soak.healthy import HEALTHY, Pair, cancelled_loads, crowds


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


def run(pair, actors, seconds):
    shared, failures = Round(time.monotonic() + seconds, Counter(), {}, None, [], pair=pair), []
    for thread in [begin(actor, "seed", shared, failures) for actor in actors]:
        thread.join()
    assert failures == []
    return shared


def test_healthy_operations_beside_cancelled_loads_and_a_crowd_are_not_hit():
    with memory_transport(), Pair() as pair:
        shared = run(pair, (*HEALTHY, cancelled_loads, crowds), 1)
    assert shared.hits == []
    assert shared.counts["cancelled_loads"] > 0 < shared.counts["crowds"]
    assert shared.counts["healthy"] > 60, "those of the crowd, and others"


def test_healthy_operations_whose_peers_are_gone_are_hits():
    with memory_transport(), Pair() as pair:
        pair.producer.close()
        pair.sender.close(timeout=0)
        shared = run(pair, HEALTHY, 0.2)
    assert {hit.what for hit in shared.hits} == {actor.__name__ for actor in HEALTHY}
    assert "ConnectError" in " ".join(map(str, shared.hits))


def test_an_operation_that_is_late_or_tried_again_is_a_hit(monkeypatch):
    monkeypatch.setattr(healthy, "DEADLINE_S", -1.0)
    shared = Round(time.monotonic(), Counter(), {}, None, [])
    assert not healthy._healthy(shared, "late", lambda: None)
    monkeypatch.undo()
    assert not healthy._healthy(shared, "again", lambda: "4 blocks were read twice")
    assert not healthy._healthy(shared, "good", lambda: 0)
    assert [hit.what for hit in shared.hits] == ["late", "again"]
