"""A user's own implementation of `KVStore`: a folder with a file for each value, which all processes of a host share.

`tests.e2e.file_store:FileStore:/folder` names it. A value is written beside its place and linked there, so that it
appears at once, whole, and never twice. A take renames it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import Any, Self

from kvpipe.exceptions import ClosedError, ConfigError, PeerLostError, TransferTimeoutError
from kvpipe.store import KVStore, Lease, Reservation, StoreStats, Value, ValueInfo

_NUMBERS = itertools.count()
_RECORD_LENGTH_BYTES = 4


class FileStore(KVStore):
    """Values in files, named by their keys in hex. Its waits poll: it is for tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_closed = False

    @classmethod
    def open(cls, url: str, *, token: str | None = None, timeout: float = 10) -> Self:
        folder = Path(url)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def path(self, key: bytes) -> Path:
        """File of a value."""
        if self._is_closed:
            raise ClosedError("the store was closed")
        return self.folder / key.hex()

    def exists(self, keys: Any) -> list[bool]:
        return [self.path(key).exists() for key in keys]

    def reserve(self, key: bytes, num_bytes: int, *, ttl_s: float | None = None, timeout: float | None = 0) -> Any:
        return None if self.path(key).exists() else _FileReservation(self, key, num_bytes)

    def select(self, key: bytes, *, timeout: float | None = 0) -> Value | None:
        return _wait(lambda: _FileValue.find(key, self.path(key)), timeout)

    def take(self, key: bytes, *, lease_s: float = 30, timeout: float | None = 0) -> Lease | None:
        return _wait(lambda: self._take(key), timeout)

    def _take(self, key: bytes) -> Lease | None:
        leased = self.folder / f"{key.hex()}.leased"
        with contextlib.suppress(FileNotFoundError):
            self.path(key).rename(leased)
            lease = _FileLease.find(key, leased)
            lease.home = self.path(key)
            return lease
        return None

    def delete(self, keys: Any) -> int:
        num_deleted = 0
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self.path(key).unlink()
                num_deleted += 1
        return num_deleted

    def list(self, prefix: bytes = b"") -> Any:
        names = [path.name for path in self.folder.iterdir() if "." not in path.name]
        infos = [ValueInfo(bytes.fromhex(name), (self.folder / name).stat().st_size) for name in names]
        return iter([info for info in infos if info.key.startswith(prefix)])

    def stats(self) -> StoreStats:
        infos = list(self.list())
        return StoreStats(num_values=len(infos), num_bytes=sum(info.num_bytes for info in infos))

    def close(self) -> None:
        self._is_closed = True


class _FileReservation(Reservation):
    def __init__(self, store: FileStore, key: bytes, num_bytes: int) -> None:
        self.key, self.num_bytes = key, num_bytes
        self._home = store.path(key)
        self._path = store.folder / f"{key.hex()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = self._path.open("wb")

    def write(self, data: Any) -> None:
        self._file.write(data)

    def commit(self, record: bytes = b"") -> None:
        if self._file.tell() != self.num_bytes:
            self.abort()
            raise ConfigError("not all was written")
        self._file.write(record + len(record).to_bytes(_RECORD_LENGTH_BYTES, "little"))
        self._file.close()
        with contextlib.suppress(FileExistsError):
            os.link(self._path, self._home)
        self.abort()

    def abort(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class _FileValue(Value):
    @classmethod
    def find(cls, key: bytes, path: Path) -> Any:
        """The value in a file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            value = cls()
            value.key, value.path, value._file = key, path, path.open("rb")
            size = value._file.seek(-_RECORD_LENGTH_BYTES, os.SEEK_END)
            value.num_bytes = size - int.from_bytes(value._file.read(), "little")
            value._file.seek(value.num_bytes)
            value.record = value._file.read()[:-_RECORD_LENGTH_BYTES]
            return value
        return None

    def read_into(self, out: Any) -> None:
        self._file.seek(0)
        if self._file.readinto(out) != self.num_bytes:
            raise PeerLostError("the file was cut")

    def close(self) -> None:
        self._file.close()


class _FileLease(_FileValue, Lease):
    def renew(self, lease_s: float = 30) -> None:
        if not self.path.exists():
            raise TransferTimeoutError("the lease has ended")

    def acknowledge(self) -> None:
        self.path.unlink()

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(self.home)
        self._file.close()

    def close(self) -> None:
        self.release()


def _wait(attempt: Any, timeout: float | None) -> Any:
    deadline_s = float("inf") if timeout is None else time.monotonic() + timeout
    while (found := attempt()) is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found
