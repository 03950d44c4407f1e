"""ValkeyStore against real servers: the contract, alone and in a cluster, with and without TLS."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from kvpipe.exceptions import ConfigError, PeerLostError
from kvpipe.store.valkey import ValkeyStore
from kvpipe.store.valkey.scripts import Script
from tests.store.contract import LONG_S, StoreContract, eventually

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(running_cluster, tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture(scope="module")
def tls_server(running, tmp_path_factory, tls):
    with running(tmp_path_factory.mktemp("tls"), tls=tls) as server:
        yield server


@pytest.fixture(scope="module")
def tls_cluster(running_cluster, tmp_path_factory, tls):
    with running_cluster(tmp_path_factory.mktemp("tls-cluster"), tls=tls) as servers:
        yield servers


@pytest.mark.usefixtures("program")
class _ValkeyContract(StoreContract):
    """The contract.

    Attributes:
        fixture: The name of that of the server or the cluster.
    """

    fixture: str
    reservation_s = 1.0

    @pytest.fixture
    def connect(self, request):
        found = request.getfixturevalue(self.fixture)
        server = found[1] if isinstance(found, list) else found
        with contextlib.ExitStack() as stores:
            yield lambda: stores.enter_context(ValkeyStore.open(server.url("reservation_s=1")))


class TestOneServer(_ValkeyContract):
    fixture = "server"


class TestCluster(_ValkeyContract):
    fixture = "cluster"


class TestOneServerWithTls(_ValkeyContract):
    fixture = "tls_server"


@pytest.mark.slow
class TestClusterWithTls(_ValkeyContract):
    fixture = "tls_cluster"


def move_slot(servers, key):
    """Gives the slot of a key, and all keys in it, to the next server."""
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(server.client()) for server in servers]
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", key)
        owner = next(index for index, client in enumerate(clients) if has_slot(client, slot))
        source, target = clients[owner], clients[(owner + 1) % len(clients)]
        ids = [client.execute_command("CLUSTER", "MYID") for client in (source, target)]
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        port = servers[(owner + 1) % len(clients)].port
        keys = source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        # The first half of the move: the source answers ASK for the parts.
        yield
        source.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
        yield
        for client in (target, source, *clients):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        yield


def has_slot(client, slot):
    try:
        client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot)
        client.execute_command("GET", slot_key(client, slot))
    except redis.exceptions.ResponseError:
        return False
    return True


def slot_key(client, slot):
    """A key in a slot."""
    keys = (f"probe{number}" for number in itertools.count())
    return next(key for key in keys if client.execute_command("CLUSTER", "KEYSLOT", key) == slot)


@pytest.mark.slow
def test_values_are_read_and_written_while_their_slot_moves_to_another_server(running_cluster, tmp_path, tls_or_none):
    with (
        running_cluster(tmp_path, tls=tls_or_none) as servers,
        ValkeyStore.open(servers[0].url("part_bytes=65536")) as store,
    ):
        data = bytes(range(256)) * 2048
        assert store.put(b"k", data)
        value = store.select(b"k")
        assert value.read() == data
        for _ in move_slot(servers, "{k}"):
            assert value.read() == data
            assert store.exists([b"k", b"other"]) == [True, False]
        value.close()
        with store.take(b"k") as lease:
            assert lease.read() == data
            lease.acknowledge()
        assert store.put(b"k", data)
        assert store.select(b"k").read() == data


def test_a_cluster_without_redis_py_names_the_extra_that_it_needs(cluster, monkeypatch):
    monkeypatch.delitem(sys.modules, "kvpipe.store.valkey.cluster", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"is a cluster, which needs redis-py: pip install 'kvpipe\[valkey\]'$"):
        ValkeyStore.open(cluster[0].url())


def test_the_servers_of_a_cluster_share_the_values(cluster):
    with ValkeyStore.open(cluster[0].url("prefix=spread")) as store:
        for number in range(60):
            assert store.put(b"%d" % number, b"x")
        for server in cluster:
            with server.client() as client:
                assert 5 < sum(1 for _ in client.scan_iter(match="spread:v:*")) < 40


def test_a_server_of_a_cluster_that_is_killed_is_known(running_cluster, tmp_path, tls_or_none):
    with (
        running_cluster(tmp_path, tls=tls_or_none) as servers,
        ValkeyStore.open(servers[0].url("answer_s=2")) as store,
    ):
        keys = [b"%d" % number for number in range(30)]
        for key in keys:
            assert store.put(key, bytes(1 << 20))
        servers[2].kill()
        num_lost = 0
        for key in keys:
            try:
                with store.select(key) as value:
                    assert value.read() == bytes(1 << 20)
            except PeerLostError:
                num_lost += 1
        assert 0 < num_lost <= 30
        with pytest.raises(PeerLostError):
            store.exists(keys)


def has_subscriber(server):
    with server.client() as client:
        return client.client_list(_type="pubsub") != []


@pytest.mark.slow
def test_a_wait_goes_on_when_the_server_that_it_is_subscribed_at_is_stopped(running_cluster, tmp_path):
    with (
        running_cluster(tmp_path) as servers,
        ThreadPoolExecutor(1) as threads,
        ValkeyStore.open(servers[0].url("answer_s=2")) as store,
    ):
        assert store.select(b"k", timeout=0.1) is None
        subscribed = next(server for server in servers if has_subscriber(server))
        others = [server for server in servers if server is not subscribed]
        with subscribed.client() as client:
            keys = (b"%d" % number for number in itertools.count())
            slots = ((key, client.execute_command("CLUSTER", "KEYSLOT", b"{%s}" % key)) for key in keys)
            key = next(key for key, slot in slots if not has_slot(client, slot))
            waiting = threads.submit(store.take, key, timeout=LONG_S)
            eventually(lambda: client.pubsub_channels("kvpipe:w:*") == [b"kvpipe:w:{%s}" % key])
        subscribed.stop()
        try:
            eventually(lambda: waiting.done() or any(map(has_subscriber, others)))
            assert store.put(key, b"abc")
            with waiting.result(LONG_S) as lease:
                assert lease.read() == b"abc"
                lease.acknowledge()
        finally:
            subscribed.resume()


def test_a_call_for_a_key_without_a_server_counts_once_as_one_that_lost_it(cluster):
    with ValkeyStore.open(cluster[0].url("prefix=unknown")) as store:
        store._context.client.cluster.library.nodes_manager.slots_cache.clear()
        for number, call in enumerate((lambda: store.select(b"k"), lambda: store.exists([b"k"])), 1):
            with pytest.raises(PeerLostError):
                call()
            assert store.stats().num_lost == number


def test_a_script_that_a_redirection_leads_to_runs_once_when_its_answer_is_lost(running_cluster, tmp_path):
    # The time of a script stands still in Valkey 9, and Redis 7.0 has no `os`.
    counting = Script.of("""
redis.call('INCR', KEYS[1])
local function time_s()
  if rawget(_G, 'os') then return rawget(_G, 'os').clock() end
  local now = redis.call('TIME')
  return now[1] + now[2] / 1000000
end
local began_s = time_s()
repeat until time_s() - began_s > 0.45
return 1
""")
    with running_cluster(tmp_path) as servers, ValkeyStore.open(servers[0].url("answer_s=0.3")) as store:
        cluster, key = store._context.client.cluster, b"{k}"
        with pytest.raises(PeerLostError):
            cluster.run_script(counting, 1, [key])
        # Until a second run would have ended, too.
        time.sleep(2)
        assert cluster.run(b"GET", key) == b"1"


def serves_slots(server, other):
    """True if a server of a cluster knows that another one has slots."""
    with server.client() as client:
        slots = client.execute_command("CLUSTER", "SLOTS")
    return other.port in [node[1] for _, _, node, *_ in slots]


@pytest.fixture
def replicated(running, running_cluster, tmp_path):
    """The servers of a cluster, and a replica of the first one."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-config-file", "replica.conf")
    with (
        running_cluster(tmp_path, "--cluster-node-timeout", "1000") as servers,
        running(tmp_path, *options) as replica,
        replica.client() as client,
        servers[0].client() as primary,
    ):
        client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        node = primary.execute_command("CLUSTER", "MYID")
        eventually(lambda: node in client.execute_command("CLUSTER", "NODES"))
        client.execute_command("CLUSTER", "REPLICATE", node)
        eventually(lambda: client.info()["master_link_status"] == "up")
        yield servers, replica


@pytest.mark.slow
def test_a_server_of_a_cluster_that_is_demoted_costs_no_call(replicated):
    servers, replica = replicated
    with replica.client() as client, ValkeyStore.open(servers[1].url("answer_s=2&part_bytes=65536")) as store:
        keys = [b"%d" % number for number in range(30)]
        for key in keys:
            assert store.put(key, bytes(MIB))
        client.execute_command("CLUSTER", "FAILOVER")
        eventually(lambda: all(serves_slots(server, replica) for server in servers))
        assert store.exists(keys) == [True] * len(keys)
        for key in keys:
            with store.take(key) as lease:
                assert lease.read() == bytes(MIB)
                lease.acknowledge()
            assert store.put(key, bytes(MIB))
        assert store.stats().num_lost == 0


@pytest.mark.slow
def test_a_replica_that_takes_the_place_of_a_killed_server_is_used(replicated):
    servers, replica = replicated
    with (
        replica.client() as client,
        servers[0].client() as primary,
        ValkeyStore.open(servers[1].url("answer_s=2")) as store,
    ):
        keys = [b"%d" % number for number in range(30)]
        for key in keys:
            assert store.put(key, bytes(MIB))
        eventually(lambda: primary.info()["master_repl_offset"] == client.info()["slave_repl_offset"])
        servers[0].kill()
        eventually(lambda: all(serves_slots(server, replica) for server in servers[1:]))
        assert store.exists(keys) == [True] * len(keys)
        for key in keys:
            with store.take(key, timeout=LONG_S) as lease:
                assert lease.read() == bytes(MIB)
                lease.acknowledge()
            assert store.put(key, bytes(MIB))
