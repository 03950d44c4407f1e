"""LMCache's two ways to a store on another machine: its C++ client for Redis, and the protocol of its own server."""

from __future__ import annotations

import select
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmcache

from . import redis_values
from .server_program import ServerProgram
from .side import Setup, Words, seconds
from .values import ValuesClient

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task

_START_S = 60.0


class _Client(ValuesClient):
    """Puts, gets and asks with all values of a task at once. A subclass says how."""

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects to the server."""
        self._connect(words["host"], int(words["port"]))
        return {}

    def clear(self, task: Task) -> None:
        """Puts what is read, and every other key that is asked for."""
        self._out[:] = 0
        if task.kind == "exists":
            self._put_all(_keys(task)[::2], [memoryview(b"x" * 8)] * len(_keys(task)[::2]))
        else:
            offsets = self._all_offsets(task)
            self._put_all([_key(at) for at in offsets], [_view(self._source, at, task) for at in offsets])

    def run(self, task: Task) -> Words:
        """Runs a task of one kind."""
        if task.kind == "exists":
            return self._run_exists(task)
        offsets = task.offsets(len(self._source))
        keys = [_key(at) for at in offsets]
        if task.kind == "put":
            views = [_view(self._source, at, task) for at in offsets]
            return seconds(lambda: self._put_all(keys, views))
        views = [_view(self._out, at, task) for at in offsets]
        return seconds(lambda: self._get_all(keys, views))

    def _get(self, task: Task, at: int) -> None:
        self._get_all([_key(at)], [_view(self._out, at, task)])

    def _exist(self, task: Task) -> list[bool]:
        return self._exist_all(_keys(task))

    def _connect(self, host: str, port: int) -> None:
        """Connects."""
        raise NotImplementedError

    def _put_all(self, keys: list[str], views: list[memoryview]) -> None:
        """Puts values, and waits until they are there."""
        raise NotImplementedError

    def _get_all(self, keys: list[str], views: list[memoryview]) -> None:
        """Reads values."""
        raise NotImplementedError

    def _exist_all(self, keys: list[str]) -> list[bool]:
        """Returns for each key whether it has a value."""
        raise NotImplementedError


class RedisClient(_Client):
    """`LMCacheRedisClient`: threads of C++, each with a connection, which share the values of a batch."""

    def _connect(self, host: str, port: int) -> None:
        from lmcache.lmcache_redis import LMCacheRedisClient  # noqa: PLC0415 - of this role

        self._client = LMCacheRedisClient(host, port, int(self._options["connections"]))

    def _put_all(self, keys: list[str], views: list[memoryview]) -> None:
        self._done(self._client.submit_batch_set(keys, views))

    def _get_all(self, keys: list[str], views: list[memoryview]) -> None:
        self._done(self._client.submit_batch_get(keys, views))

    def _exist_all(self, keys: list[str]) -> list[bool]:
        return [bool(found) for found in self._done(self._client.submit_batch_exists(keys))]

    def _done(self, wanted: int) -> Any:
        while True:
            select.select([self._client.event_fd()], [], [])
            for number, is_ok, error, answers in self._client.drain_completions():
                if number == wanted:
                    if not is_ok:
                        raise ConnectionError(error)
                    return answers


class ServerClient(_Client):
    """The requests of `lm://` over one connection, as `LMCServerConnector` sends them. A put has no answer."""

    def _connect(self, host: str, port: int) -> None:
        import torch  # noqa: PLC0415 - of this role
        from lmcache.utils import CacheEngineKey  # noqa: PLC0415 - of this role
        from lmcache.v1 import protocol  # noqa: PLC0415 - of this role
        from lmcache.v1.memory_management import MemoryFormat  # noqa: PLC0415 - of this role

        self._protocol, self._size, self._dtype, self._format = protocol, torch.Size, torch.uint8, MemoryFormat(1)
        self._key_class = CacheEngineKey
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _ask(self, command: str, key: str, num_bytes: int) -> None:
        named = self._key_class("m", 1, 0, int(key), self._dtype)
        code, shape = self._protocol.ClientCommand[command], self._size([num_bytes, 0, 0, 0])
        message = self._protocol.ClientMetaMessage(code, named, num_bytes, self._format, self._dtype, shape)
        self._socket.sendall(message.serialize())

    def _answer(self) -> Any:
        size = self._protocol.ServerMetaMessage.packlength()
        data = bytearray(size)
        self._receive(memoryview(data))
        return self._protocol.ServerMetaMessage.deserialize(bytes(data))

    def _receive(self, view: memoryview) -> None:
        while view:
            num_bytes = self._socket.recv_into(view)
            if not num_bytes:
                message = "the server has closed the connection"
                raise ConnectionError(message)
            view = view[num_bytes:]

    def _put_all(self, keys: list[str], views: list[memoryview]) -> None:
        for key, view in zip(keys, views, strict=True):
            self._ask("PUT", key, view.nbytes)
            self._socket.sendall(view)
        # The next answer comes when all of them are there.
        self._exist_all(keys[-1:])

    def _get_all(self, keys: list[str], views: list[memoryview]) -> None:
        for key, view in zip(keys, views, strict=True):
            self._ask("GET", key, 0)
            if self._answer().length != view.nbytes:
                message = "a value that was put is not there"
                raise ValueError(message)
            self._receive(view)

    def _exist_all(self, keys: list[str]) -> list[bool]:
        found = []
        for key in keys:
            self._ask("EXIST", key, 0)
            found.append(self._answer().code == self._protocol.ServerReturnCode.SUCCESS)
        return found


class RedisServer(redis_values.Server):
    """A Redis or Valkey server of this machine."""

    def hello(self) -> Words:
        """Returns its address."""
        return _hello(self._address)


class Server(ServerProgram):
    """`lmcache_server HOST PORT cpu`."""

    def __init__(self, setup: Setup) -> None:
        program = str(Path(sys.executable).with_name("lmcache_server"))
        super().__init__(setup.host, lambda host, port: (program, host, str(port), "cpu"), _START_S)

    def hello(self) -> Words:
        """Returns its address."""
        return _hello(self._address)


def _hello(address: tuple[str, int]) -> Words:
    host, port = address
    return {"host": host, "port": str(port), "version": f"lmcache-{lmcache.__version__}"}


def _key(number: int) -> str:
    return str(1000 + number)


def _keys(task: Task) -> list[str]:
    return [f"{10**30 + number}" for number in range(task.num_blocks)]


def _view(buffer: Any, at: int, task: Task) -> memoryview:
    return memoryview(buffer[at : at + task.num_bytes])


ROLES = {
    "redis_client": RedisClient,
    "redis_server": RedisServer,
    "server_client": ServerClient,
    "server": Server,
}
