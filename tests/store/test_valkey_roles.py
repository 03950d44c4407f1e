"""ValkeyStore when servers change their role, load their data or refuse the password, and keep their connections."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpipe.exceptions import AuthenticationError, KVPipeError, PeerLostError, ProtocolError, TransferTimeoutError
from kvpipe.store.valkey import ValkeyStore
from kvpipe.store.valkey.connections import check_role
from kvpipe.store.valkey.errors import NotNowError, NotServingError, check_serves
from tests.store.contract import LONG_S, eventually
from tests.store.valkey_servers import free_port, num_connections

MIB = 1 << 20


@pytest.fixture
def pair(running, tmp_path, tls_or_none):
    """Two servers that know nothing of each other."""
    with (
        running(tmp_path, "--enable-debug-command", "yes", tls=tls_or_none) as first,
        running(tmp_path, tls=tls_or_none) as second,
    ):
        yield first, second


def url_of(servers, query="", login=""):
    """Of all of them, in this order."""
    return (
        servers[0].url(query, login).replace("/0?", "".join(f",127.0.0.1:{each.port}" for each in servers[1:]) + "/0?")
    )


def demote(server):
    """Makes a replica of a server, which keeps its clients, and its values: its primary is out of reach."""
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", free_port())


def promote(server):
    with server.client() as client:
        client.execute_command("REPLICAOF", "NO", "ONE")


def num_clients(server):
    """Connections of others than this one."""
    with server.client() as client:
        return len(client.client_list()) - 1


@pytest.mark.parametrize(
    "text",
    [
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_1): @user_script:3: -READONLY You can't write against a replica",
        "READONLY You can't write against a read only replica. script: 1, on @user_script:3.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "LOADING Redis is loading the dataset in memory",
        "CLUSTERDOWN The cluster is down",
        "NOAUTH Authentication required.",
    ],
)
def test_a_refusal_for_what_the_server_is_now_is_known_by_its_kind(text):
    with pytest.raises(NotServingError):
        check_serves([b"OK", text], "host:1")
    check_serves([b"OK", None, "NOPERM no", "OOM no", "MOVED 1 host:2"], "host:1")


HELLO = [b"role", b"master", b"mode", b"standalone", b"version", b"8.0.0", b"modules", []]


@pytest.mark.parametrize(
    "reply", [1, None, [], b"text", [b"a", b"b", b"c"], HELLO[:4], HELLO[2:4], [[], b"x"], [b"mode", 1, b"version", 2]]
)
def test_a_reply_that_is_none_to_hello_is_a_protocol_error_that_names_the_server(reply):
    with pytest.raises(ProtocolError, match=r"^host:1 answers HELLO with"):
        check_role(reply, "host:1")


def test_a_role_that_is_no_text_is_no_primary():
    check_role(HELLO, "host:1")
    with pytest.raises(NotServingError, match="host:1 is a"):
        check_role([b"role", b"\xff", *HELLO[2:]], "host:1")


@pytest.mark.parametrize(
    "text",
    [
        "NOREPLICAS Not enough good replicas to write.",
        "NOREPLICAS Not enough good replicas to write. script: 1, on @user_script:3.",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    ],
)
def test_a_refusal_for_now_leaves_the_connection_of_use(text):
    with pytest.raises(NotNowError, match=r"^host:1: the server answered: "):
        check_serves([b"OK", text], "host:1")


def test_a_primary_that_lacks_replicas_is_left_for_the_next_one(pair):
    first, second = pair
    with ValkeyStore.open(url_of(pair)) as store, first.client() as one, second.client() as other:
        assert store.put(b"k", bytes(MIB))
        one.config_set("min-replicas-to-write", 1)
        assert store.put(b"new", bytes(8 * MIB))
        assert other.exists("kvpipe:v:{new}")
        assert store.stats().num_lost == 0
        # The one that has failed comes last, and is found again.
        other.config_set("min-replicas-to-write", 1)
        one.config_set("min-replicas-to-write", 0)
        assert store.put(b"newer", b"x")
        assert one.exists("kvpipe:v:{newer}")


def test_parts_that_a_primary_without_replicas_refuses_are_not_committed_and_say_why(running, tmp_path):
    with (
        running(tmp_path) as server,
        running(tmp_path, "--replicaof", "127.0.0.1", str(server.port)) as replica,
        server.client() as client,
        ValkeyStore.open(url_of((server, replica))) as store,
    ):
        assert store.put(b"k", b"x")
        reservation = store.reserve(b"new", 2 * MIB)
        reservation.write(bytes(MIB))
        client.config_set("min-replicas-to-write", 2)
        before = num_connections(client)
        for number, call in enumerate((lambda: reservation.write(bytes(MIB)), lambda: store.put(b"other", b"x")), 1):
            with pytest.raises(PeerLostError, match="NOREPLICAS Not enough good replicas"):
                call()
            assert store.stats().num_lost == number
            assert store.exists([b"k", b"other"]) == [True, False]
        assert num_connections(client) == before
        client.config_set("min-replicas-to-write", 0)
        assert store.put(b"other", b"x")


CALLS = {
    "exists": lambda store: store.exists([b"k", b"other"]) == [False, False],
    "put": lambda store: store.put(b"new", bytes(MIB)),
    "put of a key that was there": lambda store: store.put(b"k", bytes(MIB)),
    "select": lambda store: store.select(b"k") is None,
    "take": lambda store: store.take(b"k") is None,
    "delete": lambda store: store.delete([b"k"]) == 0,
    "list": lambda store: list(store.list()) == [],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_server_that_is_demoted_and_keeps_its_connections_answers_no_call(pair, call):
    first, second = pair
    with ValkeyStore.open(url_of(pair)) as store:
        assert store.put(b"k", bytes(8 * MIB))
        assert store.select(b"k", timeout=0.01).read() == bytes(8 * MIB)
        assert store.select(b"missing", timeout=0.01) is None
        demote(first)
        assert num_clients(first) > 1
        assert call(store)
        eventually(lambda: num_clients(first) == 0)
        assert store.put(b"after", b"x")
        with second.client() as client:
            assert client.exists("kvpipe:v:{after}")
        assert store.stats().num_lost == 0


def test_a_list_that_is_under_way_begins_again_at_a_new_primary(pair):
    names = [{f"{letter}{number}".encode() for number in range(1000)} for letter in "ab"]
    for server, of_server in zip(pair, names, strict=True):
        with server.client() as client, client.pipeline() as many:
            for name in of_server:
                many.hset(b"kvpipe:v:{%s}" % name, mapping={"e": "1", "n": "1"})
            many.execute()
    with ValkeyStore.open(url_of(pair)) as store:
        listing = store.list()
        assert next(listing).key in names[0]
        demote(pair[0])
        assert {info.key for info in listing} - names[0] == names[1]


def test_parts_that_a_demoted_server_refuses_are_written_to_the_next_one_and_their_commit_fails(pair):
    with ValkeyStore.open(url_of(pair)) as store:
        reservation = store.reserve(b"k", 8 * MIB)
        reservation.write(bytes(4 * MIB))
        demote(pair[0])
        reservation.write(bytes(4 * MIB))
        with pytest.raises(TransferTimeoutError):
            reservation.commit()
        assert num_clients(pair[0]) == 0
        assert store.put(b"k", b"again")
        with pair[1].client() as client:
            assert client.dbsize() == 2


def test_a_call_that_waits_at_a_demoted_server_goes_on_at_the_next_one(pair):
    with ThreadPoolExecutor(1) as threads, ValkeyStore.open(url_of(pair, "answer_s=0.5")) as store:
        waiting = threads.submit(store.select, b"k", timeout=LONG_S)
        with pair[0].client() as first:
            eventually(lambda: first.pubsub_numsub("kvpipe:w:{k}")[0][1] == 1)
        demote(pair[0])
        with pair[1].client() as second:
            eventually(lambda: second.pubsub_numsub("kvpipe:w:{k}")[0][1] == 1)
        eventually(lambda: num_clients(pair[0]) == 0)
        with ValkeyStore.open(pair[1].url()) as writer:
            assert writer.put(b"k", b"abc")
        with waiting.result(LONG_S) as value:
            assert value.read() == b"abc"


def test_a_subscription_that_opens_while_the_primary_changes_is_made_again_at_the_new_one(pair, monkeypatch):
    with ThreadPoolExecutor(1) as threads, ValkeyStore.open(url_of(pair, "answer_s=60")) as store:
        connections = store._context.client.connections
        subscribe = connections.subscribe

        def subscribe_and_change(servers):
            subscription = subscribe(servers)
            monkeypatch.undo()
            demote(pair[0])
            assert store.exists([b"k"]) == [False]
            return subscription

        monkeypatch.setattr(connections, "subscribe", subscribe_and_change)
        waiting = threads.submit(store.select, b"k", timeout=LONG_S)
        with pair[1].client() as second:
            eventually(lambda: second.pubsub_numsub("kvpipe:w:{k}")[0][1] == 1)
        with ValkeyStore.open(pair[1].url()) as writer:
            assert writer.put(b"k", b"abc")
        with waiting.result(LONG_S) as value:
            assert value.read() == b"abc"


def test_values_that_were_replicated_are_read_at_the_new_primary(running, tmp_path, tls_or_none):
    tls = ("--tls-replication", "yes") if tls_or_none else ()
    with (
        running(tmp_path, *tls, tls=tls_or_none) as first,
        running(tmp_path, *tls, "--replicaof", "127.0.0.1", str(first.port), tls=tls_or_none) as second,
        first.client() as primary,
        second.client() as replica,
        ValkeyStore.open(url_of((first, second))) as store,
    ):
        eventually(lambda: replica.info()["master_link_status"] == "up")
        assert store.put(b"k", bytes(4 * MIB))
        value = store.select(b"k")
        assert value.read() == bytes(4 * MIB)
        eventually(lambda: primary.info()["master_repl_offset"] == replica.info()["slave_repl_offset"])
        replica.execute_command("REPLICAOF", "NO", "ONE")
        primary.execute_command("REPLICAOF", "127.0.0.1", second.port)
        assert store.exists([b"k"]) == [True]
        assert value.read() == bytes(4 * MIB)
        assert store.take(b"k") is None
        value.close()
        with store.take(b"k") as lease:
            assert lease.read() == bytes(4 * MIB)
            lease.acknowledge()
        assert store.stats().num_lost == 0


def test_role_changes_under_load_cost_each_caller_the_call_that_is_under_way(pair):
    num_callers, num_changes = 4, 4
    has_ended = threading.Event()
    rounds = [0] * num_callers
    failed = []

    def work(caller):
        while not has_ended.is_set():
            key = b"%d-%d" % (caller, rounds[caller])
            try:
                if store.put(key, bytes(MIB)) and store.exists([key]) == [True] and (lease := store.take(key)):
                    with contextlib.suppress(TransferTimeoutError):
                        lease.acknowledge()
            except KVPipeError as error:
                failed.append(error)
            rounds[caller] += 1

    with ThreadPoolExecutor(num_callers) as threads, ValkeyStore.open(url_of(pair, "part_bytes=262144")) as store:
        working = [threads.submit(work, caller) for caller in range(num_callers)]
        try:
            for change in range(num_changes):
                before = list(rounds)
                eventually(lambda before=before: all(now > then + 5 for now, then in zip(rounds, before, strict=True)))
                promote(pair[(change + 1) % 2])
                demote(pair[change % 2])
            before = list(rounds)
            eventually(lambda: all(now > then + 5 for now, then in zip(rounds, before, strict=True)))
            assert num_clients(pair[1]) == 0
        finally:
            has_ended.set()
        for each in working:
            each.result(LONG_S)
        # Another call begins at a server that serves.
        assert len(failed) <= num_callers * num_changes, failed
        assert store.stats().num_committed > 5 * num_callers * num_changes / 2


def test_a_server_that_loads_its_data_is_left_for_the_next_host(pair):
    with (
        pair[0].client() as client,
        pair[0].client() as admin,
        ThreadPoolExecutor(1) as threads,
        ValkeyStore.open(url_of(pair)) as store,
    ):
        assert store.put(b"k", bytes(MIB))
        client.config_set("key-load-delay", 10_000)
        # So often it answers others meanwhile.
        client.config_set("loading-process-events-interval-bytes", 1024)
        with client.pipeline() as many:
            for number in range(1000):
                many.set(b"filler:%d" % number, os.urandom(4096))
            many.execute()
        reload = threads.submit(client.execute_command, "DEBUG", "RELOAD")
        try:
            eventually(lambda: admin.info("persistence")["loading"] == 1)
            assert store.exists([b"k"]) == [False]
            assert store.put(b"k", b"x")
            assert store.stats().num_lost == 0
        finally:
            admin.config_set("key-load-delay", 0)
            reload.result(LONG_S)


def test_a_single_host_that_becomes_a_primary_again_is_used_again(running, tmp_path, tls_or_none):
    with running(tmp_path, tls=tls_or_none) as server, ValkeyStore.open(server.url()) as store:
        assert store.put(b"k", bytes(MIB))
        demote(server)
        for number, call in enumerate((lambda: store.exists([b"k"]), lambda: store.put(b"x", b"y")), 1):
            with pytest.raises(PeerLostError, match="no primary"):
                call()
            assert store.stats().num_lost == number
        promote(server)
        assert store.exists([b"k"]) == [True]
        assert store.put(b"x", b"y")


def test_every_host_of_the_url_is_tried_whenever_a_connection_is_made_anew(running, tmp_path, tls_or_none):
    with (
        running(tmp_path, tls=tls_or_none) as first,
        running(tmp_path, tls=tls_or_none) as second,
        ValkeyStore.open(url_of((first, second))) as store,
    ):
        assert store.put(b"k", b"x")
        first.kill()
        assert_goes_on(store)
        with running(tmp_path, tls=tls_or_none, port=first.port):
            second.kill()
            assert_goes_on(store)


def assert_goes_on(store):
    """The call that is under way may fail."""
    with contextlib.suppress(PeerLostError):
        store.exists([b"k"])
    assert store.exists([b"k"]) == [False]
    assert store.put(b"k", b"x")


def test_a_host_that_refuses_the_password_is_passed_over_and_the_last_one_is_an_authentication_error(running, tmp_path):
    login = ":secret@"
    with (
        running(tmp_path, "--requirepass", "secret") as first,
        running(tmp_path, "--requirepass", "secret") as second,
        ValkeyStore.open(url_of((first, second), login=login)) as store,
    ):
        assert store.put(b"k", b"x")
        first.kill()
        with running(tmp_path, "--requirepass", "changed", port=first.port):
            assert_goes_on(store)
            with second.client(password="secret") as client:
                client.config_set("requirepass", "changed")
                client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(AuthenticationError):
                store.exists([b"k"])
            with second.client(password="changed") as client:
                client.config_set("requirepass", "secret")
            assert store.exists([b"k"]) == [True]


def test_what_is_closed_while_the_server_refuses_the_password_raises_nothing(running, tmp_path):
    with (
        running(tmp_path) as server,
        server.client() as client,
        ValkeyStore.open(server.url("pin_s=1&reservation_s=1")) as store,
    ):
        for name in (b"value", b"lease"):
            assert store.put(name, b"x")
        with store.reserve(b"reserved", 1), store.select(b"value"), store.take(b"lease", lease_s=1):
            client.config_set("requirepass", "changed")
            client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(AuthenticationError):
                store.exists([b"value"])
        client.config_set("requirepass", "")
        # They end by time.
        eventually(lambda: store.exists([b"value", b"lease"]) == [True, True])
        eventually(lambda: store.put(b"reserved", b"x"))
        eventually(lambda: store.delete([b"value", b"lease", b"reserved"]) == 3)
