"""A connected server or cluster: scripts over connections of our own, other commands by redis-py."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from kvpipe.exceptions import ClosedError, ConfigError, ConnectError, IncompatiblePeerError, PeerLostError
from kvpipe.store.valkey.connections import Connections, UnreachedError
from kvpipe.store.valkey.context import Counters
from kvpipe.store.valkey.errors import REDIRECTIONS, error_of, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpipe.store.valkey.keys import ValueKeys
    from kvpipe.store.valkey.scripts import Script
    from kvpipe.store.valkey.settings import Address, ValkeySettings

T = TypeVar("T")

_OLDEST = (6, 2)
# A client waits for nobody: each thread that calls has a connection.
_MAX_CONNECTIONS = 1 << 16
# Of each script.
_NUM_KEYS = 3


class Client:
    """A connected server or cluster. Any thread may call.

    Attributes:
        is_cluster: Whether keys are spread over servers.
        capacity_bytes: The server's `maxmemory`, if it is one server and has a limit.
        connections: Those of our own, which redis-py does not know.
        counters: Of the store.
    """

    def __init__(self, settings: ValkeySettings, timeout: float) -> None:
        self.settings = settings
        self.address = ",".join(f"{host}:{port}" for host, port in settings.hosts)
        self.connections = Connections(settings)
        self.counters = Counters()
        self.is_closed = False
        self._pid = os.getpid()
        info = self._first_info(timeout)
        self.is_cluster = bool(info.get("cluster_enabled"))
        self.capacity_bytes = None if self.is_cluster else int(info.get("maxmemory", 0)) or None
        if self.is_cluster and settings.database:
            raise ConfigError(f"database {settings.database}: a cluster has only database 0")
        try:
            with translated(self.address):
                self.library: Any = self._cluster() if self.is_cluster else redis.Redis(**self._options(self._server))
        except PeerLostError as error:
            raise ConnectError(str(error)) from error

    def run(self, script: Script, keys: ValueKeys, second: bytes, *arguments: bytes | int | str) -> Any:
        """Runs a script; `second` is its second key."""
        words = [keys.manifest, second, keys.parts, *map(_encoded, arguments)]

        def run() -> Any:
            with self.connections.for_commands([self.address_of(keys.manifest)]) as [connection]:
                reply = connection.run_script(script.sha, script.text, _NUM_KEYS, words)
            if isinstance(reply, str) and not reply.startswith(REDIRECTIONS):
                raise error_of(reply, self.address)
            return reply

        reply = self.call_natively(run)
        return self._run_by_library(script, words) if isinstance(reply, str) else reply

    def _run_by_library(self, script: Script, words: list[bytes]) -> Any:
        def evaluate() -> Any:
            try:
                return self.library.evalsha(script.sha.decode(), _NUM_KEYS, *words)
            except redis.exceptions.NoScriptError:
                return self.library.eval(script.text.decode(), _NUM_KEYS, *words)

        return self.call(evaluate)

    def call(self, operation: Callable[[], T]) -> T:
        """Calls the library.

        Raises:
            ClosedError: The store was closed here, or this is a forked process.
        """
        self.check()
        with self.counting_losses(), translated(self.address):
            return operation()

    def call_natively(self, operation: Callable[[], T]) -> T:
        """Runs what uses `connections`; raises as `call`.

        In a cluster it runs once more if a server was not reached, whose replica may have taken its place.
        """
        self.check()
        with self.counting_losses():
            try:
                return operation()
            except UnreachedError:
                if not self.is_cluster:
                    raise
                with translated(self.address):
                    self.library.nodes_manager.initialize()
                return operation()

    @contextmanager
    def counting_losses(self) -> Iterator[None]:
        """Counts calls that lose the server. Those that have ended because the store was closed raise `ClosedError`."""
        try:
            yield
        except PeerLostError:
            self.check()
            self.counters.add("num_lost")
            raise

    def check(self) -> None:
        """Raises `ClosedError` if the store was closed here, or this is a forked process."""
        if self.is_closed:
            raise ClosedError("the store was closed")
        if self._pid != os.getpid():
            raise ClosedError("the store was opened before this process was forked; open it again")

    @property
    def is_own_process(self) -> bool:
        """Whether this process opened the store."""
        return self._pid == os.getpid()

    def address_of(self, key: bytes) -> Address:
        """Returns the server that has a key. It is called within `call_natively`."""
        if not self.is_cluster:
            return self._server
        with translated(self.address):
            node = self.library.get_node_from_key(key)
        if node is None:
            raise PeerLostError(f"{self.address}: no server of the cluster has the slot of this key")
        return node.host, node.port

    def any_servers(self) -> list[Address]:
        """Returns the servers, to subscribe at one of them: a message reaches every server of a cluster."""
        nodes = self.library.get_primaries() if self.is_cluster else []
        return [(node.host, node.port) for node in nodes] or [self._server]

    def close(self) -> None:
        """Ends all connections. A second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.connections.close()
            self.library.close()

    def _first_info(self, timeout: float) -> dict[str, Any]:
        last: PeerLostError | None = None
        for server in self.settings.hosts:
            options = self._options(server) | {"socket_connect_timeout": timeout, "socket_timeout": timeout}
            try:
                with translated(f"{server[0]}:{server[1]}"), redis.Redis(**options) as client:
                    info = client.info()
            except PeerLostError as error:
                last = error
                continue
            self._server = server
            _check_info(server, info)
            return dict(info)
        raise ConnectError(str(last)) from last

    def _options(self, server: Address) -> dict[str, Any]:
        settings = self.settings
        options = {
            "host": server[0],
            "port": server[1],
            "username": settings.username,
            "password": settings.password,
            "db": settings.database,
            "socket_timeout": settings.answer_s,
            "socket_connect_timeout": settings.answer_s,
            "max_connections": _MAX_CONNECTIONS,
            "protocol": 2,
            # Scripts may be repeated by their caller, who knows which. A repetition here would double the bound.
            "retry": Retry(NoBackoff(), 0),
        }
        if settings.is_tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": settings.ca_file,
                "ssl_certfile": settings.cert_file,
                "ssl_keyfile": settings.key_file,
            }
        return options

    def _cluster(self) -> Any:
        options = self._options(self._server)
        for name in ("host", "port", "db"):
            del options[name]
        options["retry"] = Retry(NoBackoff(), 1)
        hosts = (self._server, *self.settings.hosts)
        return redis.RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in hosts], **options)


def _encoded(argument: bytes | int | str) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def _check_info(server: Address, info: dict[str, Any]) -> None:
    version = str(info.get("redis_version", "0.0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    where = f"{server[0]}:{server[1]}"
    if numbers < _OLDEST:
        raise IncompatiblePeerError(f"{where} has version {version}: expected 6.2 or newer")
    if info.get("role") == "slave" and not info.get("cluster_enabled"):
        raise ConnectError(f"{where} is a replica: connect to its primary, {info.get('master_host')}")
