"""The bytes of values between server and caller, and questions about many keys."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kvpipe import _kvpipe
from kvpipe.store.valkey.connections import HELLO, check_role
from kvpipe.store.valkey.errors import REDIRECTIONS, check_serves, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpipe.store.valkey.client import Client
    from kvpipe.store.valkey.settings import Address

Part = tuple[bytes, int]
# `None`, or why a part is not stored or read: its true size, -1 for none, or the server's error.
Outcome = str | int | None
# Fields of a manifest, as the scripts name them.
_EPOCH, _LEASED_UNTIL, _NUM_BYTES = b"e", b"l", b"n"


class Bulk:
    """Moves parts of values without a copy in Python.

    Parts of one call are on one server, and fill its memory one after the other.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def write(self, memory: memoryview, parts: Sequence[Part], ttl_ms: int) -> list[Outcome]:
        """Stores parts."""
        outcomes = self._transfer(
            parts, lambda connections: _kvpipe.RespConnection.write_parts(connections, memory, parts, ttl_ms)
        )
        for index, key, part in _redirected(memory, parts, outcomes):
            with self._client.redirections() as cluster:
                cluster.run(b"SET", key, part, b"PX", ttl_ms)
            outcomes[index] = None
        return outcomes

    def read(self, memory: memoryview, parts: Sequence[Part]) -> list[Outcome]:
        """Reads parts."""
        outcomes = self._transfer(
            parts, lambda connections: _kvpipe.RespConnection.read_parts(connections, memory, parts)
        )
        for index, key, part in _redirected(memory, parts, outcomes):
            with self._client.redirections() as cluster:
                data = cluster.run(b"GET", key)
            if data is None or len(data) != part.nbytes:
                outcomes[index] = -1 if data is None else len(data)
            else:
                part[:] = data
                outcomes[index] = None
        return outcomes

    def exist(self, manifests: Sequence[bytes]) -> list[bool]:
        """True for each manifest that is there and not leased.

        All servers are asked side by side, each in one round trip.
        """
        return [
            fields is not None and _is_free(fields[1], now_ms)
            for now_ms, fields in self._fields(manifests, (_EPOCH, _LEASED_UNTIL))
        ]

    def describe(self, manifests: Sequence[bytes]) -> list[tuple[int, bool] | None]:
        """The size of each value, and whether it is not leased; `None` for one that is not there."""
        return [
            (int(fields[2]), _is_free(fields[1], now_ms))
            if fields is not None and (fields[2] or b"").isdigit()
            else None
            for now_ms, fields in self._fields(manifests, (_EPOCH, _LEASED_UNTIL, _NUM_BYTES))
        ]

    def _fields(self, manifests: Sequence[bytes], names: Sequence[bytes]) -> list[tuple[int, list[Any] | None]]:
        """The server's time in milliseconds and fields of each manifest; `None` where there is no manifest."""
        answers: list[tuple[int, Any]] = self._client.call(lambda: self._ask(manifests, names))
        moved = [index for index, (_, reply) in enumerate(answers) if _is_redirection(reply)]
        if moved:
            with self._client.redirections() as cluster:
                now_ms, replies = cluster.fields([manifests[index] for index in moved], names)
            for index, reply in zip(moved, replies, strict=True):
                answers[index] = now_ms, reply
        return [(now_ms, _checked(reply)) for now_ms, reply in answers]

    def _ask(self, manifests: Sequence[bytes], names: Sequence[bytes]) -> list[tuple[int, Any]]:
        of_server: defaultdict[Address, list[int]] = defaultdict(list)
        for index, manifest in enumerate(manifests):
            of_server[self._client.server_of(manifest)].append(index)
        answers: list[tuple[int, Any]] = [(0, None)] * len(manifests)
        with self._client.connections.for_commands(list(of_server)) as connections:
            asked = list(zip(connections, of_server.items(), strict=True))
            for connection, (_, indexes) in asked:
                connection.send([HELLO, (b"TIME",), *((b"HMGET", manifests[index], *names) for index in indexes)])
            for connection, (server, indexes) in asked:
                hello, now, *replies = connection.receive(2 + len(indexes))
                address = f"{server[0]}:{server[1]}"
                # A server that was demoted may answer with what it had before.
                check_role(hello, address)
                check_serves([now, *replies], address)
                now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
                for index, reply in zip(indexes, replies, strict=True):
                    answers[index] = now_ms, reply
        return answers

    def _transfer(self, parts: Sequence[Part], run: Any) -> list[Outcome]:
        def transfer() -> list[Outcome]:
            server = self._client.server_of(parts[0][0])
            with self._client.connections.for_values(server, len(parts)) as connections:
                outcomes = list(run(connections))
                check_serves(outcomes, f"{server[0]}:{server[1]}")
            return outcomes

        return self._client.call(transfer)


def _redirected(
    memory: memoryview, parts: Sequence[Part], outcomes: list[Outcome]
) -> Iterator[tuple[int, bytes, memoryview]]:
    """The parts that their server has given to another one."""
    start = 0
    for index, (key, num_bytes) in enumerate(parts):
        if _is_redirection(outcomes[index]):
            yield index, key, memory[start : start + num_bytes]
        start += num_bytes


def _is_redirection(reply: Any) -> bool:
    return isinstance(reply, str) and reply.startswith(REDIRECTIONS)


def _checked(reply: Any) -> list[Any] | None:
    """The fields of a manifest. One that is no manifest is not there."""
    if isinstance(reply, str):
        if reply.startswith("WRONGTYPE"):
            return None
        raise error_of(reply)
    return reply if isinstance(reply, list) and reply[0] is not None else None


def _is_free(leased_until_ms: bytes | None, now_ms: int) -> bool:
    """True without a lease, and where the field is no number: nothing of kvpipe's has written it."""
    return leased_until_ms is None or not leased_until_ms.isdigit() or int(leased_until_ms) <= now_ms
