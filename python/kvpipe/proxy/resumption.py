"""Continues a stream at other D's after the client has P's token: they compute the prompt, and begin with the token."""

import secrets
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial

from kvpipe.proxy.attempt import Attempt, Services
from kvpipe.proxy.bodies import resumed_body
from kvpipe.proxy.early_stream import EarlyStream
from kvpipe.proxy.early_token import EarlyToken
from kvpipe.proxy.exchanges import Call
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.retries import Retries
from kvpipe.proxy.upstream import Answer, InstanceError, failed


class ResumedAttempt:
    """An attempt at one D without a P. The id is new, because a D may not have ended the first request yet.

    Args:
        services: what all attempts share.
        call: the client's request.
        decode: D.
    """

    def __init__(self, services: Services, call: Call, decode: Instance) -> None:
        self.handoff = secrets.token_hex(16)
        self._services = services
        self._call = call
        self._decode = decode
        self._is_settled = False

    async def ask(self, token: EarlyToken) -> Answer:
        """Ask D for a stream that begins with the token.

        Raises:
            InstanceError: D failed.
        """
        call, decode = self._call, self._decode
        call.record.continue_attempt(self.handoff, "", decode.url)
        self._services.recent.remember(self.handoff, decode.control, record=call.record, timing=None)
        body = resumed_body(call.body, self.handoff, [token.token])
        answer = await self._services.exchanges.post("decode", decode, call, body, when_begun=self._decode_begun)
        if answer.is_complete:
            raise failed(answer)
        return answer

    def settle(self, *, is_delivered: bool) -> None:  # noqa: ARG002 - no P holds blocks, whatever became of the answer
        """Count the result, once."""
        if not self._is_settled:
            self._is_settled = True
            counted = self._services.recorder.record(self.handoff, self._decode, None, is_decode_asked=True)
            self._services.tasks.spawn(counted)

    def _decode_begun(self, control: str) -> None:
        self._decode = replace(self._decode, control=control)
        self._services.recent.begun(self.handoff, control)


class Resumption(ABC):
    """The attempts of one stream after its early token.

    Args:
        metrics: counters of attempts.
        call: the client's request.
        retries: the D's that may be asked.
    """

    def __init__(self, metrics: Metrics, call: Call, retries: Retries) -> None:
        self._metrics = metrics
        self._call = call
        self._retries = retries
        self._is_first = True
        self._has_shown_text = False

    def begin(self, token: EarlyToken, answer: Answer) -> Answer:
        """The stream that begins with the token, and goes on with that of a D."""
        self._metrics.early_token_sent()
        self._retries.token_shown()
        stream = EarlyStream(token, answer, partial(self.retry, token), self._text_shown)
        return Answer(answer.role, answer.instance, answer.status, answer.headers, b"", stream, is_complete=False)

    async def retry(self, token: EarlyToken, error: InstanceError) -> Answer:
        """Ask for a stream that begins with the token, after one that failed.

        Raises:
            InstanceError: the last D's, when none may be asked any more.
        """
        if self._has_shown_text:
            raise error
        while True:
            self._retries.failed(error)
            decode = self._next(error)
            if decode is None or not self._retries.allows_after(error):
                raise error
            self._call.record.replaced(error)
            if decode != error.instance:
                self._metrics.replaced(error)
            try:
                return await self._ask(decode, token)
            except InstanceError as failure:
                error = failure

    def _text_shown(self) -> None:
        self._has_shown_text = True

    @abstractmethod
    async def _ask(self, decode: Instance, token: EarlyToken) -> Answer:
        """Ask a D for a stream that begins with the token; raises as `retry`."""

    def _next(self, error: InstanceError) -> Instance | None:
        """Another D; where there is none, the one that failed gets a second chance, if it was reached."""
        is_first, self._is_first = self._is_first, False
        if self._retries.has("decode"):
            return self._retries.first("decode")
        return error.instance if is_first and error.failure != "unreached" else None


class HandoffResumption(Resumption):
    """Continues a stream of a handoff at other D's.

    Args:
        services: what all attempts share.
        call: the client's request.
        retries: the D's that may be asked.
        attempt: the attempt whose handoff the client knows.

    Attributes:
        latest: the latest attempt, which its owner has to settle.
    """

    def __init__(self, services: Services, call: Call, retries: Retries, attempt: Attempt) -> None:
        super().__init__(services.metrics, call, retries)
        self.latest: Attempt | ResumedAttempt = attempt
        self._services = services

    async def retry(self, token: EarlyToken, error: InstanceError) -> Answer:
        """As `Resumption.retry`; the attempt that failed is settled."""
        self.latest.settle(is_delivered=False)
        return await super().retry(token, error)

    async def _ask(self, decode: Instance, token: EarlyToken) -> Answer:
        attempt = ResumedAttempt(self._services, self._call, decode)
        self._services.recent.continued(self.latest.handoff, attempt.handoff)
        self.latest = attempt
        try:
            return await attempt.ask(token)
        except InstanceError:
            attempt.settle(is_delivered=False)
            raise
