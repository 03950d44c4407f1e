"""Answers requests by attempts at a handoff: selects instances, sends them requests, releases KV afterwards.

Ownership: `Dispatcher._tasks` holds every task until it has ended, the requests' own tasks included, and
`Dispatcher.close` waits for all of them. A setting of `ProxyConfig` bounds every wait: `connect_timeout_s` and
`silence_timeout_s` bound HTTP, `control_timeout_s` bounds control ports. P's answer ends a subscription.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self, TypeVar

from multidict import CIMultiDict

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.attempt import Attempt
from kvpipe.proxy.bodies import CHAT_PATH, decode_body, plain_body, prefill_body, resumed_body
from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.early_token import EarlyToken, allows_early_token
from kvpipe.proxy.exchanges import (
    discard,
    failed,
    final_error,
    has_answer,
    has_begun,
    has_no_token,
    without_server_error,
)
from kvpipe.proxy.headers import HANDOFF
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.just_in_time import JustInTime, Timing
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.results import RecentHandoffs, ResultRecorder, Results
from kvpipe.proxy.routing import RoundRobin, goes_to_decode_alone
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import Answer, EarlyStart, Fault, InstanceError, Upstream

# With concurrent dispatch D's answer can be complete before P's has arrived.
_PREFILL_GRACE_S = 2.0

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request: API path, parsed body, size of the body, headers for the instances."""

    path: str
    body: dict[str, Any]
    num_bytes: int
    headers: CIMultiDict[str]


class Dispatcher:
    """Answers calls, by a handoff where that is possible.

    Args:
        config: settings of the proxy.
        upstream: HTTP client of the instances.
        control: client of control ports; the caller closes it after the dispatcher.
        metrics: counters of attempts.
    """

    def __init__(self, config: ProxyConfig, upstream: Upstream, control: Control, metrics: Metrics) -> None:
        self._metrics = metrics
        self._upstream = upstream
        self._control = control
        self._control_timeout_s = config.control_timeout_s
        self._prefill = RoundRobin(config.prefill)
        self._decode = RoundRobin(config.decode)
        exchanges = {
            "sequential": self._sequential,
            "concurrent": self._concurrent,
            "just-in-time": self._just_in_time,
        }
        self._exchange = exchanges[config.dispatch]
        all_addresses = [i.control for i in (*config.decode, *config.prefill) if i.control]
        self.recent = RecentHandoffs(tuple(dict.fromkeys(all_addresses)))
        self.results = Results(control, self.recent, config.control_timeout_s)
        self._failures = FailureLog()
        self._timer = JustInTime(control, self._failures, config.silence_timeout_s)
        self._recorder = ResultRecorder(self.results, metrics, self._timer.leads, self._failures)
        self._is_timed = config.dispatch == "just-in-time"
        self._tasks = OwnedTasks()

    def __repr__(self) -> str:
        return f"<Dispatcher {self._prefill} {self._decode}, {len(self._tasks)} tasks>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for running tasks, mainly releases; cancel those that take too long."""
        self._recorder.close()
        await self._tasks.close(self._control_timeout_s + _PREFILL_GRACE_S)

    @asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        """Yields the answer to a call, with its status; leaving before its end aborts requests and releases KV.

        Raises:
            InstanceError: every instance of a role has failed.
        """
        self._tasks.adopt_current()
        answer, attempt = await self._dispatch(call)
        try:
            yield answer
        finally:
            answer.close()
            if attempt is not None:
                self._settle(attempt, is_delivered=answer.is_complete)

    async def ask_decode(self, path: str, headers: CIMultiDict[str]) -> Answer:
        """Send a GET to decode instances, until one answers without a server error."""
        return await self._until_one_answers(lambda instance: self._upstream.get("decode", instance, path, headers))

    async def _dispatch(self, call: Call) -> tuple[Answer, Attempt | None]:
        if goes_to_decode_alone(call.body):
            return await self._decode_alone(call), None
        left = {"prefill": self._prefill.order(), "decode": self._decode.order()}
        while True:
            attempt = Attempt(left["prefill"][0], left["decode"][0])
            try:
                return await self._attempt(call, attempt), attempt
            except InstanceError as error:
                if error.answer is not None:
                    error.answer.headers[HANDOFF] = attempt.handoff  # the reason is in its result
                del left[error.role][0]
                if not left[error.role]:
                    return final_error(error), None
                self._metrics.replaced(error.role, "failed")

    async def _decode_alone(self, call: Call) -> Answer:
        body = plain_body(call.body)
        return await self._until_one_answers(
            lambda instance: self._upstream.post("decode", instance, call.path, call.headers, body)
        )

    async def _until_one_answers(self, ask: Callable[[Instance], Awaitable[Answer]]) -> Answer:
        instances = self._decode.order()
        while True:
            try:
                return await self._checked(ask(instances.pop(0)))
            except InstanceError as error:
                if not instances:
                    return final_error(error)

    async def _attempt(self, call: Call, attempt: Attempt) -> Answer:
        attempt.timing = self._begin_timing(attempt, call.num_bytes)
        if allows_early_token(call.body) and attempt.decode.control:
            attempt.early_token = asyncio.get_running_loop().create_future()
            attempt.repeats_token = self._tasks.spawn(self._decode_repeats_token(attempt.decode, call.path))
        addresses = attempt.decode.control, attempt.prefill.control
        self.recent.remember(attempt.handoff, *addresses, timing=attempt.timing)
        logger.debug(
            "handoff.start handoff=%s prefill=%s decode=%s",
            attempt.handoff,
            attempt.prefill.url,
            attempt.decode.url,
        )
        try:
            answer = await self._exchange(call, attempt)
        except BaseException:
            self._settle(attempt, is_delivered=False)
            raise
        if answer.status >= HTTPStatus.BAD_REQUEST:
            self._settle(attempt, is_delivered=False)
        return answer

    def _begin_timing(self, attempt: Attempt, num_bytes: int) -> Timing | None:
        return self._timer.begin(attempt.prefill.url, attempt.decode.url, num_bytes) if self._is_timed else None

    async def _sequential(self, call: Call, attempt: Attempt) -> Answer:
        return await self._ask_prefill(call, attempt) or await self._ask_decode(call, attempt)

    async def _concurrent(self, call: Call, attempt: Attempt) -> Answer:
        attempt.prefilling = self._tasks.spawn(self._ask_prefill(call, attempt))
        return await self._overlap(attempt.prefilling, call, attempt)

    async def _just_in_time(self, call: Call, attempt: Attempt) -> Answer:
        """Ask P, then D shortly before the predicted end of P's prefill, or when P has answered."""
        attempt.prefilling = self._tasks.spawn(self._ask_prefill(call, attempt))
        await self._until_due(attempt.prefilling, attempt)
        if attempt.prefilling.done():
            return attempt.prefilling.result() or await self._ask_decode(call, attempt)
        return await self._overlap(attempt.prefilling, call, attempt)

    async def _until_due(self, prefilling: asyncio.Task[Answer | None], attempt: Attempt) -> None:
        if attempt.timing is None:
            return
        due = self._timer.is_due(attempt.timing, attempt.prefill.control, attempt.handoff)
        waiting = self._tasks.spawn(due)
        try:
            await asyncio.wait({prefilling, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not prefilling.done() and not waiting.result():
                await asyncio.wait({prefilling})
        finally:
            waiting.cancel()

    async def _overlap(self, prefilling: asyncio.Task[Answer | None], call: Call, attempt: Attempt) -> Answer:
        """Ask D while P computes. D's answer is used once it begins; until then P's refusal is."""
        decoding = self._tasks.spawn(self._ask_decode(call, attempt))
        try:
            await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if has_answer(decoding) and (start := decoding.result().early_start) is not None:
                either: set[asyncio.Task[Any]] = {prefilling, start.first_bytes}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not has_begun(decoding) and prefilling.done():
                refusal = prefilling.result()
                if refusal is not None:
                    discard(decoding)
                    return refusal
            return await self._without_early_token(await decoding)
        except BaseException:
            discard(decoding)
            raise

    async def _without_early_token(self, answer: Answer) -> Answer:
        """Wait for the first bytes of a stream without an early token: until then another D can be asked."""
        start = answer.early_start
        if start is not None and (start.first_bytes.done() or has_no_token(start)):
            answer.body = await self._logged(start.first_bytes)
            answer.early_start = None
        return answer

    async def _ask_prefill(self, call: Call, attempt: Attempt) -> Answer | None:
        """Ask P; returns None on success, and P's answer when the request itself is bad."""
        body = prefill_body(call.body, call.path, attempt.handoff)
        attempt.may_hold_kv = True
        try:
            answer = await self._checked(self._upstream.post("prefill", attempt.prefill, call.path, call.headers, body))
        except InstanceError as error:
            attempt.may_hold_kv = error.reached
            attempt.set_early_token(None)
            raise
        early_token = EarlyToken.of(call.path, answer.body)
        if attempt.repeats_token is not None and not await attempt.repeats_token:
            early_token = None
        attempt.set_early_token(early_token)
        if answer.status == HTTPStatus.OK:
            if attempt.timing is not None:
                self._timer.answered(attempt.timing, attempt.prefill.url)
                self._metrics.prefill_answered(attempt.timing)
            return None
        attempt.may_hold_kv = False
        return answer

    async def _ask_decode(self, call: Call, attempt: Attempt) -> Answer:
        body = decode_body(call.body, attempt.handoff, attempt.prefill.control)
        attempt.is_decode_asked = True
        if attempt.timing is not None:
            self._metrics.dispatched(attempt.timing)
            arguments = attempt.decode.url, attempt.prefill.control, attempt.handoff
            attempt.measuring = self._tasks.spawn(self._timer.measure(attempt.timing, *arguments))
        early_token = attempt.early_token
        may_come_early = early_token is not None and (not early_token.done() or early_token.result() is not None)
        answer = await self._post_to_decode(call, attempt.decode, body, awaits_first_byte=not may_come_early)
        answer.headers[HANDOFF] = attempt.handoff
        if early_token is not None and may_come_early and not answer.is_complete:
            first_bytes = self._tasks.spawn(answer.piece())
            answer.early_start = EarlyStart(
                early_token,
                first_bytes,
                self._metrics.early_token_sent,
                lambda token, fault: self._retry_decode(call, attempt.decode, token, fault),
            )
        return answer

    async def _retry_decode(self, call: Call, decode: Instance, token: EarlyToken, fault: Fault) -> Answer:
        """Ask for a stream that begins with the early token, from another D if there is one, without P's KV.

        The handoff id is new, because the same D may not have ended the first request yet.
        """
        others = [instance for instance in self._decode.order() if instance != decode]
        if others:
            self._metrics.replaced("decode", fault)
            decode = others[0]
        body = resumed_body(call.body, secrets.token_hex(16), token.token)
        answer = await self._post_to_decode(call, decode, body, awaits_first_byte=True)
        if answer.is_complete:
            raise failed(answer)
        return answer

    async def _post_to_decode(self, call: Call, instance: Instance, body: bytes, *, awaits_first_byte: bool) -> Answer:
        asked = self._upstream.post(
            "decode", instance, call.path, call.headers, body, awaits_first_byte=awaits_first_byte
        )
        return await self._checked(asked)

    async def _decode_repeats_token(self, decode: Instance, path: str) -> bool:
        """Whether a D's stream begins with P's token unchanged; a reasoning parser may split it."""
        try:
            async with asyncio.timeout(self._control_timeout_s):
                described = await self._control.describe(decode.control, self._control_timeout_s)
        except (KVPipeError, OSError) as error:
            reason = f"describe: {error or type(error).__name__}"
            self._failures.note("control", decode.control, reason, asyncio.get_running_loop().time())
            return False
        has_parser = path == CHAT_PATH and bool(described.get("reasoning_parser"))
        return described.get("forces_first_tokens") is True and not has_parser

    async def _checked(self, exchange: Awaitable[Answer]) -> Answer:
        """Return an answer unless it is a server error, which is logged and raised as `InstanceError`."""
        return await self._logged(without_server_error(exchange))

    async def _logged(self, exchange: Awaitable[T]) -> T:
        try:
            return await exchange
        except InstanceError as error:
            now_s = asyncio.get_running_loop().time()
            self._failures.note(error.role, error.instance.url, error.reason, now_s)
            raise

    def _settle(self, attempt: Attempt, *, is_delivered: bool) -> None:
        """End an attempt: abort P's request and release its KV, unless D has answered."""
        attempt.end_timing()
        if not attempt.is_settled:
            arguments = attempt.handoff, attempt.decode, attempt.timing
            self._tasks.spawn(self._recorder.record(*arguments, is_decode_asked=attempt.is_decode_asked))
        attempt.is_settled = True
        prefilling, attempt.prefilling = attempt.prefilling, None
        if is_delivered:
            if prefilling is not None and not prefilling.done():
                self._tasks.spawn(self._await_prefill(attempt, prefilling))
            return
        if prefilling is not None:
            prefilling.cancel()
        if attempt.may_hold_kv:
            attempt.may_hold_kv = False
            self._tasks.spawn(self._release(attempt))

    async def _await_prefill(self, attempt: Attempt, prefilling: asyncio.Task[Answer | None]) -> None:
        _, pending = await asyncio.wait({prefilling}, timeout=_PREFILL_GRACE_S)
        if pending:
            prefilling.cancel()
            await self._release(attempt)

    async def _release(self, attempt: Attempt) -> None:
        address, handoff = attempt.prefill.control, attempt.handoff
        try:
            async with asyncio.timeout(self._control_timeout_s):
                is_known = await self._control.release(address, handoff, self._control_timeout_s)
        except (KVPipeError, OSError) as error:
            reason = f"release: {error or type(error).__name__}"
            self._failures.note("control", address, reason, asyncio.get_running_loop().time())
        else:
            logger.debug("handoff.released handoff=%s known=%s", handoff, is_known)
