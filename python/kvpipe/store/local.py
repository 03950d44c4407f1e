"""LocalStore: a store in this process, for tests of programs that use a `KVStore`. Other processes cannot reach it."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from kvpipe import _kvpipe
from kvpipe._redaction import redact
from kvpipe.exceptions import CapacityError, ClosedError, ConfigError
from kvpipe.store.base import LEASE_S, RESERVATION_S, KVStore, Lease, Reservation, StoreStats, Value, ValueInfo
from kvpipe.store.catalogue import Catalogue, Reserved, Stored
from kvpipe.store.checks import check_key, check_out, check_record, check_written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from typing_extensions import Buffer

T = TypeVar("T")

_NEVER = float("inf")


class LocalStore(KVStore):
    """A store whose values are in memory of this process. Values of a full store are evicted, the least used first.

    Args:
        capacity_bytes: Limit for the bytes of all values and reservations; their keys and records do not count.
        reservation_s: Seconds after its last call at which a reservation ends.
    """

    def __init__(self, capacity_bytes: int = 1 << 30, *, reservation_s: float = RESERVATION_S) -> None:
        self._content = _Content(capacity_bytes, reservation_s)

    @classmethod
    def open(cls, url: str, *, token: str | None = None, timeout: float = 10) -> Self:  # noqa: ARG003 - of other stores
        """Makes an empty store.

        Raises:
            ConfigError: The URL is not `local://`.
        """
        if url != "local://":
            message = f"{redact(url)!r}: expected local://"
            raise ConfigError(message)
        return cls()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each key whether it can be selected now."""
        keys = [check_key(key) for key in keys]
        with self._content.locked() as catalogue:
            return catalogue.exists(keys)

    def reserve(
        self, key: bytes, num_bytes: int, *, ttl_s: float | None = None, timeout: float | None = 0
    ) -> Reservation | None:
        """Reserves space for a value; see `KVStore.reserve`."""
        check_key(key)
        with self._content.locked() as catalogue:
            reserved = self._content.wait(lambda: catalogue.reserve(key, num_bytes, ttl_s, time.monotonic()), timeout)
            if reserved is None:
                message = f"no space for {num_bytes} bytes in time: {catalogue.usage()}; retry later"
                raise CapacityError(message)
            return _LocalReservation(self._content, key, reserved) if reserved.ticket else None

    def select(self, key: bytes, *, timeout: float | None = 0) -> Value | None:
        """Returns a value for reading; see `KVStore.select`."""
        check_key(key)
        with self._content.locked() as catalogue:
            found = self._content.find(lambda: catalogue.open(key, _NEVER), timeout)
            return None if found is None else _LocalValue(self._content, key, *found)

    def take(self, key: bytes, *, lease_s: float = LEASE_S, timeout: float | None = 0) -> Lease | None:
        """Returns a value to one caller; see `KVStore.take`."""
        check_key(key)
        with self._content.locked() as catalogue:
            found = self._content.find(lambda: catalogue.lease(key, lease_s, time.monotonic()), timeout)
            return None if found is None else _LocalLease(self._content, key, *found)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes values that are neither open nor leased, and returns how many there were."""
        keys = [check_key(key) for key in keys]
        with self._content.locked() as catalogue:
            return catalogue.delete(keys)

    def list(self, prefix: bytes = b"") -> Iterator[ValueInfo]:
        """Iterates over the values whose keys begin with `prefix`, as they are at the call."""
        with self._content.locked() as catalogue:
            return iter(tuple(catalogue.list(prefix)))

    def stats(self) -> StoreStats:
        """Returns content and counters."""
        with self._content.locked() as catalogue:
            return catalogue.stats(self._content.num_waiting)

    def close(self) -> None:
        """Drops all values, and ends waiting calls with `ClosedError`."""
        self._content.close()


class _Content:
    """A catalogue and the bytes of its values, under one lock. A change wakes all waiting calls, which try again."""

    def __init__(self, capacity_bytes: int, reservation_s: float) -> None:
        self.bytes_of: dict[int, bytes] = {}
        self.num_waiting = 0
        self._catalogue = Catalogue(capacity_bytes, reservation_s, lambda ticket: self.bytes_of.pop(ticket, None))
        self._changed = Condition()
        self._is_closed = False

    @contextmanager
    def locked(self) -> Iterator[Catalogue]:
        """Holds the lock, and wakes waiting calls afterwards.

        Raises:
            ClosedError: The store was closed.
        """
        with self._changed:
            self._expire()
            try:
                yield self._catalogue
            finally:
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self.bytes_of.clear()
            self._changed.notify_all()

    def find(
        self, attempt: Callable[[], tuple[int, Stored] | None], timeout: float | None
    ) -> tuple[int, Stored] | None:
        """Waits for a value, with the lock held."""
        found = self.wait(attempt, timeout)
        if found is None:
            self._catalogue.missed()
        return found

    def wait(self, attempt: Callable[[], T | None], timeout: float | None) -> T | None:
        """Attempts until there is a result or the time is over, with the lock held."""
        deadline_s = _NEVER if timeout is None else time.monotonic() + timeout
        has_waited = False
        while (result := attempt()) is None and (left_s := deadline_s - time.monotonic()) > 0:
            wait_s = min(left_s, max(0.0, self._catalogue.next_end_s() - time.monotonic()))
            if not has_waited:
                self._catalogue.waited()
                has_waited = True
            self.num_waiting += 1
            self._changed.wait(None if wait_s == _NEVER else wait_s)
            self.num_waiting -= 1
            self._expire()
        return result

    def _expire(self) -> None:
        if self._is_closed:
            message = "the store was closed"
            raise ClosedError(message)
        self._catalogue.expire(time.monotonic())


class _LocalReservation(Reservation):
    def __init__(self, content: _Content, key: bytes, reserved: Reserved) -> None:
        self._content, self._ticket, self._written = content, reserved.ticket, bytearray()
        self.key, self.num_bytes = key, reserved.num_bytes

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        with self._content.locked() as catalogue:
            catalogue.extend(self.key, self._ticket, time.monotonic())
            check_written(len(self._written) + view.nbytes, self.num_bytes)
            self._written += view

    def commit(self, record: bytes = b"") -> None:
        with self._content.locked() as catalogue:
            self._content.bytes_of[self._ticket] = bytes(self._written)
            try:
                record = check_record(record)
                catalogue.commit(self.key, self._ticket, len(self._written), record, time.monotonic())
            except Exception:
                catalogue.abort(self.key, self._ticket)
                self._content.bytes_of.pop(self._ticket, None)
                raise

    def abort(self) -> None:
        with suppress(ClosedError), self._content.locked() as catalogue:
            catalogue.abort(self.key, self._ticket)


class _LocalValue(Value):
    def __init__(self, content: _Content, key: bytes, reader: int, stored: Stored) -> None:
        self._content, self._reader, self._data = content, reader, content.bytes_of[stored.ticket]
        self.key, self.num_bytes, self.record = key, stored.num_bytes, stored.record

    def read_into(self, out: Buffer) -> None:
        check_out(out, self.num_bytes)[:] = self._data

    def read_parts(self, parts: Sequence[Buffer]) -> int | None:
        rest = memoryview(self._data)
        for view in [check_out(part, memoryview(part).nbytes) for part in parts]:
            if view.nbytes > rest.nbytes:
                return None
            view[:], rest = rest[: view.nbytes], rest[view.nbytes :]
        return None if rest else _kvpipe.checksums(self._data, [0], self.num_bytes)[0]

    def close(self) -> None:
        with suppress(ClosedError), self._content.locked() as catalogue:
            catalogue.close(self.key, self._reader)


class _LocalLease(Lease):
    def __init__(self, content: _Content, key: bytes, lease: int, stored: Stored) -> None:
        self._content, self._lease = content, lease
        self.key, self.num_bytes, self.record = key, stored.num_bytes, stored.record

    def read_into(self, out: Buffer) -> None:
        view = check_out(out, self.num_bytes)
        with self._content.locked() as catalogue:
            view[:] = self._content.bytes_of[catalogue.leased(self.key, self._lease).ticket]

    def renew(self, lease_s: float = LEASE_S) -> None:
        with self._content.locked() as catalogue:
            catalogue.renew(self.key, self._lease, lease_s, time.monotonic())

    def acknowledge(self) -> None:
        with self._content.locked() as catalogue:
            catalogue.acknowledge(self.key, self._lease)

    def release(self) -> None:
        with suppress(ClosedError), self._content.locked() as catalogue:
            catalogue.release(self.key, self._lease)
