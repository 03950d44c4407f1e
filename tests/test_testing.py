"""kvpipe.testing: what users test their programs with."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvpipe import ConfigError, PeerLostError, Pipe
from kvpipe.testing import memory_transport

MIB = 1 << 20

PROGRAM = """if True:
    import sys
    import numpy
    from kvpipe import Agent, Pipe
    from kvpipe.testing import memory_transport

    with memory_transport(), Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
        work = sender.isend_tensor(numpy.arange(1 << 20))
        assert receiver.recv_tensor(timeout=20)[-1] == (1 << 20) - 1
        work.wait(20)
        assert receiver.transport == sender.transport == "memory"
    with memory_transport(), Agent() as source, Agent() as destination:
        source.register(bytearray(b"kvpipe"), "kv", 2)
        here = bytearray(4)
        region = destination.register(here, "here", 2)
        destination.connect(source.address).read_blocks(region, [1, 0], "kv", [0, 2]).wait(20)
        assert here == b"pekv"
    print("libucp" in open("/proc/self/maps").read(), "torch" in sys.modules)
"""


def test_pipes_and_agents_work_in_memory_where_there_is_no_ucx():
    env = os.environ | {"KVPIPE_UCX_LIB": "/nonexistent"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("False False\n", 0), done.stderr


def test_what_was_made_in_the_block_stays_in_memory_after_its_end():
    with memory_transport("stream"):
        receiver = Pipe.listen()
        sender = Pipe.connect(receiver.address)
    sender.isend_tensor(np.full(MIB, 3))
    assert (receiver.recv_tensor(timeout=20) == 3).all()
    sender.close()
    receiver.close()


def test_the_block_holds_for_other_threads_too():
    made = []
    with memory_transport(), Pipe.listen() as receiver:
        thread = threading.Thread(target=lambda: made.append(Pipe.connect(receiver.address)))
        thread.start()
        thread.join()
        assert made[0].transport == "memory"
        made[0].close()


def test_an_end_in_memory_and_one_of_processes_understand_each_other():
    with memory_transport():
        in_memory = Pipe.listen()
    with in_memory as receiver, Pipe.connect(receiver.address, timeout=20) as sender:
        sent = sender.isend_tensor(np.arange(MIB))
        assert np.array_equal(receiver.recv_tensor(timeout=20), np.arange(MIB))
        sent.wait(20)


@pytest.mark.parametrize("data_path", ["remote_read", "stream"])
def test_a_peer_that_leaves_under_a_transfer_is_lost(data_path):
    with memory_transport(data_path):
        receiver = Pipe.listen()
        sender = Pipe.connect(receiver.address)
    work = sender.isend_tensor(np.zeros(64 * MIB))
    received = receiver.irecv_tensor()
    receiver.close()
    with pytest.raises(PeerLostError):
        work.wait(20)
    assert received.is_completed()


def test_an_unknown_data_path_is_named():
    with (
        pytest.raises(ConfigError, match="data_path=\"put\": expected 'remote_read' or 'stream'"),
        memory_transport("put"),
    ):
        pass
