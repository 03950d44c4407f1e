"""A KVStore between processes: values put and read, how soon a waiting take wakes, and questions about many keys."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvpipe.store.server import StoreServer
from kvpipe.store.urls import open_store

from . import redis_values
from .side import Idle, Setup, Words, seconds
from .values import ValuesClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpipe.store import KVStore

    from .request import Task

_TIMEOUT_S = 30.0
# By then a consumer that has its value sleeps in its next take.
_PAUSE_S = 0.005
_MOST_THREADS = 8
_MORE_CAPACITY_BYTES = 256 << 20


class Client(ValuesClient):
    """Puts, reads and asks, by one thread or several."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._threads = ThreadPoolExecutor(_MOST_THREADS)
        self._store: KVStore

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects to the server."""
        self._store = open_store(words["url"] + self._options.get("query", ""), timeout=_TIMEOUT_S)
        return {}

    def clear(self, task: Task) -> None:
        """Deletes what other tasks have put, and puts all values once, so that the server's memory has been used."""
        self._store.delete([value.key for value in self._store.list()])
        self._out[:] = 0
        if task.kind != "exists":
            for at in self._all_offsets(task):
                self._put(task, at)
        else:
            for key in _keys(task)[::2]:
                self._store.put(key, b"")

    def run(self, task: Task) -> Words:
        """Runs a task of one kind."""
        return {"put": self._run_put, "get": self._run_get, "exists": self._run_exists}[task.kind](task)

    def _run_put(self, task: Task) -> Words:
        """Replaces values, as SET does for other clients: a server in use has memory only of values that it deletes."""
        return self._timed(task, lambda at: self._replace(task, at))

    def _replace(self, task: Task, at: int) -> None:
        self._store.delete([_key(task, at)])
        self._put(task, at)

    def _put(self, task: Task, at: int) -> None:
        if not self._store.put(_key(task, at), self._source[at : at + task.num_bytes]):
            message = "a value that was deleted is still there"
            raise ValueError(message)

    def _run_get(self, task: Task) -> Words:
        return self._timed(task, lambda at: self._get(task, at))

    def _get(self, task: Task, at: int) -> None:
        value = self._store.select(_key(task, at))
        if value is None:
            message = "a value that was put is not there"
            raise ValueError(message)
        with value:
            value.read_into(self._out[at : at + task.num_bytes])

    def _timed(self, task: Task, work: Callable[[int], None]) -> Words:
        """Does the work at each offset, by as many threads as the subject has."""
        number, offsets = int(task.options["threads"]), task.offsets(len(self._source))

        def work_of(thread: int) -> None:
            for at in offsets[thread::number]:
                work(at)

        if number == 1:
            return seconds(lambda: work_of(0))
        return seconds(lambda: list(self._threads.map(work_of, range(number))))

    def _exist(self, task: Task) -> Sequence[bool]:
        return self._store.exists(_keys(task))


class Consumer(Idle):
    """Waits for each value, and measures; processes of one machine share the monotonic clock."""

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects to the server."""
        self._store = open_store(words["url"], timeout=_TIMEOUT_S)
        return {}

    def run(self, task: Task) -> Words:
        """Takes one value after the other."""
        return {"us": statistics.median(self._wake_us(task, number) for number in range(task.count))}

    def _wake_us(self, task: Task, number: int) -> float:
        lease = self._store.take(_key(task, number), timeout=_TIMEOUT_S)
        woken_ns = time.monotonic_ns()
        if lease is None:
            message = f"no value within {_TIMEOUT_S:.0f} s"
            raise TimeoutError(message)
        with lease:
            lease.acknowledge()
        return (woken_ns - int.from_bytes(lease.record, "big")) / 1e3


class Producer(Idle):
    """Commits the values."""

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects to the server."""
        self._store = open_store(words["url"], timeout=_TIMEOUT_S)
        return {}

    def run(self, task: Task) -> Words:
        """Commits one value after the other, each with the time at which its commit began."""
        for number in range(task.count):
            reservation = self._store.reserve(_key(task, number), task.num_bytes)
            if reservation is None:
                message = "a value that was taken is still there"
                raise ValueError(message)
            with reservation:
                reservation.write(bytes(task.num_bytes))
                time.sleep(_PAUSE_S)
                reservation.commit(time.monotonic_ns().to_bytes(8, "big"))
        return {}


class Server(Idle):
    """kvpipe's own memory server."""

    def __init__(self, setup: Setup) -> None:
        self._server = StoreServer(f"{setup.host}:0", capacity_bytes=2 * setup.total + _MORE_CAPACITY_BYTES)

    def hello(self) -> Words:
        """Returns the URL of the store."""
        return {"url": self._server.url}


def _key(task: Task, number: int) -> bytes:
    return f"{task.kind}/{task.num_bytes}/{task.round if task.kind == 'wake' else 0}/{number}".encode()


def _keys(task: Task) -> list[bytes]:
    """As many keys of a usual length as a question has."""
    return [number.to_bytes(task.num_bytes, "big") for number in range(task.num_blocks)]


ROLES = {
    "client": Client,
    "consumer": Consumer,
    "producer": Producer,
    "server": Server,
    "redis_server": redis_values.Server,
}
