"""ValkeyStore: values in Valkey or Redis."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvpipe.exceptions import ConfigError, CorruptDataError, KVPipeError
from kvpipe.store.base import LEASE_S, KVStore, Lease, Reservation, StoreStats, Value, ValueInfo
from kvpipe.store.checks import check_key, check_size
from kvpipe.store.valkey import scripts
from kvpipe.store.valkey.bulk import Bulk
from kvpipe.store.valkey.client import Client
from kvpipe.store.valkey.context import Context
from kvpipe.store.valkey.keys import KeySpace
from kvpipe.store.valkey.pins import PinRenewer
from kvpipe.store.valkey.settings import ValkeySettings
from kvpipe.store.valkey.values import Manifest, ValkeyLease, ValkeyReservation, ValkeyValue
from kvpipe.store.valkey.wakeups import Wakeups

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from kvpipe.store.valkey.keys import ValueKeys

_LIST_PAGE = 500
# A call that waits asks again after so many times `answer_s`: later than a silent server is known.
_ASK_AGAIN_AFTER = 3


class ValkeyStore(KVStore):
    """A store in Valkey or Redis 6.2 and newer, one server or a cluster, which keeps and evicts the values.

    The bytes of values travel in parts of at most `part_bytes` over several connections, without a copy in Python.
    Scripts have connections of their own, and all calls that wait share one. Each part has a checksum, which is
    verified when it is read: a value that was changed or lost a part is deleted, and a miss afterwards.

    The server's `maxmemory-policy` says what happens when its memory is used up. Recommended is `allkeys-lru`: values
    that are open may be evicted too, and reading them then raises `CorruptDataError` or `PeerLostError`. With
    `noeviction`, `reserve` and `write` raise `CapacityError` at once; they do not wait for space. With the `volatile-`
    policies, only values with a `ttl_s` and reservations are evicted.

    What a killed process leaves ends by time: its reservations and their parts after `reservation_s`, leases at their
    end, and open values can be taken after `pin_s`. A user of the server's ACL needs `~PREFIX:*`, `&PREFIX:*` and
    `+@all`, or those commands that `kvpipe.store.valkey.scripts` uses.

    A server that has become a replica, loads its data or is not reached is left, with all connections to it, for the
    first host of the URL that is a primary. What was refused is done there. Reservations, leases and open values of the
    old server end, unless they were replicated. Calls that wait learn of it within three times `answer_s`.

    In a forked child process, every call raises `ClosedError`.
    """

    def __init__(self, settings: ValkeySettings, timeout: float = 10) -> None:
        client = Client(settings, timeout)
        self._context = Context(settings, client, Bulk(client), PinRenewer(settings.pin_s), client.counters)
        self._keys = KeySpace(settings.prefix)
        self._wakeups = Wakeups(client)
        self._open: WeakSet[Reservation | Value] = WeakSet()

    @classmethod
    def open(cls, url: str, *, token: str | None = None, timeout: float = 10) -> Self:  # noqa: ARG003 - of other stores
        """Connects to a server or a cluster.

        Args:
            url: `valkey://[[user]:password@]host[:port][,host...][/database][?name=value&...]`; `redis://` is the same,
                `valkeys://` and `rediss://` use TLS. The names are the attributes of `ValkeySettings` that have a
                default.
            token: Not used.
            timeout: Seconds to wait for the server.

        Raises:
            ConfigError: The URL is malformed.
            ConnectError: The server does not answer, still loads its data, or is a replica.
            AuthenticationError: The server refuses the user or password.
            IncompatiblePeerError: The server is too old.
        """
        return cls(ValkeySettings.from_url(url), timeout)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns true for each key that can be selected now, in one round trip to each server."""
        manifests = [self._keys.manifest(check_key(key)) for key in keys]
        self._context.client.check()
        return self._context.bulk.exist(manifests) if manifests else []

    def reserve(
        self,
        key: bytes,
        num_bytes: int,
        *,
        ttl_s: float | None = None,
        timeout: float | None = 0,  # noqa: ARG002 - of other stores
    ) -> Reservation | None:
        """Reserves a key; see `KVStore.reserve`. Space is not waited for: `timeout` has no effect."""
        keys = self._keys.of(check_key(key))
        check_size(num_bytes, self._context.client.capacity_bytes)
        if ttl_s is not None and ttl_s <= 0:
            message = f"ttl_s={ttl_s!r}: expected seconds, more than 0"
            raise ConfigError(message)
        reservation = ValkeyReservation(self._context, keys, key, num_bytes, ttl_s)
        if not reservation.begin():
            return None
        self._open.add(reservation)
        return reservation

    def select(self, key: bytes, *, timeout: float | None = 0) -> Value | None:
        """Returns a value for reading; see `KVStore.select`."""
        keys = self._keys.of(check_key(key))
        token = secrets.token_hex(8).encode()
        found = self._find(keys, "select", token, self._context.settings.pin_s, timeout)
        if found is None:
            return None
        value = ValkeyValue(self._context, keys, key, found[0], token)
        self._context.pins.add(value)
        self._open.add(value)
        return value

    def take(self, key: bytes, *, lease_s: float = LEASE_S, timeout: float | None = 0) -> Lease | None:
        """Returns a value to one caller; see `KVStore.take`."""
        keys = self._keys.of(check_key(key))
        token = secrets.token_hex(8).encode()
        found = self._find(keys, "take", token, lease_s, timeout)
        if found is None:
            return None
        lease = ValkeyLease(self._context, keys, key, found[0], token, ends_at_s=found[1] + lease_s)
        self._open.add(lease)
        return lease

    def _find(
        self, keys: ValueKeys, mode: str, token: bytes, held_s: float, timeout: float | None
    ) -> tuple[Manifest, float] | None:
        """Attempts until there is a value or the time is over; also returns when the last attempt began."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        found, _ = self._attempt(keys, mode, token, held_s)
        if found is None and (timeout is None or timeout > 0):
            self._context.counters.add("num_waits")
            with self._wakeups.listening(keys.channel) as waiter:
                while found is None and (deadline_s is None or time.monotonic() < deadline_s):
                    free_at_s = None
                    if waiter.begin():
                        found, free_at_s = self._attempt(keys, mode, token, held_s)
                    if found is None:
                        # A server that was demoted keeps its connections, and may say nothing any more.
                        again_at_s = time.monotonic() + _ASK_AGAIN_AFTER * self._context.settings.answer_s
                        waiter.wait(_until(deadline_s, free_at_s, again_at_s))
                if found is None:
                    waiter.begin()
        counters = self._context.counters
        if found is None:
            counters.add("num_misses")
        else:
            counters.add("num_hits")
            counters.add("hit_bytes", found[0].num_bytes)
        return found

    def _attempt(
        self, keys: ValueKeys, mode: str, token: bytes, held_s: float
    ) -> tuple[tuple[Manifest, float] | None, float | None]:
        """Returns the value and when the attempt began, or when a lease or pin of others ends."""
        began_s = time.monotonic()
        try:
            reply = self._context.client.run(scripts.FIND, keys, keys.pins, mode, token, round(held_s * 1000))
            outcome, *fields = reply
            if outcome == b"found":
                return (Manifest.parse(fields), began_s), None
        except CorruptDataError:
            # Not a manifest, which no script can have written.
            self._context.client.run_command(keys.manifest, b"UNLINK", keys.manifest)
            outcome = b"corrupt"
        if outcome == b"corrupt":
            self._context.counters.add("num_corrupt")
        # A millisecond later than the server's clock, which the script rounds down.
        return None, (time.monotonic() + fields[0] / 1000 + 0.001) if outcome == b"busy" else None

    def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes values that are neither open nor leased, and returns their number."""
        num_deleted = 0
        for of_value in [self._keys.of(check_key(key)) for key in keys]:
            num_deleted += self._context.client.run(scripts.DELETE, of_value, of_value.pins)
        return num_deleted

    def list(self, prefix: bytes = b"") -> Iterator[ValueInfo]:
        """Iterates over the values whose keys begin with `prefix`, in no order; it looks at every key of the server."""
        seen: set[bytes] = set()
        client = self._context.client
        for server in client.cluster.servers() if client.cluster is not None else [None]:
            cursor, generation = None, client.primary.generation
            while cursor != b"0":
                scan = (b"SCAN", cursor or b"0", b"MATCH", self._keys.pattern(prefix), b"COUNT", b"%d" % _LIST_PAGE)
                cursor, page = client.run_at(server, *scan)
                manifests = [manifest for manifest in dict.fromkeys(page) if manifest not in seen]
                seen.update(manifests)
                for manifest, found in zip(manifests, self._context.bulk.describe(manifests), strict=True):
                    if found is not None:
                        yield ValueInfo(self._keys.key_of(manifest), found[0], is_leased=not found[1])
                if generation != client.primary.generation:
                    # The cursor of one server means nothing to another one.
                    cursor, generation = None, client.primary.generation

    def stats(self) -> StoreStats:
        """Returns counters of this client. The content is not counted: other clients and the server change it."""
        context = self._context
        context.client.check()
        return StoreStats(
            capacity_bytes=context.client.capacity_bytes,
            num_waiting=self._wakeups.num_waiting,
            **context.counters.snapshot(),
            details={"servers": context.client.address, "is_cluster": context.client.cluster is not None},
        )

    def close(self) -> None:
        """Ends the use of the store here; see `KVStore.close`."""
        client = self._context.client
        if client.is_closed or not client.is_own_process:
            return
        self._wakeups.close()
        self._context.pins.close()
        with suppress(KVPipeError):
            # A server that is lost ends them by time; the first one that it does not answer ends this.
            self._end_all()
        client.close()

    def _end_all(self) -> None:
        client = self._context.client
        for each in list(self._open):
            client.run_at(client.servers()[0], b"PING")
            if isinstance(each, Reservation):
                each.abort()
            else:
                each.close()

    def __repr__(self) -> str:
        state = "closed" if self._context.client.is_closed else "open"
        return f"<ValkeyStore {self._context.client.address} {state}, prefix {self._context.settings.prefix}>"


def _until(*times_s: float | None) -> float:
    """Seconds until the earliest of these times."""
    return max(0.0, min(time_s for time_s in times_s if time_s is not None) - time.monotonic())
