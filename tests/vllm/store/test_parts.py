"""The parts that move chunks: loads under way, staging memory, threads, the client of a store."""

import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpipe.exceptions import ClosedError, ConfigError, ConnectError, PeerLostError
from kvpipe.store import LocalStore
from kvpipe.vllm.store.client import StoreClient, failure_reason
from kvpipe.vllm.store.loading import ActiveLoad
from kvpipe.vllm.store.metadata import StoreLoad, StoreLoadOutcome
from kvpipe.vllm.store.staging import StagingPool
from kvpipe.vllm.store.threads import TaskThreads
from tests.vllm.store.stores import URL, SharedStore

pytestmark = pytest.mark.vllm

DEADLINE_S = 5.0
WAIT_S = 10.0


def active(num_chunks: int = 3) -> ActiveLoad:
    return ActiveLoad(StoreLoad("request", [bytes([index]) for index in range(num_chunks)], 0, [], 1.0), DEADLINE_S)


def test_a_load_ends_when_all_chunks_are_copied_in_any_order() -> None:
    load = active()
    for index in (2, 0):
        load.copy(index, lambda: True)
        assert load.outcome(0.0) is None
    load.copy(1, lambda: True)
    assert load.outcome(0.0) == StoreLoadOutcome(3)


def test_a_load_ends_at_its_first_failure_with_the_chunks_before_it() -> None:
    load = active()
    load.copy(0, lambda: True)
    load.fail(2, "missing")
    assert load.outcome(0.0) is None
    load.fail(1, "corrupt")
    assert not load.wants(2)
    assert load.outcome(0.0) == StoreLoadOutcome(1, "corrupt")


@pytest.mark.parametrize("end", [lambda load: load.outcome(DEADLINE_S), lambda load: load.cancel("cancelled")])
def test_nothing_is_copied_after_the_end_of_a_load(end: Callable[[ActiveLoad], Any]) -> None:
    load, copied = active(), []
    end(load)
    assert load.copy(0, lambda: bool(copied.append(0))), "nothing is left to be done"
    assert copied == []
    assert load.outcome(0.0).num_loaded == 0


def test_a_load_does_not_end_while_a_thread_copies() -> None:
    load, outcomes = active(), []
    load.copy(0, lambda: outcomes.append(load.outcome(DEADLINE_S)) is None)
    assert outcomes == [None]
    assert load.outcome(DEADLINE_S) == StoreLoadOutcome(1, "timeout")


def test_a_copy_that_fails_does_not_count() -> None:
    load = active()
    with pytest.raises(ZeroDivisionError):
        load.copy(0, lambda: 1 // 0)
    assert not load.copy(0, lambda: False)
    assert load.outcome(DEADLINE_S) == StoreLoadOutcome(0, "timeout")


def test_a_chunk_can_be_copied_again_after_a_copy_that_failed() -> None:
    load = active(1)
    assert not load.copy(0, lambda: False)
    assert load.copy(0, lambda: True)
    assert load.outcome(0.0) == StoreLoadOutcome(1)


def test_a_pool_gives_out_its_slots_and_no_more() -> None:
    pool = StagingPool(100, 32)
    slots = [pool.acquire() for _ in range(4)]
    assert [slot is None for slot in slots] == [False, False, False, True]
    slots[1][:] = 7
    pool.release(slots[1])
    assert pool.acquire()[0] == 7


@pytest.mark.parametrize("slot_bytes", [32, 128 + 4096, (1 << 20) + 8])
def test_each_slot_of_a_pool_begins_at_a_cache_line(slot_bytes: int) -> None:
    pool = StagingPool(3 * slot_bytes, slot_bytes)
    slots = [pool.acquire() for _ in range(3)]
    assert [slot.ctypes.data % 64 for slot in slots] == [0, 0, 0]
    assert [slot.nbytes for slot in slots] == [slot_bytes] * 3


def test_a_pool_with_its_pages_faults_none_in_when_a_slot_is_written() -> None:
    slot = StagingPool(3 << 20, 1 << 20, has_pages=True).acquire()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    slot.fill(1)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < slot.nbytes // resource.getpagesize() // 10


def test_a_pool_smaller_than_a_chunk_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"staging_bytes=10: a chunk of this model has 32 bytes; write a larger"):
        StagingPool(10, 32)


def test_a_task_that_raises_does_not_end_its_thread() -> None:
    threads, done = TaskThreads("test", 1), threading.Event()
    threads.submit(lambda: 1 // 0)
    threads.submit(done.set)
    assert done.wait(WAIT_S)
    assert threads.close(WAIT_S)


def test_closed_threads_drop_what_they_have_not_begun_and_say_if_they_cannot_end() -> None:
    threads, begun, go_on, dropped = TaskThreads("test", 1), threading.Event(), threading.Event(), []
    threads.submit(lambda: (begun.set(), go_on.wait(WAIT_S)))
    threads.submit(lambda: dropped.append(1))
    assert begun.wait(WAIT_S)
    began_s = time.monotonic()
    assert not threads.close(0.05)
    assert time.monotonic() - began_s < WAIT_S / 2
    go_on.set()
    assert threads.close(WAIT_S)
    threads.submit(lambda: dropped.append(2))
    assert dropped == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one core only")
def test_threads_do_not_stay_on_the_core_of_a_bound_caller() -> None:
    cores, found = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, {min(cores)})
    try:
        threads = TaskThreads("test", 1)
        threads.submit(lambda: found.append(os.sched_getaffinity(0)))
        while not found:
            time.sleep(0.01)
        assert len(found[0]) > 1
        assert threads.close(WAIT_S)
    finally:
        os.sched_setaffinity(0, cores)


class LosableStore(SharedStore):
    """A store that counts how often it is opened."""

    num_opened = 0
    is_away = False

    @classmethod
    def open(cls, url: str, *, token: str | None = None, timeout: float = 10) -> Any:
        if cls.is_away:
            raise ConnectError("away")
        cls.num_opened += 1
        return super().open(url)


def test_a_store_that_was_away_or_lost_is_opened_again() -> None:
    client = StoreClient("tests.vllm.store.test_parts:LosableStore:lost", 1)
    LosableStore.is_away = True
    with pytest.raises(ConnectError):
        client.run(lambda store: store.exists([b"a"]))
    LosableStore.is_away = False
    assert client.run(lambda store: store.exists([b"a"])) == [False]
    client.run(lambda store: setattr(store, "failure", PeerLostError("lost")))
    with pytest.raises(PeerLostError):
        client.run(lambda store: store.exists([b"a"]))
    client.run(lambda store: setattr(store, "failure", None))
    assert client.run(lambda store: store.exists([b"a"])) == [False]
    assert LosableStore.num_opened == 2


def test_a_closed_client_opens_nothing() -> None:
    client = StoreClient(URL + "closed", 1)
    client.close()
    with pytest.raises(ClosedError, match="the connector was shut down"):
        client.run(LocalStore.stats)


def test_the_kind_of_a_failure_is_told() -> None:
    assert [failure_reason(error) for error in (PeerLostError(), ConnectError(), ClosedError(), OSError())] == [
        *("lost", "lost", "lost", "error")
    ]
