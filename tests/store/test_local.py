"""LocalStore: the contract of all stores, and what it counts."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpipe import CapacityError, ClosedError, ConfigError
from kvpipe.store import LocalStore
from tests.store.contract import StoreContract, eventually

# Of each value, beside its bytes.
BESIDES = 512 + len(b"a")


class TestContract(StoreContract):
    @pytest.fixture
    def connect(self):
        with LocalStore(reservation_s=self.reservation_s) as store:
            yield lambda: store


def test_a_full_store_evicts_the_values_that_were_used_least_recently():
    with LocalStore(3 * (1000 + BESIDES)) as store:
        for name in (b"a", b"b", b"c"):
            assert store.put(name, bytes(1000))
        store.select(b"a").close()
        assert store.put(b"d", bytes(1000))
        assert store.exists([b"a", b"b", b"c", b"d"]) == [True, False, True, True]
        stats = store.stats()
        assert (stats.num_evicted, stats.num_bytes, stats.num_values) == (1, 3 * (1000 + BESIDES), 3)


@pytest.mark.parametrize("call", [LocalStore.select, LocalStore.take])
def test_a_store_whose_values_are_in_use_refuses_more(call):
    with LocalStore(1000 + BESIDES) as store:
        assert store.put(b"a", bytes(1000))
        with call(store, b"a"), pytest.raises(CapacityError, match="values hold 1513"):
            store.reserve(b"b", 1)


def test_a_closed_store_ends_who_waits():
    with LocalStore() as store, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.select, b"a", timeout=None)
        eventually(lambda: store.stats().num_waiting == 1)
        store.close()
        with pytest.raises(ClosedError):
            waiting.result(20)


def test_the_url_of_another_store_is_refused():
    with pytest.raises(ConfigError, match="expected local://"):
        LocalStore.open("kvpipe://127.0.0.1:1")


def test_a_value_that_is_larger_than_the_store_is_refused():
    with LocalStore(1000) as store, pytest.raises(ConfigError, match="capacity is 1000"):
        store.reserve(b"a", 1000, timeout=None)


def test_another_store_has_other_values():
    with LocalStore() as store, LocalStore() as other:
        assert store.put(b"a", b"1")
        assert other.exists([b"a"]) == [False]
