"""Messages between front ends and workers, as AMQP 0-9-1 messages. Pure: no input or output, no clock.

A front end publishes a `Request` to the queue of all workers. A worker sends `Reply`s to the front end's queue, several
in a message where they are ready together, and gets `DeliveryControl` messages in its own. The fields are JSON in front
of a payload: headers of AMQP would have to fit into one frame. docs/reference/wire-queue.md has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import orjson
from aio_pika import DeliveryMode, Message

from kvpipe.exceptions import ProtocolError
from kvpipe.proxy import exact_json
from kvpipe.proxy.bodies import CHAT_PATH, COMPLETIONS_PATH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aio_pika.abc import AbstractMessage

# `begin`: asks whether to go on with a request that was delivered before. `head`: status and headers, with the body of
# an answer that is no stream. `piece`: events of a stream. `part`: the beginning of the next head or piece, which is
# larger than a message. `end`: the stream's end. `failed`: D has failed it for good.
# `returned`: the front end did not read its replies, or D was frozen. The front end publishes the request again, unless
# it has the answer.
# `interrupted`: the worker lost a connection or channel, or D was frozen, which was not the request's fault.
ReplyKind = Literal["begin", "head", "piece", "part", "end", "failed", "returned", "interrupted"]
# `continue`: go on after the tokens. `done`: the front end has all of the answer. `drop`: the front end needs no more.
# `requeue`: pieces were lost on the way; have another worker go on. `cancel`: the client has left.
ControlKind = Literal["continue", "done", "drop", "requeue", "cancel"]

PATHS = (COMPLETIONS_PATH, CHAT_PATH)
_REQUEST, _REPLIES = "request", "replies"
_REPLY_KINDS, _CONTROL_KINDS = frozenset(get_args(ReplyKind)), frozenset(get_args(ControlKind))
_LAST_STATUS = 599
_LENGTH_BYTES = 4
# Largest head or piece that is put together of parts, in the memory of worker and front end.
MAX_REPLY_BYTES = 64 << 20
# Of RabbitMQ; in milliseconds it fits 32 bits.
_LONGEST_TTL_S = 4_000_000.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request for any D.

    Attributes:
        id: chosen by the front end; its replies have it.
        reply_to: queue of the front end.
        path: API path.
        headers: HTTP headers for D.
        body: body for D, JSON.
        publication: number of earlier publications. After one the client may have a part of its answer.
        parsed: the body, as it was read with the message; None at a front end.
    """

    id: str
    reply_to: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    publication: int = 0
    parsed: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    def message(self, ttl_s: float) -> Message:
        """As a message that ends in the queue after this time."""
        return Message(
            _framed({"path": self.path, "headers": self.headers}, self.body),
            type=_REQUEST,
            correlation_id=self.id,
            message_id=str(self.publication),
            reply_to=self.reply_to,
            delivery_mode=DeliveryMode.PERSISTENT,
            expiration=min(ttl_s, _LONGEST_TTL_S),
        )

    @classmethod
    def of(cls, message: AbstractMessage, fronts: str = "") -> Self:
        """Reads a message.

        Args:
            message: the message.
            fronts: prefix of the names of front ends' queues.

        Raises:
            ProtocolError: It is no request of a front end.
        """
        is_request = message.type == _REQUEST and message.correlation_id and message.reply_to
        if not is_request or not str(message.reply_to).startswith(fronts):
            raise _wrong(message, "a request with an id and a front end's queue for replies")
        fields, body = _unframed(message, message.body)
        path = fields.get("path")
        if path not in PATHS:
            raise _wrong(message, f"one of the paths {', '.join(PATHS)}")
        parsed = _parsed(message, body)
        if not isinstance(parsed, dict):
            raise _wrong(message, "a JSON object as body")
        headers = list(_pairs(message, fields.get("headers")))
        publication = publication_of(message)
        return cls(str(message.correlation_id), str(message.reply_to), str(path), headers, body, publication, parsed)


def publication_of(message: AbstractMessage) -> int:
    """Number of times that the request of a message was published before."""
    number = message.message_id or ""
    return int(number) if number.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class Reply:
    """Report of a worker to a front end about one delivery of a request.

    Attributes:
        kind: see `ReplyKind`.
        id: of the request.
        delivery: of this delivery of the request, chosen by the worker.
        worker: queue of the worker.
        number: place of a head, piece, part or end in the answer; from 0.
        body: of an answer, or of a piece.
        tokens: token ids that D has sampled, as far as this piece has them.
        status: of a head; of a failure, the status that the client gets.
        headers: HTTP headers of a head.
        is_stream: of a head, true if pieces follow.
        decode_control: of a head, address of D's control port; empty if its worker does not have it.
        reason: of a failure.
    """

    kind: ReplyKind
    id: str
    delivery: str
    worker: str
    number: int = 0
    body: bytes = b""
    tokens: tuple[int, ...] = ()
    status: int = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()
    is_stream: bool = False
    decode_control: str = ""
    reason: str = ""

    @property
    def is_last(self) -> bool:
        """True if nothing follows it."""
        return self.kind in ("end", "failed") or (self.kind == "head" and not self.is_stream)

    def framed(self) -> bytes:
        """As a part of the body of `replies`."""
        fields: dict[str, Any] = {
            "type": self.kind,
            "id": self.id,
            "delivery": self.delivery,
            "number": self.number,
            "bytes": len(self.body),
        }
        if self.tokens:
            fields["tokens"] = self.tokens
        if self.kind == "head":
            fields |= {"status": self.status, "headers": self.headers, "is_stream": self.is_stream}
            fields |= {"decode_control": self.decode_control} if self.decode_control else {}
        elif self.kind == "failed":
            fields |= {"status": self.status, "reason": self.reason}
        return _framed(fields, self.body)

    @classmethod
    def all_of(cls, message: AbstractMessage) -> list[Self]:
        """Reads the replies in a message.

        Raises:
            ProtocolError: It is none of a worker.
        """
        if message.type != _REPLIES or not message.reply_to:
            raise _wrong(message, "replies with a worker's queue")
        found, rest = [], message.body
        while rest:
            fields, rest = _unframed(message, rest)
            num_bytes = fields.get("bytes")
            if type(num_bytes) is not int or not 0 <= num_bytes <= len(rest):
                raise _wrong(message, "the length of a payload")
            found.append(cls._of(message, fields, rest[:num_bytes]))
            rest = rest[num_bytes:]
        return found

    @classmethod
    def _of(cls, message: AbstractMessage, fields: dict[str, Any], body: bytes) -> Self:
        kind, id, delivery, number = (fields.get(name) for name in ("type", "id", "delivery", "number"))  # noqa: A001
        status = fields.get("status", int(HTTPStatus.OK))
        if kind not in _REPLY_KINDS or not isinstance(id, str):
            raise _wrong(message, "a reply with the id of a request")
        if not isinstance(delivery, str) or type(number) is not int or type(status) is not int:
            raise _wrong(message, "a delivery, a number and a status")
        if not HTTPStatus.OK <= status <= _LAST_STATUS:
            raise _wrong(message, "an HTTP status")
        return cls(
            kind,  # type: ignore[arg-type]  # one of them, as was checked
            id,
            delivery,
            str(message.reply_to),
            number,
            body,
            _tokens(message, fields.get("tokens", [])),
            status,
            _pairs(message, fields.get("headers", [])),
            bool(fields.get("is_stream")),
            str(fields.get("decode_control", "")),
            str(fields.get("reason", "")),
        )


def replies(worker: str, framed: Sequence[bytes], *, is_kept: bool = False) -> Message:
    """A message with replies of a worker to one front end. One that is kept outlives the broker."""
    mode = DeliveryMode.PERSISTENT if is_kept else DeliveryMode.NOT_PERSISTENT
    return Message(b"".join(framed), type=_REPLIES, reply_to=worker, delivery_mode=mode)


@dataclass(frozen=True, slots=True)
class DeliveryControl:
    """Command of a front end to a worker about a request.

    Attributes:
        kind: see `ControlKind`.
        id: of the request.
        delivery: of the delivery that is meant; empty for all.
        tokens: with `continue`, the token ids that the client has.
        has_interruptions: with `continue`, true if an earlier delivery of this publication was `interrupted`.
    """

    kind: ControlKind
    id: str
    delivery: str = ""
    tokens: tuple[int, ...] = ()
    has_interruptions: bool = False

    def message(self) -> Message:
        """As a message."""
        fields: dict[str, Any] = {"delivery": self.delivery, "tokens": self.tokens}
        if self.has_interruptions:
            fields["has_interruptions"] = True
        body = _framed(fields, b"")
        return Message(body, type=self.kind, correlation_id=self.id)

    @classmethod
    def of(cls, message: AbstractMessage) -> Self:
        """Reads a message.

        Raises:
            ProtocolError: No front end sends it.
        """
        if message.type not in _CONTROL_KINDS or not message.correlation_id:
            raise _wrong(message, "a message to a worker with the id of a request")
        fields, _ = _unframed(message, message.body)
        delivery = fields.get("delivery")
        if not isinstance(delivery, str):
            raise _wrong(message, "a delivery")
        tokens = _tokens(message, fields.get("tokens", []))
        has_interruptions = fields.get("has_interruptions") is True
        return cls(message.type, str(message.correlation_id), delivery, tokens, has_interruptions)  # type: ignore[arg-type]


def _framed(fields: dict[str, Any], payload: bytes) -> bytes:
    head = orjson.dumps(fields)
    return len(head).to_bytes(_LENGTH_BYTES, "big") + head + payload


def _unframed(message: AbstractMessage, body: bytes) -> tuple[dict[str, Any], bytes]:
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "big")
    fields = _parsed(message, body[_LENGTH_BYTES:end])
    if not isinstance(fields, dict):
        raise _wrong(message, "fields in front of its payload")
    return fields, body[end:]


def _parsed(message: AbstractMessage, text: bytes) -> Any:
    try:
        return exact_json.read(text)
    except ValueError as error:
        raise _wrong(message, "JSON") from error


def _pairs(message: AbstractMessage, found: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in found):  # noqa: PLR2004
        raise _wrong(message, "headers as a list of pairs")
    return tuple((str(name), str(value)) for name, value in found)


def _tokens(message: AbstractMessage, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise _wrong(message, "token ids")
    return tuple(found)


def _wrong(message: AbstractMessage, expected: str) -> ProtocolError:
    return ProtocolError(f"AMQP message {str(message.type)[:40]!r}: expected {expected}")
