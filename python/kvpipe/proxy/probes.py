"""Probes one instance while it owes an answer, or while it is in doubt; nothing probes one that is idle and well."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from kvpipe.proxy.health import Health
from kvpipe.proxy.silence import wait_awake
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import InstanceError

# Between two probes, and before the first one: most answers begin earlier.
_INTERVAL_S = 1.0
# An HTTP port that takes longer is slow. It may tokenize a long prompt.
_SLOW_S = 1.0
# A probe of a frozen instance waits for its thaw; a new one follows for hosts that have lost the connection.
_LONGEST_S = 30.0

logger = logging.getLogger(__name__)

# Asks a port. Returns true if it has answered. Anything but silence is an answer.
Ask = Callable[[], Awaitable[bool]]


class Probes:
    """The probes of one instance.

    Args:
        name: role and URL of the instance, for the log.
        health: its health.
        http: asks its HTTP port.
        control: asks its control port; returns False at once if it has none.
        tasks: owner of the task that probes.
    """

    def __init__(self, name: str, health: Health, http: Ask, control: Ask, tasks: OwnedTasks) -> None:
        self._name = name
        self._health = health
        self._http = http
        self._control = control
        self._tasks = tasks
        self._owed: dict[object, Callable[[], None]] = {}
        self._running: asyncio.Task[None] | None = None
        self._thawed = asyncio.Event()
        self._thawed.set()

    @contextmanager
    def owing(self, when_frozen: Callable[[], None], *, is_generation: bool) -> Iterator[None]:
        """The instance owes an answer while this is entered; `when_frozen` is called each time it freezes meanwhile.

        Only the answer to a generation tells whether a half-open instance works again.
        """
        key = object()
        self._owed[key] = when_frozen
        is_trial = is_generation and self._health.asked()
        if self._running is None or self._running.done():
            self._running = self._tasks.spawn(self._run())
        try:
            yield
        except BaseException as error:
            if is_trial and not isinstance(error, InstanceError):  # which is noted as a failure
                self._health.trial_left()
            raise
        else:
            if is_generation:
                self._health.served()
        finally:
            del self._owed[key]

    async def until_thawed(self) -> None:
        """Return when the instance is not frozen."""
        await self._thawed.wait()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if not self._owed and not self._health.is_doubtful:
                return
            await self._probe()

    async def _probe(self) -> None:
        """Probe once: until HTTP answers, or the control port where HTTP is slow, or the instance is frozen."""
        health = self._health
        http = asyncio.ensure_future(self._ask(self._http, is_http=True))
        control = asyncio.ensure_future(self._ask(self._control, is_http=False))
        try:
            waited_s = await wait_awake({http}, _SLOW_S)
            if not _has_answered(http):
                health.slow()
            if health.is_frozen:
                await asyncio.wait({http}, timeout=_LONGEST_S)
                return
            while not any(map(_has_answered, (http, control))):
                health.silent(waited_s)
                pending = {port for port in (http, control) if not port.done()}
                if not pending:
                    # Both refuse at once: it is silent until the next probe.
                    health.silent(_INTERVAL_S)
                if not pending or health.left_s <= 0:
                    break
                waited_s = await wait_awake(pending, health.left_s)
        finally:
            http.cancel()
            control.cancel()
        if health.freeze():
            self._thawed.clear()
            logger.warning("instance.frozen %s waiting=%s", self._name, len(self._owed))
            for when_frozen in list(self._owed.values()):
                when_frozen()

    async def _ask(self, ask: Ask, *, is_http: bool) -> bool:
        has_answered = await ask()
        if has_answered:
            self._health.answered(is_http=is_http)
            if not self._health.is_frozen and not self._thawed.is_set():
                self._thawed.set()
                logger.info("instance.thawed %s", self._name)
        return has_answered


def _has_answered(task: "asyncio.Task[bool]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result()
