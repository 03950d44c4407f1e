"""LookupBufferStore: the contract of all stores, and clients that die."""

import contextlib
import secrets
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvpipe import ClosedError, ConfigError, ConnectError, LookupBuffer
from kvpipe.store import LookupBufferStore
from kvpipe.store.lookup_server import REQUEST, tokens_of
from tests.store.contract import LONG_S, StoreContract, eventually

pytestmark = pytest.mark.ucx


@pytest.fixture(scope="module")
def server():
    with LookupBufferStore.serve(capacity_bytes=256 << 20, reservation_s=StoreContract.reservation_s) as server:
        yield server


def connected(server):
    return LookupBufferStore.open(f"lookup://{server.address}")


class TestContract(StoreContract):
    @pytest.fixture
    def connect(self, server):
        with contextlib.ExitStack() as stores:
            yield lambda: stores.enter_context(connected(server))


@pytest.fixture
def key():
    return secrets.token_bytes(16)


def client(server, key, code):
    """Another process with `store` and `key`, which runs the code and then prints a line."""
    program = (
        "import sys, time\n"
        "from kvpipe.store import LookupBufferStore\n"
        f"store, key = LookupBufferStore.open('lookup://{server.address}'), bytes.fromhex('{key.hex()}')\n"
        f"{code}\nprint('ready', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_the_reservation_of_a_client_that_is_killed_ends(key):
    with LookupBufferStore.serve(reservation_s=3) as server, connected(server) as store:
        killed(client(server, key, "reservation = store.reserve(key, 3); reservation.write(b'ab')"))
        assert store.reserve(key, 3) is None
        time.sleep(4.5)
        assert store.put(key, b"abc")


def test_the_lease_of_a_client_that_is_killed_returns_its_value_whole(server, key):
    with connected(server) as store:
        assert store.put(key, b"x" * 100_000)
        killed(client(server, key, "lease = store.take(key, lease_s=4); lease.read()"))
        assert store.take(key) is None
        with store.take(key, timeout=30) as lease:
            assert lease.read() == b"x" * 100_000
            lease.acknowledge()


def test_a_client_that_is_killed_while_it_waits_gets_nothing_that_others_want(key, monkeypatch):
    monkeypatch.setattr("kvpipe.store.lookup_server._REPLY_S", 3.0)
    with LookupBufferStore.serve() as server, connected(server) as store:
        waiting = client(
            server,
            key,
            "import threading\n"
            "threading.Thread(target=store.take, args=[key], kwargs={'timeout': None}, daemon=True).start()\n"
            "time.sleep(0.5)",
        )
        killed(waiting)
        assert store.put(key, b"abc")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store.take, key, timeout=LONG_S)
            with waiting.result(LONG_S / 2) as lease:
                assert lease.read() == b"abc"


def test_a_value_that_is_released_wakes_one_that_waits(key, monkeypatch):
    monkeypatch.setattr("kvpipe.store.lookup_server._REPLY_S", 1000.0)
    with LookupBufferStore.serve() as server, connected(server) as store, connected(server) as other:
        assert store.put(key, b"abc")
        with store.take(key) as lease:
            assert lease.read() == b"abc"
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(other.take, key, timeout=LONG_S)
                eventually(lambda: store.stats().num_waits == 1)
                lease.release()
                with waiting.result(LONG_S / 2) as second:
                    assert second.read() == b"abc"


def test_a_client_that_closes_waits_no_longer_at_the_server(key):
    with LookupBufferStore.serve() as server, connected(server) as store, ThreadPoolExecutor(1) as threads:
        with connected(server) as other:
            waiting = threads.submit(other.take, key, timeout=LONG_S)
            eventually(lambda: store.stats().num_waiting == 1)
        with pytest.raises(ClosedError):
            waiting.result(LONG_S)
        assert store.stats().num_waiting == 0


def test_nothing_is_left_of_aborted_reservations(server, key):
    with connected(server) as store:
        before = store.stats().num_bytes
        for number in range(300):
            with store.reserve(key + number.to_bytes(4, "big"), 1000) as reservation:
                reservation.write(bytes(500))
        stats = store.stats()
        assert (stats.num_reserved, stats.num_bytes) == (0, before)
        assert list(store.list(key)) == []


def test_entries_of_deleted_values_leave_the_lookup_buffer(key):
    with LookupBufferStore.serve(capacity_bytes=10_000) as server, connected(server) as store:
        for number in range(50):
            assert store.put(key + bytes([number]), bytes(1000))
        assert store.stats().num_values == 10
        assert store.stats().num_evicted == 40
        assert server._buffer.stats().num_entries < 20


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        b"[]",
        b"{}",
        b'{"op": "exists", "client": 1, "number": 1, "keys": 5}',
        b'{"op": "none", "client": 1, "number": 2}',
        b'{"op": "reserve", "client": 1, "number": 3, "key": "00"}',
    ],
)
def test_a_request_that_is_none_disturbs_nobody(server, key, message):
    with LookupBuffer.connect(server.address) as stranger, connected(server) as store:
        stranger.insert(tokens_of(REQUEST), None, np.frombuffer(message, np.uint8), None, None)
        stranger.insert(tokens_of(REQUEST), None, np.frombuffer(message, np.uint8), np.zeros(1, np.uint8), None)
        stranger.insert(tokens_of(REQUEST), None, None, None, None)
        assert store.put(key, b"abc")


@pytest.mark.parametrize("url", ["lookup://", "lookup://h:1/path", "kvpipe://h:1"])
def test_a_url_of_another_form_is_refused(url):
    with pytest.raises(ConfigError, match=url):
        LookupBufferStore.open(url)


def test_a_store_that_is_not_there_is_an_error_in_time():
    with pytest.raises(ConnectError):
        LookupBufferStore.open("lookup://127.0.0.1:1", timeout=0.5)
