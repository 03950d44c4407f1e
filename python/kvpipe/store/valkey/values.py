"""Reservations, values and leases of a Valkey or Redis store."""

from __future__ import annotations

import secrets
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpipe import _kvpipe
from kvpipe.exceptions import (
    CapacityError,
    ClosedError,
    ConfigError,
    CorruptDataError,
    KVPipeError,
    PeerLostError,
    TransferTimeoutError,
)
from kvpipe.store.base import LEASE_S, Lease, Reservation, Value
from kvpipe.store.checks import check_out, check_record
from kvpipe.store.valkey import scripts
from kvpipe.store.valkey.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from kvpipe.store.valkey.bulk import Outcome, Part
    from kvpipe.store.valkey.context import Context
    from kvpipe.store.valkey.keys import ValueKeys

# Size and CRC-64/NVME of a part. The scripts read the size.
_PART = struct.Struct("<IQ")
# Smaller writes are copied and joined: a part of its own costs a round trip.
_MIN_PART_BYTES = 256 << 10
# A reservation is extended when this share of its time has passed since it was.
_EXTEND_AFTER = 1 / 8


@dataclass(frozen=True)
class Manifest:
    """Description of a committed value.

    Attributes:
        epoch: Of the reservation.
        num_bytes: Size of the value.
        parts: Size and checksum of each part.
        record: Committed with the value.
    """

    epoch: bytes
    num_bytes: int
    parts: tuple[tuple[int, int], ...]
    record: bytes

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> Manifest:
        """Reads what a script has returned.

        Raises:
            CorruptDataError: It is no manifest.
        """
        epoch, num_bytes, packed, record = fields
        try:
            parts = tuple(_PART.iter_unpack(packed))
            manifest = cls(bytes(epoch), int(num_bytes), parts, bytes(record))
        except (struct.error, TypeError, ValueError) as error:
            raise CorruptDataError(f"the manifest is none: {error}") from error
        if sum(size for size, _ in parts) != manifest.num_bytes:
            raise CorruptDataError(f"the parts of the manifest are not {num_bytes} bytes")
        return manifest


class ValkeyReservation(Reservation):
    """A reservation marker at the server, and parts that the server deletes unless they are committed."""

    def __init__(self, context: Context, keys: ValueKeys, key: bytes, num_bytes: int, ttl_s: float | None) -> None:
        self._context, self._keys, self._ttl_s = context, keys, ttl_s
        self.key, self.num_bytes = key, num_bytes
        self._epoch = secrets.token_hex(8).encode()
        self._parts: list[tuple[int, int]] = []
        self._pending = bytearray()
        self._num_written = 0
        self._extended_s = time.monotonic()
        self._is_ended = False

    def begin(self) -> bool:
        """Reserves the key. Returns true if it was free."""
        ttl_ms = self._context.settings.reservation_ms
        keys = self._keys
        is_free = bool(self._context.client.run(scripts.RESERVE, keys, keys.reservation, self._epoch, ttl_ms))
        self._is_ended = not is_free
        return is_free

    def write(self, data: Buffer) -> None:
        """Appends bytes; see `Reservation.write`. Also raises `CapacityError` when the server is out of memory."""
        with self._context.counters.counting_refusals():
            self._write(memoryview(data).cast("B"))

    def _write(self, view: memoryview) -> None:
        self._check()
        if self._num_written + view.nbytes > self.num_bytes:
            message = f"{self._num_written + view.nbytes} bytes were written, {self.num_bytes} are reserved"
            raise ConfigError(message)
        if time.monotonic() - self._extended_s > self._context.settings.reservation_s * _EXTEND_AFTER:
            self._extend()
        self._num_written += view.nbytes
        if view.nbytes < _MIN_PART_BYTES:
            self._pending += view
        else:
            self._flush()
            self._store(view)
        # The last bytes are sent at once: the commit, which others wait for, is one round trip then.
        if len(self._pending) >= _MIN_PART_BYTES or self._num_written == self.num_bytes:
            self._flush()

    def commit(self, record: bytes = b"") -> None:
        """Makes the value visible; see `Reservation.commit`."""
        with self._context.counters.counting_refusals():
            self._check()
            try:
                self._finish(self._commit(check_record(record)))
            except BaseException:
                with suppress(KVPipeError):
                    self.abort()
                raise

    def _commit(self, record: bytes) -> int:
        if self._num_written != self.num_bytes:
            message = f"{self._num_written} bytes were written, {self.num_bytes} are reserved; it is aborted"
            raise ConfigError(message)
        self._flush()
        packed = b"".join(_PART.pack(*part) for part in self._parts)
        settings = self._context.settings
        ttl_ms = 0 if self._ttl_s is None else max(1, round(self._ttl_s * 1000))
        arguments = (packed, len(self._parts), record, ttl_ms, round(settings.pin_s * 1000), self._keys.channel)
        keys = self._keys
        return int(
            self._context.client.run(scripts.COMMIT, keys, keys.reservation, self._epoch, self.num_bytes, *arguments)
        )

    def _finish(self, outcome: int) -> None:
        if outcome == 0:
            raise self._ended()
        if outcome < 0:
            self._context.counters.add("num_lost")
            raise PeerLostError(f"the server has evicted a part of {self.key!r} before its commit")
        self._is_ended = True
        self._context.counters.add("num_committed")
        self._context.counters.add("committed_bytes", self.num_bytes)

    def abort(self) -> None:
        """Ends the reservation; see `Reservation.abort`."""
        if self._is_ended or not self._context.client.is_own_process:
            return
        self._is_ended = True
        keys = self._keys
        # Whatever the server answers, it ends by time: an error here would hide that of the caller.
        with suppress(KVPipeError):
            self._context.client.run(scripts.ABORT, keys, keys.reservation, self._epoch, len(self._parts))

    def _check(self) -> None:
        self._context.client.check()
        if self._is_ended:
            raise self._ended()

    def _ended(self) -> TransferTimeoutError:
        return TransferTimeoutError(f"the reservation of {self.key!r} has ended; reserve again")

    def _extend(self) -> None:
        began_s = time.monotonic()
        arguments = (self._epoch, len(self._parts), self._context.settings.reservation_ms)
        if self._context.client.run(scripts.EXTEND, self._keys, self._keys.reservation, *arguments) == 0:
            raise self._ended()
        self._extended_s = began_s

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._store(memoryview(pending))

    def _store(self, view: memoryview) -> None:
        """Writes parts of nearly the same size, with as many connections as it has parts."""
        step = self._context.settings.part_bytes
        for start in range(0, view.nbytes, step * self._context.settings.connections):
            self._store_parts(view[start : start + step * self._context.settings.connections], step)

    def _store_parts(self, view: memoryview, step: int) -> None:
        parts: list[Part] = []
        sums = []
        for start in range(0, view.nbytes, step):
            part = view[start : start + step]
            parts.append((self._keys.part(self._epoch, len(self._parts) + len(parts)), part.nbytes))
            sums += _kvpipe.checksums(part, [0], part.nbytes)
        # Recorded before the write, so that an abort also deletes parts whose write has an unknown result.
        self._parts += [(num_bytes, checksum) for (_, num_bytes), checksum in zip(parts, sums, strict=True)]
        outcomes = self._context.bulk.write(view, parts, self._context.settings.reservation_ms)
        refused = next((outcome for outcome in outcomes if outcome is not None), None)
        if refused is not None:
            error = error_of(str(refused))
            if isinstance(error, CapacityError):
                self.abort()
            with self._context.client.counting_losses():
                raise error


class ValkeyValue(Value):
    """A value with a pin at the server, which a thread of the store renews."""

    def __init__(self, context: Context, keys: ValueKeys, key: bytes, manifest: Manifest, token: bytes) -> None:
        self._context, self._keys, self._manifest, self._token = context, keys, manifest, token
        self.key, self.num_bytes, self.record = key, manifest.num_bytes, manifest.record
        self._is_open = True

    def read_into(self, out: Buffer) -> None:
        """Reads the bytes; see `Value.read_into`."""
        view = check_out(out, self.num_bytes)
        if not self._is_open:
            raise ClosedError(f"the value {self.key!r} was closed")
        read_parts(self._context, self._keys, self._manifest, view)

    def pin(self) -> None:
        """Renews the pin."""
        keys = self._keys
        self._context.client.run(scripts.PIN, keys, keys.pins, self._token, round(self._context.settings.pin_s * 1000))

    def close(self) -> None:
        """Lets others take the value; see `Value.close`."""
        if not self._is_open or not self._context.client.is_own_process:
            return
        self._is_open = False
        self._context.pins.remove(self)
        keys = self._keys
        with suppress(KVPipeError):
            self._context.client.run(scripts.UNPIN, keys, keys.pins, self._token, keys.channel)


class ValkeyLease(Lease):
    """A value whose manifest has the token of this lease, until a time of the server."""

    def __init__(
        self, context: Context, keys: ValueKeys, key: bytes, manifest: Manifest, token: bytes, *, ends_at_s: float
    ) -> None:
        self._context, self._keys, self._manifest, self._token = context, keys, manifest, token
        self.key, self.num_bytes, self.record = key, manifest.num_bytes, manifest.record
        # Counted from before the question, so that it ends here before it ends at the server.
        self._ends_at_s = ends_at_s
        self._is_open = True

    def read_into(self, out: Buffer) -> None:
        """Reads the bytes; see `Value.read_into`."""
        view = check_out(out, self.num_bytes)
        with self._context.counters.counting_refusals():
            self._check()
            try:
                read_parts(self._context, self._keys, self._manifest, view)
            except PeerLostError:
                self._check()
                raise
            self._check()

    def renew(self, lease_s: float = LEASE_S) -> None:
        """Extends the lease; see `Lease.renew`."""
        began_s = time.monotonic()
        with self._context.counters.counting_refusals():
            self._run("renew", lease_s)
        self._ends_at_s = began_s + lease_s

    def acknowledge(self) -> None:
        """Deletes the value; see `Lease.acknowledge`."""
        with self._context.counters.counting_refusals():
            self._run("acknowledge")
        self._is_open = False

    def release(self) -> None:
        """Returns the value; see `Lease.release`."""
        if not self._is_open or not self._context.client.is_own_process:
            return
        with suppress(KVPipeError):
            self._run("release")
        self._is_open = False

    def _run(self, operation: str, lease_s: float = 0) -> None:
        self._check()
        keys, client = self._keys, self._context.client
        arguments = (self._token, round(lease_s * 1000), keys.channel)
        if client.run(scripts.LEASE, keys, keys.pins, operation, *arguments) == 0:
            raise self._ended()

    def _check(self) -> None:
        self._context.client.check()
        if not self._is_open or time.monotonic() >= self._ends_at_s:
            raise self._ended()

    def _ended(self) -> TransferTimeoutError:
        return TransferTimeoutError(f"the lease of {self.key!r} has ended; another caller may have the value")


def read_parts(context: Context, keys: ValueKeys, manifest: Manifest, view: memoryview) -> None:
    """Reads and verifies all parts of a value.

    Raises:
        CorruptDataError: A part is not there, or not what was committed. The value was deleted.
        PeerLostError: The server was lost, or the value was deleted meanwhile.
    """
    if not manifest.parts:
        return
    parts = [(keys.part(manifest.epoch, number), size) for number, (size, _) in enumerate(manifest.parts)]
    outcomes = context.bulk.read(view, parts)
    with context.client.counting_losses():
        problem = _problem(manifest, view, outcomes)
    if problem is None:
        return
    was_there = context.client.run(scripts.DISCARD, keys, keys.pins, manifest.epoch) == 1
    if not was_there and "-1" in problem:
        context.counters.add("num_lost")
        raise PeerLostError("the value was deleted while it was open")
    context.counters.add("num_corrupt")
    raise CorruptDataError(f"{problem}; the value was deleted")


def _problem(manifest: Manifest, view: memoryview, outcomes: Sequence[Outcome]) -> str | None:
    """Error in the parts that were read."""
    start = 0
    for number, ((size, checksum), outcome) in enumerate(zip(manifest.parts, outcomes, strict=True)):
        if isinstance(outcome, str):
            error = error_of(outcome)
            if not isinstance(error, CorruptDataError):
                raise error
            return f"part {number}: {outcome}"
        if outcome is not None:
            return f"part {number} has {outcome} bytes, {size} were committed"
        if _kvpipe.checksums(view[start : start + size], [0], size) != [checksum]:
            return f"the checksum of part {number} does not match"
        start += size
    return None
