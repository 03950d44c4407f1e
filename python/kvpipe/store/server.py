"""StoreServer: kvpipe's own memory server for values, in this process. `kvpipe store serve` runs one."""

from __future__ import annotations

from kvpipe import _kvpipe
from kvpipe._closing import Closing
from kvpipe._transport import transport
from kvpipe.config import resolve_token
from kvpipe.exceptions import ConfigError
from kvpipe.store.base import RESERVATION_S, StoreStats
from kvpipe.store.remote import stats_of

DEFAULT_CAPACITY_BYTES = 1 << 30


class StoreServer(Closing):
    """Serves a store in memory, by a thread of its own. Clients are `RemoteStore`s, also in this process.

    When space is needed, it evicts the values that nobody has open or leased, the longest unused first. What a client
    holds ends with its connection. Values are lost with the server.

    Args:
        address: `host:port` to listen at; port 0 picks a free one, see the property `address`.
        capacity_bytes: Limit for the memory of all values and reservations. A value counts its bytes (from 4 MiB on
            rounded up to 2 MiB), its key and record, and 512 bytes. Memory of deleted values, at most 1 GiB, is kept
            for 60 s beside it.
        token: The shared secret; by default `KVPIPE_TOKEN`. Required for addresses other than loopback.
        reservation_s: Seconds after its last call at which a reservation ends.

    Raises:
        ConfigError: The address cannot be bound, or others could reach it without a token.
        TransportUnavailableError: There is no usable UCX.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        token: str | None = None,
        reservation_s: float = RESERVATION_S,
    ) -> None:
        if not isinstance(capacity_bytes, int) or not 1 <= capacity_bytes < 1 << 63:
            message = f"capacity_bytes={capacity_bytes!r}: expected a number of bytes, 1 or more"
            raise ConfigError(message)
        secret = resolve_token(token)
        self._native = _kvpipe.StoreServer(address, secret, transport(), capacity_bytes, reservation_s)

    @property
    def address(self) -> str:
        """Where clients connect: `host:port`."""
        return self._native.address

    @property
    def url(self) -> str:
        """What clients open."""
        return f"kvpipe://{self.address}"

    def stats(self) -> StoreStats:
        """Returns content and counters. `details` has `num_clients`.

        Raises:
            ClosedError: The server was closed.
        """
        work = self._native.stats()
        work.wait()
        return stats_of(work.result())

    def close(self) -> None:
        """Ends the server: its values are dropped, and its clients lose it. A second call does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<StoreServer {self.url}>"
