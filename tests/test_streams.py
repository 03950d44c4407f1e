"""Several connections for the streams of one session (`KVPIPE_STREAMS`)."""

import contextlib
import itertools
import mmap
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvpipe import Agent, ConfigError, PeerLostError, Pipe
from tests.peers import LARGE, LOOPBACK, MIB, pattern, wait_until

NUM_STREAMS = 3
NUM_BLOCKS = 64


@pytest.fixture(autouse=True, params=["off", "on"])
def streams(request, monkeypatch):
    monkeypatch.setenv("KVPIPE_DATA_PATH", "tcp")
    monkeypatch.setenv("KVPIPE_STREAMS", str(NUM_STREAMS))
    monkeypatch.setenv("KVPIPE_ENCRYPTION", request.param)


@pytest.fixture
def address(start):
    """Of a child that serves blocks."""
    return start("serve_blocks", NUM_BLOCKS, MIB).read()


def connections_to(address):
    """Connections of this process to a port of this host: their local ports."""
    port = int(address.rpartition(":")[2])
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ends = [[int(end.rpartition(":")[2], 16) for end in row[1:3]] for row in rows if row[3] == "01"]
    return {near for near, far in ends if far == port}


def cut(local_port):
    """Ends a connection of this process, as a network that drops it does for both sides."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if entry.is_symlink() and str(entry.readlink()).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family == socket.AF_INET and found.getsockname()[1] == local_port:
                    found.shutdown(socket.SHUT_RDWR)


def frame(connection):
    """The next frame."""
    head = connection.recv(4, socket.MSG_WAITALL)
    return head + connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)


def pump(source, destination):
    with contextlib.suppress(OSError):
        while received := source.recv(1 << 20):
            destination.sendall(received)
    for end in (source, destination):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Middle:
    """Stands between both sides: the session's own connection gets through, `further` has each further one."""

    def __init__(self, address, further):
        self._target, self._further = int(address.rpartition(":")[2]), further
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads, self._sockets = [], [self._listener]
        self._begin(self._accept)

    def _begin(self, call, *arguments):
        self._threads.append(threading.Thread(target=call, args=arguments))
        self._threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            for number in itertools.count():
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                ways = [(pump, near, far), (pump, far, near)] if number == 0 else [(self._further, near, far)]
                for way in ways:
                    self._begin(*way)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()


def ends_before_it_has_joined(near, far):
    """JOIN and REPLY get through; READY is lost, and with it what follows."""
    far.sendall(frame(near))
    near.sendall(frame(far))
    frame(near)
    time.sleep(0.3)
    for end in (near, far):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def loses_what_follows(near, far):
    """It joins. What the near side sends then is acknowledged by the network, and lost."""
    far.sendall(frame(near))
    near.sendall(frame(far))
    far.sendall(frame(near))
    back = threading.Thread(target=pump, args=(far, near))
    back.start()
    with contextlib.suppress(OSError):
        while near.recv(1 << 20):
            pass
    back.join()


def send_through(further, start):
    """Pipes tensors, which must arrive."""
    with Middle(start("receive_in_order").read(), further) as middle, Pipe.connect(middle.address) as sender:
        for number in range(3):
            sender.send_tensor(np.full(LARGE, number, np.uint8), timeout=60)


class Reader:
    """Reads blocks of a child, which are compared."""

    def __init__(self, agent, address):
        self.memory = np.zeros((NUM_BLOCKS, MIB), np.uint8)
        self.expected = pattern(NUM_BLOCKS, MIB).view(np.uint8)
        self.region, self.peer = agent.register(self.memory, "mine", MIB), agent.connect(address)

    def begin(self, num_blocks):
        self.memory[:] = 0
        blocks = list(range(num_blocks))
        return self.peer.read_blocks(self.region, blocks, "kv", blocks)

    def read(self, num_blocks=NUM_BLOCKS):
        self.begin(num_blocks).wait(60)
        self.check(num_blocks)

    def check(self, num_blocks=NUM_BLOCKS):
        assert np.array_equal(self.memory[:num_blocks], self.expected[:num_blocks])


def test_the_first_long_stream_dials_further_connections_which_end_with_the_session(address):
    with Agent(LOOPBACK) as agent:
        reader = Reader(agent, address)
        assert len(connections_to(address)) == 1
        reader.read()
        wait_until(lambda: len(connections_to(address)) == 1 + NUM_STREAMS)
        for _ in range(3):
            reader.read()
        assert len(connections_to(address)) == 1 + NUM_STREAMS
    wait_until(lambda: not connections_to(address))


def test_a_connection_that_is_lost_under_load_costs_no_block_and_the_session_goes_on(address):
    with Agent(LOOPBACK) as agent:
        reader = Reader(agent, address)
        own = connections_to(address)
        reader.read()
        wait_until(lambda: len(connections_to(address)) == 1 + NUM_STREAMS)
        for left in reversed(range(NUM_STREAMS)):
            under_way = reader.begin(NUM_BLOCKS)
            cut(min(connections_to(address) - own))
            under_way.wait(60)
            reader.check()
            wait_until(lambda left=left: len(connections_to(address)) == 1 + left)
        reader.read()
        assert connections_to(address) == own


def test_the_side_that_dials_opens_them_where_it_is_the_source_too(start):
    with Pipe.connect(address := start("receive_in_order").read()) as sender:
        for number in range(4):
            sender.send_tensor(np.full(LARGE, number, np.uint8), timeout=60)
        assert len(connections_to(address)) == 1 + NUM_STREAMS


def test_a_connection_that_ends_before_it_has_joined_costs_no_tensor(start):
    send_through(ends_before_it_has_joined, start)


@pytest.mark.slow
def test_a_connection_on_which_nothing_gets_through_is_given_up_after_the_silence_limit(start):
    send_through(loses_what_follows, start)


def test_memory_that_cannot_be_sent_ends_the_session_and_leaves_no_waiter(start, tmp_path, monkeypatch):
    """The file behind it was truncated. Connections that have failed to send are closed, the session's own at last."""
    monkeypatch.setenv("KVPIPE_ENCRYPTION", "off")  # to seal it would be a fault of this process
    address = start("receive_in_order").read()
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(LARGE)
        gone = np.frombuffer(mmap.mmap(file.fileno(), LARGE), np.uint8)
        file.truncate(0)
        sender = Pipe.connect(address, integrity="none")
        sender.send_tensor(np.full(LARGE, 0, np.uint8), timeout=60)
        with pytest.raises(PeerLostError):
            sender.send_tensor(gone, timeout=60)
        with pytest.raises(PeerLostError):
            sender.close()


@pytest.mark.parametrize("setting", ["0", "17", "four"])
def test_a_number_that_is_none_is_refused_by_name(monkeypatch, setting):
    monkeypatch.setenv("KVPIPE_STREAMS", setting)
    with pytest.raises(ConfigError, match=f"KVPIPE_STREAMS={setting}: expected auto"):
        Agent(LOOPBACK)


def test_a_short_stream_dials_none(start):
    num_blocks, block_bytes = 8, MIB // 16
    address = start("serve_blocks", num_blocks, block_bytes).read()
    with Agent(LOOPBACK) as agent:
        memory, blocks = np.zeros((num_blocks, block_bytes), np.uint8), list(range(num_blocks))
        region, peer = agent.register(memory, "mine", block_bytes), agent.connect(address)
        peer.read_blocks(region, blocks, "kv", blocks).wait(60)
        assert np.array_equal(memory, pattern(num_blocks, block_bytes).view(np.uint8))
        assert len(connections_to(address)) == 1
