"""LocalStore: the contract of all stores, and its own limits."""

import threading

import pytest

from kvpipe import CapacityError, ConfigError
from kvpipe.store import LocalStore
from tests.store.contract import StoreContract


class TestContract(StoreContract):
    @pytest.fixture
    def connect(self):
        with LocalStore(reservation_s=self.reservation_s) as store:
            yield lambda: store


def test_a_full_store_evicts_the_values_that_were_used_least_recently():
    store = LocalStore(100)
    for name in (b"a", b"b", b"c"):
        assert store.put(name, bytes(30))
    store.select(b"a").close()
    assert store.exists([b"b"]) == [True]
    assert store.put(b"d", bytes(40))
    assert store.exists([b"a", b"b", b"c", b"d"]) == [True, False, True, True]
    stats = store.stats()
    assert (stats.num_evicted, stats.num_bytes, stats.num_values) == (1, 100, 3)


def test_open_and_leased_values_are_not_evicted():
    store = LocalStore(100)
    for name in (b"a", b"b"):
        assert store.put(name, bytes(40))
    with store.select(b"a"), store.take(b"b"):
        with pytest.raises(CapacityError, match=r"80 of 100"):
            store.reserve(b"c", 30)
        with pytest.raises(CapacityError):
            store.reserve(b"c", 30, timeout=0.1)
    assert store.put(b"c", bytes(30))


def test_a_reservation_waits_for_space():
    store = LocalStore(100)
    first = store.reserve(b"a", 90)
    threading.Timer(0.1, first.abort).start()
    assert store.reserve(b"b", 90, timeout=10) is not None


def test_a_value_that_is_larger_than_the_store_is_refused():
    with pytest.raises(ConfigError, match=r"101.*capacity is 100"):
        LocalStore(100).reserve(b"a", 101, timeout=None)
