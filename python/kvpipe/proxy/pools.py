"""The instances of one role, and the way they are asked: each by HTTP, or all through a broker."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from multidict import CIMultiDict

from kvpipe.proxy.instances import QUEUE
from kvpipe.proxy.probed import ProbedInstance
from kvpipe.proxy.routing import RoundRobin
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import InstanceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvpipe.proxy.config import ProxyConfig
    from kvpipe.proxy.control import Control
    from kvpipe.proxy.descriptions import Describe
    from kvpipe.proxy.health import Health
    from kvpipe.proxy.instances import Instance
    from kvpipe.proxy.ranks import Ranks
    from kvpipe.proxy.upstream import Answer, DecodeQueue, Role, Upstream, WhenBegun

T = TypeVar("T")


class Pool(ABC):
    """The instances of one role, in turn.

    Args:
        role: their role.
        num_partners: number of the instances of the other role, as for `RoundRobin`.
    """

    # True if instances answer other requests than those for tokens, such as one for their models.
    answers_gets = True

    def __init__(self, role: Role, num_partners: Callable[[], int] = lambda: 0) -> None:
        self.role: Role = role
        self._turn = RoundRobin(num_partners)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.role} of {len(self.instances)}>"

    @property
    @abstractmethod
    def instances(self) -> tuple[Instance, ...]:
        """The instances; a server's data-parallel ranks are found while the proxy runs."""

    def order(self) -> list[Instance]:
        """All instances, in the order in which one request asks them."""
        return self._turn.order(self.instances, lambda _: False)

    def failed(self, instance: Instance, *, is_server: bool) -> None:  # noqa: B027 - a broker knows its workers
        """Note that an instance has failed; with `is_server`, that all ranks of its server have."""

    def takes(self, instance: Instance) -> bool:  # noqa: ARG002
        """Returns true if an instance may be sent a request now."""
        return True

    async def unless_frozen(
        self,
        instance: Instance,  # noqa: ARG002
        exchange: Awaitable[T],
        may_leave: Callable[[], bool],  # noqa: ARG002
        *,
        is_generation: bool = True,  # noqa: ARG002
    ) -> T:
        """Returns the result of an exchange that awaits the first byte of an answer.

        Args:
            instance: the instance that owes it.
            exchange: the exchange; it is cancelled where the instance freezes.
            may_leave: true if another instance can be asked then; else the exchange goes on.
            is_generation: true if its answer shows that a half-open instance works again.

        Raises:
            InstanceError: that of the exchange, or the instance is frozen.
        """
        return await exchange

    def is_frozen(self, instance: Instance) -> bool:  # noqa: ARG002
        """Returns true if none of an instance's ports answers, or none of another rank of its server."""
        return False

    async def until_thawed(self, instance: Instance) -> None:  # noqa: B027
        """Return when an instance is not frozen."""

    async def close(self) -> None:  # noqa: B027
        """Stop probing."""

    @abstractmethod
    def check(self) -> None:
        """Raises `InstanceError` while no request can be taken."""

    def check_size(self, num_bytes: Callable[[], int]) -> None:  # noqa: B027 - HTTP takes any size
        """Raises `InstanceError` for a request whose body and headers are larger than a broker takes."""

    @abstractmethod
    def describe(self, instance: Instance) -> dict[str, Any] | None:
        """The description of an instance's engine; None if none is known."""

    @abstractmethod
    async def health(self) -> dict[str, str]:
        """The state of each instance, by its name: `ok`, or why it does not answer."""

    @abstractmethod
    async def post(
        self,
        instance: Instance,
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        awaits_first_byte: bool,
        when_begun: WhenBegun | None,
    ) -> Answer:
        """As `Upstream.post`; `when_begun` is called where a broker chooses the instance."""


@dataclass(frozen=True, slots=True)
class Asks:
    """Clients of HTTP and of control ports, the descriptions of engines, and the ranks of servers."""

    upstream: Upstream
    control: Control
    described: Describe
    ranks: Ranks


class HttpPool(Pool):
    """Instances that are asked by HTTP, each with its health.

    Args:
        role: their role.
        config: the servers, and limits.
        asks: clients with which they are asked.
    """

    def __init__(self, role: Role, config: ProxyConfig, asks: Asks) -> None:
        partners = config.prefill if role == "decode" else ()
        super().__init__(role, lambda: len(asks.ranks.of(partners)))
        self._servers = config.prefill if role == "prefill" else config.decode
        self._probe_timeout_s = config.connect_timeout_s
        self._frozen_after_s = config.frozen_after_s
        self._control_timeout_s = config.control_timeout_s
        self._asks = asks
        self._tasks = OwnedTasks()
        # Without fallback, and at D's, no other can answer while the only instance has its trial.
        self._is_last_resort = role == "decode" or config.on_prefill_failure == "fail"
        self._probed: dict[Instance, ProbedInstance] = {}
        self._frozen_ranks: defaultdict[str, set[Health]] = defaultdict(set)  # by URL

    @property
    def instances(self) -> tuple[Instance, ...]:
        """As `Pool.instances`."""
        return self._asks.ranks.of(self._servers)

    def order(self) -> list[Instance]:
        """As `Pool.order`: those come last that have failed, are slow, or take no requests."""
        now_s = asyncio.get_running_loop().time()
        return self._turn.order(self.instances, lambda instance: self._of(instance).health.is_avoided(now_s))

    def failed(self, instance: Instance, *, is_server: bool) -> None:
        """As `Pool.failed`."""
        self._of(instance).failed()
        for each in self.instances if is_server else ():
            if each.url == instance.url:
                self._of(each).failed()

    def takes(self, instance: Instance) -> bool:
        """As `Pool.takes`."""
        health = self._of(instance).health
        if health.takes_requests or health.is_server_frozen or not self._is_last_resort:
            return health.takes_requests
        return not any(self._of(each).health.takes_requests for each in self.instances)

    def check(self) -> None:
        """As `Pool.check`: all instances are frozen."""
        instances = self.instances
        if all(map(self.is_frozen, instances)):
            raise self._of(instances[0]).frozen("unavailable")

    async def unless_frozen(
        self,
        instance: Instance,
        exchange: Awaitable[T],
        may_leave: Callable[[], bool],
        *,
        is_generation: bool = True,
    ) -> T:
        """As `Pool.unless_frozen`."""
        return await self._of(instance).unless_frozen(exchange, may_leave, is_generation=is_generation)

    def is_frozen(self, instance: Instance) -> bool:
        """As `Pool.is_frozen`."""
        return bool(self._frozen_ranks[instance.url])

    async def close(self) -> None:
        """As `Pool.close`."""
        await self._tasks.close(0.0)

    async def until_thawed(self, instance: Instance) -> None:
        """As `Pool.until_thawed`."""
        for each in [probed for rank, probed in self._probed.items() if rank.url == instance.url]:
            await each.until_thawed()

    def describe(self, instance: Instance) -> dict[str, Any] | None:
        """As `Pool.describe`."""
        return self._asks.described(instance)

    async def health(self) -> dict[str, str]:
        """As `Pool.health`, within the timeout of a probe; one that is known to be frozen is not asked."""
        instances = self.instances
        states = await asyncio.gather(*map(self._probe, instances))
        return {instance.name: state for instance, state in zip(instances, states, strict=True)}

    async def post(
        self,
        instance: Instance,
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        awaits_first_byte: bool,
        when_begun: WhenBegun | None,  # noqa: ARG002 - the instance is chosen here
    ) -> Answer:
        """As `Upstream.post`."""
        upstream = self._asks.upstream
        return await upstream.post(self.role, instance, path, headers, body, awaits_first_byte=awaits_first_byte)

    def _of(self, instance: Instance) -> ProbedInstance:
        if instance not in self._probed:
            self._probed[instance] = ProbedInstance(
                self.role,
                instance,
                self._asks.upstream,
                self._asks.control,
                frozen_after_s=self._frozen_after_s,
                control_timeout_s=self._control_timeout_s,
                tasks=self._tasks,
                frozen_ranks=self._frozen_ranks[instance.url],
            )
        return self._probed[instance]

    async def _probe(self, instance: Instance) -> str:
        probed = self._of(instance)
        if probed.health.is_frozen:  # it is probed until it goes on
            return probed.frozen("frozen").reason
        if probed.health.is_server_frozen:
            return "is frozen, as another rank of its server is"
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                answer = await self._asks.upstream.get(self.role, instance, "/health", CIMultiDict())
        except InstanceError as error:
            return error.reason
        except TimeoutError:
            return "no answer in time (--connect-timeout)"
        return "ok" if answer.status == HTTPStatus.OK else f"answered {answer.status}"


class BrokerPool(Pool):
    """All decode instances behind a broker, as one: which of them answers is their workers' choice."""

    answers_gets = False

    def __init__(self, queue: DecodeQueue) -> None:
        super().__init__("decode")
        self._queue = queue

    @property
    def instances(self) -> tuple[Instance, ...]:
        """As `Pool.instances`: one."""
        return (QUEUE,)

    def check(self) -> None:
        """As `Pool.check`."""
        self._queue.check()

    def check_size(self, num_bytes: Callable[[], int]) -> None:
        """As `Pool.check_size`."""
        self._queue.check(num_bytes())

    def describe(self, instance: Instance) -> dict[str, Any] | None:  # noqa: ARG002 - it has one
        """As `Pool.describe`: what all decode instances have in common."""
        return self._queue.describe()

    async def health(self) -> dict[str, str]:
        """As `Pool.health`."""
        return {QUEUE.url: self._queue.health()}

    async def post(
        self,
        instance: Instance,  # noqa: ARG002 - it has one
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        awaits_first_byte: bool,
        when_begun: WhenBegun | None,
    ) -> Answer:
        """As `Upstream.post`."""
        return await self._queue.post(path, headers, body, awaits_first_byte=awaits_first_byte, when_begun=when_begun)
