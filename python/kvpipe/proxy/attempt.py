"""Attempts at a request: one instance alone, or a P and a D, which share a store or make a handoff."""

import asyncio
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from kvpipe import transfer_params
from kvpipe.proxy.bodies import loading_body, plain_body, prefill_body, resumed_body
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.descriptions import Describe
from kvpipe.proxy.early_token import EarlyToken, allows_early_token, repeats_first_token
from kvpipe.proxy.exchanges import Call, Exchanges
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.just_in_time import JustInTime
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.prefill_answer import PrefillAnswer
from kvpipe.proxy.results import RecentHandoffs, ResultRecorder
from kvpipe.proxy.steps import Available
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import Answer, InstanceError, Role, failed


@dataclass(frozen=True, slots=True)
class Services:
    """Services that all attempts of a proxy share."""

    exchanges: Exchanges
    control: Control
    control_timeout_s: float
    silence_timeout_s: float
    describe: Describe
    failures: FailureLog
    metrics: Metrics
    recent: RecentHandoffs
    recorder: ResultRecorder
    tasks: OwnedTasks
    timer: JustInTime
    is_timed: bool
    sends_early_tokens: bool


class Attempt(ABC):
    """One attempt at a request. It owns what it has begun at instances until `settle`.

    Args:
        services: services that all attempts share.
        call: the client's request.
        may_leave: true if another instance can be asked instead of one that is frozen.

    Attributes:
        handoff: id of the handoff; empty where one instance works alone.
        early_token: P's token, if the client may have it before D's stream; None before P has answered.
    """

    handoff: str = ""
    early_token: EarlyToken | None = None
    # True if a control port of the instance is asked about the request: that of the rank that has it.
    _names_rank = True

    def __init__(self, services: Services, call: Call, may_leave: Available) -> None:
        self.services = services
        self.call = call
        self.may_leave = may_leave

    @abstractmethod
    async def ask(self) -> Answer:
        """Ask the instances, and record the attempt.

        Raises:
            InstanceError: one failed.
        """

    async def ask_next(self, decode: Instance) -> Answer:
        """Go on with another D on what P computes; raises as `ask`."""
        raise NotImplementedError

    def failure_of_prefill(self) -> InstanceError | None:
        """The failure of P, where D was asked beside it."""
        return None

    def settle(self, *, is_delivered: bool) -> None:  # noqa: B027 - an attempt at one instance keeps nothing
        """End the attempt, once: abort what still runs, release what P keeps."""

    async def _post(self, role: Role, instance: Instance, body: bytes, *, awaits_first_byte: bool = True) -> Answer:
        """Ask an instance; errors as those of `Exchanges.post`."""
        return await self.services.exchanges.post(
            role,
            instance,
            self.call,
            body,
            may_leave=partial(self.may_leave, role, instance),
            awaits_first_byte=awaits_first_byte,
            names_rank=self._names_rank,
            when_begun=self._decode_begun,
        )

    def _decode_begun(self, control: str) -> None:  # noqa: B027
        """Note the control port of the D that has begun, where a broker chooses it."""


class AloneAttempt(Attempt):
    """One instance answers without another one: D, or P where its one token is all that the client wants."""

    _names_rank = False

    def __init__(self, services: Services, call: Call, may_leave: Available, role: Role, instance: Instance) -> None:
        super().__init__(services, call, may_leave)
        self._role: Role = role
        self._instance = instance

    async def ask(self) -> Answer:
        """As `Attempt.ask`."""
        urls = (self._instance.url, "") if self._role == "prefill" else ("", self._instance.url)
        self.call.record.begin_attempt("", *urls)
        body = plain_body(self.call.body)
        return await self._post(self._role, self._instance, body)


class ResumedAttempt(Attempt):
    """A D alone computes the prompt, and begins with P's token, which the client has.

    The id is new, because a D may not have ended the first request yet, or has consumed the entry in the store.
    """

    def __init__(self, before: Attempt, decode: Instance) -> None:
        super().__init__(before.services, before.call, before.may_leave)
        self.handoff = secrets.token_hex(16)
        self.decode = decode
        self.early_token = before.early_token
        self._before = before

    async def ask(self) -> Answer:
        """As `Attempt.ask`."""
        self._remember()
        tokens = [] if self.early_token is None else [self.early_token.token]
        body = resumed_body(self.call.body, self.handoff, tokens)
        answer = await self._post("decode", self.decode, body)
        if answer.is_complete:
            raise failed(answer)
        return answer

    def _remember(self) -> None:
        self.call.record.continue_attempt("", "", self.decode.name)


class SplitAttempt(Attempt):
    """P computes the prompt, and D answers: after P's answer, or beside P from when `_until_due` returns.

    Args:
        services: services that all attempts share.
        call: the client's request.
        may_leave: true if another instance can be asked instead of one that is frozen.
        prefill: P.
        decode: D; another one replaces it where it did not answer.
    """

    def __init__(
        self, services: Services, call: Call, may_leave: Available, prefill: Instance, decode: Instance
    ) -> None:
        super().__init__(services, call, may_leave)
        self.handoff = secrets.token_hex(16)
        self.prefill = prefill
        self.decode = decode
        self._prefilling: asyncio.Task[Answer | None] | None = None

    async def ask(self) -> Answer:
        """As `Attempt.ask`; returns P's answer where that is the client's: P refused, or its token ends the request."""
        self._begin()
        self._prefilling = prefilling = self.services.tasks.spawn(self._ask_prefill())
        await self._until_due(prefilling)
        return await self._ask_decode(prefilling)

    async def ask_next(self, decode: Instance) -> Answer:
        """As `Attempt.ask_next`."""
        self.decode = decode
        self._continue()
        # P that has broken off is left to D: one more P could be the third engine that the request ends.
        if self._prefilling is None or _has_broken_off(self._prefilling):
            return await self._post_decode()
        return await self._ask_decode(self._prefilling)

    def failure_of_prefill(self) -> InstanceError | None:
        """As `Attempt.failure_of_prefill`."""
        return None if self._prefilling is None else _failure(self._prefilling)

    def settle(self, *, is_delivered: bool) -> None:  # noqa: ARG002 - nothing is kept at P
        """As `Attempt.settle`."""
        if self._prefilling is not None:
            self._prefilling.cancel()

    @abstractmethod
    def _begin(self) -> None:
        """Record the attempt."""

    @abstractmethod
    def _continue(self) -> None:
        """Record that another D goes on."""

    @abstractmethod
    def _prefill_params(self) -> dict[str, Any]:
        """Transfer parameters for P."""

    @abstractmethod
    def _prefilled(self, prefilled: PrefillAnswer) -> None:
        """Note what P's answer reports."""

    @abstractmethod
    def _decode_body(self, token: EarlyToken | None) -> bytes:
        """D's body; `token` is P's where the client gets it before D's stream, and is known."""

    async def _until_due(self, prefilling: asyncio.Task[Answer | None]) -> None:
        """Wait until D should be asked."""
        await asyncio.wait({prefilling})

    async def _ask_prefill(self) -> Answer | None:
        """Ask P; returns P's answer when that is the client's.

        Raises:
            InstanceError: P failed.
        """
        call = self.call
        body = prefill_body(call.body, call.path, self._prefill_params())
        answer = await self._post("prefill", self.prefill, body)
        if not answer.is_complete:
            answer.close()
            raise InstanceError("prefill", self.prefill, "answered a stream, which was not asked for", "broken")
        if answer.status != HTTPStatus.OK:
            return answer
        prefilled = PrefillAnswer.parse(answer.body)
        call.record.usage.prefilled(prefilled.prompt_tokens, prefilled.cached_tokens)
        self._prefilled(prefilled)
        if not prefilled.ends_request(call.body):
            return None
        answer.body = prefilled.final_body()
        return answer

    async def _ask_decode(self, prefilling: asyncio.Task[Answer | None]) -> Answer:
        """Ask D. Beside P, D's answer is used once it begins; until then P's is, where it is the client's."""
        if prefilling.done():
            return prefilling.result() or await self._post_decode()
        decoding = self.services.tasks.spawn(self._post_decode())
        try:
            await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if _has_answer(decoding) and (first_bytes := decoding.result().first_bytes) is not None:
                either: set[asyncio.Task[Any]] = {prefilling, first_bytes}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            decides = prefilling.done() and not _has_broken_off(prefilling) and not _has_begun(decoding)
            if decides and (answer := prefilling.result()) is not None:
                _discard(decoding)
                return answer
            return await decoding
        except BaseException:
            _discard(decoding)
            raise

    async def _post_decode(self) -> Answer:
        is_early = self._may_come_early()
        body = self._decode_body(self.early_token if is_early else None)
        answer = await self._post("decode", self.decode, body, awaits_first_byte=not is_early)
        if is_early and not answer.is_complete:
            first_bytes = self.services.exchanges.first_bytes(
                answer, partial(self.may_leave, "decode", answer.instance)
            )
            answer.first_bytes = self.services.tasks.spawn(first_bytes)
        return answer

    def _read_token(self, prefilled: PrefillAnswer) -> None:
        if self._allows_early_token():
            self.early_token = EarlyToken.of(self.call.path, prefilled.fields)

    def _allows_early_token(self) -> bool:
        return self.services.sends_early_tokens and allows_early_token(self.call.body)

    def _may_come_early(self) -> bool:
        """True if the client can have P's token before D's stream, as far as is known when D is asked."""
        is_prefilled = self._prefilling is not None and self._prefilling.done()
        if not self._allows_early_token() or (is_prefilled and self.early_token is None):
            return False
        return repeats_first_token(self.services.describe(self.decode), self.call.path)


class StoreAttempt(SplitAttempt):
    """P saves the prompt's KV in the store that it shares with D, which loads it."""

    _is_saved = False

    def _begin(self) -> None:
        self.call.record.begin_attempt("", self.prefill.name, self.decode.name)

    def _continue(self) -> None:
        self.call.record.continue_attempt("", self.prefill.name, self.decode.name)

    def _prefill_params(self) -> dict[str, Any]:
        return transfer_params.save(self.handoff)

    def _prefilled(self, prefilled: PrefillAnswer) -> None:
        self._is_saved = prefilled.saved == self.handoff
        if self._is_saved:
            self._read_token(prefilled)

    def _decode_body(self, token: EarlyToken | None) -> bytes:
        if not self._is_saved:
            return plain_body(self.call.body)
        # D forces a token that it gets here however P has sampled it, because a client may have it.
        return loading_body(self.call.body, self.handoff, None if token is None else token.token)

    async def _post_decode(self) -> Answer:
        try:
            return await super()._post_decode()
        except InstanceError as error:
            if error.failure != "unreached":
                # D may have consumed the entry, and another one would wait for it.
                self._is_saved, self.early_token = False, None
            raise


def _failure(task: asyncio.Task[Any]) -> InstanceError | None:
    error = task.exception() if task.done() and not task.cancelled() else None
    return error if isinstance(error, InstanceError) else None


def _has_broken_off(prefilling: asyncio.Task[Answer | None]) -> bool:
    error = _failure(prefilling)
    return error is not None and error.has_broken_off


def _has_answer(task: asyncio.Task[Answer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _has_begun(decoding: asyncio.Task[Answer]) -> bool:
    """True if D has answered, and a stream has its first bytes or has ended."""
    if not _has_answer(decoding):
        return False
    first_bytes = decoding.result().first_bytes
    return first_bytes is None or first_bytes.done()


def _discard(decoding: asyncio.Task[Answer]) -> None:
    """Abort the exchange with D, whether it has an answer or not."""
    if _has_answer(decoding):
        decoding.result().close()
    else:
        decoding.cancel()
