"""Instances that are killed and restarted under load, and the blocks that prefill leases meanwhile."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import aiohttp

from bench.instances.servers import resumed
from bench.serving import generator
from bench.serving.run import Cell, warm_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.instances.servers import Server
    from bench.progress import Progress
    from bench.serving.generator import Outcome
    from bench.serving.subjects import Group
    from bench.serving.workload import Workload

_LEASED = re.compile(rb"^vllm:kvpipe_leased_blocks\{.*\} ([0-9.e+]+)$", re.MULTILINE)
_SAMPLE_EVERY_S = 1.0


@dataclass(frozen=True)
class Fault:
    """An instance that was killed.

    Attributes:
        instance: Its name.
        killed_s: When, from the beginning of the workload.
        back_s: When it was healthy again; `None` if the workload had ended before.
    """

    instance: str
    killed_s: float
    back_s: float | None


@dataclass(frozen=True)
class Faults:
    """A workload under faults.

    Attributes:
        faults: What was killed.
        leased: By prefill instance, the times and numbers of leased blocks, read every second; without those at which
            it was not there.
    """

    faults: list[Fault]
    leased: dict[str, list[tuple[float, float]]]


class FaultyRun:
    """One workload without faults, and the same with them.

    Args:
        group: kvpipe's instances and proxy.
        interval_s: Seconds between two kills; the next one waits until the instance killed before is back.
        limit_s: Seconds after which a request is given up.
        progress: Where progress is shown.
    """

    def __init__(self, group: Group, interval_s: float, limit_s: float, progress: Progress) -> None:
        self._group, self._interval_s, self._limit_s = group, interval_s, limit_s
        self._progress = progress
        self._faults: list[Fault] = []
        self._leased: dict[str, list[tuple[float, float]]] = {}

    def measure(self, workload: Workload) -> tuple[list[Cell], Faults]:
        """Offers the workload twice."""
        (subject,) = self._group.subjects
        cells = []
        with resumed(self._group.servers):
            for phase, has_faults in (("load", False), ("faults", True)):
                warm_up(self._group, subject, phase, workload.requests[0].num_prompt, self._limit_s)
                outcomes = asyncio.run(self._offer(phase, workload, has_faults=has_faults))
                cells.append(Cell(phase, subject.name, workload.rate, 1, outcomes, {}))
        return cells, Faults(self._faults, self._leased)

    async def _offer(self, phase: str, workload: Workload, *, has_faults: bool) -> list[Outcome]:
        (subject,) = self._group.subjects
        zero_s = time.monotonic()
        beside = [asyncio.create_task(self._sample(zero_s))] if has_faults else []
        if has_faults:
            beside.append(asyncio.create_task(self._kill_in_turn(zero_s)))

        def ended(outcome: Outcome) -> None:
            self._progress.step(f"{phase}: {outcome.error[:20] or 'answered'}")

        try:
            return await generator.offer(subject.target, workload, phase, self._limit_s, ended)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _kill_in_turn(self, zero_s: float) -> None:
        """Kills prefill and decode instances in turn, one at a time."""
        victims = cycle(_alternating(list(self._group.instances.values())))
        next_s = zero_s + self._interval_s
        while True:
            await asyncio.sleep(next_s - time.monotonic())
            next_s = time.monotonic() + self._interval_s
            await self._kill(next(victims), zero_s)

    async def _kill(self, victim: Server, zero_s: float) -> None:
        killed_s = time.monotonic() - zero_s
        self._faults.append(Fault(victim.name, killed_s, None))
        self._progress.line(f"{killed_s:.0f} s: {victim.name} killed")
        await asyncio.to_thread(victim.end)
        victim.start()
        await _until_healthy(victim)
        back_s = time.monotonic() - zero_s
        self._faults[-1] = Fault(victim.name, killed_s, back_s)
        self._progress.line(f"{back_s:.0f} s: {victim.name} is back")

    async def _sample(self, zero_s: float) -> None:
        timeout = aiohttp.ClientTimeout(total=_SAMPLE_EVERY_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                for server in self._group.instances["prefill"]:
                    if (blocks := await leased_blocks(http, server.url)) is not None:
                        self._leased.setdefault(server.name, []).append((time.monotonic() - zero_s, blocks))
                await asyncio.sleep(_SAMPLE_EVERY_S)


async def _until_healthy(server: Server) -> None:
    """Waits for an instance in a way that can be cancelled."""
    while not await asyncio.to_thread(server.is_healthy):
        server.require_running()
        await asyncio.sleep(_SAMPLE_EVERY_S)


def _alternating(roles: Sequence[Sequence[Server]]) -> list[Server]:
    return [server for of_each_role in zip(*roles, strict=True) for server in of_each_role]


async def leased_blocks(http: aiohttp.ClientSession, url: str) -> float | None:
    """Blocks that a prefill instance leases, by its metrics; `None` if it does not answer."""
    try:
        async with http.get(f"{url}/metrics") as response:
            found = _LEASED.findall(await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return sum(map(float, found)) if found else 0.0
