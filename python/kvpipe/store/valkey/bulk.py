"""The bytes of values between server and caller, and questions about many keys."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpipe import _kvpipe
from kvpipe.store.valkey.errors import REDIRECTIONS, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpipe.store.valkey.client import Client
    from kvpipe.store.valkey.settings import Address

Part = tuple[bytes, int]
# `None`, or why a part is not stored or read: its true size, -1 for none, or the server's error.
Outcome = str | int | None


class Bulk:
    """Moves parts of values without a copy in Python.

    Parts of one call are on one server, and fill its memory one after the other.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._moved = _Moved(client)

    def write(self, memory: memoryview, parts: Sequence[Part], ttl_ms: int) -> list[Outcome]:
        """Stores parts."""
        outcomes = self._transfer(
            parts, lambda connections: _kvpipe.RespConnection.write_parts(connections, memory, parts, ttl_ms)
        )
        for index, part in _redirected(memory, parts, outcomes):
            outcomes[index] = self._moved.write(part, [parts[index]], ttl_ms)[0]
        return outcomes

    def read(self, memory: memoryview, parts: Sequence[Part]) -> list[Outcome]:
        """Reads parts."""
        outcomes = self._transfer(
            parts, lambda connections: _kvpipe.RespConnection.read_parts(connections, memory, parts)
        )
        for index, part in _redirected(memory, parts, outcomes):
            outcomes[index] = self._moved.read(part, [parts[index]])[0]
        return outcomes

    def exist(self, manifests: Sequence[bytes]) -> list[bool]:
        """True for each manifest that is there and not leased.

        All servers are asked side by side, each in one round trip.
        """
        answers = self._client.call_natively(lambda: self._exist(manifests))
        moved = [index for index, answer in enumerate(answers) if answer is None]
        for index, answer in zip(moved, self._moved.exist([manifests[index] for index in moved]), strict=True):
            answers[index] = answer
        return [answer is True for answer in answers]

    def _exist(self, manifests: Sequence[bytes]) -> list[bool | None]:
        """Answers for each manifest; `None` for one that its server has given to another one."""
        of_server: defaultdict[Address, list[int]] = defaultdict(list)
        for index, manifest in enumerate(manifests):
            of_server[self._client.address_of(manifest)].append(index)
        answers: list[bool | None] = [None] * len(manifests)
        with self._client.connections.for_commands(list(of_server)) as connections:
            asked = list(zip(connections, of_server.values(), strict=True))
            for connection, indexes in asked:
                connection.send([(b"TIME",), *((b"HMGET", manifests[index], b"e", b"l") for index in indexes)])
            for connection, indexes in asked:
                now, *replies = connection.receive(1 + len(indexes))
                if isinstance(now, str):
                    raise error_of(now)
                now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
                for index, reply in zip(indexes, replies, strict=True):
                    if not (isinstance(reply, str) and reply.startswith(REDIRECTIONS)):
                        answers[index] = _is_free(reply, now_ms)
        return answers

    def _transfer(self, parts: Sequence[Part], run: Any) -> list[Outcome]:
        def transfer() -> list[Outcome]:
            server = self._client.address_of(parts[0][0])
            with self._client.connections.for_values(server, len(parts)) as connections:
                return list(run(connections))

        return self._client.call_natively(transfer)


class _Moved:
    """Keys that a cluster moves at the moment, over the library's connections: it follows the redirections."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def write(self, memory: memoryview, parts: Sequence[Part], ttl_ms: int) -> list[Outcome]:
        """Stores parts."""
        for key, part in _split(memory, parts):
            self._client.call(partial(self._client.library.set, key, part, px=ttl_ms))
        return [None] * len(parts)

    def read(self, memory: memoryview, parts: Sequence[Part]) -> list[Outcome]:
        """Reads parts."""
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
        """True for each manifest that is there and not leased."""
        if not manifests:
            return []
        now_ms = self._now_ms()

        def ask() -> list[Any]:
            pipeline = self._client.library.pipeline(transaction=False)
            for manifest in manifests:
                pipeline.hmget(manifest, "e", "l")
            replies = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
                    raise reply
            return list(replies)

        return [_is_free(reply, now_ms) for reply in self._client.call(ask)]

    def _now_ms(self) -> int:
        library = self._client.library
        options = {"target_nodes": library.get_random_node()} if self._client.is_cluster else {}
        seconds, microseconds = self._client.call(lambda: library.time(**options))
        return int(seconds) * 1000 + int(microseconds) // 1000


def _redirected(memory: memoryview, parts: Sequence[Part], outcomes: list[Outcome]) -> Iterator[tuple[int, memoryview]]:
    """The parts that their server has given to another one."""
    for index, (_, part) in enumerate(_split(memory, parts)):
        outcome = outcomes[index]
        if isinstance(outcome, str) and outcome.startswith(REDIRECTIONS):
            yield index, part


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
