"""The disk tier of `StoreServer`: the contract, restarts, kills, a full disk, damaged files, and load."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpipe import ConfigError, TransferTimeoutError
from kvpipe.store import RemoteStore, StoreServer
from tests.store.contract import LONG_S, StoreContract, eventually

MIB = 1 << 20
DISK_BYTES = 1 << 30
FILE = "kvpipe-store.redb"

_SERVE = """
import resource, sys
from kvpipe.store import StoreServer
directory, capacity_bytes, file_limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if file_limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
with StoreServer(token="t", capacity_bytes=capacity_bytes, disk=directory, disk_capacity_bytes=1 << 30) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


class TestContract(StoreContract):
    """Memory holds two of the largest values, so that most are read from the disk."""

    @pytest.fixture
    def connect(self, tmp_path):
        with serve(tmp_path, 24 * MIB, reservation_s=self.reservation_s) as server, contextlib.ExitStack() as stores:
            yield lambda: stores.enter_context(connected(server))


def serve(directory, capacity_bytes=64 * MIB, disk_capacity_bytes=DISK_BYTES, **settings):
    return StoreServer(
        token="t", capacity_bytes=capacity_bytes, disk=directory, disk_capacity_bytes=disk_capacity_bytes, **settings
    )


def connected(server):
    return RemoteStore.open(server.url, token="t")


@contextlib.contextmanager
def serving_process(directory, capacity_bytes=64 * MIB, file_limit=0):
    """A server in a process that is killed at the end, and a client of it."""
    arguments = [sys.executable, "-c", _SERVE, str(directory), str(capacity_bytes), str(file_limit)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            with RemoteStore.open(child.stdout.readline().strip(), token="t") as store:
                yield store, child.pid
        finally:
            child.kill()


def content(number, num_bytes):
    return random.Random(number).randbytes(num_bytes)


def until_saved(stats_of, num_values):
    eventually(lambda: stats_of().details["num_disk_values"] == num_values)


def saves_nothing(details):
    """Bytes count from the moment a value of 1 MiB is to be written, values once they are."""
    return details["num_disk_bytes"] < (details["num_disk_values"] + 1) * MIB


def read(store, key):
    value = store.select(key, timeout=2)
    if value is None:
        return None
    with value:
        return bytes(value.read())


def test_values_that_left_memory_are_read_from_the_disk(tmp_path):
    sizes = [0, 100, 40_000, MIB, 5 * MIB + 3]
    with serve(tmp_path, 8 * MIB) as server, connected(server) as store:
        for number in range(20):
            assert store.put(b"%d" % number, content(number, sizes[number % 5]), b"record %d" % number)
            until_saved(server.stats, number + 1)
        for number in range(20):
            with store.select(b"%d" % number, timeout=LONG_S) as value:
                assert value.record == b"record %d" % number
                assert value.read() == content(number, sizes[number % 5])
        stats = server.stats()
        assert stats.num_bytes <= 8 * MIB
        assert stats.num_evicted == 0
        assert stats.details["num_loaded"] > 0


def test_a_server_that_was_closed_begins_with_all_values_but_those_with_a_ttl(tmp_path):
    with serve(tmp_path) as server, connected(server) as store:
        for number in range(30):
            assert store.put(b"key%d" % number, content(number, MIB), b"record")
        assert store.put(b"brief", b"x", ttl_s=1000)
    with serve(tmp_path) as server, connected(server) as store:
        assert server.stats().num_bytes == 0
        assert {value.key for value in store.list()} == {b"key%d" % number for number in range(30)}
        for number in range(30):
            assert not store.put(b"key%d" % number, b"another")
            assert read(store, b"key%d" % number) == content(number, MIB)
        assert store.put(b"new", b"value")
    with serve(tmp_path) as server, connected(server) as store:
        assert server.stats().num_values == 31
        assert read(store, b"new") == b"value"


@pytest.mark.slow
def test_a_server_that_is_killed_at_any_moment_has_whole_values_or_none(tmp_path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    known = set()

    def value_of(number):
        """Of any size up to 3 MiB."""
        return content(number, 1 + number * 100_003 % (3 * MIB))

    for round_number in range(6):
        with serving_process(tmp_path) as (store, pid):
            for key in known:
                assert read(store, b"%d" % key) == value_of(key), key
            timer = threading.Timer(chance.uniform(0.05, 0.5), os.kill, [pid, signal.SIGKILL])
            timer.start()
            number = round_number << 16
            with contextlib.suppress(Exception):
                while True:
                    store.put(b"%d" % number, value_of(number))
                    number += 1
            timer.join()
        with serve(tmp_path) as server, connected(server) as store:
            known = {int(value.key) for value in store.list()}
            for key in known:
                assert read(store, b"%d" % key) == value_of(key)
    assert known


def test_what_was_acknowledged_or_deleted_does_not_come_back_after_a_kill(tmp_path):
    for round_number in range(8):
        with serving_process(tmp_path) as (store, pid):
            keys = [b"%d %d" % (round_number, number) for number in range(4)]
            for key in keys:
                assert store.put(key, content(1, MIB))
            if round_number % 2:
                until_saved(store.stats, len(keys))
            with store.take(keys[0]) as lease:
                lease.read()
                lease.acknowledge()
            assert store.delete(keys[1:]) == 3
            os.kill(pid, signal.SIGKILL)
        with serve(tmp_path) as server:
            assert server.stats().num_values == 0


def test_a_disk_that_takes_no_more_costs_nothing_but_what_it_does_not_keep(tmp_path, capfd):
    """A limit for the size of files stands for a full disk: the system refuses the writes."""
    with serving_process(tmp_path, file_limit=24 * MIB) as (store, _):
        for number in range(60):
            assert store.put(b"%d" % number, content(number, MIB))
        eventually(lambda: store.stats().details["num_disk_failures"] > 0)
        assert read(store, b"59") == content(59, MIB)
        found = [read(store, b"%d" % number) for number in range(60)]
        assert all(data in (None, content(number, MIB)) for number, data in enumerate(found))
        assert sum(data is not None for data in found) >= 50
        with store.take(b"59") as lease:
            lease.acknowledge()
        eventually(lambda: saves_nothing(store.stats().details))
        kept = store.stats().details["num_disk_values"]
    assert "store.disk_failed" in capfd.readouterr().err
    with serve(tmp_path) as server, connected(server) as store:
        assert server.stats().num_values == kept
        for value in list(store.list()):
            assert read(store, value.key) == content(int(value.key), MIB)


def test_a_full_tier_erases_the_values_that_were_used_least(tmp_path):
    with serve(tmp_path, 4 * MIB, disk_capacity_bytes=10 * MIB) as server, connected(server) as store:
        for number in range(30):
            assert store.put(b"%d" % number, content(number, MIB))
            eventually(lambda number=number: server.stats().details["num_disk_values"] >= min(number + 1, 9))
            assert read(store, b"0") == content(0, MIB)
        stats = server.stats()
        assert stats.details["num_disk_bytes"] <= 10 * MIB
        assert stats.num_evicted > 15
        assert read(store, b"29") == content(29, MIB)
        assert store.exists([b"1"]) == [False]


def test_a_value_that_changed_on_disk_is_a_miss_and_the_others_are_read(tmp_path):
    marker = os.urandom(64)
    with serve(tmp_path) as server, connected(server) as store:
        assert store.put(b"good", content(1, MIB))
        assert store.put(b"changed", bytes(1000) + marker + bytes(MIB))
    file = tmp_path / FILE
    data = bytearray(file.read_bytes())
    at = data.find(marker)
    assert at > 0
    data[at] ^= 1
    file.write_bytes(data)
    with serve(tmp_path) as server, connected(server) as store:
        assert store.select(b"changed") is None
        assert read(store, b"good") == content(1, MIB)
        assert store.exists([b"changed"]) == [False]
        assert (server.stats().num_corrupt, server.stats().num_values) == (1, 1)
        assert store.put(b"changed", b"anew")


def test_a_file_that_is_damaged_anywhere_gives_right_bytes_misses_or_a_refusal(tmp_path):
    with serve(tmp_path) as server, connected(server) as store:
        for number in range(40):
            assert store.put(b"%d" % number, content(number, 1 + number * 3000), b"record")
    whole = (tmp_path / FILE).read_bytes()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    num_served = 0
    for _ in range(30):
        data = bytearray(whole)
        start = chance.choice([0, chance.randrange(len(data)), chance.randrange(64 << 10)])
        if chance.random() < 0.2:
            del data[start + 1 :]
        else:
            for at in range(start, min(len(data), start + chance.choice([1, 8, 4096]))):
                data[at] ^= chance.randrange(1, 256)
        (tmp_path / FILE).write_bytes(data)
        try:
            server = serve(tmp_path)
        except ConfigError as error:
            assert "delete the file" in str(error) or "cannot be used" in str(error)  # noqa: PT017
            continue
        with server, connected(server) as store:
            num_served += 1
            for number in range(40):
                found = store.select(b"%d" % number)
                if found is not None:
                    with found:
                        assert (found.read(), found.record) == (content(number, 1 + number * 3000), b"record")
            assert store.put(b"new", b"value")
            assert read(store, b"new") == b"value"
    assert num_served > 0


def test_a_file_of_something_else_is_refused_with_the_remedy(tmp_path):
    (tmp_path / FILE).write_bytes(b"precious" * 10_000)
    with pytest.raises(ConfigError, match=rf"{FILE}.*delete the file"):
        serve(tmp_path)
    assert (tmp_path / FILE).read_bytes() == b"precious" * 10_000


def test_a_disk_is_for_one_server(tmp_path):
    with serve(tmp_path), pytest.raises(ConfigError, match="another store server uses"):
        serve(tmp_path)
    serve(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used"):
        serve(tmp_path / "file" / "below")


@pytest.mark.parametrize("settings", [{"disk": "d"}, {"disk_capacity_bytes": 1}])
def test_a_directory_and_its_capacity_belong_together(settings):
    with pytest.raises(ConfigError, match="belong together"):
        StoreServer(token="t", **settings)


@pytest.mark.slow
def test_clients_see_whole_values_of_both_tiers_under_load(tmp_path):
    """Values are of one byte each, which their key names; memory holds a sixth of them, the disk two thirds."""
    num_readers, num_keys, ends_s = 3, 90, time.monotonic() + 6
    num_read = [0] * num_readers

    def data_of(number):
        return bytes([number]) * (2 * MIB)

    def write():
        with connected(server) as store:
            while time.monotonic() < ends_s:
                number = random.randrange(num_keys)
                store.put(bytes([number]), data_of(number))

    def use(index):
        with connected(server) as store:
            while time.monotonic() < ends_s:
                key = random.randrange(num_keys)
                try:
                    held = (store.take if random.random() < 0.2 else store.select)(bytes([key]), timeout=0.05)
                except TransferTimeoutError:  # a second later: a busy machine
                    continue
                if held is not None:
                    with held:
                        assert held.read() == data_of(key)
                        num_read[index] += 1
                        if random.random() < 0.5 and hasattr(held, "acknowledge"):
                            held.acknowledge()

    with serve(tmp_path, 32 * MIB, disk_capacity_bytes=120 * MIB) as server:
        with ThreadPoolExecutor(1 + num_readers) as threads:
            running = [threads.submit(write), *(threads.submit(use, index) for index in range(num_readers))]
            for each in running:
                each.result()
        stats = server.stats()
        assert stats.details["num_loaded"] > 0
        assert stats.details["num_disk_bytes"] <= 120 * MIB
        assert (stats.num_leased, stats.num_reserved, stats.num_waiting) == (0, 0, 0)
    assert min(num_read) > 0


def test_the_command_serves_a_disk_and_writes_the_rest_when_it_is_stopped(tmp_path):
    command = [sys.executable, "-m", "kvpipe", "store", "serve", "--listen", "127.0.0.1:0", "--disk", str(tmp_path)]
    for has_before in (False, True):
        with subprocess.Popen(
            [*command, "--disk-capacity", "1GiB"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            with RemoteStore.open(child.stdout.readline().strip()) as store:
                assert store.exists([b"key"]) == [has_before]
                store.put(b"key", content(1, 9 * MIB))
                assert read(store, b"key") == content(1, 9 * MIB)
            child.terminate()
            assert child.wait(LONG_S) == 0
            assert "store.disk " in child.stderr.read()
