"""Answers requests: selects instances, and decides after each failure who is asked next.

Ownership: `Dispatcher._tasks` holds every task until it has ended, the requests' own tasks included, and
`Dispatcher.close` waits for all of them. A setting of `ProxyConfig` bounds every wait: `connect_timeout_s` and
`silence_timeout_s` bound HTTP, `control_timeout_s` bounds control ports. P's answer ends a subscription.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Self

from multidict import CIMultiDict

from kvpipe import transfer_params
from kvpipe.proxy.attempt import PREFILL_GRACE_S, Attempt, Services
from kvpipe.proxy.bodies import plain_body, prefill_body
from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.descriptions import Descriptions, ModelDescriber, StoreDescriber
from kvpipe.proxy.endpoints import HANDED_OFF
from kvpipe.proxy.exchanges import Call, Exchanges
from kvpipe.proxy.headers import HANDOFF
from kvpipe.proxy.instances import QUEUE, Instance
from kvpipe.proxy.just_in_time import JustInTime
from kvpipe.proxy.limits import LengthCheck, is_contradictory, output_limit
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.modes import MODES, Mode
from kvpipe.proxy.prefill_answer import PrefillAnswer
from kvpipe.proxy.prompt_length import PromptLengths
from kvpipe.proxy.results import RecentHandoffs, ResultRecorder, Results
from kvpipe.proxy.resumption import HandoffResumption
from kvpipe.proxy.retries import Retries, RetryBudget
from kvpipe.proxy.routing import RoundRobin, goes_to_decode_alone
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.through_store import Saved, StoreRequests
from kvpipe.proxy.upstream import Answer, DecodeQueue, EarlyStart, InstanceError, Role, Upstream


class Dispatcher:
    """Answers calls, by a handoff where that is possible.

    Args:
        config: settings of the proxy.
        upstream: HTTP client of the instances.
        control: client of control ports; the caller closes it after the dispatcher.
        metrics: counters of attempts.
        queue: the decode instances, where a broker gives them their requests.
    """

    def __init__(
        self,
        config: ProxyConfig,
        upstream: Upstream,
        control: Control,
        metrics: Metrics,
        queue: DecodeQueue | None = None,
    ) -> None:
        self._control_timeout_s = config.control_timeout_s
        decode = config.decode if queue is None else (QUEUE,)
        self._pools: dict[Role, RoundRobin] = {
            "prefill": RoundRobin(config.prefill),
            "decode": RoundRobin(decode, num_partners=len(config.prefill)),
        }
        self._queue = queue
        self._sends_early_tokens = config.early_token
        has_control = any(instance.control for instance in config.prefill)
        self._mode = MODES.get(config.dispatch) if has_control or queue is None else None
        self._split_from = config.split_from
        self._prompts = PromptLengths()
        self._falls_back = config.on_prefill_failure == "decode"
        self._metrics = metrics
        self._budget = RetryBudget()
        self._tasks = OwnedTasks()
        failures = FailureLog()
        addresses = dict.fromkeys(instance.control for instance in (*config.decode, *config.prefill))
        self.descriptions = Descriptions(control, addresses, failures, config.control_timeout_s)
        is_described = config.dispatch == "store" and config.early_token
        urls = [instance.url for instance in config.decode] if is_described else []
        self._engines = Descriptions(StoreDescriber(upstream), urls, failures, config.control_timeout_s)
        self._exchanges = Exchanges(upstream, failures, self.descriptions, self._engines, self._pools)
        self._on_store = StoreRequests(self._exchanges, self._describe_on_store, metrics, self._tasks)
        urls = [instance.url for instance in (*config.decode, *config.prefill) if not instance.control]
        self._models = Descriptions(ModelDescriber(upstream), urls, failures, config.control_timeout_s)
        self._length = LengthCheck(upstream, self.descriptions, self._models, config.control_timeout_s)
        self.recent = RecentHandoffs()
        self.results = Results(control, self.recent, config.control_timeout_s)
        timer = JustInTime(control, failures, config.silence_timeout_s)
        self._recorder = ResultRecorder(self.results, metrics, timer.leads, failures)
        self._services = Services(
            exchanges=self._exchanges,
            control=control,
            control_timeout_s=config.control_timeout_s,
            describe=self._describe,
            failures=failures,
            metrics=metrics,
            recent=self.recent,
            recorder=self._recorder,
            tasks=self._tasks,
            timer=timer,
            is_timed=config.dispatch == "just-in-time",
            sends_early_tokens=config.early_token,
        )

    def __repr__(self) -> str:
        return f"<Dispatcher {self._pools['prefill']} {self._pools['decode']}, {len(self._tasks)} tasks>"

    async def __aenter__(self) -> Self:
        await asyncio.gather(self.descriptions.start(), self._engines.start(), self._models.start())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for running tasks, mainly releases; cancel those that take too long."""
        self._recorder.close()
        await self._tasks.close(self._control_timeout_s + PREFILL_GRACE_S)
        await self.descriptions.close()
        await self._engines.close()
        await self._models.close()

    @asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        """Yields the answer to a call, with its status; leaving before its end aborts requests and releases KV.

        Raises:
            InstanceError: an instance has failed, and no other may be asked.
        """
        self._tasks.adopt_current()
        answer, resumption = await self._dispatch(call)
        try:
            yield answer
        finally:
            answer.close()
            if self._split_from and call.record.prompt_tokens is not None:
                self._prompts.learn(call.body, call.path, call.record.prompt_tokens)
            if resumption is not None:
                resumption.latest.settle(is_delivered=answer.is_complete)

    async def ask_decode(self, path: str, headers: CIMultiDict[str]) -> Answer:
        """Send a GET to decode instances, or prefill's behind a broker, until one answers without a server error."""
        role: Role = "decode" if self._queue is None else "prefill"
        instances = self._order(role)
        while True:
            try:
                return await self._exchanges.get(role, instances.pop(0), path, headers)
            except InstanceError as error:
                if not instances or error.failure == "timeout":
                    return _final(error)

    async def _dispatch(self, call: Call) -> tuple[Answer, HandoffResumption | None]:
        self._budget.add_request()
        if self._queue is not None:
            self._queue.check()
        if reason := self._alone_reason(call):
            retries = Retries((), self._order("decode"), self._budget, self._metrics)
            return await self._ask_decode_alone(call, retries, reason), None
        fit = await self._length.fit(call, self._order("prefill"), self._order("decode"))
        retries = Retries(fit.prefill, fit.decode, self._budget, self._metrics)
        if fit.alone:
            return await self._ask_decode_alone(call, retries, fit.alone), None
        if output_limit(call.body, call.path) == 1:
            return await self._ask_alone("prefill", call, retries), None
        if self._mode is None:
            return await self._ask_through_store(call, retries), None
        return await self._hand_off(call, retries, self._mode)

    async def _hand_off(self, call: Call, retries: Retries, mode: Mode) -> tuple[Answer, HandoffResumption | None]:
        while retries.has("prefill") and retries.has("decode"):
            attempt = Attempt(self._services, call, retries)
            resumption = HandoffResumption(self._services, call, retries, attempt)
            try:
                return await self._attempt(attempt, mode, resumption), resumption
            except InstanceError as error:
                if error.answer is not None:
                    error.answer.headers[HANDOFF] = attempt.handoff  # the reason is in its result
                if self._next_role(error, call, retries) is None or not retries.has("decode"):
                    return _final(error), None
        return await self._ask_alone("decode", call, retries), None

    def _alone_reason(self, call: Call) -> str:
        """Why D gets a request alone, as far as the request tells; empty if it does not."""
        if call.path not in HANDED_OFF:
            return "endpoint"
        if goes_to_decode_alone(call.body):
            return "no_handoff"
        if is_contradictory(call.body, call.path):
            return "contradictory"
        num_tokens = self._prompts.tokens(call.body, call.path) if self._split_from else None
        return "short" if num_tokens is not None and num_tokens < self._split_from else ""

    def _describe(self, decode: Instance) -> dict[str, Any] | None:
        """The description of a D with a control port."""
        return self.descriptions.of(decode.control) if self._queue is None else self._queue.describe()

    def _describe_on_store(self, decode: Instance) -> dict[str, Any] | None:
        """The description of a D that shares a store with P's; None where nobody has to know it."""
        if self._queue is None:
            return self._engines.of(decode.url)
        return self._queue.describe() if self._sends_early_tokens else None

    def _order(self, role: Role) -> list[Instance]:
        return self._pools[role].order(asyncio.get_running_loop().time())

    async def _attempt(self, attempt: Attempt, mode: Mode, resumption: HandoffResumption) -> Answer:
        attempt.begin()
        try:
            answer = await mode(attempt)
            answer = await _with_stream_begun(answer, attempt, resumption)
        except BaseException as error:
            if isinstance(error, InstanceError) and error.role == "decode":
                attempt.note_failed_prefill()
            attempt.settle(is_delivered=False)
            raise
        if answer.status >= HTTPStatus.BAD_REQUEST or answer.role == "prefill":
            attempt.settle(is_delivered=False)
        return answer

    async def _ask_decode_alone(self, call: Call, retries: Retries, reason: str) -> Answer:
        call.record.alone = reason
        self._metrics.went_to_decode_alone(reason)
        return await self._ask_alone("decode", call, retries)

    async def _ask_through_store(self, call: Call, retries: Retries) -> Answer:
        """Have P compute the prompt into the store that it shares with D, then D answer from P's first token on."""
        while retries.has("prefill") and retries.has("decode"):
            prefill = retries.first("prefill")
            # Another one for each P: one that was given up may still save its token.
            handoff = secrets.token_hex(16)
            body = prefill_body(call.body, call.path, transfer_params.save(handoff))
            call.record.begin_attempt("", prefill.url, retries.first("decode").url)
            try:
                answer = await self._exchanges.post("prefill", prefill, call, body)
            except InstanceError as error:
                if self._next_role(error, call, retries) is None:
                    return _final(error)
                continue
            if answer.status != HTTPStatus.OK:
                return answer
            prefilled = PrefillAnswer.parse(answer.body)
            if prefilled.ends_request(call.body):
                answer.body = prefilled.final_body()
                return answer
            saved = Saved.of(handoff, prefilled, call)
            return await self._ask_alone("decode", call, retries, prefill.url, saved)
        return await self._ask_alone("decode", call, retries)

    async def _ask_alone(
        self, role: Role, call: Call, retries: Retries, prefill: str = "", saved: Saved | None = None
    ) -> Answer:
        """Have an instance answer without another one: D, or P where its one token is all that the client wants.

        Args:
            role: its role.
            call: the client's request.
            retries: the instances that may be asked.
            prefill: URL of the P that has computed the prompt into the store that it shares with D.
            saved: what that P has saved for D alone.
        """
        while True:
            instance = retries.first(role)
            urls = (instance.url, "") if role == "prefill" else (prefill, instance.url)
            call.record.begin_attempt("", *urls)
            try:
                if saved is not None:
                    return await self._on_store.ask(instance, call, saved, retries)
                return await self._exchanges.post(role, instance, call, plain_body(call.body))
            except InstanceError as error:
                next_role = self._next_role(error, call, retries)
                if next_role is None:
                    return _final(error)
                role = next_role
                if error.failure != "unreached":
                    saved = None  # D may have consumed the entry, and another one would wait for it

    def _next_role(self, error: InstanceError, call: Call, retries: Retries) -> Role | None:
        """Role of the instance that is asked after a failure; None if none may be."""
        call.record.replaced(error)
        retries.failed(error)
        if retries.has(error.role) and retries.allows_after(error):
            self._metrics.replaced(error)
            return error.role
        is_prefill = error.role == "prefill"
        if is_prefill and self._falls_back and retries.has("decode") and retries.allows_decode_alone_after(error):
            call.record.alone = "no_prefill"
            self._metrics.fell_back()
            return "decode"
        return None


async def _with_stream_begun(answer: Answer, attempt: Attempt, resumption: HandoffResumption) -> Answer:
    """Have P's token sent before the stream begins; without one wait for the stream: until then another D can be asked.

    Raises:
        InstanceError: D failed before its stream began.
    """
    if (first_bytes := answer.first_bytes) is None:
        return answer
    token = attempt.early_token
    if token is not None and not first_bytes.done():
        answer.early_start = EarlyStart(token, resumption)
        return answer
    try:
        answer.body, answer.first_bytes = await first_bytes, None
    except BaseException:
        answer.close()
        raise
    return answer.with_first_event_checked()


def _final(error: InstanceError) -> Answer:
    """Returns D's own error as the client's answer; otherwise raises."""
    if error.role == "decode" and error.answer is not None:
        return error.answer
    raise error
