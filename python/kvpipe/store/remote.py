"""RemoteStore: a client of kvpipe's own store server."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvpipe import _kvpipe
from kvpipe._transport import transport
from kvpipe.config import resolve_token
from kvpipe.exceptions import ClosedError, ConfigError, KVPipeError, PeerLostError
from kvpipe.store.base import (
    LEASE_S,
    KVStore,
    Lease,
    Reservation,
    StoreStats,
    Value,
    ValueInfo,
)
from kvpipe.store.checks import check_address, check_key, check_out, check_record, check_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from typing_extensions import Buffer

# Limit of one message.
_KEYS_PER_QUESTION = 1 << 14
_MOST_BYTES = (1 << 63) - 1
# Counters of a server that other stores do not have.
_DETAILS = (
    "num_clients",
    "num_disk_values",
    "num_disk_bytes",
    "disk_capacity_bytes",
    "num_loaded",
    "num_disk_failures",
    "num_over_quota",
)


class RemoteStore(KVStore):
    """A store that another process serves: `kvpipe store serve`, or `StoreServer`.

    Large values move over the fastest data path between the two processes; the reader verifies each by the checksum
    that its writer computed. One connection serves all threads. Once the server is lost, every call raises
    `PeerLostError`: open the store again.
    """

    def __init__(self, native: _kvpipe.StoreClient) -> None:
        self._native = native

    @classmethod
    def open(cls, url: str, *, token: str | None = None, timeout: float = 10) -> Self:
        """Connects to a server.

        Args:
            url: `kvpipe://host:port`.
            token: The shared secret; by default `KVPIPE_TOKEN`.
            timeout: Seconds to wait for the server, which may begin to serve meanwhile.

        Raises:
            ConfigError: The URL is malformed.
            ConnectError: The server does not answer in time.
            AuthenticationError: The server has another token.
        """
        return cls(connect(check_address(url, "kvpipe"), token, timeout))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns true for each key that can be selected now; see `KVStore.exists`."""
        asked = [self._native.exists(part) for part in _parts(keys)]
        return [is_present for work in asked for is_present in _wait(work)]

    def reserve(
        self, key: bytes, num_bytes: int, *, ttl_s: float | None = None, timeout: float | None = 0
    ) -> Reservation | None:
        """Reserves space for a value; see `KVStore.reserve`. Those that wait get space in the order of their calls."""
        work, operation = self._native.reserve(check_key(key), check_size(num_bytes, _MOST_BYTES), ttl_s, timeout)
        reserved = self._wait_for(work, operation)
        return None if reserved is None else _RemoteReservation(self._native, key, num_bytes, operation)

    def put(self, key: bytes, data: Buffer, record: bytes = b"", *, ttl_s: float | None = None) -> bool:
        """Inserts a value in one round trip; see `KVStore.put`."""
        return bool(_wait(self._native.put(check_key(key), _bytes_of(data), check_record(record), ttl_s)))

    def select(self, key: bytes, *, timeout: float | None = 0) -> Value | None:
        """Returns a value for reading; see `KVStore.select`.

        Raises:
            CapacityError: This client holds 16,384 values, reservations and waits: close some.
        """
        opened = self._wait_for(*self._native.select(check_key(key), timeout))
        return None if opened is None else _RemoteValue(self._native, key, opened)

    def take(self, key: bytes, *, lease_s: float = LEASE_S, timeout: float | None = 0) -> Lease | None:
        """Returns a value to one caller; see `KVStore.take`. It raises as `select` does."""
        opened = self._wait_for(*self._native.take(check_key(key), lease_s, timeout))
        return None if opened is None else _RemoteLease(self._native, key, opened)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes values that are neither open nor leased, and returns their number."""
        return sum(_wait(work) for work in [self._native.delete(part) for part in _parts(keys)])

    def list(self, prefix: bytes = b"") -> Iterator[ValueInfo]:
        """Iterates over the values whose keys begin with `prefix`, page by page: later pages see later changes."""
        after: int | None = 0
        while after is not None:
            page, after = _wait(self._native.list(prefix, after))
            for key, num_bytes, is_leased in page:
                yield ValueInfo(key, num_bytes, is_leased)

    def stats(self) -> StoreStats:
        """Returns content and counters of the server. `details` has `num_clients`, and this client's `transport`."""
        return stats_of(_wait(self._native.stats()), transport=self._native.transport)

    def close(self) -> None:
        """Ends the connection, and with it what this client holds; see `KVStore.close`."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} kvpipe://{self._native.address}>"

    def _wait_for(self, work: _kvpipe.Work, operation: int) -> Any:
        """Waits for what an operation holds then; an interrupted wait releases it."""
        try:
            return _wait(work)
        except BaseException:
            with suppress(KVPipeError):
                self._native.release(operation, is_waited=False)
            raise


class _RemoteReservation(Reservation):
    def __init__(self, native: _kvpipe.StoreClient, key: bytes, num_bytes: int, operation: int) -> None:
        self._native = native
        self.key = key
        self.num_bytes = num_bytes
        self._operation = operation

    def write(self, data: Buffer) -> None:
        _wait(self._native.write(self._operation, _bytes_of(data)))

    def commit(self, record: bytes = b"") -> None:
        try:
            record = check_record(record)
        except ConfigError:
            self.abort()
            raise
        _wait(self._native.commit(self._operation, record))

    def abort(self) -> None:
        _release(self._native, self._operation)


class _RemoteValue(Value):
    def __init__(self, native: _kvpipe.StoreClient, key: bytes, opened: _kvpipe.OpenedValue) -> None:
        self._native = native
        self._opened = opened
        self.key = key
        self.num_bytes = opened.num_bytes
        self.record = opened.record

    def read_into(self, out: Buffer) -> None:
        _wait(self._native.read(self._opened, check_out(out, self.num_bytes)))

    def read_parts(self, parts: Sequence[Buffer]) -> int | None:
        return self._opened.read_parts(parts)

    def close(self) -> None:
        _release(self._native, self._opened.operation)


class _RemoteLease(_RemoteValue, Lease):
    def read_parts(self, parts: Sequence[Buffer]) -> int | None:  # noqa: ARG002
        return None  # a lease may end meanwhile, which `read_into` raises

    def renew(self, lease_s: float = LEASE_S) -> None:
        _wait(self._native.renew(self._opened.operation, lease_s))

    def acknowledge(self) -> None:
        _wait(self._native.acknowledge(self._opened.operation))

    def release(self) -> None:
        _RemoteValue.close(self)

    def close(self) -> None:
        self.release()


def connect(address: str, token: str | None, timeout: float = 10) -> _kvpipe.StoreClient:
    """Connects to the server at an address; raises as `RemoteStore.open`."""
    native, connected = _kvpipe.StoreClient.connect(address, resolve_token(token), transport(), timeout)
    try:
        _wait(connected)
    except BaseException:
        native.close()
        raise
    return native


def stats_of(info: dict[str, Any], **details: Any) -> StoreStats:
    """Counters of a server as `StoreStats`."""
    for name in _DETAILS:
        details[name] = info.pop(name)
    return StoreStats(**info, details=details)


def _parts(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    checked = [check_key(key) for key in keys]
    for start in range(0, len(checked), _KEYS_PER_QUESTION):
        yield checked[start : start + _KEYS_PER_QUESTION]


def _bytes_of(data: Buffer) -> Buffer:
    """The bytes of a buffer of any format and shape."""
    view = memoryview(data)
    if not view.c_contiguous:
        message = "the data is not contiguous; copy it first"
        raise ConfigError(message)
    return view.cast("B") if view.nbytes else b""


def _release(native: _kvpipe.StoreClient, operation: int) -> None:
    # A client that was closed or has lost its server holds nothing any more.
    with suppress(ClosedError, PeerLostError):
        _wait(native.release(operation, is_waited=True))


def _wait(work: _kvpipe.Work) -> Any:
    work.wait()
    return work.result()
