"""Two hosts: nothing but the network is common to them. Run by tests/test_hosts.py, in a process of its own."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvpipe import Agent, LookupBuffer, PeerLostError, Pipe, TransferTimeoutError
from tests.faults.rounds import Holdings
from tests.hosts.namespaces import Host, why_no_hosts
from tests.hosts.translation import Translation
from tests.peers import LARGE, MIB, Child, pattern, wait_until

pytestmark = [pytest.mark.ucx, pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())]

TOKEN = "shared by both hosts"
NUM_BLOCKS, BLOCK_BYTES = 16, 64 << 10


@pytest.fixture(scope="module")
def host():
    with Host() as host:
        yield host


@pytest.fixture(scope="module", autouse=True)
def cables(host):
    """All that there are."""
    return [host.cable() for _ in range(4)]


@pytest.fixture
def cable(cables):
    return cables[0]


@pytest.fixture
def other(cables):
    return cables[1]


@pytest.fixture
def thin(cables):
    return cables[2]


@pytest.fixture
def disturbed(cables):
    return cables[3]


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("KVPIPE_TOKEN", TOKEN)


@pytest.fixture
def start(host):
    """Starts a program of `tests.peers` on the other host."""
    with contextlib.ExitStack() as stack:

        def begin(program, *arguments):
            child = Child(program, *arguments, host=host)
            stack.callback(child.end)
            return child

        yield begin


@pytest.fixture
def agent(cable):
    with Agent(f"{cable.near}:0") as agent:
        yield agent


def there(cable):
    return f"{cable.far}:0"


def test_tensors_of_all_sizes_go_there_and_back(cable, start):
    child = start("echo", there(cable))
    with Pipe.connect(child.read()) as sender, Pipe.listen(f"{cable.near}:0") as receiver:
        child.tell(receiver.address)
        for size in (0, 1, 1000, MIB, 20 * MIB):
            tensor = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
            sent = sender.isend_tensor(tensor)
            assert np.array_equal(receiver.recv_tensor(timeout=20), tensor)
            sent.wait(20)
        assert sender.transport == receiver.transport == "tcp"


def test_blocks_are_read_and_written_and_notified(cable, start, agent):
    child = start("drain_notifications", NUM_BLOCKS, BLOCK_BYTES, there(cable))
    read_write_and_notify(agent, child, child.read())


def read_write_and_notify(agent, child, address):
    memory = pattern(NUM_BLOCKS, BLOCK_BYTES)
    region = agent.register(memory, "own", BLOCK_BYTES)
    peer = agent.connect(address)
    ids = np.arange(NUM_BLOCKS)
    peer.write_blocks(region, ids, "kv", ids[::-1], notify=b"3").wait(20)
    first = memory[NUM_BLOCKS - 1 - 3, 0]
    assert child.read() == f"3 {first} tcp"
    memory[:] = 0
    peer.read_blocks(region, ids, "kv", ids[::-1]).wait(20)
    assert np.array_equal(memory, pattern(NUM_BLOCKS, BLOCK_BYTES))
    peer.notify(b"5")
    assert child.read().startswith("5 ")


def test_blocks_are_read_and_written_and_notified_through_an_address_that_no_interface_has(host, start, agent):
    try:
        translation = Translation(host)
    except OSError as error:
        pytest.skip(f"no translation: {error}")
    with translation:
        child = start("drain_notifications", NUM_BLOCKS, BLOCK_BYTES, f"{translation.target}:0")
        bound, _, port = child.read().rpartition(":")
        assert translation.address not in {bound, *listeners(host)}
        read_write_and_notify(agent, child, f"{translation.address}:{port}")


def test_entries_go_through_a_lookup_buffer(cable, start):
    child = start("serve_entries", 64 * MIB, there(cable))
    with LookupBuffer.connect(child.read()) as buffer:
        key = np.random.default_rng(1).integers(0, 256, 5 * MIB, dtype=np.uint8)
        buffer.insert(np.arange(9), None, key, None, None, timeout=20)
        tokens, _, found, _, _ = buffer.drop_select(np.arange(4), None, timeout=20)
        assert tokens.tolist() == list(range(9))
        assert np.array_equal(found, key)


def test_a_benchmark_measures_to_the_other_host(host, cable, tmp_path):
    kvpipe = [sys.executable, "-m", "kvpipe"]
    command = [*host.enter, *kvpipe, "bench", "serve", "--listen", there(cable)]
    figures = tmp_path / "figures.json"
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
        address = server.stdout.readline().removeprefix("listening on ").strip()
        arguments = ["pipe", "--sizes", "64K", "--rounds", "5", "--working-set", "8M", "--peer", address]
        done = subprocess.run(
            [*kvpipe, "bench", *arguments, "--json", figures], capture_output=True, text=True, timeout=60, check=False
        )
        host.kill(server)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert rows
    assert {row["transport"] for row in rows} == {"tcp"}


def test_a_cut_in_the_middle_of_a_transfer_ends_it_at_its_deadline_and_the_peer_is_reached_again(cable, start, agent):
    child = start("serve_blocks", LARGE // MIB, MIB, there(cable))
    address = child.read()
    region = agent.register(np.zeros(LARGE, np.uint8), "own", MIB)
    ids = range(LARGE // MIB)

    def read(peer, timeout):
        peer.read_blocks(region, ids, "kv", ids, timeout=timeout).wait()

    peer = agent.connect(address)
    read(peer, 20)
    before = Holdings.now()
    cutter = threading.Timer(0.02, cable.cut)
    cutter.start()
    try:
        begun = time.monotonic()
        with pytest.raises(TransferTimeoutError):
            read_for_ever(read, peer)
        assert time.monotonic() - begun < 3
    finally:
        cutter.join()
        cable.join()
    wait_until(lambda: read_again(agent, address, read))
    assert Holdings.settled(before).num_descriptors <= before.num_descriptors + 1


def read_for_ever(read, peer):
    while True:
        read(peer, 0.5)


def read_again(agent, address, read):
    with contextlib.suppress(PeerLostError, OSError, TimeoutError):
        read(agent.connect(address, timeout=1), 5)
        return True
    return False


def listeners(host):
    """The addresses of all listeners on a host, loopback included, as the kernel reports them."""
    lines = host.run("ss", "--listening", "--tcp", "--numeric", "--no-header").splitlines()
    return {line.split()[3].rpartition(":")[0] for line in lines}


@pytest.mark.parametrize("program", [("receive_nothing",), ("serve_blocks", 4, 4096), ("serve_entries", MIB)])
def test_on_a_host_with_several_interfaces_only_the_chosen_one_is_listened_on(host, cable, other, start, program):
    for chosen in (cable, other):
        child = start(*program, there(chosen))
        child.read()
        assert listeners(host) == {chosen.far}
        child.end()
        wait_until(lambda: not listeners(host))


def test_a_peer_is_reached_by_the_interface_that_leads_to_it(host, cable, other, start):
    """This host has several too, and the other one sends from an address that it has not said."""
    for chosen in (cable, other):
        with Pipe.listen(f"{chosen.near}:0") as receiver:
            child = start("send_nothing", receiver.address)
            assert child.read() == "tcp"
            wait_until(lambda: receiver.peer)  # the sender may know first
            assert receiver.peer.rpartition(":")[0] == chosen.far
            assert not listeners(host), "a sender listens nowhere"
            child.end()


DELAY = ("netem", "delay", "20ms", "loss", "1%")


def test_tensors_arrive_although_packets_are_late_and_lost(disturbed, start):
    try:
        disturbed.disturb(*DELAY)
    except OSError as error:
        pytest.skip(f"no delay and no loss: {error}")
    send_through(disturbed, start)


def test_tensors_arrive_although_the_cable_is_thin(thin, start):
    thin.disturb("tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms")
    send_through(thin, start)


def test_of_two_loads_over_a_thin_cable_one_is_cancelled_and_the_other_neither_notices_nor_retries(thin, start):
    thin.disturb("tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms")
    num_bytes = 12 * MIB  # half a second each
    address, incarnation = start("announce_handoffs", 2, num_bytes, there(thin)).read().split()
    memory = np.zeros((2, num_bytes // 4), np.uint32)
    with Agent(f"{thin.near}:0") as agent:
        region, native = agent.register(memory, "kv", num_bytes)._native, agent._native
        for number in (0, 1):
            handoff = bytes([number] * 16)
            parts = [([region], 0, [number])]
            native.load(handoff, address, bytes.fromhex(incarnation), parts, is_committed=True)
        wait_until(lambda: memory[0, 1] and memory[1, 1])  # both are on their way
        native.cancel(bytes(16), "not wanted", is_withdrawn=False)
        ended = {}

        def both_have_ended():
            events = [event for event in native.drain() if event["event"] != "log"]
            ended.update((event["handoff"][0], event) for event in events if event["event"] != "blocks_verified")
            return len(ended) == 2

        wait_until(both_have_ended)
        assert ended[0]["event"] == "load_failed"
        assert (ended[1]["event"], ended[1]["num_retried"]) == ("load_completed", 0)
        assert (memory[1] == pattern(2, num_bytes)[1]).all()
        assert agent.connect(address).transport == "tcp"


def test_a_late_read_over_a_thin_cable_leaves_the_healthy_one_beside_it(thin, start):
    thin.disturb("tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms")
    num_bytes = 12 * MIB
    address = start("serve_blocks", 2, num_bytes, there(thin)).read()
    memory = np.zeros((2, num_bytes // 4), np.uint32)
    with Agent(f"{thin.near}:0") as agent:
        region, peer = agent.register(memory, "mine", num_bytes), agent.connect(address)
        healthy = peer.read_blocks(region, [0], "kv", [0])
        late = peer.read_blocks(region, [1], "kv", [1], timeout=0.1)
        with pytest.raises(TransferTimeoutError, match="the peer is usable"):
            late.wait(20)
        late.settled(20)
        memory[1] = 0
        assert healthy.wait(20) == num_bytes
        assert (memory[0] == pattern(2, num_bytes)[0]).all()
        assert not memory[1].any()


def test_a_late_insert_over_a_thin_cable_fails_alone_and_its_buffer_goes_on(thin, start):
    thin.disturb("tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms")
    child = start("serve_entries", 1 << 30, there(thin))
    large = np.ones(40 * MIB, np.uint8)  # more than a second and a half
    with LookupBuffer.connect(child.read()) as client, ThreadPoolExecutor(1) as other:
        healthy = other.submit(client.drop_select, np.array([2]), None, timeout=20)
        with pytest.raises(TransferTimeoutError, match="nothing was inserted, the buffer is usable"):
            client.insert(np.array([1]), None, large, None, None, timeout=0.02)
        assert client.drop_select(np.array([1]), None, timeout=0) == [None] * 5
        client.insert(np.array([2]), None, np.arange(3), None, None, timeout=20)
        assert healthy.result()[2].tolist() == [0, 1, 2]


FAST = ("tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms")
SLOW = ("tbf", "rate", "16mbit", "burst", "64kb", "latency", "50ms")
# Bytes in front of a message, a part and the socket's, take 0.1 s; all bytes on their way when a transfer is
# cancelled, 4 MiB, take 0.5 s. A peer is taken for silent when it has not answered for 0.25 s.
BETWEEN = ("tbf", "rate", "64mbit", "burst", "64kb", "latency", "50ms")
SIZES = [1, 100, 32 << 10, (32 << 10) + 1, MIB, 7, 3 * MIB, 64 << 10, 0, MIB // 2]


def test_a_send_over_a_slow_cable_is_withdrawn_at_its_deadline_and_ten_more_arrive_in_order(host, thin, start):
    """Messages overtake the parts, and those on their way end at once. No segment is dropped: behind one that is
    dropped twice the answer to a PING is late, and the sender says that it does not know."""
    thin.disturb(*BETWEEN)
    with host.small_windows(128 << 10):
        child = start("receive_some", there(thin))
        address = child.read()
    with Pipe.connect(address) as sender:
        late = sender.isend_tensor(np.zeros(40 * MIB, np.uint8), timeout=1)
        with pytest.raises(TransferTimeoutError, match="it was withdrawn, the pipe is usable"):
            late.wait(20)
        late.settled(0)
        later = [sender.isend_tensor(np.full(max(size, 1), number, np.uint8)) for number, size in enumerate(SIZES, 1)]
        thin.disturb(*FAST)
        for work in later:
            work.wait(20)
    assert child.read() == "late 1 2 3 4 5 6 7 8 9 10"


def test_an_insert_that_is_read_long_after_its_deadline_fails_alone_and_its_buffer_goes_on(thin, start):
    thin.disturb(*SLOW)
    child = start("serve_entries", 1 << 30, there(thin))
    with LookupBuffer.connect(child.read()) as client:
        with pytest.raises(TransferTimeoutError, match=r"may still be read until .* the buffer is usable"):
            client.insert(np.array([1]), None, np.ones(40 * MIB, np.uint8), None, None, timeout=0.02)
        assert client.stats().num_waiting == 1
        later = [client.iinsert(np.array([2]), None, np.full(max(size, 1), size), None, None) for size in SIZES]
        thin.disturb(*FAST)
        for work in later:
            work.wait(20)
        assert client.stats().num_waiting == 0
        assert client.drop_select(np.array([1]), None, timeout=0) == [None] * 5
        for size in SIZES:
            found = client.drop_select(np.array([2]), None, timeout=20)[2]
            assert np.array_equal(found, np.full(max(size, 1), size))


def send_through(cable, start):
    child = start("receive_in_order", there(cable))
    with Pipe.connect(child.read()) as sender:
        for number in range(8):
            sender.send_tensor(np.full(MIB // 8 if number % 2 else 100, number), timeout=60)
    assert child.read() == "8"


def devices():
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout


def test_a_host_leaves_nothing_behind():
    with Host() as host:
        cable = host.cable()
        assert cable.name in devices()
    wait_until(lambda: cable.name not in devices())  # the kernel takes a moment
