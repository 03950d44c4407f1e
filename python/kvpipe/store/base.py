"""KVStore: the protocol of a database that keeps KV for later use by other instances.

::

    reserve ── write ── commit ──▶ visible ── select ──▶ read
       │                              │
       └── abort, or the end of       └── take ──▶ leased ── acknowledge ──▶ deleted
           the reservation                            └── release, or the end of the lease ──▶ visible

A value is a name (`key`), bytes, and a small `record` that is committed with them. Nothing of a value can be seen
before it is committed, and committed values never change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpipe._closing import Closing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer

MAX_KEY_BYTES = 512
MAX_RECORD_BYTES = 64 << 10
# Between a reservation, or the last write into it, and its commit.
RESERVATION_S = 30.0
LEASE_S = 30.0


@dataclass(frozen=True)
class Match:
    """Result of looking up a sequence of keys.

    Attributes:
        is_present: For each key, true if it can be selected now.
    """

    is_present: tuple[bool, ...]

    @property
    def num_matched(self) -> int:
        """Length of the longest prefix of keys that are all present."""
        return next((index for index, found in enumerate(self.is_present) if not found), len(self.is_present))


@dataclass(frozen=True)
class ValueInfo:
    """One committed value, as `KVStore.list` names it.

    Attributes:
        key: Its name.
        num_bytes: Size of its bytes, without the record.
        is_leased: True while a `take` holds it.
    """

    key: bytes
    num_bytes: int
    is_leased: bool = False


@dataclass(frozen=True)
class StoreStats:
    """Content and counters of a store. What an implementation does not know is `None`.

    Attributes:
        num_values: Committed values, leased ones included.
        num_bytes: Bytes of all values and reservations.
        capacity_bytes: Limit of `num_bytes`.
        num_reserved: Reservations under way.
        num_leased: Values that a `take` holds.
        num_waiting: Calls that wait for a value or for space.
        num_committed: Values committed so far.
        num_hits: Values returned by `select` and `take`.
        num_misses: Calls of `select` and `take` that returned nothing.
        num_evicted: Values deleted to make space.
        num_expired: Reservations, leases and values that ended by time.
        num_corrupt: Values whose bytes did not match their checksum.
        committed_bytes: Bytes of the values that were committed.
        hit_bytes: Bytes of the values that `select` and `take` returned.
        num_waits: Calls that had to wait for a value or for space.
        num_fenced: Calls refused because their reservation or lease had ended.
        num_lost: At a server: reservations, open values and leases that ended with the connection of their client. At a
            client of Valkey or Redis: calls that lost the server, and values that it deleted while they were in use.
        details: Further facts of the implementation, for people.
    """

    num_values: int | None = None
    num_bytes: int | None = None
    capacity_bytes: int | None = None
    num_reserved: int | None = None
    num_leased: int | None = None
    num_waiting: int | None = None
    num_committed: int | None = None
    num_hits: int | None = None
    num_misses: int | None = None
    num_evicted: int | None = None
    num_expired: int | None = None
    num_corrupt: int | None = None
    committed_bytes: int | None = None
    hit_bytes: int | None = None
    num_waits: int | None = None
    num_fenced: int | None = None
    num_lost: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Reservation(ABC):
    """Space for a value that is not visible yet. As a context manager it aborts unless it was committed.

    One thread uses it. It ends by itself `RESERVATION_S` after its last call, and when the store loses its holder.

    Attributes:
        key: Name of the value.
        num_bytes: Size of the value.
    """

    key: bytes
    num_bytes: int

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Appends bytes, which may be changed once this returns.

        Args:
            data: A contiguous buffer in host memory. All writes together have `num_bytes`.

        Raises:
            ConfigError: More bytes than were reserved.
            TransferTimeoutError: The reservation has ended.
            PeerLostError: The store was lost.
        """

    @abstractmethod
    def commit(self, record: bytes = b"") -> None:
        """Makes the value visible, at once and whole. Calls that wait for it are woken.

        Args:
            record: Committed with the value; at most `MAX_RECORD_BYTES`.

        Raises:
            ConfigError: Fewer bytes were written than reserved, or the record is too long. The reservation is aborted.
            TransferTimeoutError: The reservation has ended; nothing is visible.
            PeerLostError: The store was lost; the value may be visible.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends the reservation and frees its space. Does nothing if it has ended or is committed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()


class Value(Closing):
    """A committed value that this caller may read. As a context manager it closes itself.

    While it is open the store does not evict it, for as long as the store can tell that its holder lives.

    Attributes:
        key: Name of the value.
        num_bytes: Size of its bytes.
        record: The record that was committed with it.
    """

    key: bytes
    num_bytes: int
    record: bytes

    @abstractmethod
    def read_into(self, out: Buffer) -> None:
        """Reads the bytes.

        Args:
            out: A writable, contiguous buffer of `num_bytes` in host memory. After an error its content is undefined.

        Raises:
            ConfigError: The buffer has another size, or is read-only.
            CorruptDataError: The bytes do not match the checksum of the commit. The store deletes the value.
            PeerLostError: The store or the value was lost meanwhile.
            TransferTimeoutError: The lease has ended.
        """

    def read_parts(self, parts: Sequence[Buffer]) -> int | None:  # noqa: ARG002 - for stores that can
        """Reads the bytes straight into several buffers, if this value can be read so without waiting for the store.

        Args:
            parts: Writable, contiguous buffers in host memory, filled one after the other; `num_bytes` together.

        Returns:
            The checksum of the bytes, CRC-64/NVME, if the parts have them and they match the checksum of the commit.
            `None` otherwise, as by default in a store that does not implement this method. The content of the
            parts is undefined then: `read_into` reads the value, or raises what is wrong.

        Raises:
            ConfigError: A part is read-only or not contiguous.
        """
        return None

    def read(self) -> bytearray:
        """Reads the bytes into new memory. Raises as `read_into`."""
        out = bytearray(self.num_bytes)
        self.read_into(out)
        return out

    @abstractmethod
    def close(self) -> None:
        """Lets the store evict the value again. A second call does nothing."""


class Lease(Value):
    """A value that this caller alone may read, until it acknowledges it or the lease ends.

    `close`, also at the end of a `with` block, releases a lease that was not acknowledged.
    """

    @abstractmethod
    def renew(self, lease_s: float = LEASE_S) -> None:
        """Extends the lease: it ends `lease_s` from now.

        Raises:
            TransferTimeoutError: It has ended.
        """

    @abstractmethod
    def acknowledge(self) -> None:
        """Deletes the value, which this caller has consumed.

        Raises:
            TransferTimeoutError: The lease has ended, and another caller may have the value. Do not use what was read.
            PeerLostError: The store was lost; the value may be available to others.
        """

    @abstractmethod
    def release(self) -> None:
        """Returns the value to the store: it can be selected and taken again. Does nothing if the lease has ended."""

    def close(self) -> None:
        """Releases the lease, if it was not acknowledged."""
        self.release()


class KVStore(Closing):
    """A store of KV values, shared by engines that need not know each other.

    Any thread may call, and calls of several threads go on side by side. No call waits longer than its `timeout` and
    the store's own bound for an answer, after which it raises `TransferTimeoutError` or `PeerLostError`.

    A subclass implements the abstract methods; `tests/store/contract.py` has the tests that it must pass.
    """

    @classmethod
    @abstractmethod
    def open(cls, url: str, *, token: str | None = None, timeout: float = 10) -> Self:
        """Connects to a store.

        Args:
            url: As the user wrote it, `module:Class` removed.
            token: The shared secret of kvpipe's own store; by default `KVPIPE_TOKEN`. Others may ignore it.
            timeout: Seconds to wait for the store.

        Raises:
            ConfigError: The URL is malformed.
            ConnectError: The store does not answer in time.
            AuthenticationError: The store refuses the token or password.
        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns true for each key that can be selected now, in one round trip. No value's age changes."""

    def lookup(self, keys: Sequence[bytes]) -> Match:
        """Returns which keys are present, and how long the prefix is that is present."""
        return Match(tuple(self.exists(keys)))

    @abstractmethod
    def reserve(
        self, key: bytes, num_bytes: int, *, ttl_s: float | None = None, timeout: float | None = 0
    ) -> Reservation | None:
        """Reserves space for a value.

        Args:
            key: Its name, 1 to `MAX_KEY_BYTES` bytes.
            num_bytes: Its size, 0 or more.
            ttl_s: Seconds from the commit until the store deletes it; `None`: when the store needs the space.
            timeout: Seconds to wait for space. Other values are evicted first, so that only reservations and open
                values fill a store.

        Returns:
            The reservation; `None` if the key has a value, or another reservation is under way: nothing is to be done.

        Raises:
            ConfigError: The key or size is out of range, or larger than the whole store.
            CapacityError: There was no space in time, or a quota is used up.
        """

    def put(self, key: bytes, data: Buffer, record: bytes = b"", *, ttl_s: float | None = None) -> bool:
        """Inserts a value in one call: reserves, writes and commits.

        Returns:
            Whether it was inserted; `False` if the key has a value, or another reservation is under way.

        Raises:
            ConfigError: As `reserve` and `commit`.
            CapacityError: As `reserve`.
            PeerLostError: The store was lost; the value may be visible.
        """
        view = memoryview(data).cast("B")
        reservation = self.reserve(key, view.nbytes, ttl_s=ttl_s)
        if reservation is None:
            return False
        with reservation:
            reservation.write(view)
            reservation.commit(record)
        return True

    @abstractmethod
    def select(self, key: bytes, *, timeout: float | None = 0) -> Value | None:
        """Returns a value for reading, or waits until it is committed. Others may read it too.

        Args:
            key: Its name.
            timeout: Seconds to wait for a commit; 0 does not wait, `None` waits without limit. A commit wakes the call.

        Returns:
            The value; `None` if there was none in time.

        Raises:
            PeerLostError: The store was lost.
            ClosedError: The store was closed here, also while the call waited.
        """

    @abstractmethod
    def take(self, key: bytes, *, lease_s: float = LEASE_S, timeout: float | None = 0) -> Lease | None:
        """Returns a value to exactly one caller, or waits for one.

        A value that others have open cannot be taken before they close it. It raises as `select` does.

        Args:
            key: Its name.
            timeout: As for `select`.
            lease_s: Seconds after which the value goes back, unless the lease was renewed or acknowledged. It also goes
                back when the store loses its holder.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes values that are neither open nor leased, and returns their number."""

    @abstractmethod
    def list(self, prefix: bytes = b"") -> Iterator[ValueInfo]:
        """Iterates over the values whose keys begin with `prefix`, in no order. For people and tests: it costs time."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Returns content and counters."""

    @abstractmethod
    def close(self) -> None:
        """Ends the use of the store here: reservations are aborted, leases released, and waiting calls end.

        They raise `ClosedError`, as later calls do. A second call does nothing.
        """
