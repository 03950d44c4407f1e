"""LookupBufferStore: a store whose values wait in a lookup buffer."""

from __future__ import annotations

import itertools
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpipe import exceptions
from kvpipe.exceptions import KVPipeError, PeerLostError, ProtocolError, TransferTimeoutError
from kvpipe.lookup_buffer import LookupBuffer
from kvpipe.store.base import LEASE_S, RESERVATION_S, KVStore, Lease, Reservation, StoreStats, Value, ValueInfo
from kvpipe.store.checks import check_address, check_key, check_out, check_record, check_size, check_written
from kvpipe.store.lookup_server import REPLY, REQUEST, VALUE, LookupStoreServer, packed, tokens_of, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from typing_extensions import Buffer

# For the answer of a server that is alive, and for the space of a request or value.
_ANSWER_S = 10.0


class LookupBufferStore(KVStore):
    """A store whose values are entries of a `LookupBuffer`: a commit inserts one, and an acknowledged take drops it.

    It is meant for trials, and for those who have lookup buffers: one Python thread of the serving process answers all
    clients, two or three times for each call. `kvpipe store serve` is the store for load.

    A value that is open or leased may be evicted after `LEASE_S`, or at the end of the lease, if its client has died.
    """

    def __init__(self, buffer: LookupBuffer) -> None:
        self._connection = _Connection(buffer)

    @staticmethod
    def serve(
        address: str = "127.0.0.1:0",
        capacity_bytes: int = 1 << 30,
        *,
        token: str | None = None,
        reservation_s: float = RESERVATION_S,
    ) -> LookupStoreServer:
        """Serves an empty store; see `LookupStoreServer`. Its `address` is that of `lookup://` URLs."""
        return LookupStoreServer(address, capacity_bytes, token=token, reservation_s=reservation_s)

    @classmethod
    def open(cls, url: str, *, token: str | None = None, timeout: float = 10) -> Self:
        """Connects to a served store.

        Args:
            url: `lookup://host:port`.
            token: The shared secret; by default `KVPIPE_TOKEN`.
            timeout: Seconds to wait for the server.

        Raises:
            ConfigError: The URL has another form.
            ConnectError: The server does not answer in time.
            AuthenticationError: The server has another token.
        """
        return cls(LookupBuffer.connect(check_address(url, "lookup"), token=token, timeout=timeout))

    # --- calls

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each key whether it can be selected now."""
        found: list[bool] = self._connection.ask("exists", keys=[check_key(key).hex() for key in keys])["found"]
        return found

    def reserve(
        self, key: bytes, num_bytes: int, *, ttl_s: float | None = None, timeout: float | None = 0
    ) -> Reservation | None:
        """Reserves space for a value; see `KVStore.reserve`."""
        check_size(num_bytes)
        ticket = self._connection.ask(
            "reserve", timeout=timeout, key=check_key(key).hex(), num_bytes=num_bytes, ttl_s=ttl_s
        )["ticket"]
        return _LookupReservation(self._connection, key, num_bytes, ticket) if ticket else None

    def select(self, key: bytes, *, timeout: float | None = 0) -> Value | None:
        """Returns a value for reading; see `KVStore.select`."""
        answer = self._connection.ask("open", timeout=timeout, key=check_key(key).hex())
        return None if answer["value"] is None else _LookupValue(self._connection, key, answer)

    def take(self, key: bytes, *, lease_s: float = LEASE_S, timeout: float | None = 0) -> Lease | None:
        """Returns a value to one caller; see `KVStore.take`."""
        answer = self._connection.ask("lease", timeout=timeout, key=check_key(key).hex(), lease_s=lease_s)
        return None if answer["value"] is None else _LookupLease(self._connection, key, answer)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes values that are neither open nor leased, and returns how many there were."""
        return int(self._connection.ask("delete", keys=[check_key(key).hex() for key in keys])["found"])

    def list(self, prefix: bytes = b"") -> Iterator[ValueInfo]:
        """Iterates over the values whose keys begin with `prefix`, as they are at the call."""
        found = self._connection.ask("list", key=prefix.hex())["found"]
        return (ValueInfo(bytes.fromhex(key), num_bytes, is_leased) for key, num_bytes, is_leased in found)

    def stats(self) -> StoreStats:
        """Returns content and counters."""
        return StoreStats(**self._connection.ask("stats")["found"])

    def close(self) -> None:
        """Ends the use of the store here; waiting calls raise `ClosedError`."""
        self._connection.close()


class _Connection:
    """Requests to a store's server, and the bytes of values."""

    def __init__(self, buffer: LookupBuffer) -> None:
        self._buffer = buffer
        self._client = secrets.randbits(62)
        self._numbers = itertools.count()

    def ask(self, op: str, *, timeout: float | None = 0, record: bytes = b"", **asked: Any) -> dict[str, Any]:
        """Asks the server, and waits for its answer."""
        number = next(self._numbers)
        message = asked | {"op": op, "client": self._client, "number": number, "timeout": timeout}
        self._buffer.insert(tokens_of(REQUEST), None, packed(message), _array(record), None, timeout=_ANSWER_S)
        answer_s = None if timeout is None else timeout + _ANSWER_S
        reply = self._buffer.drop_select(tokens_of(REPLY, self._client, number), None, answer_s)[2]
        if reply is None:
            text = f"the store at {self._buffer.address} has not answered within {answer_s} s"
            raise TransferTimeoutError(text)
        answer = unpacked(reply)
        if "error" in answer:
            raise getattr(exceptions, answer["error"], ProtocolError)(answer["message"])
        return answer

    def insert(self, ticket: int, data: Buffer) -> None:
        """Sends the bytes of a value."""
        self._buffer.insert(tokens_of(VALUE, ticket), None, _array(data), None, None, timeout=_ANSWER_S)

    def read(self, key: bytes, ticket: int, out: memoryview) -> None:
        """Reads the bytes of a value."""
        data = self._buffer.peek(tokens_of(VALUE, ticket), None, _ANSWER_S)[2]
        if data is None:
            message = f"the value of {key!r} was deleted meanwhile"
            raise PeerLostError(message)
        out[:] = memoryview(data).cast("B")

    def close(self) -> None:
        """Ends the client's requests."""
        with suppress(KVPipeError):
            self.ask("leave")
        self._buffer.close()


class _LookupReservation(Reservation):
    def __init__(self, connection: _Connection, key: bytes, num_bytes: int, ticket: int) -> None:
        self._connection, self._written = connection, bytearray()
        self._asked: dict[str, Any] = {"key": key.hex(), "holder": ticket}
        self.key, self.num_bytes = key, num_bytes

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._connection.ask("extend", **self._asked)
        check_written(len(self._written) + view.nbytes, self.num_bytes)
        self._written += view

    def commit(self, record: bytes = b"") -> None:
        try:
            record = check_record(record)
            # The reservation outlasts the insert, so that the server knows of all bytes that it has.
            self._connection.ask("extend", **self._asked)
            self._connection.insert(self._asked["holder"], self._written)
            self._connection.ask("commit", record=record, num_written=len(self._written), **self._asked)
        except KVPipeError:
            self.abort()
            raise

    def abort(self) -> None:
        with suppress(KVPipeError):
            self._connection.ask("abort", **self._asked)


class _LookupValue(Value):
    def __init__(self, connection: _Connection, key: bytes, answer: dict[str, Any]) -> None:
        value = answer["value"]
        self._connection, self._ticket, self._holder = connection, value["ticket"], answer["holder"]
        self.key, self.num_bytes, self.record = key, value["num_bytes"], bytes.fromhex(value["record"])

    def read_into(self, out: Buffer) -> None:
        self._connection.read(self.key, self._ticket, check_out(out, self.num_bytes))

    def close(self) -> None:
        with suppress(KVPipeError):
            self._connection.ask("close", key=self.key.hex(), holder=self._holder)


class _LookupLease(Lease):
    def __init__(self, connection: _Connection, key: bytes, answer: dict[str, Any]) -> None:
        value = answer["value"]
        self._connection, self._ticket = connection, value["ticket"]
        self._asked: dict[str, Any] = {"key": key.hex(), "holder": answer["holder"]}
        self.key, self.num_bytes, self.record = key, value["num_bytes"], bytes.fromhex(value["record"])

    def read_into(self, out: Buffer) -> None:
        view = check_out(out, self.num_bytes)
        self._connection.ask("check", **self._asked)
        self._connection.read(self.key, self._ticket, view)

    def renew(self, lease_s: float = LEASE_S) -> None:
        self._connection.ask("renew", lease_s=lease_s, **self._asked)

    def acknowledge(self) -> None:
        self._connection.ask("acknowledge", **self._asked)

    def release(self) -> None:
        with suppress(KVPipeError):
            self._connection.ask("release", **self._asked)


def _array(data: Buffer) -> Any:
    return np.frombuffer(data, np.uint8)
