"""Connections to servers: `Connections`."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

from kvpipe import _kvpipe
from kvpipe.exceptions import ClosedError, ConnectError, IncompatiblePeerError, PeerLostError, ProtocolError
from kvpipe.store.valkey.errors import LoginError, NotNowError, NotServingError, UnreachedError, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpipe.exceptions import KVPipeError
    from kvpipe.store.valkey.settings import Address, ValkeySettings

_OLDEST = (6, 2)
# It needs no permission, and its reply has the server's role.
HELLO = (b"HELLO", b"2")


@dataclass(frozen=True)
class Greeting:
    """Facts of a server.

    Attributes:
        is_cluster: True if keys are spread over servers.
        capacity_bytes: Its `maxmemory`, if it has a limit and says so.
    """

    is_cluster: bool
    capacity_bytes: int | None


def check_role(hello: Any, address: str) -> None:
    """Raises `NotServingError` if the reply to `HELLO` is not that of a primary or of a cluster's server.

    Raises:
        ProtocolError: It is no reply to `HELLO`.
    """
    if isinstance(hello, str):
        raise error_of(hello, address)
    facts = _facts(hello, address)
    if facts.get(b"role") != b"master" and facts.get(b"mode") != b"cluster":
        role = facts.get(b"role", facts[b"mode"]).decode(errors="replace")
        raise NotServingError(f"{address} is a {role}, and no primary: name its primary in the URL of the store")


def _facts(hello: Any, address: str) -> dict[bytes, bytes]:
    """The texts of a reply to `HELLO`, among them its mode and version."""
    facts: dict[bytes, bytes] = {}
    if isinstance(hello, list):
        pairs = zip(hello[::2], hello[1::2], strict=False)
        facts = {name: value for name, value in pairs if isinstance(name, bytes) and isinstance(value, bytes)}
    if not {b"mode", b"version"} <= facts.keys():
        raise ProtocolError(f"{address} answers HELLO with {hello!r}: expected a Valkey or Redis server, 6.2 or newer")
    return facts


class Connections:
    """Connections to all servers, in two pools each: no command waits for the values of other calls.

    Any thread may call. A new connection raises `NotServingError` unless it is one to a primary or to a server of a
    cluster.
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
                return self._open(server).subscribe()
        return self._open(servers[-1]).subscribe()

    def greet(self, server: Address, timeout_s: float | None) -> Greeting:
        """Asks a server what it is, on a connection of its own.

        Args:
            server: Its host and port.
            timeout_s: Bound of the connect and of an answer; by default that of all connections.

        Raises:
            LoginError: It refuses the user or password.
            IncompatiblePeerError: It is too old.
            NotServingError: It is no primary, or loads its data.
            ProtocolError: It is another kind of server.
            UnreachedError: It was not reached.
        """
        connection = self._open(server, timeout_s)
        try:
            connection.send([HELLO, (b"INFO", b"memory")])
            hello, info = connection.receive(2)
        finally:
            connection.close()
        facts = _facts(hello, _name(server))
        version = facts[b"version"].decode(errors="replace")
        if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _OLDEST:
            raise IncompatiblePeerError(f"{_name(server)} has version {version}: expected 6.2 or newer")
        # A user without the right to ask gets an error.
        lines = info.splitlines() if isinstance(info, bytes) else ()
        limits = [line.partition(b":")[2] for line in lines if line.startswith(b"maxmemory:")]
        return Greeting(facts[b"mode"] == b"cluster", sum(int(limit) for limit in limits if limit.isdigit()) or None)

    def discard(self, server: Address) -> None:
        """Ends the connections to a server; those that calls use, when they give them back."""
        with self._lock:
            pools = [self._pools.pop(key) for key in list(self._pools) if key[0] == server]
        for pool in pools:
            pool.end(NotServingError(f"{_name(server)} does not serve any more"), with_used=False)

    def close(self) -> None:
        """Ends all connections, and calls that use them. Later calls raise `ClosedError`."""
        with self._lock:
            self._is_closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.end(ClosedError("the store was closed"), with_used=True)

    def _pool(self, server: Address, limit: int | None) -> _Pool:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the store was closed")
            pool = _Pool(lambda: self._open(server), limit, self._settings.answer_s)
            return self._pools.setdefault((server, limit), pool)

    def _open(self, server: Address, timeout_s: float | None = None) -> _kvpipe.RespConnection:
        """Opens a connection as the user, in the database. Raises as `greet`."""
        try:
            connection = _kvpipe.RespConnection(*server, timeout_s or self._settings.answer_s, self._tls)
        except ConnectError as error:
            raise UnreachedError(str(error)) from error
        try:
            self._begin(connection, _name(server))
        except NotServingError:
            connection.close()
            raise
        except PeerLostError as error:
            connection.close()
            raise UnreachedError(str(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin(self, connection: _kvpipe.RespConnection, address: str) -> None:
        settings = self._settings
        hello = [*HELLO]
        if settings.password:
            hello += [b"AUTH", (settings.username or "default").encode(), settings.password.encode()]
        # A server that loads its data, or has lost its own primary, answers HELLO, and refuses PING.
        commands = [hello, [b"PING"]]
        if settings.database:
            commands.append([b"SELECT", b"%d" % settings.database])
        connection.send(commands)
        replies = connection.receive(len(commands))
        refusal = next((reply for reply in replies if isinstance(reply, str)), None)
        if refusal is not None and refusal.startswith(("NOAUTH", "WRONGPASS")):
            raise LoginError(f"{address} refuses the user or password: {refusal}")
        if refusal is not None and refusal.startswith("ERR unknown command"):
            raise IncompatiblePeerError(f"{address} does not know HELLO: expected version 6.2 or newer")
        if refusal is not None:
            raise error_of(refusal, address)
        check_role(replies[0], address)


def _name(server: Address) -> str:
    return f"{server[0]}:{server[1]}"


class _Pool:
    """The connections to one server.

    Args:
        open_one: Opens one.
        limit: Maximum number of connections. Without one, calls wait only while the server refuses to open more.
        answer_s: Bound of that wait, the attempt to open one included.
    """

    def __init__(self, open_one: Callable[[], _kvpipe.RespConnection], limit: int | None, answer_s: float) -> None:
        self._open_one, self._limit, self._answer_s = open_one, limit, answer_s
        self._idle: list[_kvpipe.RespConnection] = []
        self._used: set[_kvpipe.RespConnection] = set()
        self._num_opening = 0
        self._changed = Condition()
        # Raised to those who come after its end.
        self._ended: KVPipeError | None = None

    @contextmanager
    def borrowed(self, num_wanted: int) -> Iterator[list[_kvpipe.RespConnection]]:
        """Takes one connection or more; see `Connections`."""
        connections: list[_kvpipe.RespConnection] = []
        try:
            connections.append(self._borrow(is_needed=True))  # type: ignore[arg-type]
            while len(connections) < num_wanted and (more := self._borrow(is_needed=False)):
                connections.append(more)
            yield connections
        except NotNowError:
            self._give_back(connections, are_usable=True)
            raise
        except BaseException:
            self._give_back(connections, are_usable=False)
            raise
        self._give_back(connections, are_usable=True)

    def _borrow(self, *, is_needed: bool) -> _kvpipe.RespConnection | None:
        began_s = time.monotonic()
        with self._changed:
            while (connection := self._next_idle()) is None and self._is_full:
                if not is_needed:
                    return None
                self._changed.wait()
            if connection is not None:
                return connection
            self._num_opening += 1
        try:
            connection = self._open_one()
        except UnreachedError as error:
            self._opened(None)
            # A server that refuses at once may have as many clients as it takes; a silent one is asked no more.
            ends_s = began_s + self._answer_s
            if time.monotonic() >= ends_s:
                raise
            return self._borrow_used(error, ends_s) if is_needed else None
        except BaseException:
            self._opened(None)
            raise
        self._opened(connection)
        return connection

    def _borrow_used(self, refusal: UnreachedError, ends_s: float) -> _kvpipe.RespConnection:
        """Waits for a connection that another call uses, since there can be no more."""
        with self._changed:
            while (connection := self._next_idle()) is None:
                left_s = ends_s - time.monotonic()
                if not self._used or left_s <= 0:
                    raise refusal
                self._changed.wait(left_s)
            return connection

    @property
    def _is_full(self) -> bool:
        return self._limit is not None and len(self._used) + self._num_opening >= self._limit

    def _next_idle(self) -> _kvpipe.RespConnection | None:
        """Takes an idle connection, with the lock held."""
        if self._ended is not None:
            raise self._ended
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle:
                self._used.add(connection)
                return connection
            # The server has closed it since it was used.
            connection.close()
        return None

    def _opened(self, connection: _kvpipe.RespConnection | None) -> None:
        with self._changed:
            self._num_opening -= 1
            if connection is not None:
                self._used.add(connection)
            else:
                self._changed.notify_all()

    def _give_back(self, connections: list[_kvpipe.RespConnection], *, are_usable: bool) -> None:
        with self._changed:
            self._used -= set(connections)
            # The failure that broke one connection has broken the idle ones, too.
            ended = [] if are_usable and self._ended is None else [*connections, *self._idle]
            self._idle = [] if ended else [*self._idle, *connections]
            self._changed.notify_all()
        for connection in ended:
            connection.close()

    def end(self, error: KVPipeError, *, with_used: bool) -> None:
        """Ends idle connections now, those in use too or when they are given back. Later calls raise the error."""
        with self._changed:
            self._ended = error
            ended = [*self._idle, *(self._used if with_used else ())]
            self._idle = []
            self._changed.notify_all()
        for connection in ended:
            connection.close()
