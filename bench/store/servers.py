"""The servers of a run, and what they have left at its end."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

from bench.instances.servers import Server
from bench.processes import until
from bench.store.values import TTL_S, content_of
from kvpipe.exceptions import KVPipeError
from kvpipe.launch.ports import free_ports
from kvpipe.store.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from random import Random

    from bench.instances.servers import ServerPool
    from bench.store.results import Survival
    from kvpipe.store.base import KVStore

HOST = "127.0.0.1"
_ANSWER_S = 10.0
# Leases and open values of the clients end after 1.5 s, reservations after 9/8 of 2 s.
RESERVATION_S = 2
SETTLES_WITHIN_S = 8.0
_CAPACITY = "24M"
_DISK_CAPACITY = "256M"
_FROZEN_FOR_S = (0.2, 2.5)


class Store:
    """The servers of one store.

    Attributes:
        name: Of the table.
        url: What clients open.
        opens_again: True if a client opens the store again when its server was lost.
        answer_s: Bound of a call, beside the time that it waits by itself.
        num_evicted: Entries that its servers have evicted while that was watched.
        faults: Each with its name; see `make`.
    """

    name: str
    url: str
    opens_again = False
    answer_s: float

    def __init__(self, name: str, random: Random) -> None:
        self.name, self._random = name, random
        self.num_evicted = 0
        self.faults: Mapping[str, Callable[[], None]] = {
            "servers killed": self.kill,
            "servers frozen": self.freeze,
        }

    def make(self, fault: str) -> None:
        """Makes one of its faults, and returns when its servers serve again.

        Raises:
            SubjectError: They do not.
        """
        self.faults[fault]()

    def servers(self) -> list[Server]:
        """Returns its servers."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kills a server, and starts it again."""
        self._replace(self._random.choice(self.servers()))

    def _replace(self, server: Server) -> None:
        server.end()
        server.start()
        server.until_healthy()

    def freeze(self) -> None:
        """Stops a server for a while."""
        server = self._random.choice(self.servers())
        server.signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(*_FROZEN_FOR_S))
        server.signal(signal.SIGCONT)

    def look(self, found: Survival) -> None:
        """Counts what is left once no client is there, takes all values, and looks again."""
        time.sleep(TTL_S + RESERVATION_S / 8)
        try:
            with open_store(self.url, timeout=_ANSWER_S) as store:
                self._look(store, found)
        except KVPipeError as error:
            found.fail("unanswered", f"{type(error).__name__}: {error}")

    def _look(self, store: KVStore, found: Survival) -> None:
        raise NotImplementedError

    def _take_all(self, store: KVStore, found: Survival, *, may_lose: bool) -> None:
        """Takes the values of all clients, and one more that is put before."""
        store.put(b"last", content_of(b"last", b"0"), b"0")
        for info in list(store.list()):
            lease = store.take(info.key)
            if lease is None:
                # A value that has lost a part is deleted when it is asked for.
                if not may_lose:
                    found.fail("leases_left", f"{info.key!r} is listed and cannot be taken")
                continue
            with lease:
                if lease.read() != content_of(info.key, lease.record):
                    found.fail("wrong", f"{info.key!r} has other bytes at the end")
                lease.acknowledge()


class OwnStore(Store):
    """`kvpipe store serve` with little memory and a disk."""

    opens_again = True
    answer_s = 6.0

    def __init__(self, name: str, pool: ServerPool, random: Random, folder: Path) -> None:
        super().__init__(name, random)
        [port] = free_ports(1)
        self.url = f"kvpipe://{HOST}:{port}"
        command = [sys.executable, "-m", "kvpipe", "store", "serve", "--listen", f"{HOST}:{port}"]
        command += ["--capacity", _CAPACITY, "--disk", str(folder / "disk"), "--disk-capacity", _DISK_CAPACITY]
        self._server = _OwnServer(name, self.url, command, {}, folder / f"{port}.log", watchdog=pool.watchdog)
        pool.add(self._server)
        self._server.until_healthy()

    def servers(self) -> list[Server]:
        """Returns the server."""
        return [self._server]

    def _look(self, store: KVStore, found: Survival) -> None:
        def is_settled() -> bool:
            stats = store.stats()
            held = (stats.num_reserved, stats.num_leased, stats.num_waiting, stats.details["num_clients"])
            return held == (0, 0, 0, 1)

        if not until(is_settled, SETTLES_WITHIN_S):
            found.fail("leases_left", f"held at the end: {store.stats()}")
        listed, stats = list(store.list()), store.stats()
        if stats.num_values != len(listed):
            num_leaked = abs((stats.num_values or 0) - len(listed))
            found.fail("leaked", f"{len(listed)} values are listed: {stats}", num_leaked)
        self._take_all(store, found, may_lose=False)
        if not until(lambda: _is_empty(store), SETTLES_WITHIN_S):
            found.fail("leaked", f"left when all values were taken: {store.stats()}")


def _is_empty(store: KVStore) -> bool:
    stats = store.stats()
    left = (stats.num_values, stats.num_bytes, stats.num_reserved, stats.num_leased)
    return not any((*left, stats.details["num_disk_values"], stats.details["num_disk_bytes"]))


class _OwnServer(Server):
    def is_healthy(self) -> bool:
        """Returns whether a client can ask it."""
        try:
            with open_store(self.url, timeout=1) as store:
                store.exists([b"x"])
        except KVPipeError:
            return False
        return True
