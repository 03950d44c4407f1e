"""A request whose answer is not complete, and why a request has none."""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from kvpipe.proxy import exact_json
from kvpipe.proxy.instances import QUEUE
from kvpipe.proxy.routing import goes_to_decode_alone
from kvpipe.proxy.silence import silent_for
from kvpipe.proxy.upstream import InstanceError
from kvpipe.queue.assembly import Assembly
from kvpipe.queue.broker import called

if TYPE_CHECKING:
    from kvpipe.proxy.upstream import Failure, WhenBegun
    from kvpipe.queue.messages import Reply, Request

TOO_LATE = "no answer in time (--silence-timeout)"


class Pending:
    """A request whose answer is not complete, with the received parts in order.

    Args:
        request: the request.
        silence_timeout_s: limit for the first part, and between parts.
        when_begun: gets the control port of each D that begins with the answer.

    Attributes:
        request: the request, as it was published last.
        assembly: the received part of its answer.
        returned_by: the deliveries that have left it to the front end.
        interrupted: the deliveries of this publication that have ended without its fault.
    """

    def __init__(self, request: Request, silence_timeout_s: float, when_begun: WhenBegun | None) -> None:
        has_one_sequence = partial(_has_one_sequence, request.body)
        self.request = request
        self.returned_by: set[str] = set()
        self.interrupted: set[str] = set()
        self.assembly = Assembly(request.id, has_one_sequence=has_one_sequence)
        self._parts: asyncio.Queue[Reply | InstanceError | None] = asyncio.Queue()
        self._silence_timeout_s = silence_timeout_s
        self._when_begun = when_begun

    def begun(self, decode_control: str) -> None:
        """A D has begun with the answer."""
        if self._when_begun is not None:
            self._when_begun(decode_control)

    def advanced(self) -> None:
        """More of a part that is not complete has come: the silence has ended."""
        self._parts.put_nowait(None)

    def put(self, part: Reply | InstanceError) -> None:
        """Adds a part, or why none comes any more."""
        self._parts.put_nowait(part)

    async def next(self) -> Reply:
        """Returns the next part.

        Raises:
            InstanceError: The request has failed, or nothing came for the silence timeout.
        """
        try:
            while (part := await called(self._parts.get(), self._silence_timeout_s)) is None:
                pass
        except TimeoutError:
            raise queue_error(silent_for(self._silence_timeout_s), "timeout") from None
        if isinstance(part, InstanceError):
            raise part
        if part.kind == "failed":
            failure: Failure = "timeout" if part.status == HTTPStatus.GATEWAY_TIMEOUT else "given_up"
            raise queue_error(part.reason, failure)
        return part


def queue_error(reason: str, failure: Failure) -> InstanceError:
    """Error for a request that no instance behind the queue answers."""
    return InstanceError("decode", QUEUE, reason, failure)


def _has_one_sequence(body: bytes) -> bool:
    """True if an answer to this request may be continued by another instance."""
    parsed = exact_json.read(body)
    return isinstance(parsed, dict) and not goes_to_decode_alone(parsed)
