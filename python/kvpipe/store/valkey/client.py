"""A connected server or cluster: `Client`."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kvpipe._address import join_host_port
from kvpipe.exceptions import ClosedError, ConfigError, ConnectError, PeerLostError, ProtocolError
from kvpipe.store.valkey.connections import HELLO, Connections, check_role
from kvpipe.store.valkey.context import Counters
from kvpipe.store.valkey.errors import ELSEWHERE, REDIRECTIONS, check_serves, error_of
from kvpipe.store.valkey.primary import Primary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpipe.exceptions import KVPipeError
    from kvpipe.store.valkey.cluster import Cluster
    from kvpipe.store.valkey.keys import ValueKeys
    from kvpipe.store.valkey.scripts import Script
    from kvpipe.store.valkey.settings import Address, ValkeySettings

T = TypeVar("T")

# Of each script.
_NUM_KEYS = 3


class Client:
    """A connected server or cluster. Any thread may call.

    Attributes:
        connections: To all servers.
        primary: The server, if it is no cluster.
        cluster: The cluster, if it is one.
        counters: Of the store.
    """

    def __init__(self, settings: ValkeySettings, timeout: float) -> None:
        self.settings = settings
        self.address = ",".join(join_host_port(*host) for host in settings.hosts)
        self.connections = Connections(settings)
        self.primary = Primary(self.connections, settings.hosts)
        self.cluster: Cluster | None = None
        self.counters = Counters()
        self.is_closed = False
        self._pid = os.getpid()
        try:
            if self.primary.open(timeout).is_cluster:
                self.cluster = self._open_cluster()
        except PeerLostError as error:
            raise ConnectError(str(error)) from error

    @property
    def capacity_bytes(self) -> int | None:
        """The server's `maxmemory`, if it is one server and has a limit."""
        return self.primary.capacity_bytes if self.cluster is None else None

    def run(self, script: Script, keys: ValueKeys, second: bytes, *arguments: bytes | int | str) -> Any:
        """Runs a script; `second` is its second key."""
        words = [keys.manifest, second, keys.parts, *map(_encoded, arguments)]
        arity = b"%d" % _NUM_KEYS

        def run() -> Any:
            server = self.server_of(keys.manifest)
            [reply] = self._ask(server, [(b"EVALSHA", script.sha, arity, *words)])
            if isinstance(reply, str) and reply.startswith("NOSCRIPT"):
                [reply] = self._ask(server, [(b"EVAL", script.text, arity, *words)])
            return reply

        reply = self.call(run)
        if isinstance(reply, str) and reply.startswith(REDIRECTIONS):
            with self.redirections() as cluster:
                return cluster.run_script(script, _NUM_KEYS, words)
        return self._checked(reply)

    def run_command(self, key: bytes, *words: bytes) -> Any:
        """Runs a command at the server that has a key."""
        [reply] = self.call(lambda: self._ask(self.server_of(key), [words]))
        if isinstance(reply, str) and reply.startswith(REDIRECTIONS):
            with self.redirections() as cluster:
                return cluster.run(*words)
        return self._checked(reply)

    def run_at(self, server: Address | None, *words: bytes) -> Any:
        """Runs a command at a server of a cluster, or else at the primary."""
        [reply] = self.call(lambda: self._ask(server or self.primary.address, [words]))
        return self._checked(reply)

    @contextmanager
    def redirections(self) -> Iterator[Cluster]:
        """Returns the cluster, which follows the redirection that a server has answered. Losses are counted."""
        if self.cluster is None:
            raise ProtocolError(
                f"{self.address} redirects, and was no cluster when the store was opened; open it again"
            )
        with self.counting_losses():
            yield self.cluster

    def call(self, operation: Callable[[], T]) -> T:
        """Runs what uses `connections`.

        It runs once more if a server was not reached or did not serve, and another one has taken its place.

        Raises:
            ClosedError: The store was closed here, or this is a forked process.
            PeerLostError: The server was lost. It is counted.
        """
        self.check()
        with self.counting_losses():
            return self.renewing(operation)

    def renewing(self, operation: Callable[[], T]) -> T:
        """As `call`, but does not count."""
        generation = self.primary.generation
        try:
            return operation()
        except ELSEWHERE as error:
            self.renew(error, generation)
            return operation()

    def renew(self, error: KVPipeError, generation: int) -> None:
        """Finds the servers anew after an error of `generation` of the primary."""
        if self.cluster is not None:
            self.cluster.refresh()
        else:
            self.primary.replace(error, generation)

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
        """True if this process opened the store."""
        return self._pid == os.getpid()

    def server_of(self, key: bytes) -> Address:
        """Returns the server that has a key. It is called within `call`."""
        return self.primary.address if self.cluster is None else self.cluster.server_of(key)

    def servers(self) -> list[Address]:
        """Returns all servers that have keys."""
        return (self.cluster.servers() if self.cluster is not None else []) or [self.primary.address]

    def close(self) -> None:
        """Ends all connections. A second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.connections.close()
            if self.cluster is not None:
                self.cluster.close()

    def _ask(self, server: Address, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """Sends commands to a server at once. A server that has been demoted refuses its answers to them."""
        address = f"{server[0]}:{server[1]}"
        with self.connections.for_commands([server]) as [connection]:
            connection.send([HELLO, *commands])
            hello, *replies = connection.receive(1 + len(commands))
            check_role(hello, address)
            check_serves(replies, address)
        return replies

    def _checked(self, reply: Any) -> Any:
        if isinstance(reply, str):
            with self.counting_losses():
                raise error_of(reply, self.address)
        return reply

    def _open_cluster(self) -> Cluster:
        if self.settings.database:
            raise ConfigError(f"database {self.settings.database}: a cluster has only database 0")
        try:
            from kvpipe.store.valkey.cluster import Cluster  # noqa: PLC0415 - redis-py is needed by clusters alone
        except ImportError as error:
            raise ConfigError(
                f"{self.address} is a cluster, which needs redis-py: pip install 'kvpipe[valkey]'"
            ) from error
        return Cluster(self.settings, self.primary.address)


def _encoded(argument: bytes | int | str) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()
