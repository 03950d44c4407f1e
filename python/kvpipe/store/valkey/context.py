"""State that the objects of one store share: `Context`, and `Counters`."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from kvpipe.exceptions import TransferTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpipe.store.valkey.bulk import Bulk
    from kvpipe.store.valkey.client import Client
    from kvpipe.store.valkey.pins import PinRenewer
    from kvpipe.store.valkey.settings import ValkeySettings

_NAMES = (
    *("num_committed", "committed_bytes", "num_hits", "hit_bytes", "num_misses"),
    *("num_waits", "num_fenced", "num_lost", "num_corrupt"),
)


class Counters:
    """Counters of `StoreStats` that a client can know."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[name] += number

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a call that is refused because its reservation or lease has ended."""
        try:
            yield
        except TransferTimeoutError:
            self.add("num_fenced")
            raise

    def snapshot(self) -> dict[str, int]:
        """Returns all counters."""
        with self._lock:
            return {name: self._counts[name] for name in _NAMES}


@dataclass(frozen=True)
class Context:
    """Connections and counters of a store."""

    settings: ValkeySettings
    client: Client
    bulk: Bulk
    pins: PinRenewer
    counters: Counters
