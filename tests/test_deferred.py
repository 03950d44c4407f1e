"""Deadlines of operations that wait for the stream of a GPU tensor. Streams and operations are stand-ins."""

import asyncio
import threading
import time

import pytest

from kvpipe import TransferTimeoutError
from kvpipe._deferred import Deferred
from kvpipe.work import Work

TIMEOUT_S = 0.05


class Stream:
    """Is done when it is told."""

    def __init__(self):
        self.done = threading.Event()

    def wait(self):
        assert self.done.wait(30)


def begin(_timeout):
    pytest.fail("it must not begin after its deadline")


@pytest.fixture
def stuck():
    stream = Stream()
    yield stream
    stream.done.set()


def test_an_awaited_operation_whose_stream_is_stuck_ends_at_its_deadline(stuck):
    deferred = Deferred(stuck, begin, TIMEOUT_S)

    async def wait():
        with pytest.raises(TransferTimeoutError, match="withdrawn, everything is usable"):
            await asyncio.wait_for(_await(Work(deferred, lambda _: None)), 20)

    asyncio.run(wait())


async def _await(work):
    return await work


def test_an_operation_that_is_only_asked_whether_it_is_done_is_so_at_its_deadline(stuck):
    deferred = Deferred(stuck, begin, 1)
    assert not deferred.is_completed()
    time.sleep(1.1)
    assert deferred.is_completed()
    with pytest.raises(TransferTimeoutError, match="withdrawn"):
        deferred.result()


def test_an_operation_whose_stream_is_done_after_its_deadline_does_not_begin(stuck):
    deferred = Deferred(stuck, begin, TIMEOUT_S)
    running = threading.Thread(target=deferred.run)
    running.start()
    time.sleep(2 * TIMEOUT_S)
    stuck.done.set()
    running.join(30)
    assert deferred.is_completed()
    with pytest.raises(TransferTimeoutError, match="withdrawn"):
        deferred.result()
