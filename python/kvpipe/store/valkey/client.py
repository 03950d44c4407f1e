"""The client for scripts and small commands: redis-py, with kvpipe's errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from kvpipe.exceptions import ClosedError, ConfigError, ConnectError, IncompatiblePeerError, PeerLostError
from kvpipe.store.valkey.errors import translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpipe.store.valkey.keys import ValueKeys
    from kvpipe.store.valkey.scripts import Script
    from kvpipe.store.valkey.settings import ValkeySettings

T = TypeVar("T")
Address = tuple[str, int]

_OLDEST = (6, 2)
# A client waits for nobody: each thread that calls has a connection.
_MAX_CONNECTIONS = 1 << 16


class Client:
    """A connected server or cluster. Any thread may call.

    Attributes:
        is_cluster: Whether keys are spread over servers.
        capacity_bytes: The server's `maxmemory`, if it is one server and has a limit.
    """

    def __init__(self, settings: ValkeySettings, timeout: float) -> None:
        self.settings = settings
        self.address = ",".join(f"{host}:{port}" for host, port in settings.hosts)
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
        of_value = (keys.manifest, second, keys.parts)

        def evaluate() -> Any:
            try:
                return self.library.evalsha(script.sha, len(of_value), *of_value, *arguments)
            except redis.exceptions.NoScriptError:
                return self.library.eval(script.text, len(of_value), *of_value, *arguments)

        return self.call(evaluate)

    def call(self, operation: Callable[[], T]) -> T:
        """Calls the library.

        Raises:
            ClosedError: The store was closed here, or this is a forked process.
        """
        self.check()
        try:
            with translated(self.address):
                return operation()
        except PeerLostError:
            self.check()
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
        """Returns the server that has a key."""
        if not self.is_cluster:
            return self._server
        node = self.call(lambda: self.library.get_node_from_key(key))
        if node is None:
            raise PeerLostError(f"{self.address}: no server of the cluster has the slot of this key")
        return node.host, node.port

    def connection(self) -> Any:
        """Returns a connection of its own, for subscriptions. A message reaches every server of a cluster."""
        nodes = self.library.get_primaries() if self.is_cluster else []
        servers = [(node.host, node.port) for node in nodes] or [self._server]
        for server in servers:
            options = self._options(server)
            tls = options.pop("ssl", False)
            del options["max_connections"]
            if tls:
                options = {name: value for name, value in options.items() if value is not None}
            connection = (redis.SSLConnection if tls else redis.Connection)(**options)
            try:
                with translated(f"{server[0]}:{server[1]}"):
                    connection.connect()
            except PeerLostError:
                if server == servers[-1]:
                    raise
            else:
                return connection
        raise PeerLostError(f"lost {self.address}")

    def close(self) -> None:
        """Ends all connections. A second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
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


def _check_info(server: Address, info: dict[str, Any]) -> None:
    version = str(info.get("redis_version", "0.0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    where = f"{server[0]}:{server[1]}"
    if numbers < _OLDEST:
        raise IncompatiblePeerError(f"{where} has version {version}: expected 6.2 or newer")
    if info.get("role") == "slave" and not info.get("cluster_enabled"):
        raise ConnectError(f"{where} is a replica: connect to its primary, {info.get('master_host')}")
