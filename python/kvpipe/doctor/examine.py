"""Asks instances: all at once, each question with a deadline. Nothing of an instance's memory but canaries is read."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import product
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe._transport import transport
from kvpipe.config import resolve_tokens
from kvpipe.control import ControlClient
from kvpipe.doctor.facts import Facts, Failure, FailureKind, InstanceAddress, InstanceFacts, PairFacts, WorkerFacts
from kvpipe.exceptions import KVPipeError, TransferTimeoutError
from kvpipe.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpipe.doctor.handoffs import Api

# A consumer gives up a connection to a producer after its own silence_s, 10 s by default.
_CHECK_TIMEOUT_S = 15.0


async def examine(
    targets: Sequence[InstanceAddress], *, token: str | None, timeout_s: float, tell: Callable[[str], None]
) -> Facts:
    """Asks instances for all that can be known from outside.

    It takes `timeout_s` three times, 15 s where a consumer does not reach a producer, and what its test handoffs take.

    Args:
        targets: The instances.
        token: The shared secret; by default `KVPIPE_TOKEN`, or the content of `KVPIPE_TOKEN_FILE`.
        timeout_s: Seconds for each question.
        tell: Called with a line before each request that costs an instance something.

    Raises:
        ConfigError: The token cannot be read, or is too short for these addresses.
    """
    async with AsyncExitStack() as stack:
        api = None
        if any(target.url for target in targets):
            from kvpipe.doctor.handoffs import Api  # noqa: PLC0415 - control ports alone need no aiohttp

            api = await stack.enter_async_context(Api(timeout_s, tell))
        examination = _Examination(token, timeout_s, api)
        stack.callback(examination.close)
        return await examination.run(targets)


class _Examination:
    def __init__(self, token: str | None, timeout_s: float, api: Api | None) -> None:
        self._timeout_s, self._api = timeout_s, api
        self._control = ControlClient(token)
        self._agent = _kvpipe.Agent("127.0.0.1:0", resolve_tokens(token), transport(), "doctor")

    def close(self) -> None:
        self._control.close()
        self._agent.close()

    async def run(self, targets: Sequence[InstanceAddress]) -> Facts:
        facts = Facts(await asyncio.gather(*map(self._instance, targets)))
        ready = [instance for instance in facts.instances if instance.description]
        producers = [instance for instance in ready if instance.is_producer]
        consumers = [instance for instance in ready if instance.is_consumer]
        facts.pairs = [PairFacts(p, d) for p, d in product(producers, consumers) if p is not d]
        await asyncio.gather(*map(self._pair, facts.pairs))
        return facts

    async def _instance(self, target: InstanceAddress) -> InstanceFacts:
        facts = InstanceFacts(target)
        await asyncio.gather(self._control_port(facts), self._http(facts))
        return facts

    async def _http(self, facts: InstanceFacts) -> None:
        if self._api is not None and facts.target.url:
            facts.http = await self._api.look(facts.target.url)

    async def _control_port(self, facts: InstanceFacts) -> None:
        address = facts.target.control
        try:
            async with asyncio.timeout(self._timeout_s):
                facts.description = await self._control.describe(address, self._timeout_s)
        except (KVPipeError, OSError) as error:
            facts.failure = await self._failure(address, error)
            return
        ranks, machines = facts.description.get("ranks", []), facts.description.get("machines", [])
        machines = [*machines, *([{}] * len(ranks))][: len(ranks)]
        facts.workers = [WorkerFacts(rank, machine) for rank, machine in zip(ranks, machines, strict=True)]
        await asyncio.gather(*map(self._worker, facts.workers))

    async def _worker(self, worker: WorkerFacts) -> None:
        """Opens a session to a worker's agent. For it each side reads the other's canary, and no KV."""
        try:
            async with asyncio.timeout(self._timeout_s):
                peer = await Work(self._agent.connect(worker.address), lambda native: native)
        except (KVPipeError, OSError) as error:
            worker.failure = await self._failure(worker.address, error)
        else:
            worker.transport, worker.transport_reason = peer.transport, peer.transport_reason

    async def _failure(self, address: str, error: Exception) -> Failure:
        if not isinstance(error, TimeoutError):
            return Failure.of(error)
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(self._timeout_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            return Failure(FailureKind.UNREACHED, f"no connection to {address} within {self._timeout_s:g} s")
        writer.close()
        return Failure(
            FailureKind.SILENT, f"{address} accepts connections, and did not answer within {self._timeout_s:g} s"
        )

    async def _pair(self, pair: PairFacts) -> None:
        try:
            check = self._control.check(pair.consumer.name, pair.producer.name, _CHECK_TIMEOUT_S)
            pair.refusal = await check
        except TransferTimeoutError:
            pair.refusal = f"{pair.consumer.name} has no session to {pair.producer.name} after {_CHECK_TIMEOUT_S:g} s"
        except (KVPipeError, OSError) as error:
            pair.refusal = str(error) or type(error).__name__
        if self._api is not None and not pair.refusal:
            await self._api.hand_over(pair, self._control)
