"""The bytes of values between server and caller, and questions about many keys."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Any

from kvpipe import _kvpipe
from kvpipe.exceptions import ClosedError, ConnectError, PeerLostError
from kvpipe.store.valkey.errors import REDIRECTIONS, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpipe.store.valkey.client import Address, Client

Part = tuple[bytes, int]
# `None`, or why a part is not stored or read: its true size, -1 for none, or the server's error.
Outcome = str | int | None


class Bulk(ABC):
    """Moves parts of values. Parts of one call are on one server, and fill its memory one after the other."""

    @abstractmethod
    def write(self, memory: memoryview, parts: Sequence[Part], ttl_ms: int) -> list[Outcome]:
        """Stores parts."""

    @abstractmethod
    def read(self, memory: memoryview, parts: Sequence[Part]) -> list[Outcome]:
        """Reads parts."""

    @abstractmethod
    def exist(self, manifests: Sequence[bytes]) -> list[bool]:
        """Returns for each manifest whether it is there and not leased."""

    @abstractmethod
    def close(self) -> None:
        """Ends all connections, and calls that use them."""


class LibraryBulk(Bulk):
    """Over the library's connections, with a copy: for TLS, and for keys that a cluster moves at the moment."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def write(self, memory: memoryview, parts: Sequence[Part], ttl_ms: int) -> list[Outcome]:
        """Stores parts; see `Bulk.write`."""
        for key, part in _split(memory, parts):
            self._client.call(partial(self._client.library.set, key, part, px=ttl_ms))
        return [None] * len(parts)

    def read(self, memory: memoryview, parts: Sequence[Part]) -> list[Outcome]:
        """Reads parts; see `Bulk.read`."""
        outcomes: list[Outcome] = []
        for key, part in _split(memory, parts):
            data = self._client.call(partial(self._client.library.get, key))
            if data is None or len(data) != part.nbytes:
                outcomes.append(-1 if data is None else len(data))
            else:
                part[:] = data
                outcomes.append(None)
        return outcomes

    def exist(self, manifests: Sequence[bytes]) -> list[bool]:
        """Answers for each manifest; see `Bulk.exist`."""
        now_ms = self._now_ms()

        def ask() -> list[Any]:
            pipeline = self._client.library.pipeline(transaction=False)
            for manifest in manifests:
                pipeline.hmget(manifest, "e", "l")
            return list(pipeline.execute(raise_on_error=False))

        return [_is_free(reply, now_ms) for reply in self._client.call(ask)]

    def _now_ms(self) -> int:
        library = self._client.library
        options = {"target_nodes": library.get_random_node()} if self._client.is_cluster else {}
        seconds, microseconds = self._client.call(lambda: library.time(**options))
        return int(seconds) * 1000 + int(microseconds) // 1000

    def close(self) -> None:
        """Does nothing: the client closes its connections."""


class NativeBulk(Bulk):
    """Over connections of its own, without a copy in Python."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pools: dict[Address, _Pool] = {}
        self._redirected = LibraryBulk(client)
        self._changed = Condition()
        self._is_closed = False

    def write(self, memory: memoryview, parts: Sequence[Part], ttl_ms: int) -> list[Outcome]:
        """Stores parts; see `Bulk.write`."""
        outcomes = self._transfer(
            parts, lambda connections: _kvpipe.RespConnection.write_parts(connections, memory, parts, ttl_ms)
        )
        for index, part in self._moved(memory, parts, outcomes):
            outcomes[index] = self._redirected.write(part, [parts[index]], ttl_ms)[0]
        return outcomes

    def read(self, memory: memoryview, parts: Sequence[Part]) -> list[Outcome]:
        """Reads parts; see `Bulk.read`."""
        outcomes = self._transfer(
            parts, lambda connections: _kvpipe.RespConnection.read_parts(connections, memory, parts)
        )
        for index, part in self._moved(memory, parts, outcomes):
            outcomes[index] = self._redirected.read(part, [parts[index]])[0]
        return outcomes

    def exist(self, manifests: Sequence[bytes]) -> list[bool]:
        """Asks all servers side by side, each in one round trip; see `Bulk.exist`."""
        self._client.check()
        of_server: defaultdict[Address, list[int]] = defaultdict(list)
        for index, manifest in enumerate(manifests):
            of_server[self._client.address_of(manifest)].append(index)
        began_s = time.monotonic()
        try:
            return self._exist(manifests, of_server)
        except PeerLostError:
            if not self._may_repeat(began_s):
                raise
            return self._exist(manifests, of_server)

    def _exist(self, manifests: Sequence[bytes], of_server: dict[Address, list[int]]) -> list[bool]:
        answers = [False] * len(manifests)
        # In one order for all threads: none waits for a connection while it holds one that another waits for.
        borrowed = [(self._pool(server), indexes) for server, indexes in sorted(of_server.items())]
        with _borrowing([pool for pool, _ in borrowed]) as connections:
            for connection, (_, indexes) in zip(connections, borrowed, strict=True):
                connection.send([(b"TIME",), *((b"HMGET", manifests[index], b"e", b"l") for index in indexes)])
            for connection, (_, indexes) in zip(connections, borrowed, strict=True):
                now, *replies = connection.receive(1 + len(indexes))
                if isinstance(now, str):
                    raise error_of(now)
                now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
                for index, reply in zip(indexes, replies, strict=True):
                    if isinstance(reply, str) and reply.startswith(REDIRECTIONS):
                        answers[index] = self._redirected.exist([manifests[index]])[0]
                    else:
                        answers[index] = _is_free(reply, now_ms)
        return answers

    def close(self) -> None:
        """Ends all connections; see `Bulk.close`."""
        with self._changed:
            self._is_closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    def _transfer(self, parts: Sequence[Part], run: Any) -> list[Outcome]:
        self._client.check()
        began_s = time.monotonic()
        try:
            return self._once(parts, run)
        except PeerLostError:
            if not self._may_repeat(began_s):
                raise
            return self._once(parts, run)

    def _once(self, parts: Sequence[Part], run: Any) -> list[Outcome]:
        with self._pool(self._client.address_of(parts[0][0])).borrowed(len(parts)) as connections:
            return list(run(connections))

    def _may_repeat(self, began_s: float) -> bool:
        """Whether an exchange may be repeated: if its connection had been closed, but not after a timeout."""
        self._client.check()
        return time.monotonic() - began_s < self._client.settings.answer_s / 2

    def _moved(
        self, memory: memoryview, parts: Sequence[Part], outcomes: list[Outcome]
    ) -> Iterator[tuple[int, memoryview]]:
        """The parts that their server has given to another one. The library follows, and learns where they are."""
        for index, (_, part) in enumerate(_split(memory, parts)):
            outcome = outcomes[index]
            if isinstance(outcome, str) and outcome.startswith(REDIRECTIONS):
                yield index, part

    def _pool(self, server: Address) -> _Pool:
        with self._changed:
            if self._is_closed:
                raise ClosedError("the store was closed")
            return self._pools.setdefault(server, _Pool(self._client, server))


class _Pool:
    """The connections to one server."""

    def __init__(self, client: Client, server: Address) -> None:
        self._client, self._server = client, server
        self._idle: list[_kvpipe.RespConnection] = []
        self._used: set[_kvpipe.RespConnection] = set()
        self._num_opening = 0
        self._changed = Condition()
        self._is_closed = False

    @contextmanager
    def borrowed(self, num_wanted: int) -> Iterator[list[_kvpipe.RespConnection]]:
        """Lends one connection or more. It waits for others' transfers, each of which is bounded."""
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
                    self._used.add(connection)
                    return connection
                if len(self._used) + self._num_opening < self._client.settings.connections:
                    break
                if not is_needed:
                    return None
                self._changed.wait()
            self._check()
            self._num_opening += 1
        try:
            connection = _open(self._client, self._server)
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


@contextmanager
def _borrowing(pools: list[_Pool]) -> Iterator[list[_kvpipe.RespConnection]]:
    """Lends a connection of each pool."""
    if not pools:
        yield []
        return
    with pools[0].borrowed(1) as first, _borrowing(pools[1:]) as others:
        yield [*first, *others]


def _open(client: Client, server: Address) -> _kvpipe.RespConnection:
    """Opens a connection as the user, in the database."""
    settings = client.settings
    try:
        connection = _kvpipe.RespConnection(*server, settings.answer_s)
    except ConnectError as error:
        # The store was open: it was there, and now is not.
        raise PeerLostError(str(error)) from error
    commands = []
    if settings.password:
        login = [settings.username] if settings.username else []
        commands.append([b"AUTH", *(word.encode() for word in (*login, settings.password))])
    if settings.database:
        commands.append([b"SELECT", b"%d" % settings.database])
    if commands:
        connection.send(commands)
        for reply in connection.receive(len(commands)):
            if isinstance(reply, str):
                connection.close()
                raise error_of(reply, f"{server[0]}:{server[1]}")
    return connection


def _split(memory: memoryview, parts: Sequence[Part]) -> Iterator[tuple[bytes, memoryview]]:
    start = 0
    for key, num_bytes in parts:
        yield key, memory[start : start + num_bytes]
        start += num_bytes


def _is_free(reply: Any, now_ms: int) -> bool:
    """Whether a manifest is there and not leased. One that is no manifest is not there."""
    if isinstance(reply, str):
        error = error_of(reply)
        if reply.startswith("WRONGTYPE"):
            return False
        raise error
    if not isinstance(reply, list) or reply[0] is None:
        return False
    return reply[1] is None or int(reply[1]) <= now_ms
