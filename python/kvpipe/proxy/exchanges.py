"""What is known of an exchange with an instance: whether it has begun, and what the client gets where it fails."""

import asyncio
from collections.abc import Awaitable
from http import HTTPStatus

from kvpipe.proxy.upstream import Answer, EarlyStart, InstanceError


def has_answer(task: asyncio.Task[Answer]) -> bool:
    """Whether the exchange has come to an answer."""
    return task.done() and not task.cancelled() and task.exception() is None


async def without_server_error(exchange: Awaitable[Answer]) -> Answer:
    """An answer that is no server error.

    Raises:
        InstanceError: It is one.
    """
    answer = await exchange
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise failed(answer)
    return answer


def has_no_token(start: EarlyStart) -> bool:
    """Whether it is known that the client cannot be told anything before the stream begins."""
    return start.token.done() and start.token.result() is None


def has_begun(decoding: asyncio.Task[Answer]) -> bool:
    """Whether D's answer is there, a stream's first bytes or early end included."""
    if not has_answer(decoding):
        return False
    start = decoding.result().early_start
    return start is None or start.first_bytes.done()


def discard(decoding: asyncio.Task[Answer]) -> None:
    """Abort D's exchange at whatever point it is."""
    if has_answer(decoding):
        decoding.result().close()
    else:
        decoding.cancel()


def failed(answer: Answer) -> InstanceError:
    """The failure that a server error is."""
    excerpt = answer.body[:200].decode(errors="replace")
    reason = f"answered {answer.status}: {excerpt}"
    return InstanceError(answer.role, answer.instance, reason, answer=answer)


def final_error(error: InstanceError) -> Answer:
    """What the client gets when nobody is left to ask: D's own error, else the exception."""
    if error.role == "decode" and error.answer is not None:
        return error.answer
    raise error
