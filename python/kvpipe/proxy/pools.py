"""The instances of one role, and the way they are asked: each by HTTP, or all through a broker."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

from kvpipe.proxy.health import Health
from kvpipe.proxy.instances import QUEUE
from kvpipe.proxy.routing import RoundRobin
from kvpipe.proxy.upstream import InstanceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpipe.proxy.descriptions import Describe
    from kvpipe.proxy.instances import Instance
    from kvpipe.proxy.upstream import Answer, DecodeQueue, Role, Upstream, WhenBegun


class Pool(ABC):
    """The instances of one role, in turn.

    Args:
        role: their role.
        instances: the instances.
        num_partners: instances of the other role, as for `RoundRobin`.
    """

    # Whether an instance can be asked for what is no request for tokens, such as its models.
    answers_gets = True

    def __init__(self, role: Role, instances: Sequence[Instance], num_partners: int = 0) -> None:
        self.role: Role = role
        self.instances = tuple(instances)
        self._turn = RoundRobin(instances, num_partners)
        self._health = {instance: Health(math.inf) for instance in instances}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.role} {self._turn}>"

    def order(self) -> list[Instance]:
        """All instances, in the order in which one request asks them."""
        now_s = asyncio.get_running_loop().time()
        return self._turn.order(lambda instance: self._health[instance].is_avoided(now_s))

    def failed(self, instance: Instance) -> None:
        """Note that an instance has failed."""
        self._health[instance].failed(asyncio.get_running_loop().time())

    def check(self, num_bytes: int) -> None:  # noqa: B027 - instances that are asked by HTTP fail one by one
        """Raises `InstanceError` while no request can be taken, or none with a body of so many bytes."""

    @abstractmethod
    def describe(self, instance: Instance) -> dict[str, Any] | None:
        """The description of an instance's engine; None if none is known."""

    @abstractmethod
    async def health(self) -> dict[str, str]:
        """The state of each instance, by its URL: `ok`, or why it does not answer."""

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


class HttpPool(Pool):
    """Instances that are asked by HTTP.

    Args:
        role: their role.
        instances: the instances.
        upstream: HTTP client of the instances.
        described: the descriptions of their engines.
        probe_timeout_s: limit for a health probe.
        num_partners: instances of the other role, as for `RoundRobin`.
    """

    def __init__(  # noqa: PLR0917
        self,
        role: Role,
        instances: Sequence[Instance],
        upstream: Upstream,
        described: Describe,
        probe_timeout_s: float,
        num_partners: int = 0,
    ) -> None:
        super().__init__(role, instances, num_partners)
        self._upstream = upstream
        self._described = described
        self._probe_timeout_s = probe_timeout_s

    def describe(self, instance: Instance) -> dict[str, Any] | None:
        """As `Pool.describe`."""
        return self._described(instance)

    async def health(self) -> dict[str, str]:
        """As `Pool.health`, within the timeout of a probe."""
        states = await asyncio.gather(*map(self._probe, self.instances))
        return {instance.url: state for instance, state in zip(self.instances, states, strict=True)}

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
        return await self._upstream.post(self.role, instance, path, headers, body, awaits_first_byte=awaits_first_byte)

    async def _probe(self, instance: Instance) -> str:
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                answer = await self._upstream.get(self.role, instance, "/health", CIMultiDict())
        except InstanceError as error:
            return error.reason
        except TimeoutError:
            return "no answer in time (--connect-timeout)"
        return "ok" if answer.status == HTTPStatus.OK else f"answered {answer.status}"


class BrokerPool(Pool):
    """All decode instances behind a broker, as one: which of them answers is their workers' choice."""

    answers_gets = False

    def __init__(self, queue: DecodeQueue) -> None:
        super().__init__("decode", (QUEUE,))
        self._queue = queue

    def check(self, num_bytes: int) -> None:
        """As `Pool.check`."""
        self._queue.check(num_bytes)

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
