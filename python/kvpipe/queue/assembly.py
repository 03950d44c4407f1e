r"""One answer out of the replies of the workers that have had its request in turn. Pure: no input or output.

Replies of a delivery are numbered. When a worker dies, the broker delivers the request to another one, which asks with
`begin` what the client has. Its D samples these tokens again, and they are left out here.

```text
  no delivery --- head, number 0 ---> delivery of this head
     ^     \----- begin ------------> delivery of this begin, which gets `continue` and the tokens so far
     |                                   |  ^
     +------ a number is missing: -------+  +--- begin of another one: the broker has delivered the request again
             the worker gets `requeue`
```
"""

from __future__ import annotations

import dataclasses
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kvpipe.queue.chunks import (
    chunk_of,
    event_of,
    has_more,
    is_empty,
    is_end_mark,
    is_finish,
    text_of,
    without_text,
)
from kvpipe.queue.messages import MAX_REPLY_BYTES, DeliveryControl, Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpipe.queue.messages import ControlKind

# Fields of a chunk that name the answer, which another instance would name differently.
_HEAD = ("id", "created", "model")
_SHOWN_BYTES = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Result of processing a reply.

    Attributes:
        control: answer to the worker.
        part: of the answer for the client: its head, a piece, its end, or a failure.
        decode_control: address of the control port of the D that begins here; empty if none begins, or it is not known.
        has_more_of_part: True if the reply is the next beginning of a head or piece that is not complete.
    """

    control: DeliveryControl | None = None
    part: Reply | None = None
    decode_control: str = ""
    has_more_of_part: bool = False


class Assembly:
    """The replies to one request.

    Args:
        id: the request's id.
        has_one_sequence: true if the answer can be continued: it has one sequence, without the prompt.

    Attributes:
        worker: queue of the worker that has the request, as far as is known.
    """

    def __init__(self, id: str, *, has_one_sequence: Callable[[], bool]) -> None:  # noqa: A002 - as in the messages
        self.worker = ""
        self._has_one_sequence = has_one_sequence
        self._id = id
        self._delivery = ""
        self._next = 0
        self._has_head = False
        self._tokens: list[int] = []
        self._events: list[bytes] = []
        self._repetition: _Repetition | None = None
        self._parts: list[Reply] = []
        self._num_part_bytes = 0

    def receive(self, reply: Reply) -> Outcome:
        """Takes the next reply of any worker."""
        if reply.kind == "begin":
            return self._begin(reply)
        if not self._delivery and not self._has_head and reply.number == 0:
            self._delivery, self.worker = reply.delivery, reply.worker
        if self._delivery and (reply.delivery != self._delivery or reply.number < self._next):
            # Of a worker that has lost the request, or it came twice.
            is_overtaken = reply.delivery != self._delivery and self._next > 0 and reply.is_last
            return Outcome(DeliveryControl("drop", self._id, reply.delivery) if is_overtaken else None)
        if reply.kind == "failed":
            return Outcome(DeliveryControl("done", self._id, reply.delivery), reply)
        if not self._delivery or reply.number > self._next:
            self._delivery = ""
            self._clear_parts()
            return Outcome(DeliveryControl("requeue", self._id, reply.delivery))
        self._next += 1
        return self._add(reply)

    def _add(self, reply: Reply) -> Outcome:
        """Takes a reply before which none is missing."""
        if reply.kind == "part":
            return self._part(reply)
        if reply.kind == "end":
            return self._end(reply)
        reply = self._joined(reply)
        return self._head(reply) if reply.kind == "head" else self._piece(reply)

    def _begin(self, reply: Reply) -> Outcome:
        self._delivery, self.worker, self._next = reply.delivery, reply.worker, 0
        self._clear_parts()
        if not self._events:
            return Outcome(self._control("continue"))
        events = b"".join(self._events).split(b"\n\n")
        if any(map(is_end_mark, events)):
            return Outcome(self._control("done"), dataclasses.replace(reply, kind="end"))
        chunks = [chunk for event in events if (chunk := chunk_of(event)) is not None]
        if not self._has_one_sequence():
            return self._failure("the worker was lost, and an answer with several sequences cannot be continued")
        if not self._tokens and not all(map(is_empty, chunks)):
            return self._failure("the worker was lost, and its decode instance gives no token ids to continue after")
        self._repetition = _Repetition(self._tokens, chunks)
        return Outcome(self._control("continue", tuple(self._tokens)))

    def _part(self, reply: Reply) -> Outcome:
        self._parts.append(reply)
        self._num_part_bytes += len(reply.body)
        if self._num_part_bytes > MAX_REPLY_BYTES:
            return self._failure(f"a worker sends an answer, or an event of one, of more than {MAX_REPLY_BYTES} bytes")
        return Outcome(has_more_of_part=True)

    def _joined(self, reply: Reply) -> Reply:
        """A head or piece with the parts before it."""
        if not self._parts:
            return reply
        parts = [*self._parts, reply]
        self._clear_parts()
        tokens = tuple(token for part in parts for token in part.tokens)
        return dataclasses.replace(reply, body=b"".join(part.body for part in parts), tokens=tokens)

    def _clear_parts(self) -> None:
        self._parts, self._num_part_bytes = [], 0

    def _end(self, reply: Reply) -> Outcome:
        if self._repetition is not None and self._repetition.is_repeating:
            return self._failure("another instance ended before what the client has")
        return Outcome(self._control("done"), reply)

    def _head(self, reply: Reply) -> Outcome:
        if not reply.is_stream:
            if self._has_head:
                return self._failure(f"another instance answered {reply.status} in the middle of the stream")
            return Outcome(self._control("done"), reply, reply.decode_control)
        part = None if self._has_head else reply
        self._has_head = True
        return Outcome(None, part, reply.decode_control)

    def _piece(self, reply: Reply) -> Outcome:
        part: Reply | None = reply
        if self._repetition is not None:
            try:
                part = self._repetition.rest_of(reply)
            except AnswerMismatchError as error:
                return self._failure(str(error))
        if part is not None:
            self._tokens.extend(part.tokens)
            self._events.append(part.body)
        return Outcome(None, part)

    def _failure(self, reason: str) -> Outcome:
        failed = Reply("failed", self._id, self._delivery, self.worker, status=HTTPStatus.BAD_GATEWAY, reason=reason)
        return Outcome(self._control("drop"), failed)

    def _control(self, kind: ControlKind, tokens: tuple[int, ...] = ()) -> DeliveryControl:
        return DeliveryControl(kind, self._id, self._delivery, tokens)


class AnswerMismatchError(Exception):
    """A worker's answer does not go on after what the client has."""


class _Repetition:
    """Leaves out what the client has, of a delivery whose pieces are one event each.

    Args:
        tokens: the token ids that the client has.
        chunks: the chunks that it has.
    """

    def __init__(self, tokens: list[int], chunks: list[dict[str, Any]]) -> None:
        self._tokens = list(tokens)
        self._num_repeated = 0
        texts = [text_of(chunk) for chunk in chunks]
        # Of what is left; `None` if it is not text alone.
        self._text = None if None in texts else "".join(text or "" for text in texts)
        self._head = {key: chunks[0][key] for key in _HEAD if key in chunks[0]} if chunks else {}
        self._has_finished = any(map(is_finish, chunks))
        self._has_usage = any(not chunk["choices"] for chunk in chunks)

    @property
    def is_repeating(self) -> bool:
        """True if the client has tokens that have not come again."""
        return self._num_repeated < len(self._tokens)

    def rest_of(self, reply: Reply) -> Reply | None:
        """The new part of a piece; `None` if the client has all of it.

        Raises:
            AnswerMismatchError: It differs from what the client has.
        """
        known = self._tokens[self._num_repeated : self._num_repeated + len(reply.tokens)]
        if tuple(known) != reply.tokens[: len(known)]:
            message = "another instance sampled other tokens than those that the client has"
            raise AnswerMismatchError(message)
        was_repeating = self.is_repeating
        self._num_repeated += len(known)
        chunk = chunk_of(reply.body)
        if was_repeating and (chunk is None or (not reply.tokens and not is_empty(chunk))):
            message = f"another instance sent {reply.body[:_SHOWN_BYTES]!r} before what the client has"
            raise AnswerMismatchError(message)
        if not was_repeating:
            return self._new(reply, chunk)
        if len(known) < len(reply.tokens):
            return self._cut(reply, chunk, len(known))
        text = "" if chunk is None else text_of(chunk)
        self._text = None if self._text is None or text is None else self._text[len(text) :]
        return None

    def _new(self, reply: Reply, chunk: dict[str, Any] | None) -> Reply | None:
        """A piece after all that the client has; `None` if it is one that a stream has once."""
        if chunk is None:
            return reply
        is_known = (
            is_empty(chunk) or (not chunk["choices"] and self._has_usage) or (is_finish(chunk) and self._has_finished)
        )
        if is_known and not reply.tokens:
            return None
        return dataclasses.replace(reply, body=event_of(chunk | self._head))

    def _cut(self, reply: Reply, chunk: dict[str, Any] | None, num_known: int) -> Reply:
        """A piece of which the client has the first tokens."""
        text = None if chunk is None else text_of(chunk)
        if chunk is None or text is None or self._text is None or not text.startswith(self._text) or has_more(chunk):
            message = "the worker was lost in the middle of a chunk that cannot be cut"
            raise AnswerMismatchError(message)
        body = event_of(without_text(chunk, len(self._text)) | self._head)
        return dataclasses.replace(reply, body=body, tokens=reply.tokens[num_known:])
