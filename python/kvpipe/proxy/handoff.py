"""Attempts at a handoff: P keeps its blocks for D, which fetches them at P's control port."""

import asyncio
import contextlib
import logging
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kvpipe import transfer_params
from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.attempt import ResumedAttempt, Services, SplitAttempt
from kvpipe.proxy.bodies import decode_body
from kvpipe.proxy.early_token import EarlyToken
from kvpipe.proxy.exchanges import Call
from kvpipe.proxy.headers import HANDOFF
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.prefill_answer import PrefillAnswer
from kvpipe.proxy.steps import Available
from kvpipe.proxy.upstream import Answer, InstanceError

if TYPE_CHECKING:
    from kvpipe.proxy.just_in_time import Timing

# With just-in-time dispatch D's answer can be complete before P's has arrived.
PREFILL_GRACE_S = 2.0
# Tries to release at a P that was frozen, and the time between them: its sessions may have to be opened again.
_RELEASE_TRIES = 10
_RELEASE_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class HandoffAttempt(SplitAttempt):
    """An attempt at a handoff from one P to one D, under an id of its own.

    Owns P's request, P's blocks and the handoff's result until `settle`. Behind a broker `decode` has the control port
    of the D that has begun with the answer.
    """

    def __init__(
        self, services: Services, call: Call, may_leave: Available, prefill: Instance, decode: Instance
    ) -> None:
        super().__init__(services, call, may_leave, prefill, decode)
        self._timing: Timing | None = None
        self._may_hold_kv = False
        self._is_decode_asked = False
        self._is_settled = False
        self._measuring: asyncio.Task[None] | None = None

    def settle(self, *, is_delivered: bool) -> None:
        """End the attempt, once: abort P's request, release its blocks unless D has them all, count the result."""
        if self._is_settled:
            return
        self._is_settled = True
        self._end_timing()
        self.services.tasks.spawn(self._settle_delivered() if is_delivered else self._settle_failed())

    def _begin(self) -> None:
        prefill, decode = self.prefill.name, self.decode.name
        self.call.record.begin_attempt(self.handoff, prefill, decode)
        if self.services.is_timed:
            self._timing = self.services.timer.begin(prefill, decode, self.call.num_bytes)
        self._remember()
        logger.debug("handoff.start handoff=%s prefill=%s decode=%s", self.handoff, prefill, decode)

    def _continue(self) -> None:
        self.call.record.continue_attempt(self.handoff, self.prefill.name, self.decode.name)
        self._remember()

    def _remember(self) -> None:
        addresses = self.decode.control, self.prefill.control
        self.services.recent.remember(self.handoff, *addresses, record=self.call.record, timing=self._timing)

    def _prefill_params(self) -> dict[str, Any]:
        return transfer_params.produce(self.handoff)

    def _prefilled(self, prefilled: PrefillAnswer) -> None:
        self._read_token(prefilled)
        if self._timing is not None:
            self.services.timer.answered(self._timing, self.prefill.name)
            self.services.metrics.prefill_answered(self._timing)

    def _decode_body(self, token: EarlyToken | None) -> bytes:  # noqa: ARG002 - D gets the token from P
        return decode_body(self.call.body, self.handoff, self.prefill.control)

    def _decode_begun(self, control: str) -> None:
        self.decode = replace(self.decode, control=control)
        self.services.recent.begun(self.handoff, control)

    async def _until_due(self, prefilling: asyncio.Task[Answer | None]) -> None:
        """Wait until shortly before the predicted end of P's prefill, or for P's answer."""
        if self._timing is not None:
            due = self.services.timer.is_due(self._timing, self.prefill.control, self.handoff)
            waiting = self.services.tasks.spawn(due)
            try:
                await asyncio.wait({prefilling, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if prefilling.done() or waiting.result():
                    return
            finally:
                waiting.cancel()
        await super()._until_due(prefilling)

    async def _ask_prefill(self) -> Answer | None:
        self._may_hold_kv = True
        try:
            answer = await super()._ask_prefill()
        except InstanceError as error:
            self._may_hold_kv = error.failure != "unreached"
            raise
        if answer is not None and answer.status != HTTPStatus.OK:
            self._may_hold_kv = False
        elif answer is not None:
            answer.headers[HANDOFF] = self.handoff
        return answer

    async def _post_decode(self) -> Answer:
        self._begin_measuring()
        try:
            answer = await super()._post_decode()
        except InstanceError as error:
            if error.answer is not None:
                error.answer.headers[HANDOFF] = self.handoff  # the reason is in its result
            raise
        answer.headers[HANDOFF] = self.handoff
        return answer

    async def _settle_delivered(self) -> None:
        """The answer is complete, which says nothing about where D had its KV from: only `full` does."""
        if self._prefilling is not None and not self._prefilling.done():
            _, pending = await asyncio.wait({self._prefilling}, timeout=PREFILL_GRACE_S)
            if pending:
                self._prefilling.cancel()
                await self._release()
        is_full = False
        try:
            result = await self._record()
            is_full = result is not None and result.get("result") == "full"
        finally:
            if not is_full:
                await self._release()

    async def _settle_failed(self) -> None:
        if self._prefilling is not None:
            self._prefilling.cancel()
        releasing = self.services.tasks.spawn(self._release())
        await self._record()
        await releasing

    async def _record(self) -> dict[str, Any] | None:
        return await self.services.recorder.record(
            self.handoff, self.decode, self._timing, is_decode_asked=self._is_decode_asked
        )

    async def _release(self) -> None:
        if not self._may_hold_kv:
            return
        self._may_hold_kv = False
        num_tries = _RELEASE_TRIES if await self._was_frozen() else 1
        for number in range(num_tries):
            await asyncio.sleep(number and _RELEASE_INTERVAL_S)
            if await self._release_once():
                return

    async def _was_frozen(self) -> bool:
        """True if P is frozen; returns when it goes on, or has no lease any more because that takes too long."""
        is_frozen = self.services.exchanges.is_frozen("prefill", self.prefill)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.services.silence_timeout_s):
                await self.services.exchanges.until_thawed("prefill", self.prefill)
        return is_frozen

    async def _release_once(self) -> bool:
        services, address = self.services, self.prefill.control
        try:
            async with asyncio.timeout(services.control_timeout_s):
                is_known = await services.control.release(address, self.handoff, services.control_timeout_s)
        except (KVPipeError, OSError) as error:
            reason = f"release: {error or type(error).__name__}"
            services.failures.note("control", address, reason, asyncio.get_running_loop().time())
            return False
        logger.debug("handoff.released handoff=%s known=%s", self.handoff, is_known)
        return True

    def _begin_measuring(self) -> None:
        if self._timing is not None:
            if not self._is_decode_asked:
                self.services.metrics.dispatched(self._timing)
            self._stop_measuring()
            asked = self.services.timer.measure(self._timing, self.decode.name, self.prefill.control, self.handoff)
            self._measuring = self.services.tasks.spawn(asked)
        self._is_decode_asked = True

    def _stop_measuring(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()

    def _end_timing(self) -> None:
        self._stop_measuring()
        if self._timing is not None:
            fields = " ".join(f"{name}={value}" for name, value in self._timing.report().items())
            logger.debug("handoff.dispatch handoff=%s %s", self.handoff, fields)


class ResumedHandoff(ResumedAttempt):
    """A D goes on alone after a handoff whose id the client knows; its result has an id of its own."""

    _is_settled = False

    def settle(self, *, is_delivered: bool) -> None:  # noqa: ARG002 - no P keeps blocks, whatever became of the answer
        """Count the result, once."""
        if not self._is_settled:
            self._is_settled = True
            counted = self.services.recorder.record(self.handoff, self.decode, None, is_decode_asked=True)
            self.services.tasks.spawn(counted)

    def _remember(self) -> None:
        self.call.record.continue_attempt(self.handoff, "", self.decode.name)
        recent = self.services.recent
        recent.continued(self._before.handoff, self.handoff)
        recent.remember(self.handoff, self.decode.control, record=self.call.record, timing=None)

    def _decode_begun(self, control: str) -> None:
        self.decode = replace(self.decode, control=control)
        self.services.recent.begun(self.handoff, control)
