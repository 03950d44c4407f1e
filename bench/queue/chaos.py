"""Requests while processes are killed at random: is any lost, answered twice, or left behind?"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING

import uvloop

from bench.processes import SubjectError, until
from bench.queue.instances import text_of
from bench.queue.load import Ask, Client, open_session
from bench.queue.results import Survival
from kvpipe.queue.topology import REPLIES_EXPIRE_S, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import ClientSession

    from bench.instances.broker_process import BrokerProcess
    from bench.instances.servers import Server
    from bench.progress import Progress
    from bench.queue.deployment import Deployment
    from bench.queue.load import Reply

_AT_ONCE = 32
_MOST_TOKENS, _LONGEST_GAP_MS = 32, 20
_MOST_ANSWERS_BETWEEN = 300
# The broker's. One front end does not know it.
MAX_MESSAGE_BYTES = 512 << 10
_LARGE_BYTES, _LARGE_REQUESTS, _LARGE_ANSWERS = 600 << 10, 0.02, 0.04
_BROKER_SHARE, _FRONT_SHARE = 0.2, 0.2
# For an answer, outages included.
_ANSWER_WITHIN_S = 240.0
_ASK_AGAIN_AFTER_S = 0.2
# P's keep KV that nobody fetches or releases for a lease of 30 s.
_RELEASED_WITHIN_S = 60.0
# The queue of a front end that was killed ends after 60 s, and with it what workers have of its requests.
_FORGOTTEN_WITHIN_S = REPLIES_EXPIRE_S + 60.0


class Chaos:
    """One run.

    Args:
        deployment: What is asked, and killed.
        num_requests: Number of requests.
        seed: Of the requests, of who is killed, and after how many answers.

    Attributes:
        found: What became of the requests.
    """

    def __init__(self, deployment: Deployment, num_requests: int, seed: int, progress: Progress) -> None:
        self._deployment = deployment
        self._requests = random.Random(f"{seed} requests")  # noqa: S311 - no secret
        self._kills = random.Random(f"{seed} kills")  # noqa: S311 - no secret
        self._num_requests = num_requests
        self._left = iter([self._request(number) for number in range(num_requests)])
        self._progress = progress
        self._ended = asyncio.Condition()
        # Odd from when a front end is killed until it has been started again.
        self._lives: Counter[str] = Counter()
        self.found = Survival()
        progress.expect(num_requests)

    def run(self) -> None:
        """Asks, kills, then ends front ends and workers in order and looks at what is left.

        Raises:
            SubjectError: A process does not start or end.
        """
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(self._run())
            except* SubjectError as errors:
                raise errors.exceptions[0] from None
        self._progress.end()
        deployment, found = self._deployment, self.found
        deployment.until_served()
        until(lambda: not deployment.has_requests(), _FORGOTTEN_WITHIN_S)
        until(lambda: not deployment.counts()["handoffs"], _RELEASED_WITHIN_S)
        counts = deployment.counts()
        found.decoded = counts["decoded"]
        if num_left := counts["handoffs"]:
            found.fail("kv_left", f"{num_left} handoffs", num_left)
        deployment.stop()
        until(lambda: left_in(deployment.broker) == (0, 0), _FORGOTTEN_WITHIN_S)
        for name, number in zip(("queues_left", "messages_left"), left_in(deployment.broker), strict=True):
            if number:
                found.fail(name, f"{deployment.broker.queues()}", number)

    async def _run(self) -> None:
        # A connection that is kept may have been cut before its next request.
        async with open_session(_ANSWER_WITHIN_S, keeps_connections=False) as http, asyncio.TaskGroup() as group:
            group.create_task(self._kill())
            for number in range(_AT_ONCE):
                order = itertools.islice(itertools.cycle(self._deployment.fronts), number, None)
                group.create_task(self._ask_in_turn(order, http))

    async def _ask_in_turn(self, fronts: Iterator[Server], http: ClientSession) -> None:
        for ask in self._left:
            while (reply := await self._reply_of(next(fronts), http, ask)) is None:  # noqa: ASYNC110 - nobody reports that one answers again
                await asyncio.sleep(_ASK_AGAIN_AFTER_S)
            async with self._ended:
                self._count(ask, reply)
                self._ended.notify_all()
            found = self.found
            self._progress.step(
                f"{found.front_kills} front ends, {found.worker_kills} workers, {found.broker_kills} brokers killed"
            )

    async def _reply_of(self, front: Server, http: ClientSession, ask: Ask) -> Reply | None:
        """Asks a front end; `None` where another one is to be asked, which makes it another request."""
        life = self._lives[front.name]
        reply = await Client(front.url, http).ask(ask)
        if reply.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.found.refused += 1
            return None
        is_killed = life % 2 or life != self._lives[front.name]
        if reply.is_cut and is_killed and _is_begun(ask, reply):
            self.found.front_end_killed += 1
            return None
        return None if reply.is_unreached else reply

    def _count(self, ask: Ask, reply: Reply) -> None:
        if ask.request_padding and reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            self.found.too_large += 1
            return
        expected = text_of(ask.number, ask.num_tokens)
        is_whole = not reply.error and reply.text == expected and reply.padding == ask.answer_padding
        if is_whole and not ask.request_padding:
            self.found.answered += 1
            return
        reason = f"request {ask.number}: {reply.error or 'complete'}; {reply.text!r} of {expected!r}"
        self.found.fail("lost" if _is_begun(ask, reply) else "answered_twice", reason)

    async def _kill(self) -> None:
        """Kills one process after another, each after some more answers: whoever was killed may come back before."""
        pick = self._kills
        while await self._until_ended(self._num_ended + pick.randint(1, _MOST_ANSWERS_BETWEEN)):
            share = pick.random()
            worker, front = pick.choice(self._deployment.workers), pick.choice(self._deployment.fronts)
            if share < _BROKER_SHARE:
                await self._kill_broker()
            elif share < _BROKER_SHARE + _FRONT_SHARE:
                await self._kill_front(front)
            else:
                await self._kill_worker(worker)

    async def _kill_broker(self) -> None:
        self._progress.line(f"{self._num_ended} ended, killing the broker")
        await asyncio.to_thread(self._deployment.replace_broker)
        self.found.broker_kills += 1

    async def _kill_front(self, front: Server) -> None:
        self._progress.line(f"{self._num_ended} ended, killing {front.name}")
        self._lives[front.name] += 1
        await asyncio.to_thread(self._deployment.replace, front)
        self._lives[front.name] += 1
        self.found.front_kills += 1

    async def _kill_worker(self, worker: Server) -> None:
        self._progress.line(f"{self._num_ended} ended, killing {worker.name}")
        await asyncio.to_thread(self._deployment.replace, worker)
        self.found.worker_kills += 1

    async def _until_ended(self, num_requests: int) -> bool:
        """Waits until so many requests have ended; returns whether there are others."""
        async with self._ended:
            await self._ended.wait_for(lambda: self._num_ended >= min(num_requests, self._num_requests))
        return self._num_ended < self._num_requests

    @property
    def _num_ended(self) -> int:
        found = self.found
        return found.answered + found.too_large + found.lost + found.answered_twice

    def _request(self, number: int) -> Ask:
        random_of = self._requests
        num_tokens = random_of.randint(2, _MOST_TOKENS)
        is_streamed, gap_ms = random_of.random() < 0.5, random_of.randint(0, _LONGEST_GAP_MS)  # noqa: PLR2004
        share = random_of.random()
        is_too_large, is_answer_large = share < _LARGE_REQUESTS, _LARGE_REQUESTS <= share < _LARGE_ANSWERS
        return Ask(number, num_tokens, is_streamed, gap_ms, is_too_large * _LARGE_BYTES, is_answer_large * _LARGE_BYTES)


def _is_begun(ask: Ask, reply: Reply) -> bool:
    """True if a client got nothing but the beginning of its answer."""
    return text_of(ask.number, ask.num_tokens).startswith(reply.text)


def left_in(broker: BrokerProcess) -> tuple[int, int]:
    """After front ends and workers have ended: how many queues of theirs are left, and messages in all queues."""
    topology = Topology()
    shared = {topology.requests, topology.urgent_requests, topology.dead}
    queues = broker.queues()
    return len(queues.keys() - shared), sum(queues.values())
