"""A client process of a run: threads that call a store at random, and a line of output for each call.

::

    python -m bench.store.client URL SEED NAME OPENS_AGAIN ANSWER_S

It ends with its input. NAME begins the records of its values, of which no two are the same.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from bench.programs.request import compose
from bench.store.values import NUM_KEYS, TTL_S, content_of, key_of
from kvpipe.exceptions import ClosedError, ConnectError, KVPipeError, PeerLostError
from kvpipe.store.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpipe.store.base import KVStore, Lease, Reservation, Value

T = TypeVar("T")

NUM_THREADS = 2
LEASE_S = 1.5
OPENS_WITHIN_S = 1.0
# Of a take or select that waits.
WAITS_S = 0.3
_LONGEST_PAUSE_S = 0.02
# Between the halves of a value, and with a lease: long enough to be killed in.
_LONGEST_STEP_S = 0.05
_ASK_AGAIN_AFTER_S = 0.1


class FailedError(Exception):
    """A call has failed with an error of kvpipe, and was reported."""


class _Output:
    """Prints whole lines of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def report(self, **words: object) -> None:
        line = compose("ok", words).encode() + b"\n"
        with self._lock, suppress(BrokenPipeError):
            os.write(1, line)


class _Opened:
    """A store that is opened again when its server was lost, where its class asks for that."""

    def __init__(self, url: str, *, opens_again: bool) -> None:
        self._url, self._opens_again = url, opens_again
        self._lock = threading.Lock()
        self._store: KVStore | None = None

    def get(self) -> KVStore:
        with self._lock:
            if self._store is None:
                self._store = open_store(self._url, timeout=OPENS_WITHIN_S)
            return self._store

    def lost(self, store: KVStore) -> None:
        with self._lock:
            if self._opens_again and self._store is store:
                store.close()
                self._store = None

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()


class _Caller:
    """The calls of one thread."""

    def __init__(self, output: _Output, opened: _Opened, seed: str, names: Iterator[bytes], answer_s: float) -> None:
        self._output, self._opened, self._names, self._answer_s = output, opened, names, answer_s
        self._random = random.Random(seed)  # noqa: S311 - no secret
        actions: dict[Callable[[KVStore, bytes], None], int] = {
            self._put: 20,
            self._reserve: 10,
            self._exists: 15,
            self._select: 25,
            self._take: 25,
            self._delete: 3,
            self._list: 2,
        }
        self._actions, self._weights = list(actions), list(actions.values())

    def run(self, has_ended: threading.Event) -> None:
        """Calls until the end."""
        while not has_ended.wait(self._random.uniform(0, _LONGEST_PAUSE_S)):
            [act] = self._random.choices(self._actions, self._weights)
            key = key_of(self._random.randrange(NUM_KEYS))
            try:
                act(self._open(), key)
            except FailedError:
                pass
            except Exception as error:  # noqa: BLE001 - a bug is a result of the run
                where = ">".join(frame.name for frame in traceback.extract_tb(error.__traceback__))
                self._output.report(bug=type(error).__name__, where=where)

    def _open(self) -> KVStore:
        try:
            return self._opened.get()
        except KVPipeError as error:
            self._output.report(error=type(error).__name__)
            time.sleep(_ASK_AGAIN_AFTER_S)
            raise FailedError from error

    def _call(self, name: str, store: KVStore, function: Callable[[], T], waits_s: float = 0) -> tuple[T, int]:
        """Calls the store and reports the call; also returns when it began."""
        began_ns, error, is_lost = time.monotonic_ns(), "bug", False
        try:
            result = function()
            error = ""
        except KVPipeError as caught:
            error = type(caught).__name__
            is_lost = isinstance(caught, PeerLostError | ClosedError | ConnectError)
            raise FailedError from caught
        finally:
            took_ns = time.monotonic_ns() - began_ns
            late_ns = took_ns - round((waits_s + self._answer_s) * 1e9)
            self._output.report(call=name, began=began_ns, took=took_ns, late=late_ns, error=error)
            if is_lost:
                self._opened.lost(store)
        return result, began_ns

    def _found(self, what: str, record: bytes, at_ns: int) -> None:
        self._output.report(**{what: record.hex(), "at": at_ns})

    # --- actions

    def _put(self, store: KVStore, key: bytes) -> None:
        record = next(self._names)
        data = content_of(key, record)
        ttl_s = self._random.choice((None, None, None, TTL_S))
        self._output.report(now="put")
        self._call("put", store, lambda: store.put(key, data, record, ttl_s=ttl_s))

    def _reserve(self, store: KVStore, key: bytes) -> None:
        record = next(self._names)
        data = content_of(key, record)
        reservation, _ = self._call("reserve", store, lambda: store.reserve(key, len(data)))
        if reservation is None:
            return
        self._output.report(now="put")
        with reservation:
            self._write(store, reservation, data)
            if self._random.random() < 0.9:  # noqa: PLR2004 - others are aborted
                self._call("commit", store, lambda: reservation.commit(record))

    def _write(self, store: KVStore, reservation: Reservation, data: bytes) -> None:
        middle = len(data) // 2
        for part in (data[:middle], data[middle:]):
            self._call("write", store, functools.partial(reservation.write, part))
            time.sleep(self._random.uniform(0, _LONGEST_STEP_S))

    def _exists(self, store: KVStore, key: bytes) -> None:
        keys = [key, *map(key_of, range(NUM_KEYS))]
        self._call("exists", store, lambda: store.exists(keys))

    def _select(self, store: KVStore, key: bytes) -> None:
        waits_s = self._waits_s()
        value, began_ns = self._call("select", store, lambda: store.select(key, timeout=waits_s), waits_s)
        if value is not None:
            self._found("seen", value.record, began_ns)
            with value:
                self._read(store, value)

    def _take(self, store: KVStore, key: bytes) -> None:
        waits_s = self._waits_s()
        lease, began_ns = self._call("take", store, lambda: store.take(key, lease_s=LEASE_S, timeout=waits_s), waits_s)
        if lease is None:
            return
        self._found("seen", lease.record, began_ns)
        self._output.report(now="lease")
        self._use(store, lease)

    def _use(self, store: KVStore, lease: Lease) -> None:
        share = self._random.random()
        time.sleep(self._random.uniform(0, _LONGEST_STEP_S))
        if share < 0.1:  # noqa: PLR2004 - it ends by time
            time.sleep(LEASE_S)
            self._acknowledge(store, lease)
            return
        with lease:
            self._read(store, lease)
            if share < 0.2:  # noqa: PLR2004
                self._call("renew", store, lambda: lease.renew(LEASE_S))
            if share < 0.8:  # noqa: PLR2004 - others are released
                self._acknowledge(store, lease)

    def _acknowledge(self, store: KVStore, lease: Lease) -> None:
        self._call("acknowledge", store, lease.acknowledge)
        self._found("acknowledged", lease.record, time.monotonic_ns())

    def _read(self, store: KVStore, value: Value) -> None:
        data, _ = self._call("read", store, value.read)
        if data != content_of(value.key, value.record):
            self._output.report(wrong=value.record.hex(), key=value.key.decode())

    def _delete(self, store: KVStore, key: bytes) -> None:
        self._call("delete", store, lambda: store.delete([key]))

    def _list(self, store: KVStore, _: bytes) -> None:
        self._call("list", store, lambda: list(store.list()))

    def _waits_s(self) -> float:
        return self._random.choice((0, 0, WAITS_S))


def main(arguments: Sequence[str]) -> int:
    """Calls a store until the end of the input."""
    url, seed, name, opens_again, answer_s = arguments
    output, has_ended = _Output(), threading.Event()
    opened = _Opened(url, opens_again=bool(int(opens_again)))

    def run(thread: int) -> None:
        names = (f"{name}-{thread}-{number}".encode() for number in itertools.count())
        _Caller(output, opened, f"{seed} {name} {thread}", names, float(answer_s)).run(has_ended)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    has_ended.set()
    for thread in threads:
        thread.join()
    opened.close()
    output.report(ended=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
