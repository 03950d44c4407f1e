"""Requests to real vLLM instances through a proxy, and through a broker: `python -m tests.chaos --vllm`.

Instances, proxies, workers of the queue and the broker are killed and stopped.
"""

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bench.chaos import Counts
from bench.instances.broker_process import BrokerProcess
from bench.instances.servers import Server
from bench.processes import SubjectError
from bench.progress import Progress
from kvpipe.exceptions import KVPipeError
from kvpipe.launch.deployment import DeploymentThread
from tests.e2e.behind_broker import Queued
from tests.e2e.client import COMPLETIONS, completion, metric, post, prompt, streamed_text, text_of, until
from tests.e2e.groups import REPOSITORY, ROOMY, two_by_two
from tests.zygote import Zygote

NUM_CLIENTS = 4
LENGTHS = (1, 31, 33, 64, 100, 300, 700)
STREAM_SHARE, QUEUE_SHARE = 0.5, 0.4
# Below and above the silence that makes a peer lost.
LONGEST_PAUSE_S = 6.0
SILENCE_S, LEASE_S = 3, 5
# Between the ends of requests that a fault waits for.
MOST_BETWEEN = 12
BOUND_S = 110.0
REST_S = 60.0
DRAINED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass
class Answers(Counts):
    """Each request gets the undivided instance's answer, an error that says why, or its proxy was killed."""

    VIOLATIONS: ClassVar = ("wrong", "late", "dead", "uncounted", "unrecovered", "leaked")

    requests: int = 0
    answered: int = 0
    answered_through_the_broker: int = 0
    failed_with_an_error: int = 0
    lost_with_killed_proxy: int = 0
    killed: int = 0
    stopped: int = 0
    longest_request_ms: int = 0
    wrong: int = 0
    late: int = 0
    dead: int = 0
    uncounted: int = 0
    unrecovered: int = 0
    leaked: int = 0


@dataclass
class Target:
    """A process, or several, that are attacked.

    Attributes:
        name: Its name.
        is_running: False if it has ended by itself.
        replace: Kills it, and starts it again.
        signal: Sends it a signal.
    """

    name: str
    is_running: Callable[[], bool]
    replace: Callable[[], object]
    signal: Callable[[int], object]


@dataclass
class FrontEnd:
    """A proxy as its clients know it.

    Attributes:
        url: Its address.
        incarnations: Number of its starts.
        is_up: True if it listens.
        num_ended: Requests that began and ended with this incarnation.
    """

    url: str
    incarnations: int = 1
    is_up: bool = True
    num_ended: int = 0


class NoAnswerError(Exception):
    """A connection has ended before the answer's end."""


class InstanceChaos:
    """Two prefill and two decode instances, and an undivided instance that is left alone.

    A proxy, and another one with a broker and a worker for each decode instance, send requests to the same instances.

    Args:
        num_requests: Number of requests.
        seed: Of prompts and faults.
        folder: Folder of the logs.
    """

    def __init__(self, num_requests, seed, folder):
        self._num_requests, self._seed, self._folder = num_requests, seed, Path(folder)
        self._changed = threading.Condition()
        self._is_over = False
        self._progress = Progress()
        self.answers = Answers()

    def run(self):
        """Returns the counts.

        Raises:
            SubjectError: There is no broker, or it does not start.
        """
        with ExitStack() as stack:
            (self._folder / "broker").mkdir(exist_ok=True)
            self._broker = stack.enter_context(BrokerProcess(self._folder / "broker"))
            zygote = stack.enter_context(Zygote(log=self._folder / "zygote.log"))
            times = {"lease_s": LEASE_S, "silence_s": SILENCE_S, "open_timeout_s": 5}
            path = {"PYTHONPATH": f"{REPOSITORY / 'python'}:{REPOSITORY}"}
            spec = two_by_two(zygote, self._folder, *ROOMY, connector_config=times, env=path)
            self._running = stack.enter_context(DeploymentThread(spec))
            self._deployment = self._running.deployment
            instances = self._deployment.prefill, self._deployment.decode
            self._queued = stack.enter_context(Queued(self._broker.url, "chaos", *instances))
            self._direct, self._through_broker = FrontEnd(self._deployment.url), FrontEnd(self._queued.url)
            self._attack()
            self._visit()
            self._rest()
        return self.answers

    def _attack(self):
        self._progress.expect(self._num_requests)
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as threads:
            faults = threads.submit(self._make_faults)
            try:
                for each in [threads.submit(self._request, number) for number in range(self._num_requests)]:
                    each.result()
            finally:
                with self._changed:
                    self._is_over = True
                    self._changed.notify_all()
                faults.result()
        self._progress.end()

    # --- requests

    def _request(self, number):
        rng = random.Random(f"{self._seed} request {number}")
        ids = prompt(rng.choice(LENGTHS), seed=rng.randrange(1000))
        body = completion(ids, max_tokens=rng.choice((1, 8, 32)), stream=rng.random() < STREAM_SHARE)
        front_end = self._through_broker if rng.random() < QUEUE_SHARE else self._direct
        _, expected = self._answer(self._deployment.undivided[0].url, body | {"stream": False})
        begun = time.monotonic()
        try:
            is_error, found = self._answer_of(front_end, body)
        except NoAnswerError as error:
            is_error, found = True, None
            self._fail("late", f"request {number} has no end after {time.monotonic() - begun:.0f} s: {error}")
        took_s = time.monotonic() - begun
        with self._changed:
            counts = self.answers
            counts.count("requests")
            counts.longest_request_ms = max(counts.longest_request_ms, int(took_s * 1000))
            if found is None:
                pass
            elif took_s > BOUND_S:
                counts.fail("late", f"request {number} took {took_s:.0f} s")
            elif is_error:
                counts.count("failed_with_an_error")
                self._progress.line(f"request {number}: {found[:200]!r}")
            elif found != expected:
                counts.fail("wrong", f"request {number}: {found!r} instead of {expected!r}")
            else:
                counts.count("answered")
                counts.answered_through_the_broker += front_end is self._through_broker
            self._changed.notify_all()
        self._progress.step("requests")

    def _answer_of(self, front_end, body):
        """What `_answer` returns, from one incarnation of a proxy: a client asks again if it is killed."""
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: front_end.is_up, BOUND_S):
                    raise NoAnswerError("its proxy does not listen")
                incarnation = front_end.incarnations
            try:
                answer = self._answer(front_end.url, body)
            except NoAnswerError:
                with self._changed:
                    if front_end.incarnations == incarnation:
                        raise
                    self.answers.count("lost_with_killed_proxy")
                continue
            with self._changed:
                front_end.num_ended += front_end.incarnations == incarnation
            return answer

    @staticmethod
    def _answer(url, body):
        """True and the error, or false and the text."""
        try:
            with post(url, COMPLETIONS, body) as response:
                payload = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(repr(error)) from error
        if response.status != http.HTTPStatus.OK:
            return True, payload
        if not body["stream"]:
            return False, text_of(json.loads(payload))
        if b'data: {"error"' in payload:
            return True, payload
        if not payload.endswith(b"data: [DONE]\n\n"):
            raise NoAnswerError(f"a stream ends with {payload[-200:]!r}")
        return False, streamed_text(payload)

    def _fail(self, name, reason):
        with self._changed:
            self.answers.fail(name, reason)

    # --- faults

    def _targets(self):
        """All that is attacked."""

        def of(name, server, replace):
            return Target(name, lambda: server.is_running, replace, lambda number: os.killpg(group(server), number))

        def group(server):
            return server.group if isinstance(server, Server) else server.pid

        deployment, queued = self._deployment, self._queued
        return [
            *(
                of(each.name, each.child, lambda each=each: self._running.call(deployment.restart(each)))
                for each in (*deployment.prefill, *deployment.decode, deployment.proxy)
            ),
            *(
                of(f"queue-{each.name}", each, lambda each=each: self._replace(each))
                for each in (queued.proxy, *queued.workers)
            ),
            of("broker", self._broker, self._replace_broker),
        ]

    def _replace(self, server):
        server.end()
        self._queued.replace(server)

    def _replace_broker(self):
        self._broker.kill()
        self._broker.start()
        self._queued.until_taken()

    def _make_faults(self):
        rng, order = random.Random(f"{self._seed} faults"), []
        targets = self._targets()
        while True:
            with self._changed:
                wanted = self.answers.requests + rng.randint(1, MOST_BETWEEN)
                self._changed.wait_for(lambda wanted=wanted: self._is_over or self.answers.requests >= wanted, BOUND_S)
                if self._is_over:
                    return
            if not order:
                order = [(fault, each) for fault in ("killed", "stopped") for each in targets]
                rng.shuffle(order)
            fault, target = order.pop()
            self._progress.line(f"{self.answers.requests} requests, {target.name} {fault}")
            if not target.is_running():
                self._fail("dead", f"{target.name} has ended by itself")
            with self._changed:
                self.answers.count(fault)
            if fault == "killed":
                try:
                    with self._without_requests(target):
                        target.replace()
                except (AssertionError, SubjectError, KVPipeError) as error:
                    self._fail("unrecovered", f"{target.name} was killed and started again: {error}")
            else:
                target.signal(signal.SIGSTOP)
                time.sleep(LONGEST_PAUSE_S * rng.random())
                target.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _without_requests(self, target):
        """Has clients send nothing inside the block to a proxy that is killed."""
        front_ends = {"proxy": self._direct, "queue-proxy": self._through_broker}
        front_end = front_ends.get(target.name, FrontEnd(""))
        with self._changed:
            front_end.is_up, front_end.num_ended = False, 0
            front_end.incarnations += 1
        try:
            yield
        finally:
            with self._changed:
                front_end.is_up = True
                self._changed.notify_all()

    def _visit(self):
        """A request through each proxy, without faults."""
        body = completion(prompt(100, seed=self._seed), max_tokens=8, stream=False)
        expected = self._answer(self._deployment.undivided[0].url, body)
        for front_end in (self._direct, self._through_broker):
            try:
                found = self._answer_of(front_end, body)
            except NoAnswerError as error:
                found = error
            if found != expected:
                self._fail("unrecovered", f"{front_end.url}: {found!r} instead of {expected!r}")

    def _are_queues_empty(self):
        queues = self._queued.state().get("queues")  # none while the broker is away
        return queues is not None and not any(queue["messages"] for queue in queues.values())

    def _rest(self):
        """Engines come to rest, queues are empty, and proxies have counted each request of their last incarnations."""
        for each in (*self._deployment.prefill, *self._deployment.decode):
            if not each.child.is_running:
                self._fail("dead", f"{each.name} has ended by itself")
                continue
            try:
                until(lambda url=each.url: not any(metric(url, name) for name in DRAINED), REST_S)
            except AssertionError:
                self._fail("leaked", f"{each.name} holds requests or blocks")
        try:
            until(self._are_queues_empty, REST_S)
        except AssertionError:
            self._fail("leaked", f"messages are left in the queues: {self._queued.state()}")
        for front_end in (self._direct, self._through_broker):
            counted = metric(front_end.url, "kvpipe_requests_total")
            if counted != front_end.num_ended:
                self._fail("uncounted", f"{front_end.url} counts {counted:.0f} of {front_end.num_ended} requests")
