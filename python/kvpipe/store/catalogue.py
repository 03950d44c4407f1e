"""The values of a store: their keys, sizes, reservations, leases and readers. No bytes, threads or clock."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import ConfigError, TransferTimeoutError
from kvpipe.store.base import StoreStats, ValueInfo
from kvpipe.store.checks import check_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_NEVER = float("inf")
_COUNTS = (
    *("num_committed", "committed_bytes", "num_hits", "hit_bytes", "num_misses"),
    *("num_waits", "num_evicted", "num_expired", "num_fenced"),
)


@dataclass(eq=False)
class Stored:
    """A committed value.

    Attributes:
        ticket: Names its bytes; never used again.
        num_bytes: Size of its bytes.
        record: Committed with them.
        ends_at_s: When it is deleted.
        readers: When each open read ends by time, by its ticket.
        lease: Ticket of its lease; 0 without one.
        lease_ends_at_s: When the lease ends.
    """

    ticket: int
    num_bytes: int
    record: bytes
    ends_at_s: float
    readers: dict[int, float]
    lease: int = 0
    lease_ends_at_s: float = _NEVER

    @property
    def is_idle(self) -> bool:
        """True if it is neither open nor leased."""
        return not self.readers and not self.lease


@dataclass(eq=False)
class Reserved:
    """A reservation.

    Attributes:
        ticket: Names it, and the bytes that are written; 0 where nothing is to be done.
        num_bytes: Size of the value.
        ends_at_s: When it ends, unless it is used.
        ttl_s: Life of the value.
    """

    ticket: int = 0
    num_bytes: int = 0
    ends_at_s: float = _NEVER
    ttl_s: float | None = None


class Catalogue:
    """The state of a store. Each method has the current time as `now_s`, of any one clock.

    Args:
        capacity_bytes: Limit for the bytes of all values and reservations.
        reservation_s: Seconds after its last use at which a reservation ends.
        forget: Called with the ticket of bytes that nobody needs any more: evicted, deleted, expired or aborted.
    """

    def __init__(self, capacity_bytes: int, reservation_s: float, forget: Callable[[int], object]) -> None:
        self._capacity_bytes = capacity_bytes
        self._reservation_s = reservation_s
        self._forget = forget
        self._stored: OrderedDict[bytes, Stored] = OrderedDict()  # the least used first
        self._reserved: dict[bytes, Reserved] = {}
        self._tickets = itertools.count(1)
        self._num_bytes = 0
        self._counts = dict.fromkeys(_COUNTS, 0)

    # --- questions

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether it can be selected."""
        return [(stored := self._stored.get(key)) is not None and not stored.lease for key in keys]

    def list(self, prefix: bytes) -> Iterator[ValueInfo]:
        """The values whose keys begin with `prefix`."""
        for key, stored in self._stored.items():
            if key.startswith(prefix):
                yield ValueInfo(key, stored.num_bytes, bool(stored.lease))

    def stats(self, num_waiting: int) -> StoreStats:
        """Content and counters."""
        counts: dict[str, Any] = self._counts
        return StoreStats(
            num_values=len(self._stored),
            num_bytes=self._num_bytes,
            capacity_bytes=self._capacity_bytes,
            num_reserved=len(self._reserved),
            num_leased=sum(bool(stored.lease) for stored in self._stored.values()),
            num_waiting=num_waiting,
            num_corrupt=0,
            **counts,
        )

    def usage(self) -> str:
        """Fill level of the store, for error messages."""
        return f"{self._num_bytes} of {self._capacity_bytes} bytes are reserved or in use"

    # --- values come

    def reserve(self, key: bytes, num_bytes: int, ttl_s: float | None, now_s: float) -> Reserved | None:
        """Reserves space, of evicted values if need be; `None` while there is none.

        Raises:
            ConfigError: The value is larger than the store.
        """
        check_size(num_bytes, self._capacity_bytes)
        if key in self._reserved or key in self._stored:
            return Reserved()
        for idle in [key for key, stored in self._stored.items() if stored.is_idle]:
            if self._num_bytes + num_bytes <= self._capacity_bytes:
                break
            self._delete(idle)
            self._counts["num_evicted"] += 1
        if self._num_bytes + num_bytes > self._capacity_bytes:
            return None
        self._num_bytes += num_bytes
        reserved = Reserved(next(self._tickets), num_bytes, now_s + self._reservation_s, ttl_s)
        self._reserved[key] = reserved
        return reserved

    def extend(self, key: bytes, ticket: int, now_s: float) -> Reserved:
        """Notes the use of a reservation.

        Raises:
            TransferTimeoutError: It has ended.
        """
        reserved = self._reserved.get(key)
        if reserved is None or reserved.ticket != ticket:
            self._counts["num_fenced"] += 1
            message = f"the reservation of {key!r} has ended; reserve again"
            raise TransferTimeoutError(message)
        reserved.ends_at_s = now_s + self._reservation_s
        return reserved

    def commit(self, key: bytes, ticket: int, num_written: int, record: bytes, now_s: float) -> None:
        """Makes a value visible.

        Raises:
            TransferTimeoutError: Its reservation has ended.
            ConfigError: Fewer bytes were written than reserved; the reservation is aborted.
        """
        reserved = self.extend(key, ticket, now_s)
        if num_written != reserved.num_bytes:
            self.abort(key, ticket)
            message = f"{num_written} bytes were written, {reserved.num_bytes} are reserved; the reservation is aborted"
            raise ConfigError(message)
        del self._reserved[key]
        ends_at_s = _NEVER if reserved.ttl_s is None else now_s + reserved.ttl_s
        self._stored[key] = Stored(ticket, reserved.num_bytes, record, ends_at_s, {})
        self._counts["num_committed"] += 1
        self._counts["committed_bytes"] += reserved.num_bytes

    def abort(self, key: bytes, ticket: int) -> None:
        """Ends a reservation, if it has not ended."""
        reserved = self._reserved.get(key)
        if reserved is not None and reserved.ticket == ticket:
            del self._reserved[key]
            self._num_bytes -= reserved.num_bytes
            self._forget(ticket)

    # --- values go

    def open(self, key: bytes, ends_at_s: float) -> tuple[int, Stored] | None:
        """Opens a value for reading: returns the reader's ticket, and the value; `None` while there is none."""
        stored = self._stored.get(key)
        if stored is None or stored.lease:
            return None
        ticket = next(self._tickets)
        stored.readers[ticket] = ends_at_s
        self._hit(key)
        return ticket, stored

    def close(self, key: bytes, reader: int) -> None:
        """Ends a read, if it has not ended."""
        if (stored := self._stored.get(key)) is not None:
            stored.readers.pop(reader, None)

    def lease(self, key: bytes, lease_s: float, now_s: float) -> tuple[int, Stored] | None:
        """Leases a value: returns the ticket of the lease, and the value; `None` while there is none to be had."""
        stored = self._stored.get(key)
        if stored is None or not stored.is_idle:
            return None
        stored.lease, stored.lease_ends_at_s = next(self._tickets), now_s + lease_s
        self._hit(key)
        return stored.lease, stored

    def renew(self, key: bytes, lease: int, lease_s: float, now_s: float) -> None:
        """Extends a lease.

        Raises:
            TransferTimeoutError: It has ended.
        """
        self.leased(key, lease).lease_ends_at_s = now_s + lease_s

    def acknowledge(self, key: bytes, lease: int) -> None:
        """Deletes a leased value.

        Raises:
            TransferTimeoutError: The lease has ended.
        """
        self.leased(key, lease)
        self._delete(key)

    def release(self, key: bytes, lease: int) -> None:
        """Ends a lease, if it has not ended."""
        stored = self._stored.get(key)
        if stored is not None and stored.lease == lease:
            stored.lease = 0

    def leased(self, key: bytes, lease: int) -> Stored:
        """The value of a lease.

        Raises:
            TransferTimeoutError: The lease has ended.
        """
        stored = self._stored.get(key)
        if stored is None or stored.lease != lease:
            self._counts["num_fenced"] += 1
            message = f"the lease of {key!r} has ended; another caller may have the value"
            raise TransferTimeoutError(message)
        return stored

    def waited(self) -> None:
        """Counts a call that has to wait."""
        self._counts["num_waits"] += 1

    def missed(self) -> None:
        """Counts a call that found nothing."""
        self._counts["num_misses"] += 1

    def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes idle values, and returns how many there were."""
        found = {key for key in keys if (stored := self._stored.get(key)) is not None and stored.is_idle}
        for key in found:
            self._delete(key)
        return len(found)

    def _hit(self, key: bytes) -> None:
        self._counts["num_hits"] += 1
        self._counts["hit_bytes"] += self._stored[key].num_bytes
        self._stored.move_to_end(key)

    def _delete(self, key: bytes) -> None:
        stored = self._stored.pop(key)
        self._num_bytes -= stored.num_bytes
        self._forget(stored.ticket)

    # --- time

    def expire(self, now_s: float) -> None:
        """Ends what has an end that has come."""
        for key, stored in list(self._stored.items()):
            for reader in [reader for reader, ends_at_s in stored.readers.items() if ends_at_s <= now_s]:
                del stored.readers[reader]
            if stored.lease and stored.lease_ends_at_s <= now_s:
                stored.lease = 0
                self._counts["num_expired"] += 1
            if stored.ends_at_s <= now_s and stored.is_idle:
                self._delete(key)
                self._counts["num_expired"] += 1
        for key, reserved in list(self._reserved.items()):
            if reserved.ends_at_s <= now_s:
                self.abort(key, reserved.ticket)
                self._counts["num_expired"] += 1

    def next_end_s(self) -> float:
        """When `expire` has something to do next; infinite if never."""
        stored = self._stored.values()
        leases = (each.lease_ends_at_s for each in stored if each.lease)
        readers = (ends_at_s for each in stored for ends_at_s in each.readers.values())
        values = (each.ends_at_s for each in stored if each.is_idle)
        reservations = (each.ends_at_s for each in self._reserved.values())
        return min(itertools.chain(leases, readers, values, reservations), default=_NEVER)
