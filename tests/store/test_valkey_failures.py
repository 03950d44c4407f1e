"""ValkeyStore when clients are killed, servers are killed or stopped, and values are changed by hand."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpipe.exceptions import (
    CapacityError,
    ConnectError,
    CorruptDataError,
    KVPipeError,
    PeerLostError,
    TransferTimeoutError,
)
from kvpipe.store.valkey import ValkeyStore
from tests.store.contract import LONG_S, eventually
from tests.store.valkey_servers import free_port, num_connections

MIB = 1 << 20


@pytest.fixture
def own_server(running, tmp_path, tls_or_none):
    with running(tmp_path, tls=tls_or_none) as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        client.flushdb()
        yield client


@pytest.fixture
def store(server, client):
    with ValkeyStore.open(server.url("reservation_s=1&pin_s=1&part_bytes=1048576")) as store:
        yield store


# --- clients that die

CHILD = """
import os, signal, sys
from kvpipe.store.valkey import ValkeyStore
store = ValkeyStore.open(sys.argv[1])
{steps}
os.kill(os.getpid(), signal.SIGKILL)
"""
STEPS = {
    "after the reservation": "r = store.reserve(b'k', 8 << 20)",
    "in the middle of writing": "r = store.reserve(b'k', 8 << 20); r.write(bytes(5 << 20))",
    "before the commit": "r = store.reserve(b'k', 8 << 20); r.write(bytes(8 << 20))",
}


def run_killed(server, steps):
    url = server.url("reservation_s=3&pin_s=0.5&part_bytes=1048576")
    process = subprocess.run([sys.executable, "-c", CHILD.format(steps=steps), url], check=False, timeout=LONG_S)
    assert process.returncode == -9


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_client_that_is_killed_leaves_nothing_once_its_reservation_has_ended(server, client, store, steps):
    run_killed(server, steps)
    assert client.dbsize() > 0
    assert store.exists([b"k"]) == [False]
    eventually(lambda: client.dbsize() == 0)
    assert store.put(b"k", b"x")


def test_the_value_of_a_client_that_is_killed_with_a_lease_goes_to_who_waits(server, client, store):
    assert store.put(b"k", b"abc")
    run_killed(server, "lease = store.take(b'k', lease_s=1); assert lease is not None")
    with store.take(b"k", timeout=LONG_S) as lease:
        assert lease.read() == b"abc"
        lease.acknowledge()
    assert client.dbsize() == 0


def test_a_value_that_a_killed_client_had_open_can_be_taken_after_its_pin(server, client, store):
    assert store.put(b"k", b"abc")
    run_killed(server, "value = store.select(b'k'); assert value is not None")
    with store.take(b"k", timeout=LONG_S) as lease:
        lease.acknowledge()
    assert client.dbsize() == 0


def test_a_value_stays_open_longer_than_one_pin(server, store):
    assert store.put(b"k", b"abc")
    with store.select(b"k") as value:
        assert store.take(b"k", timeout=2.5) is None
        assert value.read() == b"abc"
    assert store.take(b"k") is not None


@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_aborted_reservations_and_handoffs_leave_nothing(client, store, number):
    for key in (b"%d" % index for index in range(number)):
        with store.reserve(key, 10) as reservation:
            reservation.write(b"abc")
        # The handoff of a request that is aborted once it was committed: its consumer acknowledges it unread.
        assert store.put(key, b"abc")
        with store.take(key) as lease:
            lease.acknowledge()
    assert client.dbsize() == 0
    assert list(store.list()) == []


# --- servers that die


@pytest.mark.slow
def test_a_server_that_is_stopped_is_known_within_the_bound(own_server):
    store = ValkeyStore.open(own_server.url("answer_s=1"))
    assert store.put(b"k", bytes(8 * MIB))
    value = store.select(b"k")
    reservation = store.reserve(b"other", 8 * MIB)
    own_server.stop()
    try:
        for call in (
            value.read,
            lambda: store.exists([b"k"]),
            lambda: store.select(b"k"),
            lambda: reservation.write(bytes(8 * MIB)),
            reservation.commit,
        ):
            began_s = time.monotonic()
            with pytest.raises((PeerLostError, ValueError)):
                call()
            assert time.monotonic() - began_s < 5
        with pytest.raises(ConnectError):
            ValkeyStore.open(own_server.url(), timeout=0.5)
        began_s = time.monotonic()
        store.close()
        assert time.monotonic() - began_s < 5
    finally:
        own_server.resume()


def test_a_call_that_waits_without_limit_knows_that_the_server_was_stopped(own_server):
    with ThreadPoolExecutor(1) as threads, ValkeyStore.open(own_server.url("answer_s=0.5")) as store:
        waiting = threads.submit(store.select, b"k", timeout=None)
        time.sleep(0.2)
        own_server.stop()
        try:
            with pytest.raises(PeerLostError):
                waiting.result(LONG_S)
            assert store.stats().num_lost == 1
        finally:
            own_server.resume()


def test_a_server_that_is_killed_in_the_middle_of_reads_is_known(own_server):
    with ValkeyStore.open(own_server.url("answer_s=2")) as store:
        assert store.put(b"k", bytes(64 * MIB))
        value = store.select(b"k")
        has_read = threading.Event()

        def read():
            while True:
                assert value.read() == bytes(64 * MIB)
                has_read.set()

        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read)
            assert has_read.wait(LONG_S)
            own_server.kill()
            with pytest.raises(PeerLostError):
                reading.result(LONG_S)
            assert store.stats().num_lost == 1


def test_a_server_that_was_restarted_is_used_again_and_its_waits_go_on(running, tmp_path):
    with running(tmp_path) as first, ValkeyStore.open(first.url()) as store:
        assert store.put(b"before", bytes(MIB))
        first.kill()
        with pytest.raises(PeerLostError):
            store.exists([b"before"])
        with running(tmp_path, port=first.port):
            assert store.exists([b"before"]) == [False]
            assert store.put(b"after", bytes(MIB))
            with store.select(b"after") as value:
                assert value.read() == bytes(MIB)


def test_a_subscription_that_is_lost_is_made_again(own_server):
    with (
        own_server.client() as client,
        ThreadPoolExecutor(1) as threads,
        ValkeyStore.open(own_server.url()) as store,
    ):
        waiting = threads.submit(store.take, b"k", timeout=LONG_S)
        for _ in range(2):
            eventually(lambda: client.pubsub_numsub("kvpipe:w:{k}")[0][1] == 1)
            client.client_kill_filter(_type="pubsub")
        eventually(lambda: client.pubsub_numsub("kvpipe:w:{k}")[0][1] == 1)
        assert store.put(b"k", b"abc")
        with waiting.result(LONG_S) as lease:
            assert lease.read() == b"abc"


@pytest.mark.slow
def test_calls_that_wait_share_one_attempt_to_connect_again(running, tmp_path):
    with (
        running(tmp_path, "--requirepass", "secret") as server,
        server.client(password="secret") as client,
        ThreadPoolExecutor(20) as threads,
        ValkeyStore.open(server.url("answer_s=3", login=":secret@")) as store,
    ):
        waiting = [threads.submit(store.select, b"k", timeout=None) for _ in range(20)]
        eventually(lambda: store.stats().num_waiting == 20 and client.pubsub_numsub("kvpipe:w:{k}")[0][1] == 1)
        # Every call looks for the value before it subscribes and once more before it sleeps.
        eventually(lambda: client.info("commandstats")["cmdstat_hmget"]["calls"] == 2 * 20)
        before = num_connections(client)
        server.stop()
        try:
            for each in waiting:
                with pytest.raises(PeerLostError):
                    each.result(LONG_S)
            assert store.stats().num_lost == 20
        finally:
            server.resume()
        eventually(lambda: num_connections(client) > before)
        assert num_connections(client) == before + 1


def test_a_server_that_refuses_more_clients_is_not_asked_again_and_again(own_server):
    with own_server.client() as client, ValkeyStore.open(own_server.url()) as store:
        assert store.select(b"k") is None
        client.config_set("maxclients", client.info("clients")["connected_clients"])
        before = num_connections(client)
        with pytest.raises(KVPipeError):
            store.select(b"k", timeout=LONG_S)
        assert num_connections(client) <= before + 2
        client.config_set("maxclients", 100)
        assert store.select(b"k", timeout=0.01) is None


def test_a_server_that_refuses_more_clients_serves_each_call_by_the_connections_that_there_are(own_server):
    with own_server.client() as client, ValkeyStore.open(own_server.url("part_bytes=65536")) as store:
        assert store.put(b"k", bytes(65536))
        connections = store._context.client.connections
        address = store._context.client.primary.address
        client.config_set("maxclients", client.info("clients")["connected_clients"])
        # One for values, for sixteen parts.
        assert store.put(b"large", bytes(MIB))
        with store.select(b"large") as value:
            assert value.read() == bytes(MIB)
        with ThreadPoolExecutor(1) as threads:
            with connections.for_commands([address]):
                waiting = threads.submit(store.exists, [b"large"])
                time.sleep(0.3)
                assert not waiting.done()
            assert waiting.result(LONG_S) == [True]


def test_a_server_that_refuses_more_clients_is_an_error_once_the_bound_has_passed(own_server):
    with own_server.client() as client, ValkeyStore.open(own_server.url("answer_s=0.5")) as store:
        assert store.exists([b"k"]) == [False]
        client.config_set("maxclients", client.info("clients")["connected_clients"])
        with store._context.client.connections.for_commands([store._context.client.primary.address]):
            began_s = time.monotonic()
            with pytest.raises(PeerLostError):
                store.exists([b"k"])
            assert 0.4 < time.monotonic() - began_s < LONG_S / 2
        assert store.exists([b"k"]) == [False]


def test_a_process_without_descriptors_is_a_capacity_error_and_the_subscription_goes_on(server, client, store):
    assert store.select(b"k", timeout=0.01) is None
    before = num_connections(client)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(CapacityError):
            store.select(b"k", timeout=LONG_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert store.select(b"k", timeout=0.01) is None
    assert num_connections(client) == before


def test_a_call_that_a_server_refuses_as_a_replica_counts_once_as_one_that_lost_it(running, tmp_path):
    with running(tmp_path) as server, server.client() as client, ValkeyStore.open(server.url()) as store:
        assert store.put(b"k", bytes(MIB))
        value, reservation = store.select(b"k"), store.reserve(b"other", MIB)
        client.config_set("replica-serve-stale-data", "no")
        client.execute_command("REPLICAOF", "127.0.0.1", free_port())
        calls = (
            value.read,
            lambda: reservation.write(bytes(MIB)),
            lambda: store.exists([b"k"]),
            lambda: store.put(b"x", b"y"),
        )
        for number, call in enumerate(calls, 1):
            with pytest.raises(PeerLostError):
                call()
            assert store.stats().num_lost == number


def test_connections_that_the_server_has_closed_are_replaced(server, client, store):
    assert store.put(b"k", bytes(4 * MIB))
    client.client_kill_filter(_type="normal", skipme=True)
    with store.select(b"k") as value:
        client.client_kill_filter(_type="normal", skipme=True)
        assert value.read() == bytes(4 * MIB)
        client.client_kill_filter(_type="normal", skipme=True)
        assert store.exists([b"k"]) == [True]


# --- values that were changed


def part_keys(client):
    return sorted(client.scan_iter(match="kvpipe:d:*"))


def change_byte(client, keys):
    client.setrange(keys[1], 1000, b"!")


def shorten(client, keys):
    client.set(keys[1], client.get(keys[1])[:-1])


def delete_part(client, keys):
    client.delete(keys[1])


def change_type(client, keys):
    client.delete(keys[1])
    client.lpush(keys[1], b"x")


@pytest.mark.parametrize("change", [change_byte, shorten, delete_part, change_type])
def test_a_value_that_was_changed_is_never_read_and_a_miss_afterwards(client, store, change):
    assert store.put(b"k", bytes(3 * MIB))
    with store.select(b"k") as value:
        change(client, part_keys(client))
        with pytest.raises(CorruptDataError):
            value.read()
    assert store.stats().num_corrupt == 1
    assert store.exists([b"k"]) == [False]
    assert store.select(b"k") is None
    assert client.dbsize() == 0
    assert store.put(b"k", b"again")


def test_a_value_that_lost_a_part_is_a_miss_for_select_and_take(client, store):
    for find in (store.select, store.take):
        assert store.put(b"k", bytes(3 * MIB))
        delete_part(client, part_keys(client))
        assert find(b"k") is None
        assert client.dbsize() == 0
    assert store.stats().num_corrupt == 2


@pytest.mark.parametrize("field", ["n", "p", "r", "c"])
def test_a_manifest_that_was_changed_is_a_miss(client, store, field):
    assert store.put(b"k", bytes(3 * MIB))
    client.hset("kvpipe:v:{k}", field, b"7")
    value = store.select(b"k")
    if value is not None:
        with value:
            assert value.read() == bytes(3 * MIB)
    else:
        assert store.exists([b"k"]) == [False]


def test_a_lease_that_is_no_number_is_none(client, store):
    assert store.put(b"k", b"value")
    client.hset("kvpipe:v:{k}", "l", b"for ever")
    assert store.exists([b"k"]) == [True]
    with store.take(b"k") as value:
        assert value.read() == b"value"
    client.hset("kvpipe:v:{k}", "l", b"for ever")
    assert store.delete([b"k"]) == 1


def test_a_manifest_of_another_type_is_a_miss(client, store):
    client.set("kvpipe:v:{k}", b"text")
    assert store.exists([b"k"]) == [False]
    assert store.select(b"k") is None
    assert client.dbsize() == 0


def test_a_value_that_is_deleted_while_it_is_open_is_lost(client, store):
    assert store.put(b"k", bytes(3 * MIB))
    with store.select(b"k") as value:
        client.flushdb()
        with pytest.raises(PeerLostError):
            value.read()
    assert store.stats().num_lost == 1


def test_a_part_that_is_deleted_before_the_commit_makes_it_fail(client, store):
    with store.reserve(b"k", 3 * MIB) as reservation:
        reservation.write(bytes(3 * MIB))
        delete_part(client, part_keys(client))
        with pytest.raises(PeerLostError):
            reservation.commit()
    assert store.stats().num_lost == 1
    assert client.dbsize() == 0


# --- the server's memory


def test_a_server_without_memory_is_a_capacity_error_and_keeps_nothing_of_the_value(running, tmp_path):
    with (
        running(tmp_path, "--maxmemory", "16mb", "--maxmemory-policy", "noeviction") as server,
        ValkeyStore.open(server.url("part_bytes=1048576")) as store,
    ):

        def fill():
            for number in range(20):
                store.put(b"%d" % number, bytes(MIB))

        with pytest.raises(CapacityError):
            fill()
        assert 0 < len(list(store.list())) < 20
        store.delete([info.key for info in store.list()])
        assert store.put(b"k", bytes(MIB))
        assert store.stats().capacity_bytes == 16 * MIB


def test_values_that_the_server_evicts_are_misses_and_never_wrong(running, tmp_path):
    with (
        running(tmp_path, "--maxmemory", "32mb", "--maxmemory-policy", "allkeys-lru") as server,
        ValkeyStore.open(server.url("part_bytes=1048576")) as store,
    ):
        num_found = 0
        for number in range(60):
            # The server may evict the reservation itself.
            with contextlib.suppress(PeerLostError, TransferTimeoutError):
                store.put(b"%d" % number, bytes([number]) * 2 * MIB)
        for number in range(60):
            if (value := store.select(b"%d" % number)) is not None:
                with value:
                    try:
                        assert value.read() == bytes([number]) * 2 * MIB
                    except (CorruptDataError, PeerLostError):
                        continue
                    num_found += 1
        assert 0 < num_found < 20
