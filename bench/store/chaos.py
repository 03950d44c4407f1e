"""Calls of stores while servers and clients are killed, frozen and changed at random."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event, Thread
from typing import TYPE_CHECKING

from bench.instances.servers import ServerPool
from bench.processes import Process, SubjectError
from bench.store.redis_servers import ClusterStore, EvictingStore, RedisStore
from bench.store.results import Ledger
from bench.store.servers import OwnStore

if TYPE_CHECKING:
    from pathlib import Path

    from bench.progress import Progress
    from bench.store.results import Survival
    from bench.store.servers import Store

NUM_CLIENTS = 2
# In which a client is killed.
STAGES = ("put", "lease")
# From the end of a fault until each client has a call without an error.
RECOVERS_WITHIN_S = 10.0
_MOST_CALLS_BETWEEN = 200
# Faults after which a store did not recover.
_GIVES_UP_AFTER = 3
_ENDS_WITHIN_S = 30.0
# Until a client says that it puts, or has a lease.
_REACHED_WITHIN_S = 20.0


def programs() -> dict[str, str]:
    """The servers of Redis and Valkey that were found, by their names."""
    return {name: found for name in ("redis", "valkey") if (found := shutil.which(f"{name}-server"))}


class Chaos:
    """One run.

    Args:
        folder: Folder of logs and data.
        num_calls: Number of calls of all stores together, without those that end with an error.
        seed: Of the calls, of the faults, and after how many calls they come.

    Attributes:
        stores: Outcomes of the calls of each store.
    """

    def __init__(self, folder: Path, num_calls: int, seed: int, progress: Progress) -> None:
        self._folder, self._seed, self._progress = folder, seed, progress
        self._num_calls = num_calls
        self.stores: dict[str, Survival] = {}

    def run(self) -> None:
        """Starts servers and clients, makes faults, ends the clients, and looks at what is left.

        Raises:
            SubjectError: A server does not start.
        """
        with ServerPool() as pool:
            stores = self._start(pool)
            runs = [
                _StoreRun(store, self._seed, -(-self._num_calls // len(stores)), self._progress) for store in stores
            ]
            self._progress.expect(len(runs))
            # No store waits for the faults of another one.
            with ThreadPoolExecutor(len(runs)) as threads:
                for each in [threads.submit(one.run) for one in runs]:
                    each.result()
        self._progress.end()
        self.stores = {one.store.name: one.ledger.found for one in runs}

    def _start(self, pool: ServerPool) -> list[Store]:
        found = programs()
        random_of, folder = self._random, self._folder
        stores: list[Store] = [OwnStore("kvpipe", pool, random_of("kvpipe"), folder)]
        stores += [RedisStore(name, pool, random_of(name), folder, program) for name, program in found.items()]
        program = next(iter(found.values()))
        stores.append(EvictingStore("evicting", pool, random_of("evicting"), folder, program))
        stores.append(ClusterStore("cluster", pool, random_of("cluster"), folder, program))
        return stores

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} servers {name}")  # noqa: S311 - no secret


class _Client:
    """A client process, and a thread that reads its reports."""

    def __init__(self, store: Store, seed: int, name: str, ledger: Ledger) -> None:
        self.name, self._ledger = name, ledger
        self.reached: dict[str, Event] = {stage: Event() for stage in STAGES}
        self._is_killed = False
        words = [store.url, f"{seed} {store.name}", name, str(int(store.opens_again)), str(store.answer_s)]
        self._process = Process([sys.executable, "-m", "bench.store.client", *words], {})
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while "ended" not in (words := self._process.answer()):
                if event := self.reached.get(words.get("now", "")):
                    event.set()
                self._ledger.note(self.name, words)
        except SubjectError as error:
            if not self._is_killed:
                with self._ledger.changed:
                    self._ledger.found.fail("failed", f"client {self.name}: {error}")

    def kill(self) -> None:
        if self._is_killed:
            return
        self._is_killed = True
        self._process.signal(signal.SIGKILL)
        self._thread.join()
        self._process.close()

    def end(self) -> None:
        """Lets it end its calls and close its store."""
        self._process.end_input()
        self._thread.join(_ENDS_WITHIN_S)
        if self._thread.is_alive():
            with self._ledger.changed:
                self._ledger.found.fail("late", f"client {self.name} does not end within {_ENDS_WITHIN_S:.0f} s")
        self.kill()


class _StoreRun:
    """The clients of a store, and its faults one after the other."""

    def __init__(self, store: Store, seed: int, num_calls: int, progress: Progress) -> None:
        self.store, self._seed, self._num_calls, self._progress = store, seed, num_calls, progress
        self.ledger = Ledger(may_lose=isinstance(store, EvictingStore))
        self._random = random.Random(f"{seed} faults {store.name}")  # noqa: S311 - no secret
        self._lives = [0] * NUM_CLIENTS
        self._clients: list[_Client] = []
        self._faults = [*store.faults, *(f"clients killed in {stage}" for stage in STAGES)]

    def run(self) -> None:
        """Calls, makes faults, and looks at what is left."""
        with ExitStack() as stack:
            self._clients = [self._client(number) for number in range(NUM_CLIENTS)]
            stack.callback(self._kill_clients)
            self._until_served(time.monotonic_ns(), "the start")
            order: list[str] = []
            while self._until_served_calls(self.ledger.num_served + self._random.randint(1, _MOST_CALLS_BETWEEN)):
                order = order or self._random.sample(self._faults, len(self._faults))
                self._make(order.pop())
            for client in self._clients:
                client.end()
        self.ledger.found.entries_evicted = self.store.num_evicted
        self.ledger.end()
        self.store.look(self.ledger.found)
        self._progress.step(self.store.name)

    def _kill_clients(self) -> None:
        for client in self._clients:
            client.kill()

    def _client(self, number: int) -> _Client:
        self._lives[number] += 1
        return _Client(self.store, self._seed, f"{number}.{self._lives[number]}", self.ledger)

    def _until_served_calls(self, num_calls: int) -> bool:
        """Waits until so many calls have had no error; returns whether there are others."""
        ledger = self.ledger
        with ledger.changed:
            ledger.changed.wait_for(lambda: ledger.num_served >= min(num_calls, self._num_calls), _ENDS_WITHIN_S)
            return ledger.num_served < self._num_calls and ledger.found.unrecovered < _GIVES_UP_AFTER

    def _make(self, name: str) -> None:
        self._progress.line(f"{self.store.name}: {self.ledger.num_served} calls, {name}")
        if name in self.store.faults:
            self.store.make(name)
        else:
            self._kill_client(name.rpartition(" ")[2])
        ended_ns = time.monotonic_ns()
        with self.ledger.changed:
            self.ledger.found.count(name.replace(" ", "_"))
        self._until_served(ended_ns, name)

    def _until_served(self, since_ns: int, fault: str) -> None:
        """Waits until each client has a call without an error that began after a time."""
        ledger, names = self.ledger, [client.name for client in self._clients]
        with ledger.changed:
            is_served = ledger.changed.wait_for(
                lambda: all(ledger.served_since(name, since_ns) for name in names), RECOVERS_WITHIN_S
            )
            took_ms = (time.monotonic_ns() - since_ns) // 1_000_000
            ledger.found.longest_recovery_ms = max(ledger.found.longest_recovery_ms, took_ms)
            if not is_served:
                ledger.found.fail("unrecovered", f"not within {RECOVERS_WITHIN_S:.0f} s after {fault}")

    def _kill_client(self, stage: str) -> None:
        number = self._random.randrange(NUM_CLIENTS)
        client = self._clients[number]
        reached = client.reached[stage]
        reached.clear()
        if not reached.wait(_REACHED_WITHIN_S):
            with self.ledger.changed:
                self.ledger.found.fail("unrecovered", f"client {client.name} reaches no {stage}")
        client.kill()
        self._clients[number] = self._client(number)
