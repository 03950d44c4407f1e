"""Pipe between processes: lost peers, Ctrl-C, fork, memory, and what it needs of the machine."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvpipe import ConnectError, PeerLostError, Pipe
from tests.peers import LARGE, MIB, resident_bytes, wait_until

pytestmark = pytest.mark.ucx

MEDIUM = np.arange(MIB)  # larger than what travels inside its message
LOST_WITHIN_S = 2.0


@pytest.mark.usefixtures("data_path")
def test_a_pipe_without_devices_needs_no_ucx_and_listens_on_one_port():
    code = (
        "import numpy\n"
        "from pathlib import Path\n"
        "from kvpipe import Pipe, info\n"
        "from tests.peers import listening_ports\n"
        "assert info()['ucx'] is None, info()\n"
        "with Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:\n"
        "    sent = sender.isend_tensor(numpy.arange(1 << 20))\n"
        "    assert (receiver.recv_tensor() == numpy.arange(1 << 20)).all()\n"
        "    sent.wait()\n"
        "    assert listening_ports() == [int(receiver.address.rpartition(':')[2])]\n"
        "assert 'libuc' not in Path('/proc/self/maps').read_text()\n"
    )
    done = run_python(code, env={"KVPIPE_UCX_LIB": "/nonexistent"})
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("data_path")
def test_a_receiver_that_stops_while_it_is_connected_to_costs_no_cpu(start):
    """It knows of the session, and says nothing of how it reads."""
    with stopped_after_its_welcome(start("receive_nothing")) as address:
        before = time.process_time()
        with pytest.raises(ConnectError, match=r"did not establish the session within"):
            Pipe.connect(address, timeout=2)
        burnt_s = time.process_time() - before
    assert burnt_s < 0.3


@pytest.mark.slow
def test_receivers_that_are_killed_while_they_are_connected_to_end_no_other():
    """Over TCP, at any moment of the connection: UCX must neither crash nor hang."""
    code = (
        "import random\n"
        "from kvpipe import KVPipeError, Pipe\n"
        "from tests.faults.forked import Forked\n"
        "for _ in range(300):\n"
        "    child = Forked('receive_nothing')\n"
        "    address = child.read()\n"
        "    child.kill_after(random.uniform(0, 0.04))\n"
        "    try:\n"
        "        Pipe.connect(address, timeout=0.1).close(timeout=0)\n"
        "    except KVPipeError:\n"
        "        pass\n"
        "    child.end()\n"
    )
    done = run_python(code, {"KVPIPE_DATA_PATH": "tcp"}, timeout_s=300)
    assert done.returncode == 0, done.stderr[-2000:]


@contextlib.contextmanager
def stopped_after_its_welcome(receiver):
    """The address of a relay to a receiver, which stops when it has said the second thing, its welcome."""
    host, _, port = receiver.read().rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as between:
        relay = threading.Thread(target=relay_until_welcome, args=(between, (host, int(port)), receiver))
        relay.start()
        yield "{}:{}".format(*between.getsockname())
        relay.join()


def relay_until_welcome(between, address, receiver):
    with between.accept()[0] as near, socket.create_connection(address) as far:
        back = threading.Thread(target=hand_on, args=(near, far))
        back.start()
        near.sendall(far.recv(1 << 16))
        welcome = far.recv(1 << 16)
        receiver.stop()
        near.sendall(welcome)
        back.join()  # until the other side gives up


def hand_on(source, sink):
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            sink.sendall(chunk)


def run_python(code, env=None, timeout_s=60):
    """Runs code in another process, whatever its outcome."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_numpy_is_enough():
    done = run_python("""if True:
        import sys
        sys.modules["torch"] = None  # what `import torch` finds where there is none
        import kvpipe, numpy
        rx = kvpipe.Pipe.listen()
        tx = kvpipe.Pipe.connect(rx.address)
        tx.send_tensor(numpy.arange(3))
        print(rx.recv_tensor(timeout=10).tolist())
        """)
    assert (done.stdout, done.returncode) == ("[0, 1, 2]\n", 0), done.stderr


def test_bytes_are_sent_and_received_into_buffers_without_numpy_and_torch():
    done = run_python("""if True:
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None
        import kvpipe
        rx = kvpipe.Pipe.listen()
        tx = kvpipe.Pipe.connect(rx.address)
        for size in (3, 100_000):
            out = bytearray(size)
            work = tx.isend_tensor(b"k" * size)
            print(rx.recv_tensor(out=out, timeout=10) is out, out == b"k" * size)
        """)
    assert (done.stdout, done.returncode) == ("True True\n" * 2, 0), done.stderr


def until_lost(attempt):
    """Time of the detection that the peer is lost."""
    with contextlib.suppress(PeerLostError):
        while True:
            attempt()
    return time.monotonic()


@pytest.mark.usefixtures("data_path")
def test_a_receiver_that_is_killed_is_lost_within_2_s(start):
    child = start("receive_for_ever")
    tensor = np.ones(LARGE, np.uint8)
    sender = Pipe.connect(child.read())
    sender.send_tensor(tensor)
    killed_at = child.kill_after(0.2)
    lost_at = until_lost(lambda: sender.send_tensor(tensor))
    assert lost_at - killed_at[0] < LOST_WITHIN_S


@pytest.mark.usefixtures("data_path")
def test_a_sender_that_is_killed_is_lost_within_2_s(start):
    receiver = Pipe.listen()
    child = start("send_for_ever", receiver.address)
    out = np.empty(LARGE, np.uint8)
    receiver.recv_tensor(out=out)
    killed_at = child.kill_after(0.2)
    lost_at = until_lost(lambda: receiver.recv_tensor(out=out))
    assert lost_at - killed_at[0] < LOST_WITHIN_S
    receiver.close()


@pytest.mark.usefixtures("data_path")
def test_a_peer_that_is_killed_before_anything_moved_is_lost_within_2_s(start):
    child = start("receive_nothing")
    sender = Pipe.connect(child.read())
    killed_at = child.kill_after(0.1)
    lost_at = until_lost(lambda: sender.send_tensor(MEDIUM))
    assert lost_at - killed_at[0] < LOST_WITHIN_S

    receiver = Pipe.listen()
    child = start("send_nothing", receiver.address)
    child.read()
    killed_at = child.kill_after(0.1)
    lost_at = until_lost(receiver.recv_tensor)
    assert lost_at - killed_at[0] < LOST_WITHIN_S
    receiver.close()


@pytest.mark.slow
@pytest.mark.usefixtures("data_path")
def test_memory_does_not_grow_with_what_is_moved(start):
    num_tensors, allowed = 40, 1.5 * LARGE
    child = start("receive_and_weigh", num_tensors)
    sender = Pipe.connect(child.read())
    weights = []
    for i in range(num_tensors):
        sender.send_tensor(np.full(LARGE, i, np.uint8))
        weights.append(resident_bytes())
    sender.close()
    after_five, at_the_end = json.loads(child.read())
    assert sender.stats().num_bytes == num_tensors * LARGE > 2 << 30
    assert weights[-1] - weights[4] < allowed
    assert at_the_end - after_five < allowed


@pytest.mark.parametrize("end", ["recv", "send", "wait", "close", "connect", "agent"])
def test_ctrl_c_interrupts_every_wait_and_a_receive_then_consumes_no_tensor(start, end):
    child = start("interrupted", end)
    child.interrupt()
    if end == "recv":
        assert child.read() == str([1, MIB])
    assert child.process.wait(10) == 0


@pytest.mark.usefixtures("data_path")
@pytest.mark.parametrize("end", ["recv", "send", "both", "close", "connect", "agent"])
def test_a_process_exits_in_order_while_daemon_threads_wait(start, end):
    assert start("exits_while_others_wait", end).process.wait(20) == 0


def test_a_forked_child_gets_errors_of_what_its_parent_made_and_the_parent_goes_on(start):
    child = start("forked")
    outcomes = ["ClosedError"] * 4 + ["fine"] * 5
    assert json.loads(child.read()) == outcomes
    assert child.read() == "[0, 1, 2]"
    assert child.process.wait(10) == 0


def test_the_transport_of_the_tensors_is_logged_once_and_tcp_on_one_machine_is_warned_about(data_path, caplog):
    caplog.set_level("INFO", logger="kvpipe")
    with Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
        for _ in range(3):
            sender.send_tensor(None)
            receiver.recv_tensor()
        transport = sender.transport

    def opened():
        return [each.getMessage() for each in caplog.records if "pipe.open" in each.getMessage()]

    def warned():
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

    wait_until(lambda: len(opened()) == 2)  # one at each end
    assert all(f"transport={transport}" in each for each in opened())
    assert warned() == []
