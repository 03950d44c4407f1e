"""Pipe in one process, over every transport: order, timeouts, close, threads."""

import contextlib
import math
import threading
import time

import numpy as np
import pytest

from kvpipe import (
    ClosedError,
    ConfigError,
    EndOfPipeError,
    PeerLostError,
    Pipe,
    PipeStats,
    TransferTimeoutError,
)
from tests.peers import MIB, wait_until

pytestmark = pytest.mark.usefixtures("transport")

SMALL, MEDIUM = np.arange(8), np.arange(MIB)  # MEDIUM is larger than what travels inside its message
LOST_WITHIN_S = 2.0


def both_ways(sender, receiver):
    """Asserts that the pipe works."""
    work = sender.isend_tensor(MEDIUM)
    assert np.array_equal(receiver.recv_tensor(timeout=10), MEDIUM)
    work.wait(10)


# --- order ------------------------------------------------------------------------------------------------------


def test_tensors_arrive_in_the_order_of_sending(pair, transport):
    sender, receiver = pair
    sent = [np.full(1 << (i % 19), i) if i % 5 else None for i in range(200)]
    works = [sender.isend_tensor(tensor) for tensor in sent]
    for tensor in sent:
        received = receiver.recv_tensor(timeout=10)
        assert received is None if tensor is None else np.array_equal(received, tensor)
    assert all(work.wait(10) is None for work in works)


def test_receives_are_served_in_the_order_of_asking(pair):
    sender, receiver = pair
    works = [receiver.irecv_tensor() for _ in range(20)]
    for i in range(20):
        sender.send_tensor(np.full(10 + i * 1000, i))
    assert [int(work.wait(10)[0]) for work in works] == list(range(20))


def test_threads_may_send_at_once_and_each_keeps_its_order(pair):
    sender, receiver = pair
    num_threads, num_each = 8, 50

    def send(thread):
        for i in range(num_each):
            sender.send_tensor(np.full(1 if i % 2 else 20_000, 1000 * thread + i))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    received = [int(receiver.recv_tensor(timeout=20)[0]) for _ in range(num_threads * num_each)]
    for thread in threads:
        thread.join()
    for thread in range(num_threads):
        assert [n - 1000 * thread for n in received if n // 1000 == thread] == list(range(num_each))


def test_eight_threads_may_send_while_eight_receive_and_each_tensor_goes_to_one(pair):
    sender, receiver = pair
    num_each, received = 20, []

    def send(thread):
        for i in range(num_each):
            sender.send_tensor(np.full(1 if i % 2 else 20_000, num_each * thread + i))

    def receive():
        for _ in range(num_each):
            tensor = receiver.recv_tensor(timeout=60)
            assert (tensor == tensor[0]).all()
            received.append(int(tensor[0]))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(8)]
    threads += [threading.Thread(target=receive) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(received) == list(range(8 * num_each))


def test_isend_and_irecv_are_ordered_by_their_calls_in_any_thread(pair):
    sender, receiver = pair
    in_order, receives, lock = [], [], threading.Lock()

    def call(thread):
        for i in range(20):
            with lock:
                in_order.append(100 * thread + i)
                sender.isend_tensor(np.full(1 if i % 3 else 10_000, in_order[-1]))
            with lock:
                receives.append(receiver.irecv_tensor())

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(work.wait(60)[0]) for work in receives] == in_order


def test_a_dropped_work_cancels_nothing(pair):
    sender, receiver = pair
    sender.isend_tensor(MEDIUM.copy())
    assert np.array_equal(receiver.recv_tensor(timeout=10), MEDIUM)


def test_a_small_tensor_may_be_changed_before_it_is_received(pair):
    sender, receiver = pair
    tensor = np.zeros(100)
    sender.send_tensor(tensor)
    tensor += 1
    assert not receiver.recv_tensor(timeout=10).any()


# --- timeouts ---------------------------------------------------------------------------------------------------


def test_timeout_0_polls(pair):
    sender, receiver = pair
    started = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="the pipe is usable"):
        receiver.recv_tensor(timeout=0)
    with pytest.raises(TransferTimeoutError, match="the pipe is usable"):
        sender.send_tensor(MEDIUM, timeout=0)
    assert time.monotonic() - started < 1
    both_ways(sender, receiver)


def test_timeout_0_receives_what_has_arrived(pair):
    sender, receiver = pair
    waiting = receiver.irecv_tensor()
    sender.send_tensor(SMALL)
    sender.send_tensor(SMALL + 1)
    waiting.wait(10)
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        try:
            assert np.array_equal(receiver.recv_tensor(timeout=0), SMALL + 1)
        except TransferTimeoutError:
            continue
        return
    pytest.fail("what was sent did not become visible to polling")


def test_an_expired_receive_consumes_nothing_and_leaves_the_pipe_usable(pair):
    sender, receiver = pair
    with pytest.raises(TransferTimeoutError, match="no tensor came in time; the pipe is usable"):
        receiver.recv_tensor(timeout=0.05)
    both_ways(sender, receiver)


def test_an_expired_send_is_withdrawn_and_leaves_the_pipe_usable(pair):
    sender, receiver = pair
    with pytest.raises(TransferTimeoutError, match="withdrawn, the pipe is usable"):
        sender.send_tensor(MEDIUM + 1, timeout=0.05)
    both_ways(sender, receiver)


def test_an_operation_that_was_begun_expires_too_and_is_settled_then(pair):
    sender, receiver = pair
    for begin, message in (
        (lambda: sender.isend_tensor(MEDIUM + 1, timeout=0.05), "withdrawn, the pipe is usable"),
        (lambda: receiver.irecv_tensor(timeout=0.05), "no tensor came in time; the pipe is usable"),
    ):
        late = begin()
        late.settled(20)
        with pytest.raises(TransferTimeoutError, match=message):
            late.result()
    both_ways(sender, receiver)


def test_a_receive_that_expires_after_the_two_have_met_loses_that_tensor_and_leaves_the_pipe_usable(pair):
    sender, receiver = pair
    work, behind = sender.isend_tensor(np.zeros(48 * MIB)), sender.isend_tensor(MEDIUM)
    text = "the pipe is usable"
    while "no tensor came" in text or text == "the pipe is usable":  # as long as the offer has not come
        with pytest.raises(TransferTimeoutError) as caught:
            receiver.recv_tensor(timeout=0.004)
        text = str(caught.value)
    assert "not received in time; it is lost, the pipe is usable" in text
    with pytest.raises(TransferTimeoutError, match="not received in time; it was withdrawn, the pipe is usable"):
        work.wait(20)
    assert np.array_equal(receiver.recv_tensor(timeout=20), MEDIUM)
    behind.wait(20)
    both_ways(sender, receiver)


def test_an_expired_wait_lets_the_operation_go_on(pair):
    sender, receiver = pair
    work = receiver.irecv_tensor()
    with pytest.raises(TransferTimeoutError, match=r"not completed within 0.01 s; the operation continues"):
        work.wait(0.01)
    sender.send_tensor(SMALL)
    assert np.array_equal(work.wait(10), SMALL)


@pytest.mark.parametrize("timeout", [-1, -math.inf, math.nan])
def test_a_bad_timeout_is_named_and_changes_nothing(pair, timeout):
    sender, receiver = pair
    work = receiver.irecv_tensor()
    for attempt in (
        lambda: sender.send_tensor(SMALL, timeout=timeout),
        lambda: receiver.recv_tensor(timeout=timeout),
        lambda: work.wait(timeout),
        lambda: sender.close(timeout=timeout),
        lambda: receiver.close(timeout=timeout),
        lambda: Pipe.connect(receiver.address, timeout=timeout),
    ):
        with pytest.raises(ConfigError, match=r"(?i)timeout=(-1|-?inf|nan):"):
            attempt()
    sender.send_tensor(SMALL)
    assert np.array_equal(work.wait(10), SMALL)


# --- close ------------------------------------------------------------------------------------------------------


def test_after_the_senders_close_the_rest_is_received_then_the_end():
    receiver = Pipe.listen()
    with Pipe.connect(receiver.address) as sender:
        works = [sender.isend_tensor(tensor) for tensor in (SMALL, MEDIUM, None)]
        waits = [receiver.irecv_tensor() for _ in range(4)]
    assert [type(work.wait(10)) for work in waits[:3]] == [np.ndarray, np.ndarray, type(None)]
    assert [work.result() for work in works] == [None] * 3
    for attempt in (lambda: waits[3].wait(10), receiver.recv_tensor, lambda: receiver.recv_tensor(timeout=0)):
        with pytest.raises(EndOfPipeError):
            attempt()
    receiver.close()


def test_the_senders_close_raises_when_not_all_is_received_in_time():
    with Pipe.listen() as receiver:
        sender = Pipe.connect(receiver.address)
        sender.send_tensor(SMALL)
        with pytest.raises(TransferTimeoutError, match="1 tensors had not been received in time; the pipe is closed"):
            sender.close(timeout=0.05)
        with pytest.raises(ClosedError):
            sender.send_tensor(SMALL)


def test_the_receivers_close_fails_the_sender():
    receiver = Pipe.listen()
    sender = Pipe.connect(receiver.address)
    work = sender.isend_tensor(MEDIUM)
    receiver.close()
    with pytest.raises(PeerLostError):
        work.wait(10)
    with pytest.raises(PeerLostError):
        sender.send_tensor(SMALL)


def test_the_senders_close_raises_when_the_receiver_left_with_small_tensors_not_received():
    receiver = Pipe.listen()
    sender = Pipe.connect(receiver.address)
    sender.send_tensor(SMALL)
    receiver.close()
    with contextlib.suppress(PeerLostError):
        while True:
            sender.send_tensor(SMALL)
    with pytest.raises(PeerLostError):
        sender.close()
    sender.close()


def test_a_sender_that_closes_at_once_ends_the_pipe_in_order():
    for _ in range(20):
        with Pipe.listen() as receiver:
            work = receiver.irecv_tensor()
            Pipe.connect(receiver.address).close()
            with pytest.raises(EndOfPipeError):
                work.wait(10)


def test_the_first_tensor_arrives_however_early_it_comes():
    for _ in range(40):
        with Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
            work = sender.isend_tensor(MEDIUM)
            assert receiver.recv_tensor(timeout=10).nbytes == MEDIUM.nbytes
            work.wait(10)


def test_closing_twice_is_fine_and_later_calls_raise_closed_error(pair):
    sender, receiver = pair
    for end in pair:
        end.close()
        end.close()
    for attempt in (lambda: sender.send_tensor(SMALL), receiver.recv_tensor, receiver.irecv_tensor):
        with pytest.raises(ClosedError, match="closed"):
            attempt()


def test_threads_that_close_at_the_same_time_all_wait_until_everything_was_received(pair):
    sender, receiver = pair
    work = sender.isend_tensor(MEDIUM)
    outcomes = []
    closers = [threading.Thread(target=lambda: outcomes.append(sender.close(30))) for _ in range(3)]
    for closer in closers:
        closer.start()
    time.sleep(0.2)
    assert all(closer.is_alive() for closer in closers)
    assert np.array_equal(receiver.recv_tensor(timeout=20), MEDIUM)
    for closer in closers:
        closer.join(20)
    assert outcomes == [None] * 3
    work.wait(20)


def test_close_ends_waits_of_other_threads(pair):
    _, receiver = pair
    work = receiver.irecv_tensor()
    threading.Timer(0.1, receiver.close).start()
    with pytest.raises(ClosedError):
        work.wait(10)


def test_an_exception_in_the_with_block_ends_the_pipe_without_waiting():
    with Pipe.listen() as receiver:
        started = time.monotonic()
        with contextlib.suppress(KeyError), Pipe.connect(receiver.address) as sender:
            sender.send_tensor(SMALL)
            raise KeyError
        assert time.monotonic() - started < 5


def test_a_dropped_pipe_ends_its_thread(new_threads):
    threads = new_threads()
    receiver = Pipe.listen()
    sender = Pipe.connect(receiver.address)
    assert threads()
    del receiver, sender
    wait_until(lambda: not threads())  # the one that connected ends by itself


def test_repr_and_stats_show_the_state(pair):
    sender, receiver = pair
    both_ways(sender, receiver)
    assert repr(sender) == f"<Pipe sender peer={receiver.address} transport={sender.transport} open, 0 in flight>"
    assert repr(receiver).startswith("<Pipe receiver peer=127.0.0.1:")
    assert repr(receiver).endswith(f"transport={receiver.transport} open, 0 in flight>")
    for end in pair:
        assert end.stats() == PipeStats(1, MEDIUM.nbytes, 0, end.transport)
        assert end.transport
    receiver.close()
    assert "closed" in repr(receiver)


def test_each_end_refuses_what_the_other_does(pair):
    sender, receiver = pair
    with pytest.raises(ConfigError, match="sending end of the pipe; it cannot receive"):
        sender.recv_tensor()
    with pytest.raises(ConfigError, match="receiving end of the pipe; it cannot send"):
        receiver.send_tensor(SMALL)
    assert sender.address is None
