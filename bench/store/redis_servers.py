"""Stores in Redis or Valkey: pairs of a primary and its replica, and a cluster."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.instances.servers import Server
from bench.processes import SubjectError, until
from bench.programs.redis_values import server_command
from bench.store.servers import HOST, RESERVATION_S, SETTLES_WITHIN_S, Store
from bench.store.values import NUM_KEYS, key_of
from kvpipe.launch.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from random import Random

    from bench.instances.servers import ServerPool
    from bench.store.results import Survival
    from kvpipe.store.base import KVStore

# Of one exchange with a server.
_EXCHANGE_S = 1.0
_PIN_S = 2
_QUERY = f"answer_s={_EXCHANGE_S}&reservation_s={RESERVATION_S}&pin_s={_PIN_S}&part_bytes=500000"
_ADMIN_ANSWERS_WITHIN_S = 10.0
_CHANGES_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.02
# A server that evicts has this much less memory than it uses.
_EVICTED_SHARE = 0.4
_EVICTS_FOR_S = 0.5
_REFUSES_FOR_S = (0.3, 1.5)
_NUM_SLOTS = 16_384
_NUM_CLUSTER_SERVERS = 3
_LONGEST_MOVE_STEP_S = 0.1


class RedisServer(Server):
    """A Redis or Valkey server without persistence."""

    def __init__(self, pool: ServerPool, name: str, program: str, port: int, folder: Path, *options: str) -> None:
        import redis  # noqa: PLC0415 - of an extra, which was checked

        self.port, self._data = port, folder / str(port)
        self._data.mkdir()
        self.admin: Any = redis.Redis(HOST, port, socket_timeout=_ADMIN_ANSWERS_WITHIN_S, retry=None)
        command = [*server_command(program, HOST, port), "--dir", str(self._data), *options]
        super().__init__(name, f"redis://{HOST}:{port}", command, {}, folder / f"{port}.log", watchdog=pool.watchdog)

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


@contextlib.contextmanager
def _asking(name: str) -> Iterator[None]:
    """Asks servers beside their clients.

    Raises:
        SubjectError: One does not answer.
    """
    import redis  # noqa: PLC0415

    try:
        yield
    except redis.RedisError as error:
        message = f"{name}: {type(error).__name__}: {error}"
        raise SubjectError(message) from error


class _DatabaseStore(Store):
    """A store whose servers can be asked for their keys.

    Attributes:
        has_evicted: True if a server has evicted keys that it may still miss.
    """

    has_evicted = False

    def primaries(self) -> Sequence[RedisServer]:
        """Returns the servers that have the keys."""
        raise NotImplementedError

    def make(self, fault: str) -> None:
        """Makes one of its faults; see `Store.make`."""
        with _asking(self.name):
            super().make(fault)

    def kill_connections(self) -> None:
        """Ends all connections of clients."""
        for server in self.primaries():
            for kind in ("normal", "pubsub"):
                server.admin.client_kill_filter(_type=kind, skipme=True)

    def _look(self, store: KVStore, found: Survival) -> None:
        with _asking(self.name):
            self._look_at_keys(store, found)

    def _look_at_keys(self, store: KVStore, found: Survival) -> None:
        def is_settled() -> bool:
            keys = self._keys()
            return not (keys.leased or keys.unknown - self._orphans(keys))

        until(is_settled, SETTLES_WITHIN_S)
        keys = self._keys()
        orphans = self._orphans(keys)
        found.orphans = len(orphans)
        for name, left in (("leases_left", keys.leased), ("leaked", keys.unknown - orphans)):
            if left:
                found.fail(name, f"{left}", len(left))
        listed = {info.key: info.num_bytes for info in store.list()}
        has_all = keys.num_bytes == sum(listed.values()) or self.has_evicted
        if len(listed) != keys.num_values or not has_all:
            found.fail("leaked", f"{listed} are listed, {keys.num_values} values have {keys.num_bytes} bytes")
        self._take_all(store, found, may_lose=self.has_evicted)
        keys = self._keys()
        num_left = keys.num_values + len(keys.unknown - orphans)
        if num_left or not self._agree():
            found.fail("leaked", f"left when all values were taken: {keys}", max(1, num_left))

    def _agree(self) -> bool:
        """True if replicas have what their primaries have."""
        return True

    def _keys(self) -> _Keys:
        owners = {name: server.admin for server in self.primaries() for name in server.admin.scan_iter(count=1000)}
        names = owners.keys()
        manifests = {name: owners[name].hgetall(name) for name in names if name.startswith(b"kvpipe:v:")}
        now_s, now_us = self.primaries()[0].admin.time()
        leased = {
            name for name, fields in manifests.items() if int(fields.get(b"l") or 0) > now_s * 1000 + now_us // 1000
        }
        parts = {
            b"%b:%b:%d" % (name.replace(b":v:", b":d:", 1), fields[b"e"], number)
            for name, fields in manifests.items()
            if fields
            for number in range(int(fields[b"c"]))
        }
        num_bytes = sum(owners[part].strlen(part) for part in parts & names)
        unknown = names - manifests.keys() - parts
        kept = {key for key in unknown if b":d:" in key and owners[key].ttl(key) == -1}
        return _Keys(len(manifests), num_bytes, leased, unknown, kept)

    def _orphans(self, keys: _Keys) -> set[bytes]:
        return keys.kept if self.has_evicted else set()


@dataclass
class _Keys:
    """The keys of a store.

    Attributes:
        num_values: First entries of values.
        num_bytes: Of the parts that these name.
        leased: First entries of values with a lease.
        unknown: Keys of no value.
        kept: Those of them that are parts and do not end by time, as what belongs to a reservation does.
    """

    num_values: int
    num_bytes: int
    leased: set[bytes]
    unknown: set[bytes]
    kept: set[bytes]


class RedisStore(_DatabaseStore):
    """A primary and its replica; both are hosts of the URL.

    A killed primary comes back empty, and its replica follows it: what it had is a miss. A replica that took over from
    a primary that is dead would lack what was not replicated, also acknowledgements, which no client can know.
    """

    # A call may lose its connection, ask both hosts which one is the primary, and be done again.
    answer_s = 4 * _EXCHANGE_S

    def __init__(self, name: str, pool: ServerPool, random: Random, folder: Path, program: str) -> None:
        super().__init__(name, random)
        ports = free_ports(2)
        # Neither is a primary when it starts: no client uses one whose role is not decided.
        # A link that says nothing is made again before `_CHANGES_WITHIN_S`; by default after 60 s.
        common = ("--repl-diskless-sync-delay", "0", "--repl-timeout", "5", "--repl-ping-replica-period", "1")
        options = [(*common, "--replicaof", HOST, str(sum(ports) - port)) for port in ports]
        self._servers = [
            RedisServer(pool, f"{name} {port}", program, port, folder, *of_one)
            for port, of_one in zip(ports, options, strict=True)
        ]
        pool.add(*self._servers)
        for server in self._servers:
            server.until_healthy()
        self._primary, self._replica = self._servers
        self._primary.promote()
        hosts = ",".join(f"{HOST}:{port}" for port in ports)
        self.url = f"redis://{hosts}/0?{_QUERY}"
        self.faults = {
            **self.faults,
            "roles changed": self.change_roles,
            "passwords changed": self.change_password,
            "connections killed": self.kill_connections,
        }

    def servers(self) -> list[Server]:
        """Returns both."""
        return [*self._servers]

    def primaries(self) -> Sequence[RedisServer]:
        """Returns the primary."""
        return [self._primary]

    def _agree(self) -> bool:
        self._until_synchronous()
        return bool(self._replica.admin.dbsize() == self._primary.admin.dbsize())

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
            infos = [server.admin.info("replication") for server in (self._primary, self._replica)]
            message = f"{self.name}: the replica does not follow within {_CHANGES_WITHIN_S:.0f} s: {infos}"
            raise SubjectError(message)

    def change_roles(self) -> None:
        """Makes the replica the primary, with all that the old one has, which keeps its connections."""
        self._until_synchronous()
        self._primary.admin.execute_command("FAILOVER", "TO", HOST, self._replica.port)
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


class ClusterStore(_DatabaseStore):
    """A cluster of three servers without replicas, whose slots move between them."""

    # A call may lose its connection, ask a silent server and another one who has the slots, follow a redirection of the
    # new server, and be done again.
    answer_s = 8 * _EXCHANGE_S

    def __init__(self, name: str, pool: ServerPool, random: Random, folder: Path, program: str) -> None:
        super().__init__(name, random)
        # A cluster's servers connect to each other at ports that are 10,000 higher, unless others are configured.
        ports = free_ports(2 * _NUM_CLUSTER_SERVERS)
        self._servers = [
            RedisServer(
                pool, f"{name} {port}", program, port, folder, "--cluster-enabled", "yes", "--cluster-port", str(bus)
            )
            for port, bus in zip(ports[::2], ports[1::2], strict=True)
        ]
        pool.add(*self._servers)
        for server in self._servers:
            server.until_healthy()
        first, share = self._servers[0], -(-_NUM_SLOTS // _NUM_CLUSTER_SERVERS)
        for index, server in enumerate(self._servers):
            slots = range(index * share, min((index + 1) * share, _NUM_SLOTS))
            server.admin.execute_command("CLUSTER", "ADDSLOTS", *slots)
            server.admin.execute_command("CLUSTER", "MEET", HOST, first.port, ports[1])
        self._until_whole()
        self.url = f"redis://{HOST}:{first.port},{HOST}:{self._servers[1].port}/0?{_QUERY}"
        self.faults = {
            **self.faults,
            "connections killed": self.kill_connections,
            "slots moved": self.move_slot,
        }

    def servers(self) -> list[Server]:
        """Returns all of them."""
        return [*self._servers]

    def primaries(self) -> Sequence[RedisServer]:
        """Returns all of them."""
        return self._servers

    def _replace(self, server: Server) -> None:
        super()._replace(server)
        self._until_whole()

    def _until_whole(self) -> None:
        def is_whole() -> bool:
            infos = [server.admin.execute_command("CLUSTER", "INFO").splitlines() for server in self._servers]
            known = b"cluster_known_nodes:%d" % _NUM_CLUSTER_SERVERS
            return all(known in info and b"cluster_state:ok" in info for info in infos)

        if not until(is_whole, _CHANGES_WITHIN_S, _LOOK_EVERY_S):
            message = f"{self.name}: the cluster does not form within {_CHANGES_WITHIN_S:.0f} s"
            raise SubjectError(message)

    def move_slot(self) -> None:
        """Moves the slot of a key to another server, one key after the other."""
        name = b"{%b}" % key_of(self._random.randrange(NUM_KEYS))
        ids = {server: server.admin.execute_command("CLUSTER", "MYID").decode() for server in self._servers}
        slot = self._servers[0].admin.execute_command("CLUSTER", "KEYSLOT", name)
        source = next(server for server in self._servers if _has_slot(server, slot))
        target = self._random.choice([server for server in self._servers if server is not source])
        target.admin.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.admin.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while keys := source.admin.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 2):
            time.sleep(self._random.uniform(0, _LONGEST_MOVE_STEP_S))
            for key in keys:
                source.admin.execute_command("MIGRATE", HOST, target.port, key, 0, 5000)
        for server in (target, source, *self._servers):
            server.admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


def _has_slot(server: RedisServer, slot: int) -> bool:
    """True if a server says that it has a slot."""
    nodes = server.admin.execute_command("CLUSTER", "NODES").decode().splitlines()
    own = next(line for line in nodes if "myself" in line)
    ranges = [each.split("-") for each in own.split()[8:] if not each.startswith("[")]
    return any(int(each[0]) <= slot <= int(each[-1]) for each in ranges)
