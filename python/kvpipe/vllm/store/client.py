"""The store of one process: opened when the process starts, and again after it was lost."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from vllm.logger import init_logger

from kvpipe._redaction import redact
from kvpipe.exceptions import ClosedError, ConnectError, PeerLostError, TransferTimeoutError
from kvpipe.store.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpipe.store.base import KVStore

T = TypeVar("T")

logger = init_logger("vllm.kvpipe.store")

# For the first time a store is opened: engines, and often the store, start at the same time, on busy machines.
_FIRST_OPEN_S = 10.0


class StoreClient:
    """A store that may be away for a while. Any thread may use it, except those of vLLM's hooks: each call may wait.

    Args:
        url: See `open_store`.
        timeout_s: Seconds to wait for the store when it is opened again.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._store: KVStore | None = None
        self._is_closed = False

    def open(self) -> None:
        """Opens the store before it is needed. If it is away, the next use tries again."""
        try:
            self._opened(_FIRST_OPEN_S)
        except Exception as error:  # noqa: BLE001 - a user's store may raise anything; the engine works without it
            if not self._is_closed:
                logger.warning("store.away url=%s; it is opened with the next use: %s", redact(self._url), error)

    def run(self, operation: Callable[[KVStore], T]) -> T:
        """Runs an operation on the store. Whatever it raises is raised; a store that was lost is opened next time.

        Raises:
            ConnectError: The store cannot be opened.
            AuthenticationError: It refuses this process.
            ClosedError: This client was closed.
        """
        store = self._opened(self._timeout_s)
        try:
            return operation(store)
        except (PeerLostError, ClosedError):
            self._forget(store)
            raise

    def close(self) -> None:
        """Closes the store, which ends calls that wait for it."""
        self._is_closed = True
        store = self._store
        if store is not None:
            store.close()

    def _opened(self, timeout_s: float) -> KVStore:
        with self._lock:
            if self._store is None and not self._is_closed:
                self._store = open_store(self._url, timeout=timeout_s)
                logger.info("store.open url=%s", redact(self._url))
            if self._store is None or self._is_closed:
                self.close()
                message = "the connector was shut down"
                raise ClosedError(message)
            return self._store

    def _forget(self, store: KVStore) -> None:
        with self._lock:
            if self._store is store:
                self._store = None
                if not self._is_closed:
                    logger.warning("store.lost url=%s; it is opened again with the next use", redact(self._url))
        store.close()


def failure_reason(error: Exception) -> str:
    """Returns the kind of a failure, for metrics: `timeout`, `lost`, or `error` for what no store should raise."""
    if isinstance(error, TransferTimeoutError):
        return "timeout"
    return "lost" if isinstance(error, PeerLostError | ConnectError | ClosedError) else "error"
