"""Stores that tests watch, delay and break. Engines open them by `tests.vllm.store.stores:SharedStore:NAME`."""

from __future__ import annotations

import threading
from typing import Any, Self

from kvpipe import _kvpipe
from kvpipe.store import KVStore, LocalStore

URL = "tests.vllm.store.stores:SharedStore:"
WAIT_S = 20


class SharedStore(LocalStore):
    """One store for each name, for all engines of this process; closing it does nothing.

    `is_open`: calls wait while it is cleared. `failure` is raised by every call while it is set. `on_select` is called
    with each key before it is looked for, `on_put` with each key before it is put. `lookups` has the keys of each
    question. `on_open` is called with the name before a store is opened. `has_parts`: true if values are read in parts.
    """

    of: dict[str, SharedStore] = {}  # noqa: RUF012 - the registry
    on_open = staticmethod(lambda _: None)

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        super().__init__(capacity_bytes)
        self.is_open = threading.Event()
        self.is_open.set()
        self.failure: Exception | None = None
        self.lookups: list[list[bytes]] = []
        self.on_select = self.on_put = lambda _: None
        self.num_puts = self.num_selects = 0
        self.has_parts = True

    @classmethod
    def open(cls, url: str, *, token: str | None = None, timeout: float = 10) -> Self:
        cls.on_open(url)
        return cls.of.setdefault(url, cls())

    @property
    def keys(self) -> list[bytes]:
        return sorted(info.key for info in self.list())

    def _use(self) -> None:
        assert self.is_open.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure

    def exists(self, keys: Any) -> list[bool]:
        self.lookups.append(list(keys))
        self._use()
        return super().exists(keys)

    def put(self, key: bytes, *arguments: Any, **more: Any) -> bool:
        self.num_puts += 1
        self.on_put(key)
        self._use()
        return super().put(key, *arguments, **more)

    def select(self, key: bytes, **more: Any) -> Any:
        self.num_selects += 1
        self.on_select(key)
        self._use()
        value = super().select(key, **more)
        if value is not None:
            value.read_parts = (lambda parts: _read_parts(value, parts)) if self.has_parts else (lambda _: None)
        return value

    def replace(self, key: bytes, data: bytes) -> None:
        """Changes a value, as by hand in a database."""
        assert self.delete([key]) == 1
        assert LocalStore.put(self, key, data)

    def read(self, key: bytes) -> bytes | None:
        """The bytes of a value, None if it is gone: an engine's thread deletes a corrupt one at any time."""
        value = LocalStore.select(self, key)
        if value is None:
            return None
        with value:
            return bytes(value.read())

    def close(self) -> None:
        pass


def _read_parts(value: Any, parts: Any) -> int | None:
    """Reads a value of any size in parts, as kvpipe's own store does with large ones."""
    data = memoryview(value.read())
    views = [memoryview(part).cast("B") for part in parts]
    if sum(view.nbytes for view in views) != data.nbytes:
        return None
    at = 0
    for view in views:
        view[:] = data[at : at + view.nbytes]
        at += view.nbytes
    checksum: int = _kvpipe.checksums(data, [0], data.nbytes)[0]
    return checksum


class NoStore:
    """Not a store."""


assert issubclass(SharedStore, KVStore)
