"""ValkeyStore against real servers: the contract, alone and in a cluster."""

from __future__ import annotations

import contextlib

import pytest

from tests.store.contract import StoreContract
from tests.store.valkey_servers import needs_server, running, running_cluster

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
