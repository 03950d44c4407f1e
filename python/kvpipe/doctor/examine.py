"""Queries instances: all at once, each query with a deadline. Nothing of an instance's memory but canaries is read."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from itertools import product
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe._transport import transport
from kvpipe.config import resolve_tokens
from kvpipe.control import ControlClient
from kvpipe.doctor.facts import Facts, Failure, FailureKind, InstanceAddress, InstanceFacts, PairFacts, WorkerFacts
from kvpipe.exceptions import ConfigError, ConnectError, KVPipeError, TransferTimeoutError
from kvpipe.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvpipe.doctor.handoffs import Api

# Errors of the consumer's connections begin so, see rust/core/src/session/session.rs.
_UNREACHED = "cannot reach "
# A consumer gives up a connection to a producer after its own silence_s, 10 s by default.
_CHECK_TIMEOUT_S = 15.0


async def examine(
    targets: Sequence[InstanceAddress],
    *,
    token: str | None,
    timeout_s: float,
    announce: Callable[[str], None],
    instances_ca_file: Path | None = None,
    instances_api_key_file: Path | None = None,
) -> Facts:
    """Queries instances for all that can be known from outside.

    It takes `timeout_s` three times, 15 s where a consumer does not reach a producer, and what its test handoffs take,
    see docs/guide/doctor.md.

    Args:
        targets: The instances.
        token: The shared secret; by default `KVPIPE_TOKEN`, or the content of `KVPIPE_TOKEN_FILE`.
        timeout_s: Seconds for each query.
        announce: Called with a line before each request that costs an instance something.
        instances_ca_file: Of instances with https URLs, as of `kvpipe proxy`.
        instances_api_key_file: Of instances with URLs, as of `kvpipe proxy`; by default the key is `VLLM_API_KEY`.

    Raises:
        ConfigError: The token or a file cannot be read, or the token is too short for these addresses.
    """
    async with AsyncExitStack() as stack:
        api = None
        if any(target.url for target in targets):
            from kvpipe.doctor.handoffs import Api  # noqa: PLC0415 - control ports alone need no aiohttp

            api = await stack.enter_async_context(Api(timeout_s, announce, instances_ca_file, instances_api_key_file))
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
        await asyncio.gather(*map(self._check, facts.pairs))
        if self._api is not None:
            await self._api.hand_over([pair for pair in facts.pairs if not pair.refusal], self._control)
        return facts

    async def _instance(self, target: InstanceAddress) -> InstanceFacts:
        facts = InstanceFacts(target)
        await asyncio.gather(self._control_port(facts), self._http(facts))
        return facts

    async def _http(self, facts: InstanceFacts) -> None:
        if self._api is not None and facts.target.url:
            facts.http = await self._api.query(facts.target.url)

    async def _control_port(self, facts: InstanceFacts) -> None:
        address = facts.target.control
        try:
            async with asyncio.timeout(self._timeout_s):
                facts.description = await self._control.describe(address, self._timeout_s)
        except ConfigError:
            raise  # of this process's token
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
        except ConfigError:
            raise  # of this process's token
        except (KVPipeError, OSError) as error:
            worker.failure = await self._failure(worker.address, error)
        else:
            worker.transport, worker.transport_reason = peer.transport, peer.transport_reason

    async def _failure(self, address: str, error: Exception) -> Failure:
        if not isinstance(error, (TimeoutError, ConnectError)):
            return Failure.of(error)
        try:
            async with asyncio.timeout(self._timeout_s):
                without = await _error_of_connection(address)
        except OSError as no_address_or_time:
            without = no_address_or_time
        if without is not None:
            return Failure.without_connection(address, without)
        if isinstance(error, ConnectError):
            return Failure.of(error)
        return Failure(
            FailureKind.SILENT, f"{address} accepts connections, and did not answer within {self._timeout_s:g} s"
        )

    async def _check(self, pair: PairFacts) -> None:
        """Has the consumer connect to the address that the producer advertises, as for a real handoff."""
        try:
            pair.refusal = await self._control.check(pair.consumer.name, pair.address, _CHECK_TIMEOUT_S)
            pair.is_reached = not pair.refusal.startswith(_UNREACHED)
        except TransferTimeoutError:
            pair.refusal = f"{pair.consumer.name} has no session to {pair.address} after {_CHECK_TIMEOUT_S:g} s"
            pair.is_reached = False
        except (KVPipeError, OSError) as error:
            pair.refusal = str(error) or type(error).__name__


async def _error_of_connection(address: str) -> OSError | None:
    """Connects to an address, and returns the system's error. That of asyncio for several addresses has no number."""
    host, _, port = address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    without = None
    for *_, (ip, *_) in found:
        try:
            _, writer = await asyncio.open_connection(str(ip), int(port))
        except OSError as error:
            without = error
        else:
            writer.close()
            return None
    return without
