"""The data-parallel ranks of servers, read in the background: each is an instance of its own to the proxy.

vLLM runs an engine for each rank behind one HTTP port (`--data-parallel-size`), and a request goes to the rank that its
header names. The control ports of the ranks follow each other. An engine knows its rank, and not the number of ranks,
because vLLM 0.32 sets `data_parallel_size` to 1 in the engines of dense models: that number is in the server's metrics.
"""

from __future__ import annotations

import asyncio
import logging
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.descriptions import PageDescriber
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.tasks import OwnedTasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpipe.proxy.control import FailureLog
    from kvpipe.proxy.descriptions import Descriptions
    from kvpipe.proxy.upstream import Upstream

# Between two looks: where all ranks are known, and where one is not.
_REFRESH_S = 10.0
_RETRY_S = 1.0
# The proxy begins to serve after this time even if servers do not answer.
_START_S = 1.0
# There is one sample for each engine behind the URL.
_ENGINE = re.compile(r'^vllm:num_requests_running\{(?:[^}]*,)?engine="\d+"[,}]', re.MULTILINE)

logger = logging.getLogger(__name__)


class Ranks:
    """The instances of each server: its data-parallel ranks, or the server itself where it has one engine.

    A rank is used once its control port describes it. Until the number of ranks is known, only the one whose control
    port the user has named is used.

    Args:
        servers: the servers, each with the control address of its first rank.
        upstream: HTTP client of the servers.
        descriptions: descriptions by control address, which has those of the servers.
        failures: log of ranks that cannot be used.
        timeout_s: limit for a question to a server.
    """

    def __init__(
        self,
        servers: Iterable[Instance],
        upstream: Upstream,
        descriptions: Descriptions,
        failures: FailureLog,
        timeout_s: float,
    ) -> None:
        self._pages = PageDescriber(upstream)
        self._descriptions = descriptions
        self._failures = failures
        self._timeout_s = timeout_s
        self._found: dict[Instance, tuple[Instance, ...]] = {server: (server,) for server in servers if server.control}
        self._followed: dict[Instance, tuple[str, ...]] = {}
        self._tasks = OwnedTasks()

    def of(self, servers: Sequence[Instance]) -> tuple[Instance, ...]:
        """The instances of these servers, as far as they are known."""
        return tuple(chain.from_iterable(self._found.get(server, (server,)) for server in servers))

    async def start(self) -> None:
        """Look for ranks from now on; returns when all servers have been looked at once, or after a second."""
        looks = {server: self._tasks.spawn(self._look(server)) for server in self._found}
        if looks:
            await asyncio.wait(looks.values(), timeout=_START_S)
        for server, look in looks.items():
            self._tasks.spawn(self._keep(server, look))

    async def close(self) -> None:
        """Stop looking."""
        await self._tasks.close(0.0)

    async def _keep(self, server: Instance, look: asyncio.Task[bool]) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S if await look else _RETRY_S)
            look = self._tasks.spawn(self._look(server))

    async def _look(self, server: Instance) -> bool:
        """Look once at a server's ranks. Returns true if all are known."""
        first = self._descriptions.of(server.control)
        if first is None:  # what was known about it holds on
            return False
        if first.get("data_parallel_rank") is None:
            await self._follow(server, ())
            self._found[server] = (server,)
            return True
        before = self._found[server]
        num_ranks = await self._num_engines(server)
        named, *others = [_rank(server, index) for index in range(num_ranks or len(before))]
        await self._follow(server, [rank.control for rank in others])
        found = (named, *(rank for rank in others if self._is_usable(rank, first, is_known=rank in before)))
        if found != before:
            logger.info("server.ranks url=%s usable=%s of=%s", server.url, len(found), num_ranks or "unknown")
        self._found[server] = found
        return bool(num_ranks) and len(found) == num_ranks

    async def _num_engines(self, server: Instance) -> int:
        """The number of engines behind a server's URL; 0 if it is not known."""
        try:
            page = await self._pages.get(server.url, "/metrics", self._timeout_s)
        except (KVPipeError, OSError) as error:
            self._note(server, f"number of its data-parallel ranks: {error or type(error).__name__}")
            return 0
        num_engines = len(_ENGINE.findall(page.body.decode(errors="replace")))
        if not num_engines:
            self._note(server, "its metrics have no engine to count; start it without --disable-log-stats")
        return num_engines

    async def _follow(self, server: Instance, addresses: Sequence[str]) -> None:
        """Have these control ports asked, and those of ranks that are gone not any more."""
        for address in set(self._followed.pop(server, ())).difference(addresses):
            self._descriptions.forget(address)
        self._followed[server] = tuple(addresses)
        await asyncio.gather(*map(self._descriptions.follow, addresses))

    def _is_usable(self, rank: Instance, first: dict[str, Any], *, is_known: bool) -> bool:
        """True if a control port describes this rank; one that is silent now may have done so before."""
        description = self._descriptions.of(rank.control)
        if description is None:
            return is_known
        number = first["data_parallel_rank"] + rank.rank
        engine_id = f"{str(first.get('engine_id')).rpartition('_dp')[0]}_dp{number}"
        is_usable: bool = description.get("engine_id") == engine_id
        if not is_usable:
            remedy = "have each rank listen at the port of `listen` plus its rank, which is not 0"
            other = f"{rank.control} is the control port of engine {description.get('engine_id')}, not of {engine_id}"
            self._note(rank, f"it gets no requests: {other}; {remedy}")
            self._descriptions.refresh(rank.control)  # the server may have been started again
        return is_usable

    def _note(self, instance: Instance, reason: str) -> None:
        self._failures.note("rank", instance.name, reason, asyncio.get_running_loop().time())


def _rank(server: Instance, index: int) -> Instance:
    host, _, port = server.control.rpartition(":")
    return Instance(server.url, f"{host}:{int(port) + index}", index)
