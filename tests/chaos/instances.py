"""Requests through the proxy to real vLLM instances that are killed and stopped: `python -m tests.chaos --vllm`."""

import http.client
import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bench.chaos import Counts
from bench.progress import Progress
from kvpipe.launch.deployment import DeploymentSpec, DeploymentThread
from tests.e2e.client import COMPLETIONS, TOKEN, completion, metric, post, prompt, text_of, until
from tests.e2e.groups import COMMON, REPOSITORY, ROOMY, tiny_model
from tests.zygote import Zygote

NUM_CLIENTS = 4
LENGTHS = (1, 31, 33, 64, 100, 300, 700)
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
    """Each request gets the undivided instance's answer, or an HTTP error that says why."""

    VIOLATIONS: ClassVar = ("wrong", "late", "dead", "uncounted", "leaked")

    requests: int = 0
    answered: int = 0
    failed_with_an_error: int = 0
    killed: int = 0
    stopped: int = 0
    longest_request_ms: int = 0
    wrong: int = 0
    late: int = 0
    dead: int = 0
    uncounted: int = 0
    leaked: int = 0


class InstanceChaos:
    """Two prefill and two decode instances, a proxy, and an undivided instance that is left alone.

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
        """Returns the counts."""
        with Zygote(log=self._folder / "zygote.log") as zygote:
            spec = DeploymentSpec(
                model=tiny_model(),
                num_prefill=2,
                num_decode=2,
                num_undivided=1,
                token=TOKEN,
                block_size=32,
                server_command=zygote.command(),
                connector_config={"lease_s": LEASE_S, "silence_s": SILENCE_S, "open_timeout_s": 5},
                env={"PYTHONPATH": f"{REPOSITORY / 'python'}:{REPOSITORY}"},
                vllm_args=(*COMMON, *ROOMY),
                log_dir=self._folder,
            )
            with DeploymentThread(spec) as self._running:
                self._deployment = self._running.deployment
                self._attack()
                self._rest()
        return self.answers

    def _attack(self):
        self._progress.expect(self._num_requests)
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as threads:
            faults = threads.submit(self._make_faults)
            for each in [threads.submit(self._request, number) for number in range(self._num_requests)]:
                each.result()
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            faults.result()
        self._progress.end()

    def _request(self, number):
        rng = random.Random(f"{self._seed} request {number}")
        body = completion(prompt(rng.choice(LENGTHS), seed=rng.randrange(1000)), max_tokens=rng.choice((1, 8, 32)))
        expected = self._answer(self._deployment.undivided[0].url, body)
        begun = time.monotonic()
        found = self._answer(self._deployment.url, body)
        took_s = time.monotonic() - begun
        with self._changed:
            counts = self.answers
            counts.count("requests")
            counts.longest_request_ms = max(counts.longest_request_ms, int(took_s * 1000))
            if found is None or took_s > BOUND_S:
                counts.fail("late", f"request {number} has no end after {took_s:.0f} s")
            elif isinstance(found, bytes):
                counts.count("failed_with_an_error")
                self._progress.line(f"request {number}: {found[:200]!r}")
            elif found != expected:
                counts.fail("wrong", f"request {number}: {found!r} instead of {expected!r}")
            else:
                counts.count("answered")
            self._changed.notify_all()
        self._progress.step("requests")

    @staticmethod
    def _answer(url, body):
        """The text; the error of an HTTP error, or None if there is no answer."""
        try:
            with post(url, COMPLETIONS, body) as response:
                payload = response.read()
        except (OSError, http.client.HTTPException):
            return None
        return text_of(json.loads(payload)) if response.status == http.HTTPStatus.OK else payload

    def _make_faults(self):
        rng, order = random.Random(f"{self._seed} faults"), []
        targets = [*self._deployment.prefill, *self._deployment.decode]
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
            if not target.child.is_running:
                with self._changed:
                    self.answers.fail("dead", f"{target.name} has ended by itself")
            with self._changed:
                self.answers.count(fault)
            if fault == "killed":
                self._running.call(target.child.stop(0))
                self._running.call(self._deployment.restart(target))
            else:
                target.child._process.signal_all(signal.SIGSTOP)
                time.sleep(LONGEST_PAUSE_S * rng.random())
                target.child._process.signal_all(signal.SIGCONT)

    def _rest(self):
        """Engines come to rest, and the proxy has counted each request once."""
        for each in (*self._deployment.prefill, *self._deployment.decode):
            if not each.child.is_running:
                self.answers.fail("dead", f"{each.name} has ended by itself")
                continue
            try:
                until(lambda url=each.url: not any(metric(url, name) for name in DRAINED), REST_S)
            except AssertionError:
                self.answers.fail("leaked", f"{each.name} holds requests or blocks")
        counted = metric(self._deployment.url, "kvpipe_requests_total")
        if counted != self.answers.requests:
            self.answers.fail("uncounted", f"the proxy counts {counted:.0f} of {self.answers.requests} requests")
