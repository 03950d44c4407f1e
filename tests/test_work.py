"""Work: ask, wait, await."""

import asyncio
import contextlib
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpipe import ConfigError, PeerLostError, Pipe
from kvpipe import work as work_module

pytestmark = pytest.mark.usefixtures("transport")

TENSOR = np.arange(100_000)


def run(scene):
    """Runs a coroutine to its end; one that would hang fails."""

    async def bounded():
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(bounded())


def test_a_work_reports_whether_it_has_ended(pair):
    sender, receiver = pair
    work = receiver.irecv_tensor()
    assert not work.is_completed()
    assert repr(work) == "<Work under way>"
    with pytest.raises(ConfigError, match="not completed yet"):
        work.result()
    sender.send_tensor(TENSOR)
    work.wait(10)
    assert work.is_completed()
    assert repr(work) == "<Work completed>"


def test_the_result_is_the_same_object_each_time(pair):
    sender, receiver = pair
    work = receiver.irecv_tensor()
    sender.send_tensor(TENSOR)
    first = work.wait(10)
    assert work.wait(10) is work.result() is first


def test_an_error_is_raised_each_time():
    receiver = Pipe.listen()
    sender = Pipe.connect(receiver.address)
    sender.send_tensor(None)
    receiver.recv_tensor(timeout=10)
    work = receiver.irecv_tensor()
    del sender
    for attempt in (lambda: work.wait(10), work.result):
        with pytest.raises(PeerLostError):
            attempt()
    receiver.close()


def test_many_threads_may_wait_for_one_work(pair):
    sender, receiver = pair
    work, results = receiver.irecv_tensor(), []
    threads = [threading.Thread(target=lambda: results.append(work.wait(10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    sender.send_tensor(TENSOR)
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(result, TENSOR) for result in results)


def test_a_work_keeps_the_memory_of_its_operation_alive(pair):
    sender, receiver = pair
    work = sender.isend_tensor(np.full(1 << 20, 7))
    gc.collect()
    assert (receiver.recv_tensor(timeout=10) == 7).all()
    work.wait(10)


def test_waiting_lets_other_threads_run(pair):
    sender, receiver = pair
    threading.Timer(0.05, lambda: sender.isend_tensor(TENSOR)).start()
    assert np.array_equal(receiver.irecv_tensor().wait(10), TENSOR)


def test_await_gives_the_result_and_needs_no_thread(pair, new_threads):
    async def scene():
        sender, receiver = pair
        threads = new_threads()
        work = receiver.irecv_tensor()
        asyncio.get_running_loop().call_later(0.05, sender.isend_tensor, TENSOR)
        assert np.array_equal(await work, TENSOR)
        assert not threads()

    run(scene)


def test_await_of_an_ended_work_returns_at_once(pair):
    async def scene():
        sender, _ = pair
        work = sender.isend_tensor(None)
        work.wait(10)
        assert await work is None

    run(scene)


def test_await_raises_the_error_of_the_operation():
    async def scene():
        receiver = Pipe.listen()
        first, work = receiver.irecv_tensor(), receiver.irecv_tensor()
        with Pipe.connect(receiver.address) as sender:
            sender.isend_tensor(None)
            await first
        with pytest.raises(EOFError):
            await work
        receiver.close()

    run(scene)


def test_two_tasks_may_await_the_same_work(pair):
    async def scene():
        sender, receiver = pair
        work = receiver.irecv_tensor()
        both = asyncio.gather(_await(work), _await(work))
        await asyncio.sleep(0.01)
        sender.isend_tensor(TENSOR)
        first, second = await both
        assert first is second

    run(scene)


async def _await(work):
    return await work


def test_a_cancelled_await_cancels_nothing(pair):
    async def scene():
        sender, receiver = pair
        work = receiver.irecv_tensor()
        cancelled, other = asyncio.create_task(_await(work)), asyncio.create_task(_await(work))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        sender.isend_tensor(TENSOR)
        assert np.array_equal(await other, TENSOR)
        assert np.array_equal(await work, TENSOR)

    run(scene)


def test_many_works_are_awaited_side_by_side_without_a_thread(pair, new_threads):
    async def scene():
        sender, receiver = pair
        threads = new_threads()
        receives = [receiver.irecv_tensor() for _ in range(200)]
        waits = asyncio.gather(*map(_await, receives))
        await asyncio.sleep(0.01)
        assert not threads()
        sends = [sender.isend_tensor(np.full(1 if i % 2 else 20_000, i)) for i in range(200)]
        await asyncio.gather(*map(_await, sends))
        assert [int(result[0]) for result in await waits] == list(range(200))
        assert not threads()

    run(scene)


def num_eventfds():
    """Eventfds of this process, which wake loops. Sockets of reactors that earlier tests have left come and go."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(descriptor.readlink()))
    return names.count("anon_inode:[eventfd]")


def test_a_thousand_awaited_works_share_one_descriptor(pair):
    async def scene():
        sender, receiver = pair
        before = num_eventfds()
        receives = [receiver.irecv_tensor() for _ in range(1000)]
        waits = asyncio.gather(*map(_await, receives))
        await asyncio.sleep(0.01)
        assert num_eventfds() <= before + 1
        for i in range(1000):
            sender.isend_tensor(np.full(1, i))
        assert [int(result[0]) for result in await waits] == list(range(1000))
        assert num_eventfds() <= before + 1

    run(scene)


def test_cancelled_awaits_leave_nothing_behind(pair):
    async def scene():
        sender, receiver = pair
        works = [receiver.irecv_tensor() for _ in range(100)]
        waits = [asyncio.create_task(_await(work)) for work in works]
        await asyncio.sleep(0.01)
        completions = work_module._completions[asyncio.get_running_loop()]()
        assert len(completions._waiting) == 100
        for wait in waits[1:]:
            wait.cancel()
        await asyncio.gather(*waits[1:], return_exceptions=True)
        assert len(completions._waiting) == 1
        for _ in works:
            sender.isend_tensor(TENSOR)
        await waits[0]
        assert completions._waiting == {}
        for work in works:
            assert np.array_equal(await work, TENSOR)

    run(scene)


def test_two_loops_may_await_the_same_works(pair):
    sender, receiver = pair
    works = [receiver.irecv_tensor() for _ in range(50)]
    ready, results = threading.Barrier(3), []

    async def scene():
        waits = asyncio.gather(*map(_await, works))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(ready.wait)
        results.append(await waits)

    threads = [threading.Thread(target=run, args=(scene,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(20)
    for i in range(50):
        sender.isend_tensor(np.full(1, i))
    for thread in threads:
        thread.join()
    assert [[int(result[0]) for result in of_one] for of_one in results] == [list(range(50))] * 2


def test_a_loop_that_is_closed_while_it_awaits_is_forgotten_with_its_descriptor(pair):
    sender, receiver = pair
    gc.collect()
    before, work = num_eventfds(), receiver.irecv_tensor()

    def abandon():
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # a task that is destroyed while it is pending
        pending = loop.create_task(_await(work))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        assert not pending.done()

    abandon()
    gc.collect()
    assert num_eventfds() <= before
    sender.send_tensor(TENSOR)
    assert np.array_equal(work.wait(10), TENSOR)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where there are threads
def test_a_forked_child_drains_nothing_of_its_parents(pair):
    async def scene():
        sender, receiver = pair
        work = receiver.irecv_tensor()
        wait = asyncio.create_task(_await(work))
        await asyncio.sleep(0.01)
        child = os.fork()
        if child == 0:
            os._exit(len(work_module._completions))
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0
        sender.isend_tensor(TENSOR)
        assert np.array_equal(await wait, TENSOR)

    run(scene)


def test_uvloop_can_await_too(pair):
    uvloop = pytest.importorskip("uvloop")

    async def scene():
        sender, receiver = pair
        work = receiver.irecv_tensor()
        sender.isend_tensor(TENSOR)
        async with asyncio.timeout(20):
            assert np.array_equal(await work, TENSOR)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scene())
