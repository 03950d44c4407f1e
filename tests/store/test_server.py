"""StoreServer and RemoteStore between processes: crashes at every step, bounds, and load."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvpipe import (
    AuthenticationError,
    CapacityError,
    ConfigError,
    ConnectError,
    CorruptDataError,
    IncompatiblePeerError,
    LookupBuffer,
    PeerLostError,
    TransferTimeoutError,
    _kvpipe,
)
from kvpipe.store import RemoteStore, StoreServer
from tests.store.contract import LONG_S, eventually

LARGE = 8 << 20

_SERVE = """
import sys
from kvpipe.store import StoreServer
with StoreServer(token="t") as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""
_RESERVE = """
import sys
from kvpipe.store import RemoteStore
store = RemoteStore.open(sys.argv[1], token="t")
reservation = store.reserve(b"key", 16 << 20)
reservation.write(bytes(8 << 20))
print("holds", flush=True)
while True:
    try:
        reservation.write(bytes(1 << 20))
    except Exception:
        sys.stdin.read()
"""
_TAKE = """
import sys
from kvpipe.store import RemoteStore
store = RemoteStore.open(sys.argv[1], token="t")
lease = store.take(b"key", lease_s=1000)
out = bytearray(lease.num_bytes)
print("holds", flush=True)
while True:
    lease.read_into(out)
"""


class Process:
    """Another Python process, which is killed at the end of the test at the latest."""

    def __init__(self, code, *args):
        self._child = subprocess.Popen(
            [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first_line = self._child.stdout.readline().strip()
        self.pid = self._child.pid

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._child.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._child.kill()
        self._child.communicate()


@pytest.fixture
def server():
    with StoreServer(token="t", capacity_bytes=64 << 20) as server:
        yield server


@pytest.fixture
def store(server):
    with RemoteStore.open(server.url, token="t") as store:
        yield store


def test_a_client_that_is_killed_in_mid_write_leaves_nothing(server, store):
    with Process(_RESERVE, server.url) as writer:
        assert writer.first_line == "holds"
        assert store.reserve(b"key", 1) is None
        assert server.stats().num_bytes > 16 << 20
        writer.kill()
        eventually(lambda: server.stats().num_reserved == 0)
    assert server.stats().num_bytes == 0
    assert store.put(b"key", b"x")


def test_a_client_that_is_killed_in_mid_lease_returns_the_value_to_who_waits(server, store):
    data = os.urandom(LARGE)
    assert store.put(b"key", data)
    with Process(_TAKE, server.url) as taker:
        assert taker.first_line == "holds"
        assert store.exists([b"key"]) == [False]
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store.take, b"key", timeout=LONG_S)
            taker.kill()
            with waiting.result(LONG_S) as lease:
                assert lease.read() == data
                lease.acknowledge()
    assert server.stats().num_bytes == 0


def test_a_server_that_is_killed_ends_every_call_with_peer_lost(store):
    with Process(_SERVE) as server:
        lost = RemoteStore.open(server.first_line, token="t")
        assert lost.put(b"key", bytes(LARGE))
        value, lease, reservation = lost.select(b"key"), None, lost.reserve(b"other", LARGE)
        with ThreadPoolExecutor(2) as threads:
            waiting = [
                threads.submit(lost.select, b"none", timeout=None),
                threads.submit(lost.take, b"key", timeout=None),
            ]
            time.sleep(0.2)
            server.kill()
            for each in waiting:
                with pytest.raises(PeerLostError):
                    each.result(LONG_S)
        for call in (
            lambda: lost.exists([b"key"]),
            lambda: lost.put(b"key", b"x"),
            value.read,
            lambda: reservation.write(b"x"),
            reservation.commit,
            lost.stats,
        ):
            with pytest.raises(PeerLostError):
                call()
        value.close()
        reservation.abort()
        assert lease is None
        lost.close()


def test_a_server_that_is_stopped_ends_a_call_soon_after_its_timeout():
    with Process(_SERVE) as server, RemoteStore.open(server.first_line, token="t") as store:
        server.kill(signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(TransferTimeoutError, match="not answered"):
            store.select(b"key", timeout=0.2)
        assert time.monotonic() - began_s < 3
        server.kill(signal.SIGCONT)
        assert store.put(b"key", b"x")


def test_a_value_that_changes_in_memory_is_found_corrupt_and_deleted():
    marker = os.urandom(64)
    with Process(_SERVE) as server, RemoteStore.open(server.first_line, token="t") as store:
        assert store.put(b"key", bytes(1000) + marker + bytes(1 << 20))
        with store.select(b"key") as value:
            assert value.read()[1000:1064] == marker
            rot_in_memory(server.pid, marker)
            with pytest.raises(CorruptDataError, match="deleted"):
                value.read()
        assert store.exists([b"key"]) == [False]
        stats = store.stats()
        assert (stats.num_corrupt, stats.num_values, stats.num_bytes) == (1, 0, 0)


def test_a_large_value_of_another_process_is_read_in_parts_unless_it_has_changed_in_memory():
    marker = os.urandom(64)
    with Process(_SERVE) as server, RemoteStore.open(server.first_line, token="t") as store:
        data = bytes(1000) + marker + os.urandom(5 << 20)
        assert store.put(b"key", data, b"record")
        # One of them has several slices, and no slice ends where a part does.
        parts = [bytearray(size) for size in (128, 700_001, 3 << 20, 1, len(data) - 700_130 - (3 << 20))]
        with store.select(b"key") as value:
            if store._native.transport != "cma":
                pytest.skip(f"bytes move over {store._native.transport}: this process may not read the server's memory")
            assert value.read_parts(parts) == _kvpipe.checksums(data, [0], len(data))[0]
            assert b"".join(parts) == data
            with pytest.raises(ConfigError, match="read-only"):
                value.read_parts([data])
            rot_in_memory(server.pid, marker)
            assert value.read_parts(parts) is None
            with pytest.raises(CorruptDataError, match="deleted"):
                value.read()


def test_a_value_of_a_process_that_was_killed_is_not_read_in_parts():
    with Process(_SERVE) as server, RemoteStore.open(server.first_line, token="t") as store:
        assert store.put(b"key", bytes(1 << 20))
        with store.select(b"key") as value:
            server.kill()
            assert value.read_parts([bytearray(1 << 20)]) is None
            with pytest.raises(PeerLostError):
                value.read()


def rot_in_memory(pid, marker):
    """Changes a bit of these bytes wherever another process has them, which does nothing meanwhile."""
    num_changed = 0
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in maps:
            area, access, *_ = line.split()
            start, end = (int(part, 16) for part in area.split("-"))
            if not access.startswith("rw") or "[v" in line or end - start > 256 << 20:
                continue
            memory.seek(start)
            try:
                at = memory.read(end - start).find(marker)
            except OSError:
                continue
            if at >= 0:
                memory.seek(start + at)
                memory.write(bytes([marker[0] ^ 1]))
                num_changed += 1
    assert num_changed > 0


def test_another_token_is_refused(server):
    with pytest.raises(AuthenticationError):
        RemoteStore.open(server.url, token="other")


def test_a_client_of_something_else_is_refused(server):
    with pytest.raises(IncompatiblePeerError, match="Store"):
        LookupBuffer.connect(server.address, token="t", timeout=2)


@pytest.mark.parametrize("url", ["kvpipe://", "kvpipe://host", "redis://h:1", "kvpipe://h:1/x", "kvpipe://h:99999"])
def test_a_malformed_url_is_refused(url):
    with pytest.raises(ConfigError, match="expected kvpipe://host:port"):
        RemoteStore.open(url)


def test_an_address_that_others_reach_needs_a_token(monkeypatch):
    monkeypatch.delenv("KVPIPE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="token"):
        StoreServer("0.0.0.0:0")


def test_a_store_that_is_not_served_is_not_connected_to():
    with pytest.raises(ConnectError):
        RemoteStore.open("kvpipe://127.0.0.1:9", timeout=0.3)


def test_ten_thousand_aborted_reservations_leave_nothing(server, store):
    for number in range(10_000):
        reservation = store.reserve(b"key%d" % number, 1 << 20 if number % 100 == 0 else 1000, timeout=LONG_S)
        if number % 3 == 0:
            reservation.write(b"part")
        reservation.abort()
    stats = server.stats()
    assert (stats.num_values, stats.num_bytes, stats.num_reserved, stats.num_waiting) == (0, 0, 0, 0)


def test_a_thousand_selects_wait_at_once(server, store):
    keys = [b"key%d" % number for number in range(1000)]
    with ThreadPoolExecutor(len(keys)) as threads:
        waiting = [threads.submit(store.select, key, timeout=LONG_S) for key in keys]
        eventually(lambda: server.stats().num_waiting == len(keys))
        with RemoteStore.open(server.url, token="t") as other:
            for key in keys:
                assert other.put(key, key)
        for key, each in zip(keys, waiting, strict=True):
            with each.result(LONG_S) as value:
                assert value.read() == key
    assert server.stats().num_waiting == 0


def test_what_a_client_holds_is_bounded_and_others_go_on(server, store):
    assert store.put(b"key", b"x")
    opened = [store.select(b"key", timeout=LONG_S) for _ in range(1 << 14)]
    with pytest.raises(CapacityError, match="close some"):
        store.select(b"key")
    with RemoteStore.open(server.url, token="t") as other, other.select(b"key") as value:
        assert value.read() == b"x"
    opened.pop().close()
    store.select(b"key").close()


def test_a_namespace_that_fills_its_quota_takes_nothing_from_another():
    mine, other = ([name * 14 + bytes([number]) for number in range(20)] for name in (b"m", b"o"))
    with (
        StoreServer(token="t", capacity_bytes=64 << 20, quota_bytes=16 << 20) as server,
        RemoteStore.open(server.url, token="t") as store,
    ):
        for key in other[:3]:
            assert store.put(key, bytes(4 << 20))
        for key in mine:
            assert store.put(key, bytes(4 << 20))
        assert store.exists(other[:3]) == [True] * 3
        assert store.exists(mine) == [False] * 17 + [True] * 3
        opened = [store.select(key) for key in mine[-3:]]
        with pytest.raises(CapacityError, match=r"this namespace's quota of 16777216 bytes, reservations hold 0"):
            store.reserve(mine[0], 4 << 20, timeout=LONG_S)
        with pytest.raises(ConfigError, match="quota of a namespace is 16777216"):
            store.put(mine[0], bytes(16 << 20))
        assert store.put(other[3], bytes(1 << 20))
        assert store.exists(other[:4]) == [True] * 4
        stats = store.stats()
        assert (stats.details["num_over_quota"], stats.num_waits, stats.num_evicted) == (1, 0, 17)
        for value in opened:
            value.close()
        assert store.put(mine[0], bytes(4 << 20))


def test_a_quota_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="quota_bytes=0"):
        StoreServer(token="t", quota_bytes=0)


def test_data_of_any_format_is_its_bytes_and_must_be_contiguous(store):
    tensor = np.arange(20_000, dtype=np.float32).reshape(100, 200)
    assert store.put(b"a", tensor)
    assert store.put(b"b", np.empty((0, 3)))
    with store.reserve(b"c", tensor.nbytes) as reservation:
        reservation.write(tensor)
        reservation.commit()
    for key, data in ((b"a", tensor.tobytes()), (b"b", b""), (b"c", tensor.tobytes())):
        with store.select(key) as value:
            assert value.read() == data
    with pytest.raises(ConfigError, match="contiguous"):
        store.put(b"d", tensor[:, ::2])


def test_values_larger_than_the_store_are_refused(store):
    with pytest.raises(ConfigError, match="capacity"):
        store.reserve(b"key", 1 << 70)
    with pytest.raises(ConfigError, match="capacity is 67108864"):
        store.put(b"key", bytes(64 << 20))


def test_a_reservation_waits_for_space_and_is_refused_at_its_timeout(server, store):
    first = store.reserve(b"a", 40 << 20)
    with pytest.raises(CapacityError, match="1 reservations hold"):
        store.put(b"b", bytes(40 << 20))
    threading.Timer(0.2, first.abort).start()
    with store.reserve(b"b", 40 << 20, timeout=LONG_S) as second:
        assert server.stats().num_reserved == 1
        assert second.key == b"b"


def test_ctrl_c_withdraws_a_take_and_the_value_stays(server, store):
    main = threading.main_thread().ident

    def interrupt():
        eventually(lambda: server.stats().num_waiting == 1)
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        interrupted = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.take(b"key", timeout=LONG_S)
        interrupted.result(LONG_S)
    eventually(lambda: server.stats().num_waiting == 0)
    assert store.put(b"key", b"x")
    assert store.exists([b"key"]) == [True]


def test_readers_never_see_other_bytes_while_values_are_evicted_under_them(server):
    """Values are of one byte each, which their key names, and three times what fits is written."""
    num_readers, ends_s = 3, time.monotonic() + 4
    num_read = [0] * num_readers

    def content(number):
        return bytes([number]) * (2 << 20)

    def write():
        with RemoteStore.open(server.url, token="t") as store:
            while time.monotonic() < ends_s:
                number = random.randrange(90)
                store.put(bytes([number]), content(number))

    def read(index):
        with RemoteStore.open(server.url, token="t") as store:
            while time.monotonic() < ends_s:
                number = random.randrange(90)
                value = store.select(bytes([number]), timeout=0.05)
                if value is not None:
                    with value:
                        assert value.read() == content(number)
                        num_read[index] += 1

    with ThreadPoolExecutor(1 + num_readers) as threads:
        running = [threads.submit(write), *(threads.submit(read, index) for index in range(num_readers))]
        for each in running:
            each.result()
    assert server.stats().num_evicted > 0
    assert min(num_read) > 0


@pytest.mark.slow
def test_three_hundred_clients_at_once(server):
    num_clients = 300
    with ThreadPoolExecutor(16) as threads:
        stores = list(threads.map(lambda _: RemoteStore.open(server.url, token="t", timeout=60), range(num_clients)))
        try:
            eventually(lambda: server.stats().details["num_clients"] == num_clients)

            def use(number):
                key = b"key%d" % number
                assert stores[number].put(key, key * 10_000)
                with stores[number - 1].select(key, timeout=LONG_S) as value:
                    assert value.read() == key * 10_000

            list(threads.map(use, range(num_clients)))
        finally:
            list(threads.map(RemoteStore.close, stores))
    eventually(lambda: server.stats().details["num_clients"] == 0)
