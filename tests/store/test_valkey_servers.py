"""ValkeyStore with passwords, users, TLS, prefixes, scripts that the server has forgotten, and forked processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import proxy, ref

import pytest

from kvpipe.exceptions import AuthenticationError, ClosedError, ConfigError, ConnectError
from kvpipe.store.valkey import ValkeySettings, ValkeyStore
from tests.store.contract import LONG_S, eventually
from tests.store.valkey_servers import free_port, num_connections

MIB = 1 << 20


def assert_works(store):
    assert store.put(b"k", bytes(5 * MIB), b"record")
    assert store.exists([b"k", b"other"]) == [True, False]
    with store.take(b"k") as lease:
        assert lease.read() == bytes(5 * MIB)
        lease.acknowledge()


def test_a_password_is_used_and_a_wrong_one_is_an_authentication_error(running, tmp_path):
    with running(tmp_path, "--requirepass", "right%word") as server:
        with ValkeyStore.open(server.url(login=":right%25word@")) as store:
            assert_works(store)
        for login in ("", ":wrong@", "unknown:right%25word@"):
            with pytest.raises(AuthenticationError):
                ValkeyStore.open(server.url(login=login))


def test_a_user_of_the_acl_needs_the_prefix_only(running, tmp_path):
    rules = ("on", ">secret", "~tenant:*", "&tenant:*", "+@all")
    with running(tmp_path, "--user", "someone", *rules) as server:
        with ValkeyStore.open(server.url("prefix=tenant", login="someone:secret@")) as store:
            assert_works(store)
            assert store.select(b"k", timeout=0.1) is None
        with (
            ValkeyStore.open(server.url("prefix=foreign", login="someone:secret@")) as store,
            pytest.raises(AuthenticationError),
        ):
            store.put(b"k", b"x")


def test_a_user_whose_acl_refuses_the_channel_gets_an_authentication_error_at_once(running, tmp_path, tls_or_none):
    rules = ("on", ">secret", "~tenant:*", "resetchannels", "&foreign:*", "+@all")
    with (
        running(tmp_path, "--user", "someone", *rules, tls=tls_or_none) as server,
        server.client() as client,
        ValkeyStore.open(server.url("prefix=tenant", login="someone:secret@")) as store,
    ):
        before = num_connections(client)
        for _ in range(2):
            with pytest.raises(AuthenticationError):
                store.select(b"k", timeout=LONG_S)
        # Of each call one for the script and one that subscribes.
        assert num_connections(client) <= before + 4


def test_tls_is_used_and_a_foreign_authority_is_a_connect_error(running, tmp_path, tls):
    with running(tmp_path, tls=tls) as server:
        with ValkeyStore.open(server.url()) as store:
            assert_works(store)
        with pytest.raises(ConnectError, match="signed by an authority of ca_file"):
            ValkeyStore.open(f"rediss://127.0.0.1:{server.port}")
        with pytest.raises(ConnectError):
            ValkeyStore.open(f"redis://127.0.0.1:{server.port}")


def test_a_certificate_of_another_host_is_a_connect_error(running, tmp_path, tls):
    with (
        running(tmp_path, tls=tls) as server,
        pytest.raises(ConnectError, match="name the host in subjectAltName"),
    ):
        ValkeyStore.open(server.url().replace("127.0.0.1", "localhost", 1))


def test_tls_files_that_cannot_be_used_are_a_config_error(running, tmp_path, tls):
    empty = tmp_path / "empty.pem"
    empty.touch()
    with running(tmp_path, tls=tls) as server:
        for query in (f"ca_file={empty}", f"cert_file={empty}", f"cert_file={tls.cert}&key_file={tmp_path}/none"):
            with pytest.raises(ConfigError):
                ValkeyStore.open(f"rediss://127.0.0.1:{server.port}/0?{query}")


def test_a_server_that_wants_a_certificate_gets_that_of_the_client(running, tmp_path, tls):
    with running(tmp_path, "--tls-auth-clients", "optional", tls=tls) as server:
        with server.client() as client:
            client.config_set("tls-auth-clients", "yes")
        with ValkeyStore.open(server.url(f"cert_file={tls.cert}&key_file={tls.key}")) as store:
            assert_works(store)
        with pytest.raises(ConnectError):
            ValkeyStore.open(server.url(), timeout=LONG_S)


def test_prefixes_and_databases_know_nothing_of_each_other(server):
    urls = [server.url("prefix=a"), server.url("prefix=b"), server.url("prefix=a", database=1)]
    stores = [ValkeyStore.open(url) for url in urls]
    for number, store in enumerate(stores):
        assert store.put(b"k", bytes([number]))
    for number, store in enumerate(stores):
        with store.select(b"k") as value:
            assert value.read() == bytes([number])
        assert [info.key for info in store.list()] == [b"k"]
    assert stores[0].delete([b"k"]) == 1
    assert stores[1].exists([b"k"]) == stores[2].exists([b"k"]) == [True]
    for store in stores:
        store.close()


@pytest.mark.parametrize("key", [b"}", b"{}", b"a{b}c", b"%7D", b"*", b"[a-z]?\\", b"\x00\xff\r\n"])
def test_any_byte_may_be_in_a_key(server, key):
    with ValkeyStore.open(server.url("prefix=bytes")) as store:
        assert store.put(key, b"x")
        assert store.put(b"other" + key, b"y")
        assert [info.key for info in store.list(key)] == [key]
        assert store.delete([key, b"other" + key]) == 2


def test_scripts_that_the_server_has_forgotten_are_sent_again(server):
    with ValkeyStore.open(server.url("prefix=scripts")) as store, server.client() as client:
        for _ in range(2):
            client.script_flush()
            assert_works(store)


def test_1000_operations_of_32_threads_on_two_prefixes(server):
    stores = [ValkeyStore.open(server.url(f"prefix=threads{number % 2}")) for number in range(4)]

    def work(thread):
        for turn in range(32):
            store, key = stores[thread % 4], b"%d-%d" % (thread // 4, turn)
            data = key * 1000
            if thread % 4 < 2:
                assert store.put(key, data)
            else:
                with store.take(key, timeout=LONG_S) as lease:
                    assert lease.read() == data
                    lease.acknowledge()

    with ThreadPoolExecutor(32) as threads:
        list(threads.map(work, range(32)))
    assert all(list(store.list()) == [] for store in stores)
    for store in stores:
        store.close()


def test_a_crowd_that_waits_shares_one_connection_and_leaves_its_channels_at_the_next_wait(
    running, tmp_path, tls_or_none
):
    with (
        running(tmp_path, tls=tls_or_none) as server,
        server.client() as client,
        ValkeyStore.open(server.url("prefix=crowd")) as store,
    ):
        before = set(threading.enumerate())

        def take(number):
            with store.take(b"k%d" % (number % 10), timeout=LONG_S) as lease:
                lease.acknowledge()

        with ThreadPoolExecutor(50) as threads:
            waiting = [threads.submit(take, number) for number in range(50)]
            eventually(lambda: store.stats().num_waiting == 50 and len(client.pubsub_channels("crowd:w:*")) == 10)
            assert len(client.client_list(_type="pubsub")) == 1
            assert len(set(threading.enumerate()) - before) == 50
            for number in range(50):
                eventually(partial(store.put, b"k%d" % (number % 10), b"x"))
            for each in waiting:
                each.result(LONG_S)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store.select, b"other", timeout=LONG_S)
            eventually(lambda: client.pubsub_channels("crowd:w:*") == [b"crowd:w:{other}"])
            assert store.put(b"other", b"x")
            waiting.result(LONG_S).close()
        store.close()
        eventually(lambda: not client.client_list(_type="pubsub"))


def test_a_call_that_waits_ends_with_the_exception_of_a_signal_handler(server):
    class StopError(Exception):
        pass

    def stop(*_):
        raise StopError

    main = threading.main_thread().ident
    with ValkeyStore.open(server.url("prefix=signals")) as store, ThreadPoolExecutor(2) as threads:

        def interrupt(num_waiting):
            eventually(lambda: store.stats().num_waiting == num_waiting)
            time.sleep(0.1)  # it reads by now, in most cases
            signal.pthread_kill(main, signal.SIGUSR1)

        previous = signal.signal(signal.SIGUSR1, stop)
        try:
            for num_others in (0, 1):
                # The first wait reads from the connection, the second one while another call does.
                others = [threads.submit(store.select, b"other", timeout=LONG_S) for _ in range(num_others)]
                while store.stats().num_waiting < num_others:
                    time.sleep(0.01)
                interrupted = threads.submit(interrupt, num_others + 1)
                with pytest.raises(StopError):
                    store.select(b"k", timeout=LONG_S)
                interrupted.result(LONG_S)
                assert store.put(b"other", b"x")
                for each in others:
                    each.result(LONG_S).close()
                assert store.stats().num_waiting == 0
                assert store.delete([b"other"]) == 1
        finally:
            signal.signal(signal.SIGUSR1, previous)


def test_a_wait_right_after_another_one_for_the_same_key_is_woken(server):
    with ValkeyStore.open(server.url("prefix=again")) as store, ThreadPoolExecutor(1) as threads:
        for number in range(20):
            key = b"%d" % number
            assert store.select(key, timeout=0.01) is None
            waiting = threads.submit(store.select, key, timeout=5)
            time.sleep(0.02)
            assert store.put(key, b"x")
            with waiting.result(LONG_S) as value:
                assert value.read() == b"x"


def test_a_store_that_is_closed_returns_its_leases_and_ends_its_reservations(server):
    with ValkeyStore.open(server.url("prefix=closing")) as other:
        store = ValkeyStore.open(server.url("prefix=closing"))
        assert store.put(b"leased", b"x")
        lease = store.take(b"leased")
        reservation = store.reserve(b"reserved", 1)
        assert store.put(b"open", b"x")
        value = store.select(b"open")
        store.close()
        assert other.take(b"leased") is not None
        assert other.take(b"open") is not None
        assert other.put(b"reserved", b"x")
        for call in (lease.acknowledge, lambda: reservation.write(b"x"), value.read):
            with pytest.raises(ClosedError):
                call()
        value.close()
        lease.release()
        reservation.abort()


def test_a_forked_process_gets_closed_errors_and_disturbs_nothing(server):
    # The only reference, which the child drops.
    stores = [ValkeyStore.open(server.url("prefix=fork"))]
    with server.client() as client:
        store = proxy(stores[0])
        assert store.put(b"k", bytes(MIB))
        assert store.select(b"other", timeout=0.01) is None
        subscribed = [each["id"] for each in client.client_list(_type="pubsub")]
        value = store.select(b"k")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (lambda: store.exists([b"k"]), lambda: store.put(b"x", b"y"), value.read):
                    with pytest.raises(ClosedError):
                        call()
                store.close()
                value.close()
                ended = ref(stores[0])
                stores.clear()
                gc.collect()
                assert ended() is None
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert value.read() == bytes(MIB)
        assert store.take(b"k") is None
        value.close()
        assert store.take(b"k") is not None
        assert store.select(b"other", timeout=0.01) is None
        assert [each["id"] for each in client.client_list(_type="pubsub")] == subscribed
        store.close()


def test_a_replica_is_a_connect_error(running, server, tmp_path):
    with (
        running(tmp_path, "--replicaof", "127.0.0.1", str(server.port)) as replica,
        pytest.raises(ConnectError, match="replica"),
    ):
        ValkeyStore.open(replica.url())


def test_a_port_without_a_listener_is_a_connect_error_and_the_next_host_is_tried(server):
    unused = free_port()
    for host in ("127.0.0.1", "[::1]"):
        with pytest.raises(ConnectError, match=re.escape(f"cannot connect to {host}:{unused}: ")):
            ValkeyStore.open(f"redis://{host}:{unused}")
    with ValkeyStore.open(f"redis://127.0.0.1:{unused},127.0.0.1:{server.port}/0?prefix=hosts") as store:
        assert_works(store)


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "redis://",
        "redis://host:port",
        "redis://host:99999",
        "redis://host/x",
        "redis://host/-1",
        "redis://host?unknown=1",
        "redis://host?connections=0",
        "redis://host?part_bytes=many",
        "redis://host?answer_s=0",
        "redis://host?prefix={x}",
        "redis://host?prefix=",
    ],
)
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError):
        ValkeyStore.open(url)


def test_all_parts_of_a_url_are_read():
    settings = ValkeySettings.from_url(
        "valkeys://me:p%40ss@one:7000,[::1]/3?prefix=x&connections=8&answer_s=2.5&ca_file=/c"
    )
    assert settings.hosts == (("one", 7000), ("::1", 6379))
    assert (settings.username, settings.password, settings.database) == ("me", "p@ss", 3)
    assert (settings.prefix, settings.connections, settings.answer_s, settings.ca_file) == ("x", 8, 2.5, "/c")
    assert settings.is_tls
