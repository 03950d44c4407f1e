"""What the objects of one store share: `Context`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpipe.store.valkey.bulk import Bulk
    from kvpipe.store.valkey.client import Client
    from kvpipe.store.valkey.pins import PinRenewer
    from kvpipe.store.valkey.settings import ValkeySettings


@dataclass(frozen=True)
class Context:
    """Connections and counters of a store."""

    settings: ValkeySettings
    client: Client
    bulk: Bulk
    pins: PinRenewer
    counters: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def count(self, name: str) -> None:
        """Adds one to a counter of `StoreStats`."""
        with self._lock:
            self.counters[name] += 1
