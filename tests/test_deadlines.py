"""A caller gets its answer when its deadline has passed, although the peer is stopped and says nothing.

Pipes and agents: tests/test_faults.py.
"""

import contextlib
import signal
import statistics
import time

import numpy as np
import pytest

from kvpipe import KVPipeError, LookupBuffer, Pipe, TransferTimeoutError
from tests.peers import LARGE, MIB

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("data_path")]

TRIES = 5
DEADLINE_S = 0.3
LATE_S, LATEST_S = 0.1, 1.0  # of most and of all


def lateness(client):
    """By how many seconds a select that finds nothing is late."""
    begun = time.monotonic()
    assert client.drop_select(None, None, timeout=DEADLINE_S) == [None] * 5
    return time.monotonic() - begun - DEADLINE_S


def is_in_time(late):
    return min(late) >= 0 and statistics.median(late) < LATE_S and max(late) < LATEST_S


def test_a_lookup_at_a_stopped_server_ends_with_nothing_and_goes_on_when_it_does(start):
    child = start("serve_entries", MIB)
    with LookupBuffer.connect(child.read()) as client:
        child.stop()
        late = [lateness(client) for _ in range(TRIES)]
        assert is_in_time(late), late
        child.process.send_signal(signal.SIGCONT)
        client.insert(np.array([1]), None, np.arange(3), None, None, timeout=20)
        assert client.drop_select(np.array([1]), None, timeout=20)[2].tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [8, MIB // 2])
def test_an_insert_at_a_stopped_server_ends_in_time_with_an_unknown_fate(start, size):
    child = start("serve_entries", MIB)
    tensor = np.ones(size, np.uint8)
    with LookupBuffer.connect(child.read()) as client:
        child.stop()
        begun = time.monotonic()
        with pytest.raises(TransferTimeoutError, match="is not known"):
            client.insert(np.array([1]), None, tensor, None, None, timeout=DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S + LATEST_S


def test_a_receiver_that_is_stopped_past_a_deadline_loses_no_other_tensor(start):
    child = start("receive_some")
    with Pipe.connect(child.read()) as sender:
        child.stop()
        late, *others = [
            sender.isend_tensor(np.full(LARGE, number, np.uint8), timeout)
            for number, timeout in enumerate((DEADLINE_S, None, None))
        ]
        begun = time.monotonic()
        with pytest.raises(TransferTimeoutError, match="the pipe is usable"):
            late.wait()
        assert time.monotonic() - begun < DEADLINE_S + LATEST_S
        child.process.send_signal(signal.SIGCONT)
        for other in others:
            other.wait(20)
        late.settled(20)
    assert child.read() in ("0 1 2", "late 1 2", "1 2")


def test_a_server_that_is_stopped_past_the_deadline_of_an_insert_loses_no_other_insert(start):
    child = start("serve_entries", MIB)
    with LookupBuffer.connect(child.read()) as client:
        child.stop()
        other = client.iinsert(np.array([2]), None, np.ones(MIB // 4, np.uint8), None, None)
        with pytest.raises(TransferTimeoutError, match="the buffer is usable"):
            client.insert(np.array([1]), None, np.ones(MIB // 4, np.uint8), None, None, timeout=DEADLINE_S)
        child.process.send_signal(signal.SIGCONT)
        other.wait(20)
        assert client.drop_select(np.array([2]), None, timeout=20)[0].tolist() == [2]


def test_a_deadline_that_passes_at_a_receiver_that_is_awake_withdraws_the_tensor_and_the_pipe_goes_on(start):
    child = start("receive_nothing")
    with Pipe.connect(child.read()) as sender:
        tensor = np.ones(LARGE, np.uint8)
        for _ in range(TRIES):
            with pytest.raises(TransferTimeoutError, match="usable"):
                sender.send_tensor(tensor, timeout=DEADLINE_S)
        child.process.kill()
        with contextlib.suppress(KVPipeError):
            sender.close(timeout=0)
