"""The process that has the entries of a `LookupBufferStore`: a served lookup buffer, and the store's catalogue.

Clients ask by entries too: a request is an entry under `REQUEST`, its answer one under `REPLY`, the client and the
request's number. The bytes of a value are an entry under `VALUE` and its ticket, which clients insert and peek at.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpipe._closing import Closing
from kvpipe.exceptions import CapacityError, ClosedError, KVPipeError, ProtocolError
from kvpipe.lookup_buffer import LookupBuffer
from kvpipe.store.base import LEASE_S, RESERVATION_S
from kvpipe.store.catalogue import Catalogue

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

REQUEST, REPLY, VALUE = 1, 2, 3

# Beside the values: requests, answers, and 2 KiB for each entry.
_MORE_CAPACITY_BYTES = 1 << 30
# An answer that nobody has fetched for so long has lost its client; what it grants is taken back.
_REPLY_S = 10.0
_NEVER = float("inf")


def tokens_of(*numbers: int) -> Any:
    """The tokens of an entry."""
    return np.array(numbers, np.int64)


def packed(message: dict[str, Any]) -> Any:
    """A message as a tensor."""
    return np.frombuffer(json.dumps(message).encode(), np.uint8)


def unpacked(tensor: Any) -> dict[str, Any]:
    """The message of a tensor."""
    message: dict[str, Any] = json.loads(tensor.tobytes())
    return message


@dataclass(eq=False)
class _Request:
    """A client's question, which may wait.

    Attributes:
        client: The client's own number, and the number that it gave the request.
        attempt: Returns the answer, and how to take it back; `None` while there is none.
        ends_at_s: When it gets `late` for an answer.
        late: The answer then.
        may_wait: Whether an attempt may find nothing.
        has_waited: Whether an attempt has found nothing.
    """

    client: tuple[int, int]
    attempt: Callable[[float], tuple[dict[str, Any], Callable[[], object]] | None]
    ends_at_s: float
    late: Callable[[], dict[str, Any]]
    may_wait: bool
    has_waited: bool = False


class LookupStoreServer(Closing):
    """Serves a store whose values are entries of a lookup buffer, until it is closed.

    Args:
        address: `host:port`; port 0 picks a free one, see the property `address`.
        capacity_bytes: Limit for the bytes of all values and reservations.
        token: The shared secret; by default `KVPIPE_TOKEN`. Required for addresses other than loopback.
        reservation_s: Seconds after its last call at which a reservation ends.

    Raises:
        ConfigError: The address cannot be bound.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        capacity_bytes: int = 1 << 30,
        *,
        token: str | None = None,
        reservation_s: float = RESERVATION_S,
    ) -> None:
        self._buffer = LookupBuffer(capacity_bytes + _MORE_CAPACITY_BYTES)
        self._catalogue = Catalogue(capacity_bytes, reservation_s, self._forget)
        self._waiting: list[_Request] = []
        self._replies: deque[tuple[float, tuple[int, int], Callable[[], object]]] = deque()
        self._buffer.serve(address, token)
        self._thread = Thread(target=self._run, name="kvpipe-lookup-store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Address that clients connect to."""
        return self._buffer.address

    @property
    def url(self) -> str:
        """URL for `open_store`."""
        return f"lookup://{self.address}"

    def close(self) -> None:
        """Drops all values; clients lose the store."""
        self._buffer.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                _, _, message, record, _ = self._buffer.drop_select(tokens_of(REQUEST), None, self._wait_s())
                now_s = time.monotonic()
                self._catalogue.expire(now_s)
                if message is not None:
                    self._receive(message, record, now_s)
                self._end_unread(now_s)
                self._answer_waiting(now_s)
            except ClosedError:
                return

    def _receive(self, message: Any, record: Any, now_s: float) -> None:
        """Answers a request that never waits: what it changes may be what others wait for."""
        try:
            request = self._request(unpacked(message), record.tobytes(), now_s)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            logger.warning("store.bad_request reason=%r", str(error))
            return
        if request.may_wait:
            self._waiting.append(request)
        else:
            self._answer(request, now_s)

    def _wait_s(self) -> float | None:
        ends_s = [request.ends_at_s for request in self._waiting]
        ends_s += [self._replies[0][0]] if self._replies else []
        end_s = min([self._catalogue.next_end_s(), *ends_s])
        return None if end_s == _NEVER else max(0.0, end_s - time.monotonic())

    def _answer_waiting(self, now_s: float) -> None:
        """Answers, in their order, the requests that have an answer or whose time is over."""
        self._waiting = [request for request in self._waiting if not self._answer(request, now_s)]

    def _answer(self, request: _Request, now_s: float) -> bool:
        """Attempts a request and answers it; False if it goes on waiting."""
        try:
            found = request.attempt(now_s)
        except KVPipeError as error:
            found = {"error": type(error).__name__, "message": str(error)}, _nothing
        except (LookupError, TypeError, ValueError) as error:
            found = {"error": ProtocolError.__name__, "message": f"not a request: {error}"}, _nothing
        if found is None and request.ends_at_s <= now_s:
            found = request.late(), _nothing
        if found is None:
            if not request.has_waited:
                request.has_waited = True
                self._catalogue.waited()
            return False
        self._reply(request.client, *found, now_s)
        return True

    def _reply(self, client: tuple[int, int], answer: dict[str, Any], undo: Callable[[], object], now_s: float) -> None:
        self._buffer.insert(tokens_of(REPLY, *client), None, packed(answer), None, None)
        self._replies.append((now_s + _REPLY_S, client, undo))

    def _end_unread(self, now_s: float) -> None:
        while self._replies and self._replies[0][0] <= now_s:
            _, client, undo = self._replies.popleft()
            unread = self._buffer.drop_select(tokens_of(REPLY, *client), None, 0)
            if unread[0] is not None:
                undo()

    def _forget(self, ticket: int) -> None:
        self._buffer.drop_select(tokens_of(VALUE, ticket), None, 0)

    # --- requests

    def _request(self, asked: dict[str, Any], record: bytes, now_s: float) -> _Request:
        client = (asked["client"], asked["number"])
        timeout = asked.get("timeout", 0)
        ends_at_s = _NEVER if timeout is None else now_s + timeout
        key = bytes.fromhex(asked.get("key", ""))
        waiting = {
            "reserve": lambda now_s: self._reserve(key, asked, now_s),
            "open": lambda now_s: self._open(key, now_s),
            "lease": lambda now_s: self._lease(key, asked["lease_s"], now_s),
        }
        attempt = waiting.get(asked["op"], lambda now_s: (self._done(asked, key, record, now_s), _nothing))
        return _Request(client, attempt, ends_at_s, lambda: self._late(asked), asked["op"] in waiting)

    def _late(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["op"] == "reserve":
            message = f"no space for {asked['num_bytes']} bytes in time: {self._catalogue.usage()}; retry later"
            return {"error": CapacityError.__name__, "message": message}
        self._catalogue.missed()
        return {"value": None}

    def _reserve(self, key: bytes, asked: dict[str, Any], now_s: float) -> Any:
        catalogue = self._catalogue
        reserved = catalogue.reserve(key, asked["num_bytes"], asked["ttl_s"], now_s)
        if reserved is None:
            return None
        return {"ticket": reserved.ticket}, lambda: catalogue.abort(key, reserved.ticket)

    def _open(self, key: bytes, now_s: float) -> Any:
        found = self._catalogue.open(key, now_s + LEASE_S)
        if found is None:
            return None
        reader, stored = found
        value = {"ticket": stored.ticket, "num_bytes": stored.num_bytes, "record": stored.record.hex()}
        return {"value": value, "holder": reader}, lambda: self._catalogue.close(key, reader)

    def _lease(self, key: bytes, lease_s: float, now_s: float) -> Any:
        found = self._catalogue.lease(key, lease_s, now_s)
        if found is None:
            return None
        lease, stored = found
        value = {"ticket": stored.ticket, "num_bytes": stored.num_bytes, "record": stored.record.hex()}
        return {"value": value, "holder": lease}, lambda: self._catalogue.release(key, lease)

    def _leave(self, client: int) -> None:
        """A client ends: its requests wait no longer."""
        self._waiting = [request for request in self._waiting if request.client[0] != client]

    def _done(self, asked: dict[str, Any], key: bytes, record: bytes, now_s: float) -> dict[str, Any]:
        """Answers what never waits."""
        catalogue, holder = self._catalogue, asked.get("holder", 0)
        keys = [bytes.fromhex(text) for text in asked.get("keys", ())]
        answers: dict[str, Callable[[], Any]] = {
            "exists": lambda: catalogue.exists(keys),
            "extend": lambda: catalogue.extend(key, holder, now_s).ticket,
            "commit": lambda: catalogue.commit(key, holder, asked["num_written"], record, now_s),
            "abort": lambda: catalogue.abort(key, holder),
            "close": lambda: catalogue.close(key, holder),
            "check": lambda: catalogue.leased(key, holder).ticket,
            "renew": lambda: catalogue.renew(key, holder, asked["lease_s"], now_s),
            "acknowledge": lambda: catalogue.acknowledge(key, holder),
            "release": lambda: catalogue.release(key, holder),
            "delete": lambda: catalogue.delete(keys),
            "leave": lambda: self._leave(asked["client"]),
            "list": lambda: [(each.key.hex(), each.num_bytes, each.is_leased) for each in catalogue.list(key)],
            "stats": lambda: asdict(catalogue.stats(len(self._waiting))),
        }
        return {"found": answers[asked["op"]]()}


def _nothing() -> None:
    pass
