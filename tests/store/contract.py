"""The tests that every `KVStore` passes.

::

    from tests.store.contract import StoreContract

    class TestMyStore(StoreContract):
        reservation_s = 1.0  # as the store under test is configured

        @pytest.fixture
        def connect(self, my_server):
            with contextlib.ExitStack() as stores:
                yield lambda: stores.enter_context(MyStore.open(my_server.url))
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvpipe import _kvpipe
from kvpipe.exceptions import ClosedError, ConfigError, TransferTimeoutError
from kvpipe.store.base import MAX_KEY_BYTES, MAX_RECORD_BYTES, KVStore, Value

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

SIZES = (0, 1, 1000, (1 << 20) + 1, 9 << 20)
# A wait that never comes this far has hung.
LONG_S = 30.0
# Time in which something does not happen that must not.
SHORT_S = 0.2


class StoreContract:
    """Guarantees of a store to its callers. A subclass provides `connect`.

    Attributes:
        reservation_s: Seconds after which the store under test ends a reservation that is not used.
    """

    reservation_s: float = 1.0

    @pytest.fixture
    def connect(self) -> Callable[[], KVStore]:
        """Returns a function that opens the store under test once more, as another process would."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, connect: Callable[[], KVStore]) -> KVStore:
        """Returns a client of the store under test."""
        return connect()

    @pytest.fixture
    def other(self, connect: Callable[[], KVStore]) -> KVStore:
        """Returns another client of the same store."""
        return connect()

    @pytest.fixture
    def prefix(self) -> bytes:
        """Returns the beginning of all keys of a test: a server may serve many tests."""
        return secrets.token_bytes(16)

    @pytest.fixture
    def key(self, prefix: bytes) -> bytes:
        """Returns a key that no other test uses."""
        return prefix + b"key"

    # --- two phases

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_a_value_is_read_as_it_was_written(
        self, store: KVStore, other: KVStore, key: bytes, num_bytes: int
    ) -> None:
        data = secrets.token_bytes(num_bytes)
        assert store.put(key, data, b"record")
        with _found(other.select(key)) as value:
            assert (value.key, value.num_bytes, value.record) == (key, num_bytes, b"record")
            assert value.read() == data
            assert value.read() == data

    def test_a_value_is_written_in_parts_which_may_change_once_they_are_written(
        self, store: KVStore, key: bytes
    ) -> None:
        part = bytearray(b"ab" * 50_000)
        with _reserved(store, key, 200_000) as reservation:
            reservation.write(part)
            part[:] = b"cd" * 50_000
            reservation.write(part)
            part[:] = b"ef" * 50_000
            reservation.commit()
        with _found(store.select(key)) as value:
            assert value.read() == b"ab" * 50_000 + b"cd" * 50_000
            assert value.record == b""

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_a_value_is_read_in_parts_with_its_checksum_or_not_so(
        self, store: KVStore, other: KVStore, key: bytes, num_bytes: int
    ) -> None:
        data = secrets.token_bytes(num_bytes)
        assert store.put(key, data, b"record")
        parts = [np.zeros(size, np.uint8) for size in (num_bytes // 3, num_bytes - num_bytes // 3)]
        with _found(other.select(key)) as value:
            checksum = value.read_parts(parts)
            assert checksum is None or b"".join(part.tobytes() for part in parts) == data
            assert checksum in (None, _kvpipe.checksums(data, [0], num_bytes)[0])
            assert value.read_parts([*parts, np.zeros(1, np.uint8)]) is None
            assert (
                value.read_parts([np.zeros(num_bytes - 1, np.uint8)] if num_bytes else [np.zeros(1, np.uint8)]) is None
            )
            assert value.read() == data
        with _found(other.take(key)) as lease:
            assert lease.read_parts(parts) is None
            assert lease.read() == data

    def test_hidden_states_travel_in_an_entry_beside_its_kv(self, store: KVStore, other: KVStore, key: bytes) -> None:
        draw = np.random.default_rng(5)
        tensors = {"kv": draw.random((2, 3, 4, 8), np.float32), "hidden": draw.random((5, 16)).astype(np.float16)}
        with _reserved(store, key, sum(tensor.nbytes for tensor in tensors.values())) as reservation:
            for tensor in tensors.values():
                reservation.write(tensor)
            reservation.commit(json.dumps([(name, str(it.dtype), it.shape) for name, it in tensors.items()]).encode())
        with _found(other.take(key)) as lease:
            found, at, data = {}, 0, lease.read()
            for name, dtype, shape in json.loads(lease.record):
                found[name] = np.frombuffer(data, dtype, int(np.prod(shape)), at).reshape(shape)
                at += found[name].nbytes
            lease.acknowledge()
        assert list(found) == list(tensors)
        assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
        assert all(found[name].dtype == tensors[name].dtype for name in tensors)

    def test_nothing_is_visible_before_the_commit(self, store: KVStore, other: KVStore, key: bytes) -> None:
        with _reserved(store, key, 3) as reservation:
            for part in (b"ab", b"c"):
                assert other.exists([key]) == [False]
                assert other.select(key) is None
                assert other.take(key) is None
                assert other.delete([key]) == 0
                assert list(other.list(key)) == []
                reservation.write(part)
            reservation.commit()
            assert other.exists([key]) == [True]

    def test_an_aborted_reservation_leaves_nothing_and_its_key_can_be_reserved_again(
        self, store: KVStore, other: KVStore, key: bytes
    ) -> None:
        reservation = _reserved(store, key, 3)
        reservation.write(b"abc")
        reservation.abort()
        reservation.abort()
        assert store.exists([key]) == [False]
        assert other.put(key, b"def")
        with _found(store.select(key)) as value:
            assert value.read() == b"def"

    def test_a_block_that_fails_aborts_its_reservation(self, store: KVStore, key: bytes) -> None:
        with pytest.raises(ZeroDivisionError), _reserved(store, key, 3) as reservation:
            reservation.write(b"a" * (1 // 0))
        assert store.exists([key]) == [False]
        assert store.put(key, b"x")

    def test_a_commit_of_fewer_bytes_is_refused_and_aborts(self, store: KVStore, key: bytes) -> None:
        reservation = _reserved(store, key, 3)
        reservation.write(b"ab")
        with pytest.raises(ConfigError, match=r"2.*3"):
            reservation.commit()
        assert store.exists([key]) == [False]
        assert store.put(key, b"x")

    def test_more_bytes_than_were_reserved_are_refused(self, store: KVStore, key: bytes) -> None:
        with _reserved(store, key, 3) as reservation:
            reservation.write(b"ab")
            with pytest.raises(ConfigError, match="3"):
                reservation.write(b"cd")
            reservation.write(b"c")
            reservation.commit()
        with _found(store.select(key)) as value:
            assert value.read() == b"abc"

    def test_a_key_that_is_present_or_reserved_is_not_reserved_again(
        self, store: KVStore, other: KVStore, key: bytes
    ) -> None:
        with _reserved(store, key, 3) as reservation:
            assert other.reserve(key, 3) is None
            assert not other.put(key, b"def")
            reservation.write(b"abc")
            reservation.commit()
        assert other.reserve(key, 3) is None
        assert not other.put(key, b"def")
        with _found(other.select(key)) as value:
            assert value.read() == b"abc"

    def test_a_reservation_that_has_ended_by_time_cannot_commit_over_a_later_one(
        self, store: KVStore, other: KVStore, key: bytes
    ) -> None:
        late = _reserved(store, key, 3)
        late.write(b"old")
        time.sleep(self.reservation_s * 1.5)
        later = _reserved(other, key, 3)
        with pytest.raises(TransferTimeoutError):
            late.commit()
        with pytest.raises(TransferTimeoutError):
            late.write(b"")
        late.abort()
        later.write(b"new")
        later.commit()
        with _found(store.select(key)) as value:
            assert value.read() == b"new"

    # --- questions

    def test_each_key_of_a_question_is_answered(self, store: KVStore, other: KVStore, prefix: bytes) -> None:
        keys = [prefix + bytes([number]) for number in range(6)]
        for number in (0, 1, 3, 5):
            assert store.put(keys[number], b"x")
        assert other.exists(keys) == [True, True, False, True, False, True]
        match = other.lookup(keys)
        assert match.is_present == (True, True, False, True, False, True)
        assert match.num_matched == 2
        assert other.lookup(keys[:2]).num_matched == 2
        assert other.exists([]) == []
        assert other.lookup([]).num_matched == 0

    def test_a_thousand_keys_are_asked_about_at_once(self, store: KVStore, prefix: bytes) -> None:
        keys = [prefix + number.to_bytes(4, "big") for number in range(1000)]
        for key in keys[:300]:
            assert store.put(key, b"x")
        assert store.exists(keys) == [True] * 300 + [False] * 700

    def test_values_are_listed_by_the_prefix_of_their_keys(self, store: KVStore, other: KVStore, prefix: bytes) -> None:
        for name, data in ((b"a1", b"x"), (b"a2", b"xy"), (b"b", b"")):
            assert store.put(prefix + name, data)
        assert {(it.key, it.num_bytes) for it in other.list(prefix + b"a")} == {
            (prefix + b"a1", 1),
            (prefix + b"a2", 2),
        }
        assert {it.key for it in other.list(prefix)} == {prefix + b"a1", prefix + b"a2", prefix + b"b"}
        assert all(not it.is_leased for it in other.list(prefix))
        with _found(store.take(prefix + b"b")):
            assert [it.is_leased for it in other.list(prefix + b"b")] == [True]

    def test_deleted_values_are_gone_and_counted(self, store: KVStore, other: KVStore, prefix: bytes) -> None:
        for name in (b"a", b"b"):
            assert store.put(prefix + name, b"x")
        assert other.delete([prefix + b"a", prefix + b"c", prefix + b"a"]) == 1
        assert store.exists([prefix + b"a", prefix + b"b"]) == [False, True]
        assert store.put(prefix + b"a", b"y")

    def test_a_value_with_a_ttl_is_deleted_when_it_has_passed(self, store: KVStore, key: bytes) -> None:
        assert store.put(key, b"x", ttl_s=1)
        assert store.exists([key]) == [True]
        time.sleep(1.5)
        assert store.exists([key]) == [False]
        assert store.select(key) is None
        assert store.put(key, b"y")

    # --- select

    def test_a_select_without_a_value_returns_at_its_timeout(self, store: KVStore, key: bytes) -> None:
        began_s = time.monotonic()
        assert store.select(key) is None
        assert store.select(key, timeout=SHORT_S) is None
        assert store.take(key, timeout=SHORT_S) is None
        assert time.monotonic() - began_s >= 2 * SHORT_S

    def test_waiting_selects_all_get_a_value_when_it_is_committed(
        self, store: KVStore, other: KVStore, key: bytes
    ) -> None:
        def select(number: int) -> bytes:
            with _found((store, other)[number % 2].select(key, timeout=LONG_S)) as value:
                return bytes(value.read())

        with ThreadPoolExecutor(8) as threads:
            waiting = [threads.submit(select, number) for number in range(8)]
            _assert_all_wait(waiting)
            assert store.put(key, b"abc")
            assert [each.result(LONG_S) for each in waiting] == [b"abc"] * 8

    def test_many_keys_are_waited_for_at_once_and_each_gets_its_own(
        self, connect: Callable[[], KVStore], prefix: bytes
    ) -> None:
        keys = [prefix + number.to_bytes(4, "big") for number in range(100)]
        store, other = connect(), connect()

        def select(key: bytes) -> bytes:
            with _found(store.select(key, timeout=LONG_S)) as value:
                return bytes(value.read())

        with ThreadPoolExecutor(len(keys)) as threads:
            waiting = [threads.submit(select, key) for key in keys]
            _assert_all_wait(waiting)
            for key in reversed(keys):
                assert other.put(key, key)
            assert [each.result(LONG_S) for each in waiting] == keys

    # --- take

    def test_a_value_that_is_taken_is_hidden_and_deleted_when_it_is_acknowledged(
        self, store: KVStore, other: KVStore, key: bytes
    ) -> None:
        assert store.put(key, b"abc", b"record")
        with _found(other.take(key)) as lease:
            assert (lease.key, lease.num_bytes, lease.record) == (key, 3, b"record")
            assert store.exists([key]) == [False]
            assert store.select(key) is None
            assert store.take(key) is None
            assert store.delete([key]) == 0
            assert store.reserve(key, 3) is None
            assert lease.read() == b"abc"
            lease.acknowledge()
        assert store.exists([key]) == [False]
        assert store.put(key, b"new")

    def test_a_lease_that_is_released_or_left_returns_its_value(
        self, store: KVStore, other: KVStore, key: bytes
    ) -> None:
        assert store.put(key, b"abc")
        for _ in range(2):
            with _found(other.take(key)) as lease:
                assert lease.read() == b"abc"
            lease.release()
            assert store.exists([key]) == [True]
        with pytest.raises(ZeroDivisionError), _found(store.take(key)):
            raise ZeroDivisionError
        with _found(other.select(key)) as value:
            assert value.read() == b"abc"

    def test_a_lease_that_ends_by_time_returns_its_value_to_who_waits_and_cannot_be_acknowledged(
        self, store: KVStore, other: KVStore, key: bytes
    ) -> None:
        assert store.put(key, b"abc")
        late = _found(store.take(key, lease_s=0.5))
        with _found(other.take(key, timeout=LONG_S)) as lease:
            with pytest.raises(TransferTimeoutError):
                late.acknowledge()
            with pytest.raises(TransferTimeoutError):
                late.renew()
            with pytest.raises(TransferTimeoutError):
                late.read()
            late.release()
            assert store.exists([key]) == [False]
            assert lease.read() == b"abc"
            lease.acknowledge()
        assert store.exists([key]) == [False]

    def test_a_lease_that_is_renewed_goes_on(self, store: KVStore, other: KVStore, key: bytes) -> None:
        assert store.put(key, b"abc")
        with _found(store.take(key, lease_s=2)) as lease:
            for _ in range(3):
                time.sleep(0.8)
                lease.renew(2)
            assert other.take(key) is None
            assert lease.read() == b"abc"
            lease.acknowledge()

    def test_each_value_is_taken_once_however_many_want_it(self, connect: Callable[[], KVStore], prefix: bytes) -> None:
        stores = [connect() for _ in range(4)]
        keys = [prefix + bytes([number]) for number in range(20)]

        def take(number: int) -> list[bytes]:
            taken = []
            for key in keys[number % 7 :] + keys[: number % 7]:
                lease = stores[number % len(stores)].take(key)
                if lease is not None:
                    with lease:
                        taken.append(bytes(lease.read()))
                        lease.acknowledge()
            return taken

        for key in keys:
            assert stores[0].put(key, key)
        with ThreadPoolExecutor(12) as threads:
            taken = [key for found in threads.map(take, range(12)) for key in found]
        assert sorted(taken) == keys

    def test_one_of_those_that_wait_takes_a_value_when_it_is_committed(
        self, store: KVStore, other: KVStore, key: bytes
    ) -> None:
        def take(number: int) -> bytes | None:
            lease = (store, other)[number % 2].take(key, timeout=1.5)
            if lease is None:
                return None
            with lease:
                data = bytes(lease.read())
                lease.acknowledge()
                return data

        with ThreadPoolExecutor(6) as threads:
            waiting = [threads.submit(take, number) for number in range(6)]
            _assert_all_wait(waiting)
            assert store.put(key, b"abc")
            results = [each.result(LONG_S) for each in waiting]
        assert (results.count(b"abc"), results.count(None)) == (1, 5)

    def test_a_value_is_not_taken_while_others_have_it_open(self, store: KVStore, other: KVStore, key: bytes) -> None:
        assert store.put(key, b"abc")
        with _found(store.select(key)) as value:
            assert other.take(key) is None
            assert other.delete([key]) == 0
            with _found(other.select(key)) as second:
                assert second.read() == b"abc"
            assert value.read() == b"abc"
        with ThreadPoolExecutor(1) as threads:
            value = _found(store.select(key))
            waiting = threads.submit(other.take, key, timeout=LONG_S)
            _assert_all_wait([waiting])
            value.close()
            value.close()
            with _found(waiting.result(LONG_S)) as lease:
                lease.acknowledge()

    # --- counters

    def test_what_happened_is_counted(self, store: KVStore, other: KVStore, key: bytes) -> None:
        before = store.stats()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store.take, key, lease_s=2, timeout=LONG_S)
            while store.stats().num_waits == before.num_waits:
                assert not waiting.done()
                time.sleep(0.01)
            assert store.put(key, b"abc")
            late = _found(waiting.result(LONG_S))
        with _found(store.select(key, timeout=LONG_S)):
            pass
        for call in (late.acknowledge, late.renew):
            with pytest.raises(TransferTimeoutError):
                call()
        # A release is not refused.
        late.release()
        assert store.select(key + b"missing") is None
        after = store.stats()
        names = ("num_committed", "committed_bytes", "num_hits", "hit_bytes", "num_misses", "num_waits", "num_fenced")
        changes = {name: getattr(after, name) - getattr(before, name) for name in names}
        assert changes == dict(zip(names, (1, 3, 2, 6, 1, 2, 2), strict=True))

    # --- bad arguments, and the end

    @pytest.mark.parametrize("key", [b"", b"x" * (MAX_KEY_BYTES + 1), "text"])
    def test_a_key_that_is_none_is_refused(self, store: KVStore, key: bytes) -> None:
        for call in (
            lambda: store.exists([key]),
            lambda: store.reserve(key, 1),
            lambda: store.select(key),
            lambda: store.take(key),
            lambda: store.delete([key]),
        ):
            with pytest.raises(ConfigError, match="key"):
                call()

    def test_the_longest_key_and_record_are_kept(self, store: KVStore, other: KVStore, prefix: bytes) -> None:
        key, record = prefix.ljust(MAX_KEY_BYTES, b"\0"), secrets.token_bytes(MAX_RECORD_BYTES)
        assert store.put(key, b"x", record)
        with _found(other.select(key)) as value:
            assert value.record == record
        assert [it.key for it in other.list(prefix)] == [key]

    def test_a_record_that_is_too_long_is_refused_and_aborts(self, store: KVStore, key: bytes) -> None:
        with pytest.raises(ConfigError, match="record"):
            store.put(key, b"x", b"r" * (MAX_RECORD_BYTES + 1))
        assert store.put(key, b"y")

    @pytest.mark.parametrize("num_bytes", [-1, 1.5, None])
    def test_a_size_that_is_none_is_refused(self, store: KVStore, key: bytes, num_bytes: int) -> None:
        with pytest.raises(ConfigError, match="num_bytes"):
            store.reserve(key, num_bytes)

    @pytest.mark.parametrize("out", [bytearray(2), bytearray(4), bytes(3)])
    def test_a_destination_of_another_size_or_read_only_is_refused(
        self, store: KVStore, key: bytes, out: bytearray
    ) -> None:
        assert store.put(key, b"abc")
        with _found(store.select(key)) as value:
            with pytest.raises(ConfigError, match="3"):
                value.read_into(out)
            assert value.read() == b"abc"

    def test_closing_a_store_ends_the_calls_that_wait(self, store: KVStore, prefix: bytes) -> None:
        with ThreadPoolExecutor(2) as threads:
            waiting: list[Future[Value | None]] = [
                threads.submit(store.select, prefix + b"a", timeout=None),
                threads.submit(store.take, prefix + b"b", timeout=None),
            ]
            _assert_all_wait(waiting)
            store.close()
            for each in waiting:
                with pytest.raises(ClosedError):
                    each.result(LONG_S)
        store.close()
        for call in (lambda: store.exists([prefix]), lambda: store.put(prefix, b"x"), lambda: store.select(prefix)):
            with pytest.raises(ClosedError):
                call()

    def test_many_threads_put_and_read_at_once(self, connect: Callable[[], KVStore], prefix: bytes) -> None:
        stores = [connect() for _ in range(4)]

        def work(number: int) -> None:
            store = stores[number % len(stores)]
            for turn in range(10):
                key = prefix + bytes([number, turn])
                data = key * (1 + 1000 * turn)
                assert _put(store, key, data)
                with _found(stores[turn % len(stores)].select(key)) as value:
                    assert value.read() == data

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(work, range(16)))
        assert len(list(stores[0].list(prefix))) == 160

    def test_no_thread_is_left_when_all_stores_are_closed(self, connect: Callable[[], KVStore], key: bytes) -> None:
        before = set(threading.enumerate())
        store = connect()
        assert store.select(key, timeout=SHORT_S) is None
        store.close()
        ended = time.monotonic() + LONG_S
        while (left := set(threading.enumerate()) - before) and time.monotonic() < ended:
            left.pop().join(SHORT_S)
        assert not left


def _put(store: KVStore, key: bytes, data: bytes) -> bool:
    """Puts, again where the reservation has ended: it is a second long here, and threads may starve for as long."""
    for _ in range(10):
        with suppress(TransferTimeoutError):
            return store.put(key, data)
    return False


def _found(value):
    assert value is not None
    return value


def _reserved(store: KVStore, key: bytes, num_bytes: int):
    return _found(store.reserve(key, num_bytes))


def eventually(is_so: Callable[[], bool]) -> None:
    """Polls a condition without a notification."""
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s, "not seen in time"
        time.sleep(0.01)


def _assert_all_wait(calls: list[Future[object]]) -> None:
    """Gives the calls time to begin waiting; none ends meanwhile."""
    time.sleep(SHORT_S)
    assert not any(each.done() for each in calls)
