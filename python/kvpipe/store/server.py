"""StoreServer: kvpipe's own memory server for values, in this process. `kvpipe store serve` runs one."""

from __future__ import annotations

import os

from kvpipe import _kvpipe
from kvpipe._closing import Closing
from kvpipe._transport import transport
from kvpipe.config import resolve_tokens
from kvpipe.exceptions import ConfigError
from kvpipe.store.base import RESERVATION_S, StoreStats
from kvpipe.store.remote import stats_of

DEFAULT_CAPACITY_BYTES = 1 << 30


class StoreServer(Closing):
    """Serves a store in memory, by a thread of its own. Clients are `RemoteStore`s, also in this process.

    When space is needed, it evicts the values that are neither open nor leased, the longest unused first. What a client
    holds ends with its connection. Without a disk, values are lost with the server.

    With a disk, values without a time to live are written there soon after their commit: what is evicted from memory is
    loaded again when it is wanted, and the next server with that disk has what was written. A value that was deleted or
    acknowledged does not come back. `close` writes the rest.

    Args:
        address: `host:port` to listen at; port 0 picks a free one, see the property `address`.
        capacity_bytes: Limit for the memory of all values and reservations. A value counts its bytes (from 4 MiB on
            rounded up to 2 MiB), its key and record, and 512 bytes. Memory of deleted values, at most 1 GiB, is kept
            for 60 s beside it.
        quota_bytes: Limit for that memory of each namespace, the first 14 bytes of a key; a shorter key is one of its
            own. A namespace without room evicts its own values that are not held, and no other's; while its held values
            and reservations leave no room, `reserve` raises `CapacityError` at once, and a value that is on disk alone
            is a miss. By default there is none. The disk has none.
        token: The shared secret; by default `KVPIPE_TOKEN`. Required for addresses other than loopback.
        reservation_s: Seconds after its last call at which a reservation ends.
        disk: A directory for values beyond memory, for this server alone; made if it does not exist. What the server
            knows of each value there, about 600 bytes and its key, is memory beside the capacity.
        disk_capacity_bytes: Limit for the bytes of all values there, each rounded up to 4 KiB, and 4 KiB more. The
            file takes up to 1.7 times as much of the disk.

    Raises:
        ConfigError: The address cannot be bound, others could reach it without a token, or the disk cannot be used.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        quota_bytes: int | None = None,
        token: str | None = None,
        reservation_s: float = RESERVATION_S,
        disk: str | os.PathLike[str] | None = None,
        disk_capacity_bytes: int | None = None,
    ) -> None:
        _check_bytes("capacity_bytes", capacity_bytes)
        if quota_bytes is not None:
            _check_bytes("quota_bytes", quota_bytes)
        tier = None
        if disk is not None and disk_capacity_bytes is not None:
            _check_bytes("disk_capacity_bytes", disk_capacity_bytes)
            tier = (os.fspath(disk), disk_capacity_bytes)
        elif disk is not None or disk_capacity_bytes is not None:
            message = "disk and disk_capacity_bytes belong together: a directory, and how many bytes it may hold"
            raise ConfigError(message)
        secret = resolve_tokens(token)
        self._native = _kvpipe.StoreServer(
            address, secret, transport(), capacity_bytes, quota_bytes, reservation_s, tier
        )

    @property
    def address(self) -> str:
        """Address that clients connect to: `host:port`."""
        return self._native.address

    @property
    def url(self) -> str:
        """URL that clients open."""
        return f"kvpipe://{self.address}"

    def stats(self) -> StoreStats:
        """Returns content and counters. `details` has `num_clients`, `num_over_quota`, and those of the disk.

        Raises:
            ClosedError: The server was closed.
        """
        return stats_of(self._native.stats())

    def close(self) -> None:
        """Ends the server: its clients lose it, and what only memory has is written to the disk or dropped.

        A second call does nothing.
        """
        self._native.close()

    def __repr__(self) -> str:
        return f"<StoreServer {self.url}>"


def _check_bytes(name: str, num_bytes: object) -> None:
    if not isinstance(num_bytes, int) or not 1 <= num_bytes < 1 << 63:
        message = f"{name}={num_bytes!r}: expected a number of bytes, 1 or more"
        raise ConfigError(message)
