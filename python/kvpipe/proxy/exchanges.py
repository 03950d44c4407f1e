"""State of an exchange with an instance, and the error that its client gets."""

import asyncio
from collections.abc import Awaitable
from http import HTTPStatus

from kvpipe.proxy.upstream import Answer, EarlyStart, InstanceError


def has_answer(task: asyncio.Task[Answer]) -> bool:
    """Whether the exchange has ended with an answer."""
    return task.done() and not task.cancelled() and task.exception() is None


async def without_server_error(exchange: Awaitable[Answer]) -> Answer:
    """Returns an answer that is no server error.

    Raises:
        InstanceError: It is one.
    """
    answer = await exchange
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise failed(answer)
    return answer


def has_no_token(start: EarlyStart) -> bool:
    """Whether it is certain that nothing can be sent before the stream begins."""
    return start.token.done() and start.token.result() is None


def has_begun(decoding: asyncio.Task[Answer]) -> bool:
    """Whether D has answered, and a stream has its first bytes or has ended."""
    if not has_answer(decoding):
        return False
    start = decoding.result().early_start
    return start is None or start.first_bytes.done()


def discard(decoding: asyncio.Task[Answer]) -> None:
    """Abort the exchange with D, whether it has an answer or not."""
    if has_answer(decoding):
        decoding.result().close()
    else:
        decoding.cancel()


def failed(answer: Answer) -> InstanceError:
    """Turns a server error into an `InstanceError`."""
    excerpt = answer.body[:200].decode(errors="replace")
    reason = f"answered {answer.status}: {excerpt}"
    return InstanceError(answer.role, answer.instance, reason, answer=answer)


def final_error(error: InstanceError) -> Answer:
    """Returns D's own error as the client's answer, when no instance is left; otherwise raises."""
    if error.role == "decode" and error.answer is not None:
        return error.answer
    raise error
