"""The soak's measurements beside a late detection, and the operations that it reports as hit."""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from kvpipe import CapacityError, LookupBuffer, TransferTimeoutError
from kvpipe.testing import memory_transport
from tests.faults.forked import Forked
from tests.peers import wait_until
from tests.soak import __main__ as soak
from tests.soak import healthy
from tests.soak.actors import Round, begin
from tests.soak.clock import Clock
from tests.soak.healthy import (
    CROWD,
    DEADLINE_S,
    DISTURBERS,
    HEALTHY,
    INTEGRITIES,
    Hit,
    Pair,
    healthy_entries,
    healthy_tensors,
)
from tests.soak.late import LATE, LateTensors, late_entries, late_tensors

# Each runs the soak for seconds.
pytestmark = pytest.mark.slow


def test_the_clock_measures_a_threads_wait_within_the_requested_time():
    clock = Clock()
    numbers = [random.random() for _ in range(500_000)]
    since = time.monotonic()
    numbers.sort()  # no other thread gets Python meanwhile
    until = time.monotonic()
    wait_until(lambda: clock.waits(since, until).longest_s > (until - since) / 2)
    waits = clock.waits(since, until)
    assert waits.total_s >= waits.longest_s
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


@dataclass
class Awaited(Round):
    """A round that goes on until it has what a test awaits: how much happens in a time depends on the machine."""

    is_over: Callable[[Round], bool] = field(kw_only=True)

    def goes_on(self, actor, **counts):
        if super().goes_on(actor, **counts):
            return True
        return time.monotonic() < self.ends_at + DEADLINE_S and not self.is_over(self)


def run(pair, actors, is_over, seconds=0):
    """A round until it is over, and of so many seconds at least."""
    shared, failures = Awaited(time.monotonic() + seconds, Counter(), {}, None, [], pair=pair, is_over=is_over), []
    for thread in [begin(actor, "seed", shared, failures) for actor in actors]:
        thread.join()
    assert failures == []
    return shared


def check_hit(pair, actor, why):
    """Asserts that an actor has a hit with this reason."""
    assert why in str(run(pair, (actor,), lambda shared: why in str(shared.hits)).hits)


def check_healthy(pair, disturbers, seconds, is_enough):
    """Asserts that no healthy operation beside these disturbers is hit until the counts are enough."""
    shared = run(pair, (*HEALTHY, *disturbers), lambda shared: is_enough(shared.counts), seconds)
    assert shared.hits == []
    assert is_enough(shared.counts), shared.counts


@pytest.mark.parametrize("integrity", INTEGRITIES)
def test_healthy_operations_beside_late_reads_cancelled_loads_and_a_crowd_are_not_hit(integrity):
    def is_enough(counts):
        is_validated = counts["validated_loads"] > 0
        has_others = counts["healthy"] > CROWD
        disturbed = all(counts[name] > 0 for name in ("cancelled_loads", "crowds", "late_reads"))
        return is_validated == (integrity == "validate") and has_others and disturbed

    with memory_transport(), Pair(integrity) as pair:
        check_healthy(pair, DISTURBERS, 1, is_enough)


@pytest.mark.parametrize("data_path", ["remote_read", "stream"])
@pytest.mark.parametrize("integrity", INTEGRITIES)
def test_healthy_operations_beside_late_tensors_and_entries_are_not_hit(data_path, integrity):
    def is_enough(counts):
        is_validated = counts["validated_tensors"] > 0
        disturbed = counts["late_tensors"] > counts["lost_tensors"] > 0 < counts["late_entries"]
        return is_validated == (integrity == "validate") and disturbed

    with memory_transport(data_path), Pair(integrity) as pair:
        check_healthy(pair, LATE, 2, is_enough)


def test_healthy_operations_whose_peers_are_gone_are_hits():
    actors = (*HEALTHY, *LATE)
    names = {actor.__name__ for actor in actors}
    with memory_transport(), Pair() as pair:
        pair.producer.close()
        for sender in (pair.sender, pair.late_sender):
            sender.close(timeout=0)
        pair.server.close()
        shared = run(pair, actors, lambda shared: {hit.what for hit in list(shared.hits)} == names)
    assert {hit.what for hit in shared.hits} == names
    assert "ConnectError" in str(shared.hits)


class Disturbed:
    """A pipe or a buffer of which some methods do something else."""

    def __init__(self, disturbed, **methods):
        self._disturbed, self._methods = disturbed, methods

    def __getattr__(self, name):
        method = getattr(self._disturbed, name)
        other = self._methods.get(name)
        return method if other is None else lambda *args, **kwargs: other(method, *args, **kwargs)


def send_other_bytes(isend, tensor, timeout):
    return isend(tensor + np.uint8(1), timeout=timeout)


@pytest.mark.parametrize("actor", [healthy_tensors, late_tensors])
def test_a_tensor_that_comes_with_other_bytes_is_a_hit(actor):
    with memory_transport(), Pair() as pair:
        pair.sender, pair.late_sender = (
            Disturbed(sender, isend_tensor=send_other_bytes) for sender in (pair.sender, pair.late_sender)
        )
        check_hit(pair, actor, "wrong bytes")


def test_a_late_tensor_that_ends_its_pipe_is_a_hit():
    with memory_transport(), Pair() as pair:

        def receive_and_end(irecv, timeout, **kwargs):
            work = irecv(timeout=timeout, **kwargs)
            if timeout < 1:
                pair.late_sender.close(timeout=0)
            return work

        pair.late_receiver = Disturbed(pair.late_receiver, irecv_tensor=receive_and_end)
        shared = run(pair, (late_tensors, healthy_tensors), lambda shared: shared.hits, 0.5)
    assert {hit.what for hit in shared.hits} == {"late_tensors"}


def test_a_late_tensor_that_one_end_has_lost_and_the_other_has_sent_is_a_hit():
    """Its receiver has had it all the time."""
    ended = SimpleNamespace(wait=lambda _: None, is_completed=lambda: True, settled=lambda _: None)

    def receive_late(_irecv, **_kwargs):
        def wait(_timeout):
            raise TransferTimeoutError("it is lost")

        return SimpleNamespace(wait=wait, is_completed=lambda: True, settled=lambda _: None)

    with memory_transport(), Pair() as pair:
        pair.late_receiver = Disturbed(pair.late_receiver, irecv_tensor=receive_late)
        pair.late_sender = Disturbed(pair.late_sender, isend_tensor=lambda *_args, **_kwargs: ended)
        late = LateTensors(random.Random(0), Round(0, Counter(), {}, None, [], pair=pair))
        with pytest.raises(AssertionError, match="its receiver has lost it"):
            late._receive(0)


def select_and_lose(drop_select, tokens, roi, timeout):
    drop_select(tokens, roi, timeout=0)
    return [None] * 5


def select_twice(buffer):
    delivered = set()

    def select(drop_select, tokens, roi, timeout):
        found = drop_select(tokens, roi, timeout=timeout)
        if found[0] is not None and tuple(tokens) not in delivered:
            delivered.add(tuple(tokens))
            buffer.insert(*found)
        return found

    return select


def select_another(drop_select, tokens, roi, timeout):
    found = drop_select(tokens, roi, timeout=timeout)
    return found if found[0] is None else [found[0] + 1, *found[1:]]


def select_other_bytes(drop_select, tokens, roi, timeout):
    found = drop_select(tokens, roi, timeout=timeout)
    return found if found[0] is None else [*found[:2], found[2] + np.uint8(1), *found[3:]]


def refuse(insert, *entry, timeout):
    raise CapacityError("full")


def insert_all(insert, tokens, roi, key, *others, timeout):
    """Also what it refuses."""
    insert(tokens, roi, key[: 1 << 20], *others)


FAULTS_OF_BUFFERS = {
    "the entry is lost": lambda _: {"drop_select": select_and_lose},
    "the entry was delivered twice": lambda buffer: {"drop_select": select_twice(buffer)},
    "instead of": lambda _: {"drop_select": select_another},
    "wrong bytes": lambda _: {"drop_select": select_other_bytes},
    "full": lambda _: {"insert": refuse},
}


@pytest.mark.parametrize("why", FAULTS_OF_BUFFERS)
@pytest.mark.parametrize("actor", [healthy_entries, late_entries])
def test_a_fault_of_a_lookup_buffer_is_a_hit(actor, why):
    buffer = LookupBuffer(healthy.CAPACITY_BYTES)
    disturbed = Disturbed(buffer, **FAULTS_OF_BUFFERS[why](buffer))
    check_hit(SimpleNamespace(server=disturbed, client=disturbed), actor, why)


def test_a_late_insert_that_takes_space_that_is_not_there_is_a_hit():
    buffer = Disturbed(LookupBuffer(healthy.CAPACITY_BYTES), insert=insert_all)
    check_hit(SimpleNamespace(server=buffer, client=buffer), late_entries, "an insert without space ended with None")


def test_a_soak_whose_healthy_operations_were_hit_says_which_and_fails(capsys):
    shared = {"counts": Counter(healthy=2), "late": [], "times": {}, "hits": []}
    assert soak._tell(shared, [], "nothing") == 0
    shared["hits"].append(Hit("healthy_entries", "the entry is lost"))
    assert soak._tell(shared, [], "nothing") == 1
    told = capsys.readouterr().out
    assert "hit: healthy_entries: the entry is lost" in told
    assert "healthy operations 2, hit by others 1" in told


def test_a_soak_without_a_read_that_was_late_fails_after_enough_reads(capsys):
    shared = {"counts": Counter(timely_reads=soak.NUM_READS - 1), "late": [], "times": {}, "hits": []}
    assert soak._tell(shared, [], "nothing") == 0
    shared["counts"]["timely_reads"] += 1
    assert soak._tell(shared, [], "nothing") == 1
    assert f"none of {soak.NUM_READS} reads was late" in capsys.readouterr().out
    shared["counts"]["late_reads"] += 1
    assert soak._tell(shared, [], "nothing") == 0


def test_an_operation_that_is_late_or_tried_again_is_a_hit(monkeypatch):
    monkeypatch.setattr(healthy, "DEADLINE_S", -1.0)
    shared = Round(time.monotonic(), Counter(), {}, Clock(), [])
    assert not healthy.healthy(shared, "late", lambda: None)
    monkeypatch.undo()
    assert not healthy.healthy(shared, "again", lambda: "4 blocks were read twice")
    assert not healthy.healthy(shared, "good", lambda: 0)
    assert [hit.what for hit in shared.hits] == ["late", "again"]
    assert "4 blocks were read twice; a thread that only looks at the clock waited " in str(shared.hits[1])
