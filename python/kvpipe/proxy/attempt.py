"""One attempt at a request by a handoff: begins it, exchanges with P and D, ends what it began."""

import asyncio
import logging
import secrets
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from kvpipe import transfer_params
from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.bodies import decode_body, prefill_body
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.descriptions import Describe
from kvpipe.proxy.early_token import EarlyToken, allows_early_token, repeats_first_token
from kvpipe.proxy.exchanges import Call, Exchanges
from kvpipe.proxy.headers import HANDOFF
from kvpipe.proxy.just_in_time import JustInTime, Timing
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.prefill_answer import PrefillAnswer
from kvpipe.proxy.results import RecentHandoffs, ResultRecorder
from kvpipe.proxy.retries import Retries
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import Answer, InstanceError

# With just-in-time dispatch D's answer can be complete before P's has arrived.
PREFILL_GRACE_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What all attempts of a proxy share."""

    exchanges: Exchanges
    control: Control
    control_timeout_s: float
    describe: Describe
    failures: FailureLog
    metrics: Metrics
    recent: RecentHandoffs
    recorder: ResultRecorder
    tasks: OwnedTasks
    timer: JustInTime
    is_timed: bool
    sends_early_tokens: bool


class Attempt:
    """An attempt at a handoff from one P to one D, under an id of its own.

    Owns P's request, P's blocks and the handoff's result until `settle`.

    Args:
        services: what all attempts share.
        call: the client's request.
        retries: the instances that may be asked; their first ones are.

    Attributes:
        handoff: id of the handoff.
        prefill: P.
        decode: D; one that refuses the connection is replaced by the next one. Behind a broker it has the control port
            of the D that has begun with the answer.
        timing: timing of D's part, with just-in-time dispatch.
        prefilling: the exchange with P, when it runs beside the one with D.
        early_token: P's token, if the client may have it before D's stream; None before P has answered.
    """

    def __init__(self, services: Services, call: Call, retries: Retries) -> None:
        self.handoff = secrets.token_hex(16)
        self.prefill = retries.first("prefill")
        self.decode = retries.first("decode")
        self.prefilling: asyncio.Task[Answer | None] | None = None
        self.timing: Timing | None = None
        self.early_token: EarlyToken | None = None
        self.services = services
        self._call = call
        self._retries = retries
        self._is_prefilled = False
        self._may_hold_kv = False
        self._is_decode_asked = False
        self._is_settled = False
        self._measuring: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Remember the handoff, and predict when D should be asked."""
        prefill, decode = self.prefill.url, self.decode.url
        self._call.record.begin_attempt(self.handoff, prefill, decode)
        if self.services.is_timed:
            self.timing = self.services.timer.begin(prefill, decode, self._call.num_bytes)
        self._remember()
        logger.debug("handoff.start handoff=%s prefill=%s decode=%s", self.handoff, prefill, decode)

    async def ask_prefill(self) -> Answer | None:
        """Ask P; returns P's answer when that is the client's: P refused, or its token ends the request.

        Raises:
            InstanceError: P failed.
        """
        call = self._call
        body = prefill_body(call.body, call.path, transfer_params.produce(self.handoff))
        self._may_hold_kv = True
        try:
            answer = await self.services.exchanges.post("prefill", self.prefill, call, body)
        except InstanceError as error:
            self._may_hold_kv = error.failure != "unreached"
            raise
        if not answer.is_complete:
            answer.close()
            raise InstanceError("prefill", self.prefill, "answered a stream, which was not asked for", "broken")
        self._is_prefilled = True
        if answer.status != HTTPStatus.OK:
            self._may_hold_kv = False
            return answer
        prefilled = PrefillAnswer.parse(answer.body)
        call.record.usage.prefilled(prefilled.prompt_tokens, prefilled.cached_tokens)
        if self._allows_early_token():
            self.early_token = EarlyToken.of(call.path, prefilled.fields)
        if self.timing is not None:
            self.services.timer.answered(self.timing, self.prefill.url)
            self.services.metrics.prefill_answered(self.timing)
        if not prefilled.ends_request(call.body):
            return None
        answer.body = prefilled.final_body()
        answer.headers[HANDOFF] = self.handoff
        return answer

    async def ask_decode(self) -> Answer:
        """Ask D, and other D's on the same handoff as long as they refuse the connection.

        Raises:
            InstanceError: D failed, or no D was reached.
        """
        while True:
            try:
                return await self._ask_decode()
            except InstanceError as error:
                if error.failure != "unreached" or not self._replace_decode(error):
                    raise

    def note_failed_prefill(self) -> None:
        """Note that P has failed too, where D went on and failed."""
        error = self.prefilling.exception() if self.prefilling is not None and self.prefilling.done() else None
        if isinstance(error, InstanceError):
            self._retries.failed(error)

    def settle(self, *, is_delivered: bool) -> None:
        """End the attempt, once: abort P's request, release its blocks unless D has them all, count the result."""
        if self._is_settled:
            return
        self._is_settled = True
        self._end_timing()
        self.services.tasks.spawn(self._settle_delivered() if is_delivered else self._settle_failed())

    async def _settle_delivered(self) -> None:
        """The answer is complete, which says nothing about where D had its KV from: only `full` does."""
        if self.prefilling is not None and not self.prefilling.done():
            _, pending = await asyncio.wait({self.prefilling}, timeout=PREFILL_GRACE_S)
            if pending:
                self.prefilling.cancel()
                await self._release()
        is_full = False
        try:
            result = await self._record()
            is_full = result is not None and result.get("result") == "full"
        finally:
            if not is_full:
                await self._release()

    async def _settle_failed(self) -> None:
        if self.prefilling is not None:
            self.prefilling.cancel()
        releasing = self.services.tasks.spawn(self._release())
        await self._record()
        await releasing

    async def _record(self) -> dict[str, Any] | None:
        return await self.services.recorder.record(
            self.handoff, self.decode, self.timing, is_decode_asked=self._is_decode_asked
        )

    async def _release(self) -> None:
        if not self._may_hold_kv:
            return
        self._may_hold_kv = False
        services, address = self.services, self.prefill.control
        try:
            async with asyncio.timeout(services.control_timeout_s):
                is_known = await services.control.release(address, self.handoff, services.control_timeout_s)
        except (KVPipeError, OSError) as error:
            reason = f"release: {error or type(error).__name__}"
            services.failures.note("control", address, reason, asyncio.get_running_loop().time())
        else:
            logger.debug("handoff.released handoff=%s known=%s", self.handoff, is_known)

    async def _ask_decode(self) -> Answer:
        call, services = self._call, self.services
        body = decode_body(call.body, self.handoff, self.prefill.control)
        self._begin_measuring()
        may_come_early = self._may_come_early()
        answer = await services.exchanges.post(
            "decode", self.decode, call, body, awaits_first_byte=not may_come_early, when_begun=self._decode_begun
        )
        answer.headers[HANDOFF] = self.handoff
        if may_come_early and not answer.is_complete:
            answer.first_bytes = services.tasks.spawn(services.exchanges.logged(answer.begin()))
        return answer

    def _allows_early_token(self) -> bool:
        return self.services.sends_early_tokens and allows_early_token(self._call.body)

    def _may_come_early(self) -> bool:
        """Whether the client can have P's token before D's stream, as far as is known when D is asked."""
        if not self._allows_early_token() or (self._is_prefilled and self.early_token is None):
            return False
        return repeats_first_token(self.services.describe(self.decode), self._call.path)

    def _replace_decode(self, error: InstanceError) -> bool:
        """Continue with the next D on the same handoff; False if none is left."""
        self._retries.failed(error)
        if not self._retries.has("decode"):
            return False
        self._call.record.replaced(error)
        self.services.metrics.replaced(error)
        self.decode = self._retries.first("decode")
        self._call.record.continue_attempt(self.handoff, self.prefill.url, self.decode.url)
        self._remember()
        return True

    def _remember(self) -> None:
        addresses = self.decode.control, self.prefill.control
        self.services.recent.remember(self.handoff, *addresses, record=self._call.record, timing=self.timing)

    def _decode_begun(self, control: str) -> None:
        self.decode = replace(self.decode, control=control)
        self.services.recent.begun(self.handoff, control)

    def _begin_measuring(self) -> None:
        if self.timing is not None:
            if not self._is_decode_asked:
                self.services.metrics.dispatched(self.timing)
            self._stop_measuring()
            asked = self.services.timer.measure(self.timing, self.decode.url, self.prefill.control, self.handoff)
            self._measuring = self.services.tasks.spawn(asked)
        self._is_decode_asked = True

    def _stop_measuring(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()

    def _end_timing(self) -> None:
        self._stop_measuring()
        if self.timing is not None:
            fields = " ".join(f"{name}={value}" for name, value in self.timing.report().items())
            logger.debug("handoff.dispatch handoff=%s %s", self.handoff, fields)
