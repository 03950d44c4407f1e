"""ValkeyStore against real servers: the contract, alone and in a cluster."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from kvpipe.exceptions import PeerLostError
from tests.store.contract import StoreContract
from tests.store.valkey_servers import needs_server, redis, running, running_cluster

from kvpipe.store.valkey import ValkeyStore  # isort: skip - after the module that skips where redis-py is missing

pytestmark = needs_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


class TestOneServer(StoreContract):
    reservation_s = 1.0

    @pytest.fixture
    def connect(self, server):
        with contextlib.ExitStack() as stores:
            yield lambda: stores.enter_context(ValkeyStore.open(server.url("reservation_s=1")))


class TestCluster(StoreContract):
    reservation_s = 1.0

    @pytest.fixture
    def connect(self, cluster):
        with contextlib.ExitStack() as stores:
            yield lambda: stores.enter_context(ValkeyStore.open(cluster[1].url("reservation_s=1")))


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
def test_values_are_read_and_written_while_their_slot_moves_to_another_server(tmp_path):
    with running_cluster(tmp_path) as servers, ValkeyStore.open(servers[0].url("part_bytes=65536")) as store:
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


def test_the_servers_of_a_cluster_share_the_values(cluster):
    with ValkeyStore.open(cluster[0].url("prefix=spread")) as store:
        for number in range(60):
            assert store.put(b"%d" % number, b"x")
        for server in cluster:
            with server.client() as client:
                assert 5 < sum(1 for _ in client.scan_iter(match="spread:v:*")) < 40


def test_a_server_of_a_cluster_that_is_killed_is_known(tmp_path):
    with running_cluster(tmp_path) as servers, ValkeyStore.open(servers[0].url("answer_s=1")) as store:
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
