"""LocalStore: a store of this process alone, for tests of programs that use a `KVStore`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError
from kvpipe.store.base import RESERVATION_S
from kvpipe.store.remote import RemoteStore, connect
from kvpipe.store.server import DEFAULT_CAPACITY_BYTES, StoreServer

if TYPE_CHECKING:
    from typing import Self


class LocalStore(RemoteStore):
    """A `StoreServer` with a token that no other process knows, and a client of it.

    Args:
        capacity_bytes: Limit for the memory of all values and reservations, counted as by `StoreServer`.
        reservation_s: Seconds after its last call at which a reservation ends.
    """

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES, *, reservation_s: float = RESERVATION_S) -> None:
        token = secrets.token_hex(16)
        self._server = StoreServer(capacity_bytes=capacity_bytes, token=token, reservation_s=reservation_s)
        try:
            super().__init__(connect(self._server.address, token))
        except BaseException:
            self._server.close()
            raise

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

    def close(self) -> None:
        """Drops all values, and ends waiting calls with `ClosedError`."""
        super().close()
        self._server.close()
