"""Bytes between two processes whose sessions are encrypted, as a reader of the network sees them."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from kvpipe import Agent, ConfigError, IncompatiblePeerError, LookupBuffer, Pipe
from kvpipe.store import RemoteStore, StoreServer
from tests.peers import MIB

PATTERN = b"for the two peers alone"
TENSOR = np.resize(np.frombuffer(PATTERN, np.uint8), MIB)


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch):
    monkeypatch.setenv("KVPIPE_DATA_PATH", "tcp")


class Relay:
    """Passes a connection on, and keeps what it has passed."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.passed = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source, target):
        try:
            while data := source.recv(1 << 16):
                self.passed += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self):
        self._listener.close()


def by_pipe(relayed):
    with Pipe.listen() as receiver, relayed(receiver.address) as address, Pipe.connect(address) as sender:
        for tensor in (TENSOR[:100], TENSOR):
            sent = sender.isend_tensor(tensor)
            assert np.array_equal(receiver.recv_tensor(timeout=20), tensor)
            sent.wait(20)


def by_agent(relayed):
    blocks, read = TENSOR.reshape(256, -1), np.zeros((256, 1 << 12), np.uint8)
    with Agent() as source, Agent() as reader:
        source.register(blocks, "kv", 1 << 12)
        local = reader.register(read, "kv", 1 << 12)
        with relayed(source.address) as address:
            peer = reader.connect(address)
            order = np.random.default_rng(1).permutation(256)
            assert peer.read_blocks(local, list(range(256)), "kv", order.tolist()).wait(20) == blocks.nbytes
    assert np.array_equal(read, blocks[order])


def by_lookup_buffer(relayed):
    tokens = np.arange(3)
    with LookupBuffer() as buffer:
        buffer.serve()
        with relayed(buffer.address) as address, LookupBuffer.connect(address) as client:
            client.insert(tokens, None, TENSOR, TENSOR[:100], None)
            assert np.array_equal(client.drop_select(tokens, None, timeout=20)[2], TENSOR)


def by_store(relayed):
    with StoreServer() as server, relayed(server.address) as address, RemoteStore.open(f"kvpipe://{address}") as store:
        assert store.put(b"k", TENSOR.tobytes())
        with store.select(b"k") as value:
            assert value.read() == TENSOR.tobytes()


@pytest.fixture
def relays():
    return []


@pytest.fixture
def relayed(relays):
    @contextlib.contextmanager
    def passed_on(address):
        relay = Relay(address)
        relays.append(relay)
        yield relay.address
        relay.close()

    return passed_on


KINDS = pytest.mark.parametrize("move", [by_pipe, by_agent, by_lookup_buffer, by_store])


@KINDS
@pytest.mark.parametrize("setting", ["on", "off", "auto"])
def test_what_is_moved_is_readable_on_the_way_only_on_loopback_or_by_choice(
    monkeypatch, relays, relayed, move, setting
):
    monkeypatch.setenv("KVPIPE_ENCRYPTION", setting)
    move(relayed)
    [relay] = relays
    assert len(relay.passed) > MIB
    assert (PATTERN in relay.passed) == (setting != "on")


def test_sides_that_want_and_refuse_encryption_do_not_connect_and_say_why(monkeypatch):
    monkeypatch.setenv("KVPIPE_ENCRYPTION", "off")
    with Pipe.listen() as receiver:
        monkeypatch.setenv("KVPIPE_ENCRYPTION", "on")
        with pytest.raises(IncompatiblePeerError, match="encryption"):
            Pipe.connect(receiver.address, timeout=5)


def test_a_setting_that_is_not_known_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("KVPIPE_ENCRYPTION", "yes")
    with pytest.raises(ConfigError, match="KVPIPE_ENCRYPTION=yes: expected auto"):
        Pipe.listen()
