"""The attempts at one request, one after the other. `RoutedRequest` chooses the instances; the attempts ask them."""

import logging
from http import HTTPStatus
from typing import Literal

from kvpipe.proxy.attempt import AloneAttempt, Attempt, ResumedAttempt, Services, SplitAttempt, StoreAttempt
from kvpipe.proxy.early_stream import EarlyStream
from kvpipe.proxy.early_token import EarlyToken
from kvpipe.proxy.exchanges import Call
from kvpipe.proxy.handoff import HandoffAttempt, ResumedHandoff
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.steps import RoutedRequest, Step
from kvpipe.proxy.upstream import Answer, InstanceError

# P and D by a handoff, or by a store that they share; and a D that goes on after P's token.
_SPLIT: dict[Literal["handoff", "store"], tuple[type[SplitAttempt], type[ResumedAttempt]]] = {
    "handoff": (HandoffAttempt, ResumedHandoff),
    "store": (StoreAttempt, ResumedAttempt),
}

logger = logging.getLogger(__name__)


class Attempts:
    """The attempts at one request.

    Args:
        services: services that all attempts share.
        call: the client's request.
        request: chooses the next instance.
        way: path of KV from P to D.
    """

    def __init__(
        self, services: Services, call: Call, request: RoutedRequest, way: Literal["handoff", "store"]
    ) -> None:
        self._services = services
        self._call = call
        self._request = request
        self._split, self._resumed = _SPLIT[way]
        self._latest: Attempt | None = None

    async def answer(self) -> Answer:
        """The answer for the client, which may be D's own error.

        Raises:
            InstanceError: an instance has failed, and no other may be asked.
        """
        step = self._request.first()
        self._note_fallback(step)
        try:
            return await self._until_answered(step)
        except InstanceError as error:
            return final_answer(error)

    def settle(self, *, is_delivered: bool) -> None:
        """End the latest attempt; every earlier one has ended."""
        if self._latest is not None:
            self._latest.settle(is_delivered=is_delivered)

    async def _until_answered(self, step: Step) -> Answer:
        while True:
            try:
                return await self._take(step)
            except InstanceError as error:
                step = self._after(error)
                if step.kind == "final":
                    raise
            except BaseException:
                self.settle(is_delivered=False)
                raise

    async def _take(self, step: Step) -> Answer:
        if step.kind == "same" and self._latest is not None and step.decode is not None:
            return await self._begun(self._latest, await self._latest.ask_next(step.decode))
        self._latest = attempt = self._attempt(step)
        return await self._begun(attempt, await attempt.ask())

    def _attempt(self, step: Step) -> Attempt:
        match step:
            case Step("resume", None, Instance() as decode) if self._latest is not None:
                return self._resumed(self._latest, decode)
            case Step("split", Instance() as prefill, Instance() as decode):
                return self._split(self._services, self._call, self._request.may_leave, prefill, decode)
            case Step("alone", Instance() as prefill, None):
                return AloneAttempt(self._services, self._call, self._request.may_leave, "prefill", prefill)
            case Step("alone", None, Instance() as decode):
                return AloneAttempt(self._services, self._call, self._request.may_leave, "decode", decode)
        raise ValueError(step)

    async def _begun(self, attempt: Attempt, answer: Answer) -> Answer:
        """Have P's token sent before the stream begins; without one wait for it: until then another D can be asked."""
        token = attempt.early_token
        if (first_bytes := answer.first_bytes) is not None:
            if token is not None and not first_bytes.done():
                return self._with_token(token, answer)
            try:
                answer.body, answer.first_bytes = await first_bytes, None
            except BaseException:
                answer.close()
                raise
            answer = answer.with_first_event_checked()
        if answer.status >= HTTPStatus.BAD_REQUEST or answer.role == "prefill":
            attempt.settle(is_delivered=False)
        return answer

    def _with_token(self, token: EarlyToken, answer: Answer) -> Answer:
        self._request.token_shown()
        self._services.metrics.early_token_sent()
        stream = EarlyStream(token, answer, self._resume, self._request.text_shown)
        return Answer(answer.role, answer.instance, answer.status, answer.headers, b"", stream, is_complete=False)

    async def _resume(self, error: InstanceError) -> Answer:
        step = self._after(error)
        if step.kind == "final":
            raise error
        logger.warning("early_token.retry url=%s: %s", error.instance.name, error.reason)
        return await self._until_answered(step)

    def _after(self, error: InstanceError) -> Step:
        """The step after a failure, which is counted, and whose attempt ends unless it goes on."""
        metrics, record, latest = self._services.metrics, self._call.record, self._latest
        step = self._request.failed(error, None if latest is None else latest.failure_of_prefill())
        record.replaced(error)
        if step.denial is not None:
            metrics.retry_denied(step.denial)
        asked = step.prefill if error.role == "prefill" else step.decode
        self._note_fallback(step)
        if asked not in (None, error.instance):
            metrics.replaced(error)
        if step.kind != "same":
            self.settle(is_delivered=False)
        return step

    def _note_fallback(self, step: Step) -> None:
        if step.is_fallback:
            self._call.record.alone = "no_prefill"
            self._services.metrics.fell_back()


def final_answer(error: InstanceError) -> Answer:
    """Returns D's own error as the client's answer; otherwise raises."""
    if error.role == "decode" and error.answer is not None:
        return error.answer
    raise error
