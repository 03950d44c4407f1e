"""`Cluster`: the servers of a cluster, as redis-py knows them, and the keys that move between them at the moment."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from kvpipe._address import join_host_port
from kvpipe.exceptions import AuthenticationError, CapacityError, PeerLostError
from kvpipe.store.valkey.errors import NotServingError, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpipe.store.valkey.scripts import Script
    from kvpipe.store.valkey.settings import Address, ValkeySettings

T = TypeVar("T")

# No call waits for another one: each thread that calls has a connection.
_MAX_CONNECTIONS = 1 << 16


class Cluster:
    """The servers of a cluster. Any thread may call.

    Commands run over the library's connections, which follow redirections.
    """

    def __init__(self, settings: ValkeySettings, first: Address) -> None:
        self._address = ",".join(join_host_port(*host) for host in settings.hosts)
        options = {
            "username": settings.username,
            "password": settings.password,
            "socket_timeout": settings.answer_s,
            "socket_connect_timeout": settings.answer_s,
            "max_connections": _MAX_CONNECTIONS,
            "protocol": 2,
            # A script whose answer is lost may have run: a take or commit must not run twice.
            "retry": Retry(NoBackoff(), 0),
        }
        if settings.is_tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": settings.ca_file,
                "ssl_certfile": settings.cert_file,
                "ssl_keyfile": settings.key_file,
            }
        nodes = [ClusterNode(host, port) for host, port in (first, *settings.hosts)]
        with self._translated():
            self.library: Any = redis.RedisCluster(startup_nodes=nodes, **options)
        # Of redis-py before 6, which counts its repetitions here.
        self.library.cluster_error_retry_attempts = 0

    def server_of(self, key: bytes) -> Address:
        """Returns the server that has a key."""
        with self._translated():
            node = self.library.get_node_from_key(key)
        if node is None:
            raise PeerLostError(f"{self._address}: no server of the cluster has the slot of this key")
        return node.host, node.port

    def servers(self) -> list[Address]:
        """Returns the servers that have keys."""
        return [(node.host, node.port) for node in self.library.get_primaries()]

    def refresh(self) -> None:
        """Asks the cluster anew which server has which keys."""
        with self._translated():
            self.library.nodes_manager.initialize()

    def run(self, name: bytes, *words: bytes | memoryview | int) -> Any:
        """Runs a command at the server that has its key."""
        return self._call(lambda: self.library.execute_command(name.decode(), *words))

    def run_script(self, script: Script, num_keys: int, words: Sequence[bytes]) -> Any:
        """Runs a script at the server that has its keys."""

        def evaluate() -> Any:
            try:
                return self.library.evalsha(script.sha.decode(), num_keys, *words)
            except redis.exceptions.NoScriptError:
                return self.library.eval(script.text.decode(), num_keys, *words)

        return self._call(evaluate)

    def fields(self, manifests: Sequence[bytes], names: Sequence[bytes]) -> tuple[int, list[Any]]:
        """Returns a server's time in milliseconds, and fields of hashes; `None` for what is no hash."""

        def ask() -> list[Any]:
            pipeline = self.library.pipeline(transaction=False)
            for manifest in manifests:
                pipeline.hmget(manifest, *names)
            replies = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
                    raise reply
            return [None if isinstance(reply, Exception) else reply for reply in replies]

        def ask_time() -> Any:
            return self.library.time(target_nodes=self.library.get_random_node())

        seconds, microseconds = self._call(ask_time, changes_nothing=True)
        return int(seconds) * 1000 + int(microseconds) // 1000, self._call(ask, changes_nothing=True)

    def close(self) -> None:
        """Ends the library's connections."""
        self.library.close()

    def _call(self, operation: Callable[[], T], *, changes_nothing: bool = False) -> T:
        """Calls the library, and once more with new connections where a server did not serve.

        An operation that changes nothing is also repeated where a server was lost.
        """
        try:
            with self._translated():
                return operation()
        except (PeerLostError, AuthenticationError) as error:
            is_undone = changes_nothing or isinstance(error, NotServingError | AuthenticationError)
            if not is_undone or isinstance(error.__cause__, redis.exceptions.NoPermissionError):
                raise
            self.library.disconnect_connection_pools()
            self.refresh()
        with self._translated():
            return operation()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises errors of redis-py as those of kvpipe."""
        errors = redis.exceptions
        try:
            yield
        except (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError) as error:
            raise AuthenticationError(f"{self._address} refuses the user or password: {error}") from error
        except errors.OutOfMemoryError as error:
            raise CapacityError(f"{self._address} is out of memory: {error}") from error
        except (errors.ReadOnlyError, errors.BusyLoadingError, errors.ClusterDownError) as error:
            raise NotServingError(f"{self._address} does not serve: {error}") from error
        except (
            errors.ConnectionError,
            errors.TimeoutError,
            errors.ClusterError,
            errors.RedisClusterException,
        ) as error:
            raise PeerLostError(f"lost {self._address}: {error}") from error
        except errors.ResponseError as error:
            raise error_of(str(error), self._address) from error
        except (OSError, errors.RedisError) as error:
            raise PeerLostError(f"lost {self._address}: {error}") from error
