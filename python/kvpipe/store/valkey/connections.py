"""Connections to each server that kvpipe has itself, without redis-py: `Connections`."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from threading import Condition, Lock
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe.exceptions import ClosedError, ConnectError, PeerLostError
from kvpipe.store.valkey.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpipe.store.valkey.settings import Address, ValkeySettings


class UnreachedError(PeerLostError):
    """A server that was there is not any more; nothing was sent to it."""


class Connections:
    """Connections to all servers, in two pools each: no command waits for the values of other calls.

    Any thread may call.
    """

    def __init__(self, settings: ValkeySettings) -> None:
        self._settings = settings
        self._tls: _kvpipe.RespTls | None = None
        if settings.is_tls:
            files = {"ca_file": settings.ca_file, "cert_file": settings.cert_file, "key_file": settings.key_file}
            self._tls = _kvpipe.RespTls(**files)
        self._pools: dict[tuple[Address, int | None], _Pool] = {}
        self._lock = Lock()
        self._is_closed = False

    @contextmanager
    def for_commands(self, servers: Sequence[Address]) -> Iterator[list[_kvpipe.RespConnection]]:
        """Takes a connection to each server from the pool, and puts it back."""
        with ExitStack() as borrowed:
            pools = [self._pool(server, None) for server in servers]
            yield [borrowed.enter_context(pool.borrowed(1))[0] for pool in pools]

    @contextmanager
    def for_values(self, server: Address, num_wanted: int) -> Iterator[list[_kvpipe.RespConnection]]:
        """Takes one connection or more from the pool, and puts them back.

        It waits for others' transfers, each of which is bounded.
        """
        with self._pool(server, self._settings.connections).borrowed(num_wanted) as connections:
            yield connections

    def subscribe(self, servers: Sequence[Address]) -> _kvpipe.RespSubscription:
        """Opens a subscription at the first server that answers."""
        # A stopped server accepts connections, but does not answer.
        for server in servers[:-1]:
            with suppress(PeerLostError):
                return self._open(server, [b"PING"]).subscribe()
        return self._open(servers[-1], [b"PING"]).subscribe()

    def close(self) -> None:
        """Ends all connections, and calls that use them. Later calls raise `ClosedError`."""
        with self._lock:
            self._is_closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    def _pool(self, server: Address, limit: int | None) -> _Pool:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the store was closed")
            return self._pools.setdefault((server, limit), _Pool(lambda: self._open(server), limit))

    def _open(self, server: Address, *more: list[bytes]) -> _kvpipe.RespConnection:
        """Opens a connection as the user, in the database. The server has to accept `more` commands, too.

        Raises:
            UnreachedError: The server was not reached.
        """
        settings = self._settings
        try:
            connection = _kvpipe.RespConnection(*server, settings.answer_s, self._tls)
        except ConnectError as error:
            raise UnreachedError(str(error)) from error
        commands = []
        if settings.password:
            login = [settings.username] if settings.username else []
            commands.append([b"AUTH", *(word.encode() for word in (*login, settings.password))])
        if settings.database:
            commands.append([b"SELECT", b"%d" % settings.database])
        commands += more
        if commands:
            connection.send(commands)
            for reply in connection.receive(len(commands)):
                if isinstance(reply, str):
                    connection.close()
                    raise error_of(reply, f"{server[0]}:{server[1]}")
        return connection


class _Pool:
    """The connections to one server.

    Args:
        open_one: Opens one.
        limit: How many there are at most. Without one, nobody waits.
    """

    def __init__(self, open_one: Callable[[], _kvpipe.RespConnection], limit: int | None) -> None:
        self._open_one, self._limit = open_one, limit
        self._idle: list[_kvpipe.RespConnection] = []
        self._used: set[_kvpipe.RespConnection] = set()
        self._num_opening = 0
        self._changed = Condition()
        self._is_closed = False

    @contextmanager
    def borrowed(self, num_wanted: int) -> Iterator[list[_kvpipe.RespConnection]]:
        """Takes one connection or more; see `Connections`."""
        connections: list[_kvpipe.RespConnection] = []
        try:
            connections.append(self._borrow(is_needed=True))  # type: ignore[arg-type]
            while len(connections) < num_wanted and (more := self._borrow(is_needed=False)):
                connections.append(more)
            yield connections
        except BaseException:
            self._give_back(connections, are_usable=False)
            raise
        self._give_back(connections, are_usable=True)

    def _borrow(self, *, is_needed: bool) -> _kvpipe.RespConnection | None:
        with self._changed:
            while not self._is_closed:
                if self._idle:
                    connection = self._idle.pop()
                    if not connection.is_idle:
                        # The server has closed it since it was used.
                        connection.close()
                        continue
                    self._used.add(connection)
                    return connection
                if self._limit is None or len(self._used) + self._num_opening < self._limit:
                    break
                if not is_needed:
                    return None
                self._changed.wait()
            self._check()
            self._num_opening += 1
        try:
            connection = self._open_one()
        except BaseException:
            with self._changed:
                self._num_opening -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._num_opening -= 1
            self._used.add(connection)
        return connection

    def _give_back(self, connections: list[_kvpipe.RespConnection], *, are_usable: bool) -> None:
        with self._changed:
            self._used -= set(connections)
            # What broke one connection has broken the others.
            ended = [] if are_usable and not self._is_closed else [*connections, *self._idle]
            self._idle = [] if ended else [*self._idle, *connections]
            self._changed.notify_all()
        for connection in ended:
            connection.close()

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the store was closed")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            ended = [*self._idle, *self._used]
            self._idle = []
            self._changed.notify_all()
        for connection in ended:
            connection.close()
