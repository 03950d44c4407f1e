"""The servers of a run, and what they have left at its end."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpipe.bench.chaos import until
from kvpipe.bench.instances.servers import Server
from kvpipe.bench.processes import SubjectError
from kvpipe.bench.store.values import TTL_S, content_of
from kvpipe.exceptions import KVPipeError
from kvpipe.launch.plan import free_ports
from kvpipe.store.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from random import Random

    from kvpipe.bench.instances.servers import ServerPool
    from kvpipe.store.base import KVStore

_HOST = "127.0.0.1"
_ANSWER_S = 10.0
_CHANGES_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.02
# Leases and open values of the clients end after 1.5 s, reservations after 9/8 of 2 s.
_RESERVATION_S, _PIN_S = 2, 2
SETTLES_WITHIN_S = 8.0
_CAPACITY = "24M"
_DISK_CAPACITY = "256M"
# A server that evicts has this much less memory than it uses.
_EVICTED_SHARE = 0.4
_EVICTS_FOR_S = 0.5
_REFUSES_FOR_S = (0.3, 1.5)
_FROZEN_FOR_S = (0.2, 2.5)


@dataclass
class Left:
    """What a store has at the end that it should not have.

    Attributes:
        unanswered: Servers or calls that do not answer.
        leases: Values that are leased or cannot be taken.
        leaked: Entries, or bytes where entries agree, that no listed value has.
        orphans: Parts of values whose first entry a server without memory has evicted; it evicts them too, by and by.
        wrong: Values with other bytes.
        reasons: Each in words.
    """

    unanswered: int = 0
    leases: int = 0
    leaked: int = 0
    orphans: int = 0
    wrong: int = 0
    reasons: list[str] = field(default_factory=list)


class Store:
    """The servers of one store.

    Attributes:
        name: Of the table.
        url: What clients open.
        opens_again: True if a client opens the store again when its server was lost.
        answer_s: Bound of a call, beside the time that it waits by itself.
        num_evicted: Entries that its servers have evicted while that was watched.
        faults: Each with its name; it returns when its servers serve again.
    """

    name: str
    url: str
    opens_again = False
    answer_s: float

    def __init__(self, name: str, pool: ServerPool, random: Random) -> None:
        self.name, self._pool, self._random = name, pool, random
        self.num_evicted = 0
        self.faults: Mapping[str, Callable[[], None]] = {
            "servers killed": self.kill,
            "servers frozen": self.freeze,
        }

    def servers(self) -> list[Server]:
        """Returns its servers."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kills a server, and starts it again."""
        self._replace(self._random.choice(self.servers()))

    def _replace(self, server: Server) -> None:
        server.end()
        self._pool.restart(server)
        server.until_healthy()

    def freeze(self) -> None:
        """Stops a server for a while."""
        server = self._random.choice(self.servers())
        server.signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(*_FROZEN_FOR_S))
        server.signal(signal.SIGCONT)

    def left(self) -> Left:
        """Looks at the servers once no client is there, takes all values, and looks again."""
        found = Left()
        time.sleep(TTL_S + _RESERVATION_S / 8)
        try:
            with open_store(self.url, timeout=_ANSWER_S) as store:
                self._look(store, found)
        except (KVPipeError, SubjectError) as error:
            found.unanswered += 1
            found.reasons.append(f"{self.name}: {type(error).__name__}: {error}")
        return found

    def _look(self, store: KVStore, found: Left) -> None:
        raise NotImplementedError

    def _take_all(self, store: KVStore, found: Left, *, may_lose: bool) -> None:
        """Takes the values of all clients, and one more that is put before."""
        store.put(b"last", content_of(b"last", b"0"), b"0")
        for info in list(store.list()):
            lease = store.take(info.key)
            if lease is None:
                # A value that has lost a part is deleted when it is asked for.
                if not may_lose:
                    found.leases += 1
                    found.reasons.append(f"{self.name}: {info.key!r} is listed and cannot be taken")
                continue
            with lease:
                if lease.read() != content_of(info.key, lease.record):
                    found.wrong += 1
                    found.reasons.append(f"{self.name}: {info.key!r} has other bytes at the end")
                lease.acknowledge()


class OwnStore(Store):
    """`kvpipe store serve` with little memory and a disk."""

    opens_again = True
    answer_s = 6.0

    def __init__(self, name: str, pool: ServerPool, random: Random, folder: Path) -> None:
        super().__init__(name, pool, random)
        [port] = free_ports(1)
        self.url = f"kvpipe://{_HOST}:{port}"
        command = [sys.executable, "-m", "kvpipe", "store", "serve", "--listen", f"{_HOST}:{port}"]
        command += ["--capacity", _CAPACITY, "--disk", str(folder / "disk"), "--disk-capacity", _DISK_CAPACITY]
        self._server = _OwnServer(name, self.url, command, {}, folder / f"{port}.log")
        pool.add(self._server)
        self._server.until_healthy()

    def servers(self) -> list[Server]:
        """Returns the server."""
        return [self._server]

    def _look(self, store: KVStore, found: Left) -> None:
        def is_settled() -> bool:
            stats = store.stats()
            held = (stats.num_reserved, stats.num_leased, stats.num_waiting, stats.details["num_clients"])
            return held == (0, 0, 0, 1)

        if not until(is_settled, SETTLES_WITHIN_S):
            found.leases += 1
            found.reasons.append(f"{self.name}: held at the end: {store.stats()}")
        listed, stats = list(store.list()), store.stats()
        if stats.num_values != len(listed):
            found.leaked += abs((stats.num_values or 0) - len(listed))
            found.reasons.append(f"{self.name}: {len(listed)} values are listed: {stats}")
        self._take_all(store, found, may_lose=False)
        until(lambda: _is_empty(store), SETTLES_WITHIN_S)
        if not _is_empty(store):
            found.leaked += 1
            found.reasons.append(f"{self.name}: left when all values were taken: {store.stats()}")


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


class RedisServer(Server):
    """A Redis or Valkey server, which starts as a replica of nothing that it reaches, or of another server."""

    def __init__(self, name: str, program: str, port: int, other_port: int, folder: Path) -> None:
        import redis  # noqa: PLC0415 - of an extra, which was checked

        self.port, self._data = port, folder / str(port)
        self._data.mkdir()
        self.admin: Any = redis.Redis(_HOST, port, socket_timeout=_ANSWER_S, retry=None)
        command = [program, "--bind", _HOST, "--port", str(port), "--dir", str(self._data), "--save", ""]
        command += ["--appendonly", "no", "--replicaof", _HOST, str(other_port), "--repl-diskless-sync-delay", "0"]
        super().__init__(name, f"redis://{_HOST}:{port}", command, {}, folder / f"{port}.log")

    def is_healthy(self) -> bool:
        """Returns whether it answers."""
        import redis  # noqa: PLC0415

        try:
            return bool(self.admin.ping())
        except redis.RedisError:
            return False

    def start(self) -> None:
        """Starts it without data: a file from which it once followed its primary is older than what clients know."""
        (self._data / "dump.rdb").unlink(missing_ok=True)
        super().start()

    @property
    def is_primary(self) -> bool:
        """True if it is no replica."""
        return bool(self.admin.role()[0] == b"master")

    def promote(self) -> None:
        """Makes a primary of it."""
        self.admin.execute_command("REPLICAOF", "NO", "ONE")

    def is_synchronous(self, primary: RedisServer) -> bool:
        """True if it has all that its primary has."""
        mine, theirs = self.admin.info("replication"), primary.admin.info("replication")
        is_up = mine.get("master_link_status") == "up"
        return bool(is_up and mine["slave_repl_offset"] == theirs["master_repl_offset"])


class RedisStore(Store):
    """A primary and its replica; both are hosts of the URL.

    A killed primary comes back empty, and its replica follows it: what it had is a miss. A replica that took over from
    a primary that is dead would lack what was not replicated, also acknowledgements, which no client can know.
    """

    # One call may lose its connection, ask both hosts which one is the primary, and be done again.
    _EXCHANGE_S = 1.0
    answer_s = 4 * _EXCHANGE_S

    def __init__(self, name: str, pool: ServerPool, random: Random, folder: Path, program: str) -> None:
        super().__init__(name, pool, random)
        ports = free_ports(2)
        self._servers = [RedisServer(f"{name} {port}", program, port, sum(ports) - port, folder) for port in ports]
        for server in self._servers:
            pool.add(server)
            server.until_healthy()
        self._primary, self._replica = self._servers
        self._primary.promote()
        query = f"answer_s={self._EXCHANGE_S}&reservation_s={_RESERVATION_S}&pin_s={_PIN_S}&part_bytes=500000"
        hosts = ",".join(f"{_HOST}:{port}" for port in ports)
        self.url = f"redis://{hosts}/0?{query}"
        self.has_evicted = False
        self.faults = {
            **self.faults,
            "roles changed": self.change_roles,
            "passwords changed": self.change_password,
            "connections killed": self.kill_connections,
        }

    def servers(self) -> list[Server]:
        """Returns both."""
        return [*self._servers]

    def _replace(self, server: Server) -> None:
        super()._replace(server)
        if server is self._primary:
            self._primary.promote()
            self.has_evicted = False
        self._until_synchronous()

    def _until_synchronous(self) -> None:
        import redis  # noqa: PLC0415

        def is_synchronous() -> bool:
            with contextlib.suppress(redis.RedisError):
                return self._replica.is_synchronous(self._primary)
            return False

        if not until(is_synchronous, _CHANGES_WITHIN_S, _LOOK_EVERY_S):
            message = f"{self.name}: the replica does not follow within {_CHANGES_WITHIN_S:.0f} s"
            raise SubjectError(message)

    def change_roles(self) -> None:
        """Makes the replica the primary, with all that the old one has, which keeps its connections."""
        self._until_synchronous()
        self._primary.admin.execute_command("FAILOVER", "TO", _HOST, self._replica.port)
        if not until(lambda: self._replica.is_primary, _CHANGES_WITHIN_S, _LOOK_EVERY_S):
            message = f"{self.name}: the roles have not changed within {_CHANGES_WITHIN_S:.0f} s"
            raise SubjectError(message)
        self._primary, self._replica = self._replica, self._primary

    def change_password(self) -> None:
        """Wants a password that no client has, on new connections, and then none again."""
        for server in self._servers:
            server.admin.config_set("requirepass", "changed")
        self.kill_connections()
        time.sleep(self._random.uniform(*_REFUSES_FOR_S))
        for server in self._servers:
            server.admin.config_set("requirepass", "")

    def kill_connections(self) -> None:
        """Ends all connections of clients to the primary."""
        for kind in ("normal", "pubsub"):
            self._primary.admin.client_kill_filter(_type=kind, skipme=True)

    def _look(self, store: KVStore, found: Left) -> None:
        def is_settled() -> bool:
            keys = self._keys()
            return not (keys.leased or keys.unknown - self._orphans(keys))

        until(is_settled, SETTLES_WITHIN_S)
        keys = self._keys()
        orphans = self._orphans(keys)
        found.orphans, found.leases, found.leaked = len(orphans), len(keys.leased), len(keys.unknown - orphans)
        if keys.leased or keys.unknown - orphans:
            found.reasons.append(f"{self.name}: leased {keys.leased}, unknown {keys.unknown - orphans}")
        listed = {info.key: info.num_bytes for info in store.list()}
        num_bytes = sum(self._primary.admin.strlen(key) for key in keys.parts)
        if len(listed) != keys.num_values or (num_bytes != sum(listed.values()) and not self.has_evicted):
            found.leaked += 1
            found.reasons.append(f"{self.name}: {listed} are listed, {keys.num_values} values have {num_bytes} bytes")
        self._take_all(store, found, may_lose=self.has_evicted)
        num_left = self._primary.admin.dbsize() - len(orphans)
        self._until_synchronous()
        if num_left or self._replica.admin.dbsize() != self._primary.admin.dbsize():
            found.leaked += num_left
            found.reasons.append(f"{self.name}: left when all values were taken: {self._primary.admin.keys()}")

    def _keys(self) -> _Keys:
        admin = self._primary.admin
        names = set(admin.scan_iter(count=1000))
        manifests = {name: admin.hgetall(name) for name in names if name.startswith(b"kvpipe:v:")}
        now_s, now_us = admin.time()
        leased = {
            name for name, fields in manifests.items() if int(fields.get(b"l") or 0) > now_s * 1000 + now_us // 1000
        }
        parts = {
            b"%b:%b:%d" % (name.replace(b":v:", b":d:", 1), fields[b"e"], number)
            for name, fields in manifests.items()
            if fields
            for number in range(int(fields[b"c"]))
        }
        return _Keys(len(manifests), leased, parts, names - manifests.keys() - parts)

    def _orphans(self, keys: _Keys) -> set[bytes]:
        """Parts that were committed: what belongs to a reservation ends by time."""
        if not self.has_evicted:
            return set()
        return {key for key in keys.unknown if b":d:" in key and self._primary.admin.ttl(key) == -1}


@dataclass
class _Keys:
    """The keys in a database: how many values, which are leased, the parts that they should have, and other keys."""

    num_values: int
    leased: set[bytes]
    parts: set[bytes]
    unknown: set[bytes]


class EvictingStore(RedisStore):
    """A pair whose primary has too little memory now and then, and evicts any key."""

    def __init__(self, name: str, pool: ServerPool, random: Random, folder: Path, program: str) -> None:
        super().__init__(name, pool, random, folder, program)
        self.faults = {**self.faults, "memory short": self.evict}

    def evict(self) -> None:
        """Lets the primary evict."""
        admin = self._primary.admin
        self.has_evicted = True
        before = admin.info("stats")["evicted_keys"]
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", int(admin.info("memory")["used_memory"] * _EVICTED_SHARE))
        time.sleep(_EVICTS_FOR_S)
        self.num_evicted += admin.info("stats")["evicted_keys"] - before
        admin.config_set("maxmemory", 0)
