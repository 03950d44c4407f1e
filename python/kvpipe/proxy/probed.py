"""An instance with its health: it is probed while it owes an answer, and requests leave it where it is frozen."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from multidict import CIMultiDict

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.health import Health
from kvpipe.proxy.probes import Probes
from kvpipe.proxy.upstream import InstanceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvpipe.proxy.control import Describes
    from kvpipe.proxy.instances import Instance
    from kvpipe.proxy.tasks import OwnedTasks
    from kvpipe.proxy.upstream import Failure, Role, Upstream

T = TypeVar("T")

# HTTP stalls while a healthy API server tokenizes. Without a control port it may be silent so many times longer.
_HTTP_SILENCE_FACTOR = 6
# A request leaves a frozen instance so long after the freeze, and looks again so often whether another one takes it:
# several may freeze, or thaw, at about the same time.
_LOOK_S = 1.0


class ProbedInstance:
    """One instance and its health.

    Args:
        role: its role.
        instance: the instance.
        upstream: HTTP client of the instances.
        control: client of control ports.
        frozen_after_s: silence of all ports after which it is frozen; without a control port six times as long.
        control_timeout_s: limit for one probe of its control port.
        tasks: owner of the task that probes.
        frozen_ranks: as for `Health`.

    Attributes:
        instance: the instance.
        health: its health.
    """

    def __init__(
        self,
        role: Role,
        instance: Instance,
        upstream: Upstream,
        control: Describes,
        *,
        frozen_after_s: float,
        control_timeout_s: float,
        tasks: OwnedTasks,
        frozen_ranks: set[Health] | None = None,
    ) -> None:
        self.instance = instance
        self.health = Health(frozen_after_s * (1 if instance.control else _HTTP_SILENCE_FACTOR), frozen_ranks)
        self._role: Role = role
        self._upstream = upstream
        self._control = control
        self._control_timeout_s = control_timeout_s
        name = f"role={role} url={instance.name}"
        self._probes = Probes(name, self.health, self._answers, self._answers_control, tasks)

    def failed(self) -> None:
        """Note that it has failed."""
        self.health.failed(asyncio.get_running_loop().time())

    def check(self) -> None:
        """Raises `InstanceError` while it takes no request: it is frozen, or has its trial after that."""
        if not self.health.takes_requests:
            raise self.frozen("frozen")

    async def unless_frozen(
        self, exchange: Awaitable[T], may_leave: Callable[[], bool], *, is_generation: bool = True
    ) -> T:
        """Returns the result of an exchange that awaits the first byte of an answer.

        Args:
            exchange: the exchange; it is cancelled where the instance freezes.
            may_leave: true if another instance can be asked then; else the exchange goes on.
            is_generation: true if its answer shows that a half-open instance works again.

        Raises:
            InstanceError: that of the exchange, or the instance is frozen.
        """
        loop, health = asyncio.get_running_loop(), self.health
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            timer = None
            if health.is_frozen and may_leave():
                bound.reschedule(loop.time())
            elif health.is_frozen:
                when_frozen()

        def when_frozen() -> None:
            nonlocal timer
            timer = timer or loop.call_later(_LOOK_S, look)

        try:
            async with asyncio.timeout(None) as bound:
                with self._probes.owing(when_frozen, is_generation=is_generation):
                    if health.is_frozen:
                        when_frozen()
                    return await exchange
        except TimeoutError:
            if not bound.expired():
                raise
            raise self.frozen("frozen") from None
        finally:
            if timer is not None:
                timer.cancel()

    async def until_thawed(self) -> None:
        """Return when it is not frozen."""
        await self._probes.until_thawed()

    def frozen(self, failure: Failure) -> InstanceError:
        """The failure of a request to the frozen instance."""
        ports = "neither HTTP nor its control port answers" if self.instance.control else "HTTP does not answer"
        return InstanceError(self._role, self.instance, f"is frozen: {ports}", failure)

    async def _answers(self) -> bool:
        """True if HTTP answers anything; without a control port a refused connection is an answer, too.

        An API server of vLLM that ends refuses connections, and answers the requests that it has. If its engine ended
        before it, they get no answer, and the control port, which is the engine's, refuses connections, too.
        """
        try:
            (await self._upstream.get(self._role, self.instance, "/health", CIMultiDict())).close()
        except InstanceError as error:
            if error.failure == "unreached" and self.instance.control:
                return False
            return not isinstance(error.__cause__, TimeoutError)
        return True

    async def _answers_control(self) -> bool:
        if not self.instance.control:
            return False
        try:
            async with asyncio.timeout(self._control_timeout_s):
                await self._control.describe(self.instance.control, self._control_timeout_s)
        except (KVPipeError, OSError):
            return False
        return True
