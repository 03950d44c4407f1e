"""RemoteStore and StoreServer: the contract of all stores."""

import contextlib

import pytest

from kvpipe.store.remote import RemoteStore
from kvpipe.store.server import StoreServer
from tests.store.contract import StoreContract


class TestContract(StoreContract):
    @pytest.fixture
    def connect(self):
        with StoreServer(reservation_s=self.reservation_s, token="t") as server, contextlib.ExitStack() as stores:
            yield lambda: stores.enter_context(RemoteStore.open(server.url, token="t"))
