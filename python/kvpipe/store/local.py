"""LocalStore: a store in this process, for tests of programs that use a `KVStore`. Other processes cannot reach it."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from kvpipe.exceptions import CapacityError, ClosedError, ConfigError, TransferTimeoutError
from kvpipe.store.base import (
    LEASE_S,
    RESERVATION_S,
    KVStore,
    Lease,
    Reservation,
    StoreStats,
    Value,
    ValueInfo,
    check_key,
    check_out,
    check_record,
    check_size,
)

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
            message = f"{url!r}: expected local://"
            raise ConfigError(message)
        return cls()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each key whether it can be selected now."""
        with self._content.locked() as content:
            return [content.visible(check_key(key)) is not None for key in keys]

    def reserve(
        self, key: bytes, num_bytes: int, *, ttl_s: float | None = None, timeout: float | None = 0
    ) -> Reservation | None:
        """Reserves space for a value; see `KVStore.reserve`."""
        check_key(key)
        with self._content.locked() as content:
            check_size(num_bytes, content.capacity_bytes)
            reserved = content.wait(lambda: content.reserve(key, num_bytes), timeout)
            if reserved is None:
                message = (
                    f"no space for {num_bytes} bytes in time: {content.num_bytes} of {content.capacity_bytes} are "
                    "reserved or in use; retry later, or use a larger store"
                )
                raise CapacityError(message)
            return None if reserved.is_refused else _LocalReservation(content, key, reserved, ttl_s)

    def select(self, key: bytes, *, timeout: float | None = 0) -> Value | None:
        """Returns a value for reading; see `KVStore.select`."""
        check_key(key)
        with self._content.locked() as content:
            stored = content.find(key, lambda: content.visible(key), timeout)
            if stored is None:
                return None
            stored.num_open += 1
            return _LocalValue(content, key, stored)

    def take(self, key: bytes, *, lease_s: float = LEASE_S, timeout: float | None = 0) -> Lease | None:
        """Returns a value to one caller; see `KVStore.take`."""
        check_key(key)
        with self._content.locked() as content:
            stored = content.find(key, lambda: content.idle(key), timeout)
            if stored is None:
                return None
            stored.lease, stored.lease_ends_at_s = next(content.leases), time.monotonic() + lease_s
            return _LocalLease(content, key, stored)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes values that nobody has open or leased, and returns how many there were."""
        with self._content.locked() as content:
            found = {key for key in map(check_key, keys) if content.idle(key) is not None}
            for key in found:
                del content.stored[key]
            return len(found)

    def list(self, prefix: bytes = b"") -> Iterator[ValueInfo]:
        """Iterates over the values whose keys begin with `prefix`, as they are at the call."""
        with self._content.locked() as content:
            found = [
                ValueInfo(key, len(stored.data), bool(stored.lease))
                for key, stored in content.stored.items()
                if key.startswith(prefix)
            ]
        return iter(found)

    def stats(self) -> StoreStats:
        """Returns content and counters."""
        with self._content.locked() as content:
            return StoreStats(
                num_values=len(content.stored),
                num_bytes=content.num_bytes,
                capacity_bytes=content.capacity_bytes,
                num_reserved=len(content.reserved),
                num_leased=sum(bool(stored.lease) for stored in content.stored.values()),
                num_waiting=content.num_waiting,
                num_committed=content.num_committed,
                num_hits=content.num_hits,
                num_misses=content.num_misses,
                num_evicted=content.num_evicted,
                num_expired=content.num_expired,
                num_corrupt=0,
            )

    def close(self) -> None:
        """Drops all values, and ends waiting calls with `ClosedError`."""
        self._content.close()


@dataclass(eq=False)
class _Stored:
    """A committed value."""

    data: bytes
    record: bytes
    ends_at_s: float
    num_open: int = 0
    lease: int = 0
    lease_ends_at_s: float = _NEVER

    @property
    def is_idle(self) -> bool:
        return not self.num_open and not self.lease


@dataclass(eq=False)
class _Reserved:
    """A reservation under way, or the answer that there is nothing to be done."""

    num_bytes: int = 0
    ends_at_s: float = _NEVER
    parts: list[bytes] = field(default_factory=list)
    is_refused: bool = False


class _Content:
    """What a store holds, under one lock. Every change wakes all waiting calls, which try again."""

    def __init__(self, capacity_bytes: int, reservation_s: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.reservation_s = reservation_s
        self.stored: OrderedDict[bytes, _Stored] = OrderedDict()  # the least used first
        self.reserved: dict[bytes, _Reserved] = {}
        self.leases = itertools.count(1)
        self.num_waiting = self.num_committed = self.num_hits = self.num_misses = 0
        self.num_evicted = self.num_expired = 0
        self._changed = Condition()
        self._is_closed = False

    @contextmanager
    def locked(self) -> Iterator[_Content]:
        """Holds the lock, and wakes waiting calls afterwards.

        Raises:
            ClosedError: The store was closed.
        """
        with self._changed:
            self._expire()
            try:
                yield self
            finally:
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self.stored.clear()
            self.reserved.clear()
            self._changed.notify_all()

    # --- the lock is held

    @property
    def num_bytes(self) -> int:
        stored = sum(len(value.data) for value in self.stored.values())
        return stored + sum(reserved.num_bytes for reserved in self.reserved.values())

    def visible(self, key: bytes) -> _Stored | None:
        stored = self.stored.get(key)
        return None if stored is None or stored.lease else stored

    def idle(self, key: bytes) -> _Stored | None:
        stored = self.stored.get(key)
        return stored if stored is not None and stored.is_idle else None

    def reserve(self, key: bytes, num_bytes: int) -> _Reserved | None:
        """Reserves space, of evicted values if need be; `None` while there is none."""
        if key in self.reserved or key in self.stored:
            return _Reserved(is_refused=True)
        for idle in [key for key, stored in self.stored.items() if stored.is_idle]:
            if self.num_bytes + num_bytes <= self.capacity_bytes:
                break
            del self.stored[idle]
            self.num_evicted += 1
        if self.num_bytes + num_bytes > self.capacity_bytes:
            return None
        self.reserved[key] = _Reserved(num_bytes, time.monotonic() + self.reservation_s)
        return self.reserved[key]

    def find(self, key: bytes, attempt: Callable[[], _Stored | None], timeout: float | None) -> _Stored | None:
        """Waits for a value, which is then the most used one."""
        found = self.wait(attempt, timeout)
        if found is None:
            self.num_misses += 1
        else:
            self.num_hits += 1
            self.stored.move_to_end(key)
        return found

    def wait(self, attempt: Callable[[], T | None], timeout: float | None) -> T | None:
        """Attempts until there is a result or the time is over."""
        deadline_s = _NEVER if timeout is None else time.monotonic() + timeout
        while (result := attempt()) is None and (left_s := deadline_s - time.monotonic()) > 0:
            wait_s = min(left_s, max(0.0, self._next_end_s() - time.monotonic()))
            self.num_waiting += 1
            self._changed.wait(None if wait_s == _NEVER else wait_s)
            self.num_waiting -= 1
            self._expire()
        return result

    def _expire(self) -> None:
        if self._is_closed:
            message = "the store was closed"
            raise ClosedError(message)
        now_s = time.monotonic()
        for stored in self.stored.values():
            if stored.lease and stored.lease_ends_at_s <= now_s:
                stored.lease = 0
                self.num_expired += 1
        for key in [key for key, stored in self.stored.items() if stored.ends_at_s <= now_s and stored.is_idle]:
            del self.stored[key]
            self.num_expired += 1
        for key in [key for key, reserved in self.reserved.items() if reserved.ends_at_s <= now_s]:
            del self.reserved[key]
            self.num_expired += 1

    def _next_end_s(self) -> float:
        leases = (stored.lease_ends_at_s for stored in self.stored.values() if stored.lease)
        values = (stored.ends_at_s for stored in self.stored.values() if stored.is_idle)
        reservations = (reserved.ends_at_s for reserved in self.reserved.values())
        return min(itertools.chain(leases, values, reservations), default=_NEVER)


class _LocalReservation(Reservation):
    def __init__(self, content: _Content, key: bytes, reserved: _Reserved, ttl_s: float | None) -> None:
        self._content, self._reserved, self._ttl_s = content, reserved, ttl_s
        self.key, self.num_bytes = key, reserved.num_bytes

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        with self._content.locked():
            self._extend()
            num_bytes = sum(map(len, self._reserved.parts)) + view.nbytes
            if num_bytes > self.num_bytes:
                message = f"{num_bytes} bytes were written, {self.num_bytes} are reserved"
                raise ConfigError(message)
            self._reserved.parts.append(bytes(view))

    def commit(self, record: bytes = b"") -> None:
        with self._content.locked() as content:
            self._extend()
            del content.reserved[self.key]
            data = b"".join(self._reserved.parts)
            if len(data) != self.num_bytes:
                message = f"{len(data)} bytes were written, {self.num_bytes} are reserved; the reservation is aborted"
                raise ConfigError(message)
            ends_at_s = _NEVER if self._ttl_s is None else time.monotonic() + self._ttl_s
            content.stored[self.key] = _Stored(data, check_record(record), ends_at_s)
            content.num_committed += 1

    def _extend(self) -> None:
        if self._content.reserved.get(self.key) is not self._reserved:
            message = f"the reservation of {self.key!r} has ended; reserve again"
            raise TransferTimeoutError(message)
        self._reserved.ends_at_s = time.monotonic() + self._content.reservation_s

    def abort(self) -> None:
        with suppress(ClosedError), self._content.locked() as content:
            if content.reserved.get(self.key) is self._reserved:
                del content.reserved[self.key]


class _LocalValue(Value):
    def __init__(self, content: _Content, key: bytes, stored: _Stored) -> None:
        self._content, self._stored, self._is_open = content, stored, True
        self.key, self.num_bytes, self.record = key, len(stored.data), stored.record

    def read_into(self, out: Buffer) -> None:
        check_out(out, self.num_bytes)[:] = self._stored.data

    def close(self) -> None:
        with suppress(ClosedError), self._content.locked():
            self._stored.num_open -= self._is_open
            self._is_open = False


class _LocalLease(Lease):
    def __init__(self, content: _Content, key: bytes, stored: _Stored) -> None:
        self._content, self._stored, self._lease = content, stored, stored.lease
        self.key, self.num_bytes, self.record = key, len(stored.data), stored.record

    def read_into(self, out: Buffer) -> None:
        view = check_out(out, self.num_bytes)
        with self._content.locked():
            self._check()
            view[:] = self._stored.data

    def renew(self, lease_s: float = LEASE_S) -> None:
        with self._content.locked():
            self._check()
            self._stored.lease_ends_at_s = time.monotonic() + lease_s

    def acknowledge(self) -> None:
        with self._content.locked() as content:
            self._check()
            del content.stored[self.key]
            self._stored.lease = 0

    def release(self) -> None:
        with suppress(ClosedError), self._content.locked():
            if self._stored.lease == self._lease:
                self._stored.lease = 0

    def _check(self) -> None:
        if self._stored.lease != self._lease:
            message = f"the lease of {self.key!r} has ended; another caller may have the value"
            raise TransferTimeoutError(message)
