"""LookupBuffer between processes that die, stop, or are many. What matches, and waits: test_lookup_buffer.py."""

import json
import signal
import socket
import threading
import time

import numpy as np
import pytest

from kvpipe import LookupBuffer, PeerLostError
from tests.peers import MIB
from tests.test_lookup_buffer import MOST, TIMEOUT_S, eventually, finish, in_thread, insert, select

pytestmark = pytest.mark.ucx

BIG = 256 * MIB  # so that there is time to kill a reader
LOST_WITHIN_S = 2.0
TRIES = 10


@pytest.fixture
def server():
    with LookupBuffer(4 * BIG) as buffer:
        buffer.serve()
        yield buffer


@pytest.fixture(scope="module")
def big():
    return np.random.default_rng(7).integers(0, 256, BIG, dtype=np.uint8)


def caught_reading(server, start, big):
    """A consumer that has begun to read the only entry and not ended when it was stopped."""
    for _ in range(TRIES):
        insert(server, [1], big)
        num_taken = server.stats().num_taken
        child = start("consume_one", server.address)
        assert child.read() == "ready"
        eventually(lambda: server.stats().num_entries == 0)
        child.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)  # what it had sent is here now
        if server.stats().num_taken == num_taken:
            return child
        child.process.kill()
        eventually(lambda: server.stats().num_leased == 0)
        select(server, None)
    pytest.fail("the consumer was faster each time")


@pytest.mark.usefixtures("data_path")
def test_the_entry_of_a_consumer_that_is_killed_while_it_reads_goes_to_another(server, start, big):
    child = caught_reading(server, start, big)
    with LookupBuffer.connect(server.address) as client:
        waiting = in_thread(lambda: client.drop_select(np.array([1]), None, timeout=TIMEOUT_S))
        eventually(lambda: server.stats().num_waiting == 1)
        child.process.kill()
        assert np.array_equal(finish(*waiting)[2], big)


@pytest.mark.slow
def test_the_entry_of_a_consumer_that_is_stopped_goes_to_another_and_is_not_delivered_twice(server, start, big):
    child = caught_reading(server, start, big)
    num_taken = server.stats().num_taken
    with LookupBuffer.connect(server.address) as client:
        assert np.array_equal(client.drop_select(None, None, timeout=60)[2], big)
    child.process.send_signal(signal.SIGCONT)
    assert child.read() == "PeerLostError"
    assert server.stats().num_taken == num_taken + 1


@pytest.mark.usefixtures("data_path")
def test_a_producer_that_is_killed_while_it_inserts_leaves_nothing_behind(server, start):
    child = start("insert_for_ever", server.address, BIG)
    assert child.read() == "ready"
    eventually(lambda: server.stats().num_inserted >= 1)
    child.process.kill()
    child.process.wait()
    with LookupBuffer.connect(server.address) as client:
        while client.drop_select(None, None, timeout=0)[0] is not None:
            pass
    eventually(lambda: server.stats().num_bytes == 0)
    assert server.stats().num_waiting == 0


@pytest.mark.usefixtures("data_path")
def test_a_server_that_is_killed_is_lost_for_who_waits_within_2_s(start):
    child = start("serve_entries", MIB)
    address = child.read()
    consumer, producer = LookupBuffer.connect(address), LookupBuffer.connect(address)
    insert(producer, [1], MOST)
    waits = [in_thread(lambda: select(consumer, [2], None)), in_thread(lambda: insert(producer, [2], timeout=60))]
    give_up_at = time.monotonic() + TIMEOUT_S
    while counters(child)["num_waiting"] < 2:
        assert time.monotonic() < give_up_at
    killed_at = child.kill_after(0)
    for wait in waits:
        assert isinstance(finish(*wait), PeerLostError)
    assert time.monotonic() - killed_at[0] < LOST_WITHIN_S
    for client in (consumer, producer):
        with pytest.raises(PeerLostError):
            select(client, None)
        client.close()


def counters(child):
    child.tell("stats")
    return json.loads(child.read())


@pytest.mark.slow
def test_every_entry_of_8_producers_is_consumed_by_one_of_8_consumers_though_some_are_killed(start_for_module):
    num_entries, num_each, num_killed = 10_000, 1250, 3
    server = start_for_module("serve_entries", 1 << 20)
    address = server.read()
    consumers = [start_for_module("consume_numbered", address) for _ in range(8)]
    taken = [[] for _ in consumers]
    listeners = [
        threading.Thread(target=listen, args=(child, numbers, 100 * (i + 1) if i < num_killed else None))
        for i, (child, numbers) in enumerate(zip(consumers, taken, strict=True))
    ]
    for child in consumers:
        assert child.read() == "ready"
    for listener in listeners:
        listener.start()
    producers = [start_for_module("insert_numbered", address, num_each * i, num_each) for i in range(8)]
    for child in producers:
        assert child.read() == "done"
    give_up_at = time.monotonic() + 120
    while (last := counters(server))["num_taken"] < num_entries or last["num_leased"]:
        assert time.monotonic() < give_up_at, last
        time.sleep(0.01)
    server.end()
    for listener in listeners:
        listener.join()
    numbers = [number for some in taken for number in some]
    assert len(numbers) == len(set(numbers)), "delivered twice"
    # A consumer that is killed has taken at most one entry that it had not spoken of.
    assert num_entries - num_killed <= len(numbers) <= num_entries
    assert all(len(some) >= 100 * (i + 1) for i, some in enumerate(taken[:num_killed]))
    assert last["num_inserted"] == last["num_taken"] == num_entries
    assert last["num_entries"] == last["num_leased"] == last["num_bytes"] == 0


def listen(child, numbers, kill_at):
    """Notes the entries that a consumer takes, and kills it after so many."""
    for line in child.process.stdout:
        if line.endswith("\n"):
            numbers.append(int(line))
        if len(numbers) == kill_at:
            child.process.kill()


@pytest.mark.parametrize("is_remote", [0, 1])
@pytest.mark.parametrize("what", ["select", "insert"])
def test_ctrl_c_interrupts_a_wait_which_leaves_nothing_behind(start, what, is_remote):
    child = start("interrupted_entries", what, is_remote)
    child.interrupt()
    assert child.read() == "1"


def test_a_forked_child_gets_closed_error_and_the_parent_goes_on(start):
    child = start("forked_entries")
    assert json.loads(child.read()) == ["ClosedError", "ClosedError", "fine"] * 2
    assert child.read() == "[0, 1, 2]"


def test_garbage_on_the_port_disturbs_no_peer(server):
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
        with LookupBuffer.connect(server.address) as client:
            insert(client, [1])
            assert select(client, [1]) == [1]


def test_a_consumer_without_the_library_of_an_entry_leaves_it_to_others(server, start):
    import torch  # noqa: PLC0415 - the other tests do without

    server.insert(torch.arange(3), None, None, None, None)
    child = start("consume_one_without_torch", server.address)
    assert child.read() == "ModuleNotFoundError"
    eventually(lambda: server.stats().num_entries == 1)
    assert select(server, None) == [0, 1, 2]
