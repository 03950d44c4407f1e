"""Tensors and blocks over RDMA verbs, between processes. Runs in the machine that `make test-rdma` boots."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvpipe import Agent, PeerLostError, Pipe, TransferTimeoutError, info
from tests.peers import MIB, Child, pattern, wait_until
from tests.rdma.peer import LISTEN

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.skipif("KVPIPE_TEST_LOCAL" not in os.environ, reason="needs an RDMA device: run make test-rdma"),
]

NUM_BLOCKS, BLOCK_BYTES = 256, 4096
LARGE = 16 * MIB
TIMEOUT_S = 60  # the processor is interpreted, and so is the network card
LOST_WITHIN_S = 10


@pytest.fixture(autouse=True, scope="module")
def over_verbs():
    """The user's environment of these tests: UCX has rc, with ud to connect by, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "rc_verbs,ud_verbs,self")
        patch.setenv("KVPIPE_DATA_PATH", "rdma")
        patch.setenv("KVPIPE_TOKEN", "token of the tests")
        yield


@pytest.fixture
def start():
    children = []

    def begin(program, *arguments, host=None):
        children.append(Child(program, *arguments, module="tests.rdma.peer", host=host))
        return children[-1]

    yield begin
    for child in children:
        child.end()


@pytest.fixture
def agent():
    with Agent(LISTEN) as agent:
        yield agent


@pytest.fixture
def source(start):
    return start("expose_blocks", NUM_BLOCKS, BLOCK_BYTES)


@pytest.fixture
def peer(agent, source):
    return agent.connect(source.read(), timeout=TIMEOUT_S)


@pytest.fixture
def blocks():
    return np.zeros((NUM_BLOCKS, BLOCK_BYTES // 4), np.uint32)


def test_the_machine_has_a_device_and_a_ucx_for_it():
    facts = info()
    assert facts["rdma_devices"]
    assert "/.cache/rdma/" in facts["ucx_path"]


def echoed(child, tensors):
    """The echo of each tensor, and the transport that carried it there."""
    with Pipe.listen(LISTEN) as receiver, Pipe.connect(child.read(), timeout=TIMEOUT_S) as sender:
        child.tell(receiver.address)
        back = []
        for tensor in tensors:
            sender.send_tensor(tensor, timeout=TIMEOUT_S)
            back.append(receiver.recv_tensor(timeout=TIMEOUT_S))
        return back, sender.transport


def test_tensors_of_every_size_come_back_over_rc(start):
    sizes = [0, 1, 32 << 10, (32 << 10) + 1, MIB, 5 * MIB + 3]
    sent = [np.arange(size, dtype=np.uint8) for size in sizes]
    back, transport = echoed(start("echo"), sent)
    assert transport == "rc_verbs"
    assert all(np.array_equal(tensor, came) for tensor, came in zip(sent, back, strict=True))


def test_rdma_is_the_default_transport(start, monkeypatch):
    monkeypatch.delenv("UCX_TLS")
    back, transport = echoed(start("echo"), [np.arange(MIB)])
    assert transport == "rc_verbs"
    assert np.array_equal(back[0], np.arange(MIB))


@pytest.mark.parametrize(("devices", "transport"), [("rxe0:1", "rc_verbs"), ("rdma0", "tcp")])
def test_the_users_environment_selects_the_rdma_devices(start, monkeypatch, devices, transport):
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.setenv("UCX_NET_DEVICES", devices)
    back, taken = echoed(start("echo"), [np.arange(MIB)])
    assert taken == transport
    assert np.array_equal(back[0], np.arange(MIB))


def test_scattered_blocks_are_read_with_the_keys_of_the_peer_and_nothing_else_is_written(agent, peer, blocks):
    region = agent.register(blocks, "own", BLOCK_BYTES)
    local, remote = [7, 0, 1, 2, 250, 9], [255, 10, 11, 12, 0, 10]
    assert peer.transport == "rc_verbs"
    assert peer.read_blocks(region, local, "kv", remote).wait(TIMEOUT_S) == len(local) * BLOCK_BYTES
    expected = np.zeros_like(blocks)
    expected[local] = pattern(NUM_BLOCKS, BLOCK_BYTES)[remote]
    assert np.array_equal(blocks, expected)


def test_what_was_written_to_a_peer_is_read_back(agent, peer, blocks):
    blocks[:] = np.arange(NUM_BLOCKS)[:, None]
    region = agent.register(blocks, "own", BLOCK_BYTES)
    written, back = list(range(8)), list(range(100, 108))
    assert peer.write_blocks(region, written, "kv", back).wait(TIMEOUT_S) == 8 * BLOCK_BYTES
    assert peer.read_blocks(region, back, "kv", back).wait(TIMEOUT_S) == 8 * BLOCK_BYTES
    assert np.array_equal(blocks[back], blocks[written])


def pinned_kb():
    """Memory of this process that the kernel keeps in place for the RDMA device."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPin")]
    return int(line.split()[1])


def test_a_region_is_pinned_while_it_is_registered_and_no_longer(agent):
    before = pinned_kb()
    with agent.register(np.zeros(LARGE, np.uint8), "large", MIB):
        assert pinned_kb() - before >= LARGE >> 10
    wait_until(lambda: pinned_kb() - before < LARGE >> 10)


def until_lost(attempt):
    """Time of the detection that the peer is lost."""
    with contextlib.suppress(PeerLostError):
        while True:
            attempt()
    return time.monotonic()


def test_a_receiver_that_is_killed_is_lost_in_time(start):
    child = start("receive_for_ever", LARGE)
    tensor = np.ones(LARGE, np.uint8)
    sender = Pipe.connect(child.read(), timeout=TIMEOUT_S)
    sender.send_tensor(tensor, timeout=TIMEOUT_S)
    killed_at = child.kill_after(0.2)
    assert until_lost(lambda: sender.send_tensor(tensor)) - killed_at[0] < LOST_WITHIN_S


def test_a_sender_that_is_killed_is_lost_in_time(start):
    receiver = Pipe.listen(LISTEN)
    child = start("send_for_ever", receiver.address, LARGE)
    out = np.empty(LARGE, np.uint8)
    receiver.recv_tensor(out=out, timeout=TIMEOUT_S)
    killed_at = child.kill_after(0.2)
    assert until_lost(lambda: receiver.recv_tensor(out=out)) - killed_at[0] < LOST_WITHIN_S
    receiver.close()


def test_reads_of_a_peer_that_is_killed_end_in_time_and_their_memory_is_given_back(agent, source, peer):
    every, memory = range(NUM_BLOCKS), np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
    with agent.register(memory, "first", BLOCK_BYTES) as first:
        # UCX pins what it sends from when it is first used, to ask for checksums.
        peer.read_blocks(first, every, "kv", every).wait(TIMEOUT_S)
    before = pinned_kb()
    region = agent.register(memory, "own", BLOCK_BYTES)
    killed_at = source.kill_after(0.2)
    lost_at = until_lost(lambda: peer.read_blocks(region, every, "kv", every).wait(TIMEOUT_S))
    assert lost_at - killed_at[0] < LOST_WITHIN_S
    region.close()
    wait_until(lambda: pinned_kb() - before < memory.nbytes >> 10)


def receive_four(receiver, out, timeout):
    for _ in range(4):
        receiver.recv_tensor(out=out, timeout=timeout)


def test_a_receive_from_a_peer_that_is_stopped_ends_at_its_deadline(start):
    receiver = Pipe.listen(LISTEN)
    child = start("send_for_ever", receiver.address, LARGE)
    out = np.empty(LARGE, np.uint8)
    receiver.recv_tensor(out=out, timeout=TIMEOUT_S)
    child.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises((TransferTimeoutError, PeerLostError)):
        receive_four(receiver, out, timeout=3)  # what it had offered before it was stopped can still be read
    assert time.monotonic() - began < 3 * 4 + LOST_WITHIN_S
    receiver.close()


def test_a_peer_that_was_lost_is_replaced_by_another(agent, source, start, blocks):
    region = agent.register(blocks, "own", BLOCK_BYTES)
    agent.connect(source.read(), timeout=TIMEOUT_S)
    source.process.kill()
    peer = agent.connect(start("expose_blocks", NUM_BLOCKS, BLOCK_BYTES).read(), timeout=TIMEOUT_S)
    assert peer.read_blocks(region, [3], "kv", [4]).wait(TIMEOUT_S) == BLOCK_BYTES
    assert np.array_equal(blocks[3], pattern(NUM_BLOCKS, BLOCK_BYTES)[4])


@contextlib.contextmanager
def link_down():
    """Takes the network away from the RDMA device. The kernel still delivers what it sends to itself over TCP."""
    subprocess.run(["ip", "link", "set", "rdma0", "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", "rdma0", "up"], check=True)


def test_blocks_under_way_when_the_rdma_link_goes_down_arrive_as_streams_of_the_same_session(start, monkeypatch):
    # UCX (1.13, 1.23) aborts the process when its ud queue pair fails, as that of rxe does without a link. So ud only
    # connects rc here, and shared memory carries UCX's own messages.
    monkeypatch.setenv("UCX_TLS", "rc_verbs,ud_verbs:aux,posix,self")
    monkeypatch.setenv("UCX_MM_ERROR_HANDLING", "y")
    # Not among the lines that the test reads.
    monkeypatch.setenv("UCX_LOG_FILE", "stderr")
    source = start("expose_blocks", NUM_BLOCKS, 64 << 10)
    destination = start("exchange_blocks", source.read(), NUM_BLOCKS, 64 << 10)
    assert destination.read() == "rc_verbs"
    with link_down():
        while (transport := destination.read()) == "rc_verbs":
            pass
        assert {transport, destination.read(), destination.read()} == {"tcp"}


# Starts a process without the right to read any other: Yama would not count for root.
RESTRICTED = SimpleNamespace(enter=["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"])


def may_read(pid):
    """True if the kernel lets a restricted process read this one, which is no child of it."""
    opened = subprocess.run([*RESTRICTED.enter, "head", "--bytes=0", f"/proc/{pid}/mem"], check=False)
    return opened.returncode == 0


def test_siblings_read_each_other_where_yama_lets_only_ancestors_read(start, monkeypatch):
    assert Path("/proc/sys/kernel/yama/ptrace_scope").read_text() == "1\n"
    monkeypatch.setenv("KVPIPE_DATA_PATH", "auto")
    source = start("expose_blocks", NUM_BLOCKS, BLOCK_BYTES, host=RESTRICTED)
    destination = start("exchange_blocks", source.read(), NUM_BLOCKS, BLOCK_BYTES, host=RESTRICTED)
    assert destination.read() == "cma"
    with subprocess.Popen([*RESTRICTED.enter, "sleep", "60"]) as other:
        wait_until(lambda: Path(f"/proc/{other.pid}/comm").read_text() == "sleep\n")
        assert not may_read(other.pid), "Yama is not in force"
        other.kill()
