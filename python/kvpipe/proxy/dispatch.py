"""Answers requests: selects their instances, and has them asked.

Ownership: `Dispatcher._tasks` holds every task until it has ended, the requests' own tasks included, and
`Dispatcher.close` waits for all of them. A setting of `ProxyConfig` bounds every wait: `connect_timeout_s` and
`silence_timeout_s` bound HTTP, `control_timeout_s` bounds control ports. P's answer ends a subscription.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from multidict import CIMultiDict

from kvpipe.proxy.attempt import Services
from kvpipe.proxy.attempts import Attempts, final_answer
from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.descriptions import Descriptions, ModelDescriber, StoreDescriber
from kvpipe.proxy.endpoints import HANDED_OFF
from kvpipe.proxy.exchanges import Call, Exchanges
from kvpipe.proxy.handoff import PREFILL_GRACE_S
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.just_in_time import JustInTime
from kvpipe.proxy.limits import LengthCheck, is_contradictory, output_limit
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.pools import Asks, BrokerPool, HttpPool, Pool
from kvpipe.proxy.prompt_length import PromptLengths
from kvpipe.proxy.ranks import Ranks
from kvpipe.proxy.results import RecentHandoffs, ResultRecorder, Results
from kvpipe.proxy.routing import goes_to_decode_alone, num_choices
from kvpipe.proxy.steps import RetryBudget, Route, RoutedRequest
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import Answer, DecodeQueue, InstanceError, Role, Upstream


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
        self._split_from = config.split_from
        self._prompts = PromptLengths()
        self._falls_back = config.on_prefill_failure == "decode"
        self._metrics = metrics
        self._budget = RetryBudget()
        self._tasks = OwnedTasks()
        failures = FailureLog()
        addresses = dict.fromkeys(instance.control for instance in (*config.decode, *config.prefill))
        self.descriptions = Descriptions(control, addresses, failures, config.control_timeout_s)
        is_described = config.way == "store" and config.early_token
        urls = [instance.url for instance in config.decode] if is_described else []
        self._engines = Descriptions(StoreDescriber(upstream), urls, failures, config.control_timeout_s)
        self._way = config.way
        servers = dict.fromkeys((*config.decode, *config.prefill)) if config.way == "handoff" else ()
        self.ranks = Ranks(servers, upstream, self.descriptions, failures, config.control_timeout_s)
        asks = Asks(upstream, control, self._described, self.ranks)
        self._pools: dict[Role, Pool] = {
            "prefill": HttpPool("prefill", config, asks),
            "decode": HttpPool("decode", config, asks) if queue is None else BrokerPool(queue),
        }
        self._exchanges = Exchanges(self._pools, upstream, failures, self._engines, self.ranks)
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
            silence_timeout_s=config.silence_timeout_s,
            describe=self._pools["decode"].describe,
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
        await self.ranks.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for running tasks, mainly releases; cancel those that take too long."""
        self._recorder.close()
        await self._tasks.close(self._control_timeout_s + PREFILL_GRACE_S)
        for pool in self._pools.values():
            await pool.close()
        await self.ranks.close()
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
        attempts = await self._begin(call)
        answer = await attempts.answer()
        try:
            yield answer
        finally:
            answer.close()
            if self._split_from and call.record.usage.prompt_tokens is not None:
                self._prompts.learn(call.body, call.path, call.record.usage.prompt_tokens)
            attempts.settle(is_delivered=answer.is_complete)

    async def health(self) -> tuple[dict[str, str], dict[str, str]]:
        """The state of each P and of each D, by name: `ok`, or why it does not answer."""
        return await asyncio.gather(self._pools["prefill"].health(), self._pools["decode"].health())

    async def ask_decode(self, path: str, headers: CIMultiDict[str]) -> Answer:
        """Send a GET to decode instances, or prefill's behind a broker, until one answers without a server error."""
        role: Role = "decode" if self._pools["decode"].answers_gets else "prefill"
        self._pools[role].check()
        instances = self._pools[role].order()
        while True:
            try:
                return await self._exchanges.get(role, instances[0], path, headers)
            except InstanceError as error:
                instances = [instance for instance in instances if instance.url != error.instance.url]
                if not instances or error.failure == "timeout":
                    return final_answer(error)

    async def _begin(self, call: Call) -> Attempts:
        """Decide how a request is answered, as far as the request and D's limits tell."""
        self._budget.add_request()
        if call.path in HANDED_OFF:
            call.record.num_choices = num_choices(call.body, call.path)
        self._pools["decode"].check()
        prefill, decode = self._pools["prefill"].order(), self._pools["decode"].order()
        reason = self._alone_reason(call)
        ends_at_prefill = not reason and output_limit(call.body, call.path) == 1
        if not ends_at_prefill:  # else the queue refuses it itself, if it goes there all the same
            self._pools["decode"].check_size(call.num_queued_bytes)
        if not reason:
            fit = await self._length.fit(call, prefill, decode)
            prefill, decode, reason = list(fit.prefill), list(fit.decode), fit.alone
        elif call.path in HANDED_OFF:
            decode = list(await self._length.decode_alone(call, decode))
        route: Route = self._way
        if reason:
            route = "decode"
            call.record.alone = reason
            self._metrics.went_to_decode_alone(reason)
        elif ends_at_prefill:
            route = "prefill"
        if route != "decode" and not self._falls_back:
            self._pools["prefill"].check()
        request = RoutedRequest(
            route, prefill, decode, self._budget, falls_back=self._falls_back, is_available=self._is_available
        )
        return Attempts(self._services, call, request, self._way)

    def _alone_reason(self, call: Call) -> str:
        """Reason in the request for which D gets it alone; empty if there is none."""
        if call.path not in HANDED_OFF:
            return "endpoint"
        if goes_to_decode_alone(call.body):
            return "no_handoff"
        if is_contradictory(call.body, call.path):
            return "contradictory"
        num_tokens = self._prompts.tokens(call.body, call.path) if self._split_from else None
        return "short" if num_tokens is not None and num_tokens < self._split_from else ""

    def _is_available(self, role: Role, instance: Instance) -> bool:
        return self._pools[role].takes(instance)

    def _described(self, instance: Instance) -> dict[str, Any] | None:
        return self.descriptions.of(instance.control) if self._way == "handoff" else self._engines.of(instance.url)
