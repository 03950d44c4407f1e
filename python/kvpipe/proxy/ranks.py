"""The data-parallel ranks of servers, read in the background: each is an instance of its own to the proxy.

vLLM runs an engine for each rank behind one HTTP port (`--data-parallel-size`), and a request goes to the rank that its
header names. The control ports of the ranks follow each other. An engine knows its rank, and not the number of ranks,
because vLLM 0.32 sets `data_parallel_size` to 1 in the engines of dense models: that number is in the server's metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from dataclasses import dataclass
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

# Between two looks at a server: after its metrics were read, and while they are not or a request has failed.
_REFRESH_S = 10.0
_RETRY_S = 1.0
# The proxy begins to serve after this time even if servers do not answer.
_START_S = 1.0
# There is one sample for each engine behind the URL, labelled with its rank among all nodes.
_ENGINE = re.compile(r'^vllm:num_requests_running\{(?:[^}]*,)?engine="(\d+)"[,}]', re.MULTILINE)
_NODES = "a rank on another host needs a URL of its own, by vLLM's --data-parallel-hybrid-lb on each node"

logger = logging.getLogger(__name__)


def rank_of(description: dict[str, Any]) -> int | None:
    """The rank of a described engine, among those of all nodes; None if its server has no other."""
    rank = description.get("data_parallel_rank")
    return rank if type(rank) is int else None


def engines_in(metrics: str) -> list[int]:
    """The ranks of the engines behind a URL, by its metrics; empty if the metrics have no engine."""
    return sorted({int(engine) for engine in _ENGINE.findall(metrics)})


def rank_behind_url(rank: int | None, engines: Sequence[int]) -> int | None:
    """A rank as vLLM's header names it: counted from the first one behind the URL. None if the metrics do not list it.

    Under hybrid load balancing the first one is not 0 (vLLM 0.32, v1/engine/async_llm.py and input_processor.py).
    """
    return engines.index(rank) if rank in engines else None


@dataclass(slots=True)
class _Server:
    """A server, as far as it is known.

    Attributes:
        instances: its ranks that get requests, or the server itself.
        engine_id: id of the engine whose control port the user has named, by its latest answer.
        named: rank of that engine behind the URL.
        ranks: ranks behind the URL; that one alone until they are counted, none for a server of one engine.
        is_counted: true if they are known, by the latest look.
        followed: control ports of the other ranks.
        wanted: set to look at it soon.
    """

    instances: tuple[Instance, ...]
    engine_id: str | None
    named: int
    ranks: range
    is_counted: bool
    followed: tuple[str, ...]
    wanted: asyncio.Event


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
        self._servers = {
            server: _Server((server,), None, 0, range(0), is_counted=False, followed=(), wanted=asyncio.Event())
            for server in servers
            if server.control
        }
        self._of: dict[Sequence[Instance], tuple[Instance, ...]] = {}
        self._tasks = OwnedTasks()
        descriptions.when_asked = self._asked

    def of(self, servers: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """The instances of these servers, as far as they are known."""
        if servers not in self._of:
            known = (self._servers[server].instances if server in self._servers else (server,) for server in servers)
            self._of[servers] = tuple(dict.fromkeys(chain.from_iterable(known)))
        return self._of[servers]

    def failed(self, instance: Instance) -> None:
        """Ask an instance's control port, and look at its server, soon: it may be started again with other ranks."""
        self._descriptions.refresh(instance.control)
        for server, known in self._servers.items():
            if server.url == instance.url:
                self._descriptions.refresh(server.control)
                known.wanted.set()

    async def start(self) -> None:
        """Look at the servers from now on; returns when it has looked at all of them once, or after a second."""
        looks = {server: self._tasks.spawn(self._look_first(server)) for server in self._servers}
        if looks:
            await asyncio.wait(looks.values(), timeout=_START_S)
        for server, look in looks.items():
            self._tasks.spawn(self._keep(server, look))

    async def close(self) -> None:
        """Stop looking."""
        await self._tasks.close(0.0)

    async def _keep(self, server: Instance, look: asyncio.Task[bool]) -> None:
        wanted = self._servers[server].wanted
        while True:
            await asyncio.wait({look})  # its error is logged
            await asyncio.sleep(_RETRY_S)
            if look.exception() is None and look.result():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REFRESH_S - _RETRY_S):
                        await wanted.wait()
            look = self._tasks.spawn(self._look(server))

    async def _look_first(self, server: Instance) -> bool:
        is_read = await self._look(server)
        await self._descriptions.until_asked(self._servers[server].followed)
        return is_read

    async def _look(self, server: Instance) -> bool:
        """Look once at a server. Returns true if its metrics were read, or it has one engine."""
        known = self._servers[server]
        known.wanted.clear()
        engine_id = known.engine_id
        if self._descriptions.of(server.control) is None:
            return False
        if not known.ranks:
            return True
        engines = await self._engines(server)
        first = self._descriptions.of(server.control)
        if first is None or known.engine_id != engine_id:
            return False
        engine = rank_of(first)
        named = rank_behind_url(engine, engines or ())
        known.is_counted = named is not None
        if engines and named is not None:
            known.named, known.ranks = named, range(len(engines))
        elif engines:
            reason = f"its engines are {engines}, and {server.control} is the control port of engine {engine}"
            self._note(server, reason)
        self._follow(known, [rank.control for rank in self._ranks(server) if rank.control != server.control])
        self._publish(server, first)
        for rank in self._ranks(server):
            if rank not in known.instances and (error := self._descriptions.error(rank.control)):
                self._note(rank, f"it gets no requests: its control port {rank.control}: {error}; {_NODES}")
        return engines is not None

    async def _engines(self, server: Instance) -> list[int] | None:
        """The engines behind a server's URL, as its metrics list them; None if these are not read."""
        try:
            engines = engines_in(await self._pages.metrics(server.url, self._timeout_s))
        except (KVPipeError, OSError) as error:
            self._note(server, f"number of its data-parallel ranks: {error or type(error).__name__}")
            return None
        if not engines:
            self._note(server, "its metrics have no engine to count; start it without --disable-log-stats")
        return engines

    def _follow(self, known: _Server, addresses: Sequence[str]) -> None:
        """Follow these control ports, and stop following all others."""
        for address in set(known.followed).difference(addresses):
            self._descriptions.forget(address)
        known.followed = tuple(addresses)
        for address in addresses:
            self._descriptions.follow(address)

    def _asked(self, address: str) -> None:
        """Note that a control port was asked, and has answered or not."""
        for server, known in self._servers.items():
            if address == server.control:
                self._named_asked(server)
            elif address in known.followed and (first := self._descriptions.of(server.control)) is not None:
                self._publish(server, first)

    def _named_asked(self, server: Instance) -> None:
        known, first = self._servers[server], self._descriptions.of(server.control)
        if first is None:  # its ranks are kept until it answers
            known.wanted.set()
            return
        engine_id = str(first.get("engine_id"))
        if engine_id != known.engine_id:
            # It may have been started again, with other ranks. The named port most likely has the rank that it had.
            known.engine_id = engine_id
            known.is_counted = rank_of(first) is None
            known.ranks = range(0) if known.is_counted else range(known.named, known.named + 1)
            for address in known.followed:
                self._descriptions.refresh(address)
            if known.is_counted:
                self._follow(known, ())
            known.wanted.set()
        self._publish(server, first)

    def _publish(self, server: Instance, first: dict[str, Any]) -> None:
        """Use the ranks that are known now."""
        known = self._servers[server]
        found = tuple(rank for rank in self._ranks(server) if self._is_usable(server, rank, first)) or (server,)
        if found == known.instances:
            return
        known.instances = found
        self._of.clear()
        of = max(1, len(known.ranks)) if known.is_counted else "unknown"
        logger.info("server.ranks url=%s usable=%s of=%s", server.url, len(found), of)

    def _ranks(self, server: Instance) -> list[Instance]:
        known = self._servers[server]
        host, _, port = server.control.rpartition(":")
        first = int(port) - known.named
        return [Instance(server.url, f"{host}:{first + index}", index) for index in known.ranks]

    def _is_usable(self, server: Instance, rank: Instance, first: dict[str, Any]) -> bool:
        """True if a control port describes this rank; one that is silent now may have done so before."""
        known = self._servers[server]
        if rank.control == server.control:
            return True
        description = self._descriptions.of(rank.control)
        if description is None:
            return known.is_counted and rank in known.instances
        number = (rank_of(first) or 0) + (rank.rank or 0) - known.named
        engine_id = f"{str(first.get('engine_id')).rpartition('_dp')[0]}_dp{number}"
        is_usable: bool = description.get("engine_id") == engine_id
        if not is_usable:
            remedy = "have each rank listen at the port of `listen` plus its rank, which is not 0"
            other = f"{rank.control} is the control port of engine {description.get('engine_id')}, not of {engine_id}"
            self._note(rank, f"it gets no requests: {other}; {remedy}")
        return is_usable

    def _note(self, instance: Instance, reason: str) -> None:
        self._failures.note("rank", instance.name, reason, asyncio.get_running_loop().time())
