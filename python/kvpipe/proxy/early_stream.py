"""A stream that begins with P's token: the proxy sends it before D's stream begins, and D's stream goes on after it."""

from collections.abc import AsyncIterator, Awaitable, Callable

from kvpipe.proxy.early_token import Continuation, ContradictionError, EarlyToken
from kvpipe.proxy.upstream import Answer, InstanceError


class EarlyStream:
    """P's token, then the stream of a D; another D's where that one fails before its own text.

    Args:
        token: P's token.
        answer: D's answer, whose stream may not have begun.
        resume: returns the answer of another D that begins with the token, or raises the failure that it gets.
        text_shown: called before the first text of D's own.
    """

    def __init__(
        self,
        token: EarlyToken,
        answer: Answer,
        resume: Callable[[InstanceError], Awaitable[Answer]],
        text_shown: Callable[[], None],
    ) -> None:
        self._token = token
        self._answer = answer
        self._resume = resume
        self._text_shown = text_shown
        self._pieces = self._all()

    async def piece(self) -> bytes:
        """Returns the next events, none at the end.

        Raises:
            InstanceError: the stream broke off, or no instance's stream begins with the token.
        """
        return await anext(self._pieces, b"")

    def close(self) -> None:
        """End D's stream."""
        self._answer.close()

    async def _all(self) -> AsyncIterator[bytes]:
        yield self._token.events()
        while True:
            try:
                async for event in self._continued(Continuation(self._token)):
                    yield event
            except ContradictionError as contradiction:
                error = InstanceError("decode", self._answer.instance, str(contradiction), "contradicted")
            except InstanceError as failure:
                error = failure
            else:
                return
            self._answer.close()
            self._answer = await self._resume(error)

    async def _continued(self, continuation: Continuation) -> AsyncIterator[bytes]:
        answer = self._answer
        if answer.first_bytes is not None:
            answer.body = await answer.first_bytes
        async for piece in answer.pieces():
            for event in continuation.feed(piece):
                self._text_shown()
                yield event
        if rest := continuation.end():
            yield rest
