"""One run: handoffs of clients, faults beside them, and what is left in the end."""

import contextlib
import os
import random
import re
import secrets
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench.progress import Progress
from kvpipe.launch.ports import free_ports, release_ports
from kvpipe.transfer_params import consume, load, produce, save
from tests.chaos.counts import Outcomes
from tests.chaos.processes import LostError, StartError, engine, store_server
from tests.chaos.relay import RELAYED, Relay
from tests.e2e.groups import tiny_model
from tests.vllm.handoff.computing_engine import LAYERS
from tests.vllm.store.engine import answered
from tests.zygote import Zygote

MODULES = ("tests.chaos.engine", "kvpipe.connector", "kvpipe.store_connector", "vllm.v1.core.sched.scheduler")
# Each process reads it at import, so that all have the same.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TOKEN = "the token of the tests"
# Times of the product. A pause may be shorter and longer than the silence that makes a peer lost.
TIMES = {"silence_s": 2, "open_timeout_s": 4, "handoff_timeout_s": 15, "lease_s": 4}
LONGEST_PAUSE_S = 3.0
# Nothing is late before: a request waits for the handoff at most, then it is computed, beside restarts on busy cores.
BOUND_S = 45.0
# Until leases are over and engines are at rest.
REST_S = 60.0
NUM_CLIENTS = 8
# Before a client's next request.
LONGEST_THINK_S = 0.1
MOST_BETWEEN = 30
LENGTHS = (1, 31, 32, 33, 64, 65, 100, 200, 300)
STORE_SHARE, ABORT_SHARE = 0.15, 0.03
MOST_FLIPPED = 3
SHARED_MEMORY = Path("/dev/shm")
# Python's prefix.
INSTANCE_MEMORY = "psm_"
# Descriptors and memory that Python and the allocator keep.
MORE_DESCRIPTORS, MORE_BYTES = 4, 64 << 20


def zygote(log):
    """A process from which engines are forked."""
    return Zygote(MODULES, env=ONE_THREAD, log=log)


def shared_memory():
    """Names of the shared memory of all programs that is not between the processes of a vLLM instance.

    An engine here has one process. Instances of other runs that are killed leave theirs behind.
    """
    return {each.name for each in SHARED_MEMORY.iterdir() if not each.name.startswith(INSTANCE_MEMORY)}


def mapped():
    """Those names of it that some process maps."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # a process that has ended
            names |= set(re.findall(rf"{SHARED_MEMORY}/(\S+)", maps.read_text()))
    return names


class Chaos:
    """Some prefill and decode engines, two that share a store, its server, and their wires.

    Args:
        zygote: Of `zygote`.
        num_requests: Number of requests.
        seed: Of prompts, faults, and the moments between them.
        folder: Folder of the logs.
        settings: More settings of prefill engines. Tests break them.
        has_faults: True if there are faults.

    Attributes:
        outcomes: Their counts.
    """

    def __init__(self, zygote, num_requests, seed, folder, settings=None, *, has_faults=True):
        self._zygote = zygote
        self._num_requests, self._seed, self._folder = num_requests, seed, Path(folder)
        self._settings, self._has_faults = dict(settings or {}), has_faults
        self._changed = threading.Condition()
        self._num_ended = 0
        self._progress = Progress()
        self.outcomes = Outcomes()

    def run(self):
        """Returns the outcomes.

        Raises:
            StartError: An engine does not start before the first fault.
        """
        before = shared_memory()
        with ExitStack() as stack:
            self._start(stack)
            self._visit_all()
            self._visit_all(must_be_full=True)
            held = self._look()
            self._attack()
            self._visit_all()
            self._visit_all(must_be_full=True)
            self._compare(held, self._look())
            self._end()
        self.outcomes.chunks_flipped = self._relay.num_flipped
        # The engines have ended: new memory that a process still maps is another program's.
        if left := (shared_memory() - before - mapped()) & shared_memory():
            self._fail("leaked", f"shared memory {sorted(left)}")
        return self.outcomes

    def _random(self, what):
        return random.Random(f"{self._seed} {what}")

    # --- its processes

    def _start(self, stack):
        env = os.environ | {"KVPIPE_TOKEN": TOKEN, **ONE_THREAD}
        model, command = tiny_model(), self._zygote.command("tests.chaos.engine")
        ports = free_ports(7, 2)
        stack.callback(release_ports, [first + next_one for first in ports for next_one in (0, 1)])
        of = iter([first, first + 1] for first in ports)
        self._relay = stack.enter_context(Relay([at + more for at in ports for more in (0, 1)], self._random("relay")))
        server_ports = next(of)
        self._server = store_server(server_ports, env, self._folder / "store.log")

        def made(name, settings, **variables):
            log = self._folder / f"{name}.log"
            return engine(name, next(of), command, env | variables, log, model=model, **settings)

        direct, stored = TIMES, {"store": f"kvpipe://{RELAYED}:{server_ports[0]}"}
        encrypted = {"KVPIPE_ENCRYPTION": "on"}
        self._prefill = [
            made("prefill0", direct | self._settings, **encrypted),
            made("prefill1", direct | self._settings),
        ]
        self._decode = [made("decode0", direct, KVPIPE_DATA_PATH="tcp"), made("decode1", direct)]
        self._stored = [made("stored0", stored), made("stored1", stored)]
        self._engines = [*self._prefill, *self._decode, *self._stored]
        for each in (self._server, *self._engines):
            each.start()
            stack.callback(each.kill)
        for each in self._engines:
            each.await_start()

    def _end(self):
        for each in self._engines:
            if each.has_died:
                self._fail("dead", f"{each.name} has ended by itself")
            elif status := each.end():
                self._fail("dead", f"{each.name} ended with status {status}")

    # --- requests

    def _attack(self):
        """All requests, and faults beside them."""
        self._progress.expect(self._num_requests)
        is_over = threading.Event()
        groups = {"prefill": self._prefill, "decode": self._decode, "stored": [self._server, *self._stored]}
        with ThreadPoolExecutor(NUM_CLIENTS + len(groups)) as threads:
            faults = [
                threads.submit(self._make_faults, is_over, self._random(f"faults {name}"), group)
                for name, group in groups.items()
                if self._has_faults
            ]
            clients = [threads.submit(self._request, number) for number in range(self._num_requests)]
            try:
                for each in clients:
                    each.result()
            finally:
                is_over.set()
                with self._changed:
                    self._changed.notify_all()
                for each in faults:
                    each.result()
        self._progress.end()

    def _request(self, number):
        rng = random.Random(f"{self._seed} request {number}")
        tokens = self._prompt(rng, number)
        time.sleep(rng.uniform(0, LONGEST_THINK_S))
        begun = time.monotonic()
        try:
            while (outcome := self._try(rng, tokens)) == "lost_with_killed_engine":
                self._count(outcome)
            self._count(outcome)
        except TimeoutError:
            self._fail("late", f"request {number} has no end after {BOUND_S:.0f} s")
        took_ms = int((time.monotonic() - begun) * 1000)
        with self._changed:
            self.outcomes.count("requests")
            self.outcomes.longest_request_ms = max(self.outcomes.longest_request_ms, took_ms)
            self._num_ended += 1
            self._changed.notify_all()
        self._progress.step("requests")

    def _prompt(self, rng, number):
        """A prompt of which another one may share the beginning."""
        num_shared, length = rng.choice((0, 0, 64)), rng.choice(LENGTHS)
        family = rng.randrange(3)
        return [10 + family] * min(num_shared, length) + [100 + number % 1800] * max(0, length - num_shared)

    def _try(self, rng, tokens):
        """One handoff; returns its outcome."""
        handoff, name = secrets.token_hex(16), secrets.token_hex(8)
        is_stored, is_aborted = rng.random() < STORE_SHARE, rng.random() < ABORT_SHARE
        producers, consumers = (self._stored, self._stored) if is_stored else (self._prefill, self._decode)
        producer, consumer = self._pick(rng, producers), self._pick(rng, consumers)
        if is_stored:
            given, taken = save(handoff), load(handoff)
        else:
            given, taken = produce(handoff), consume(handoff, producer.address)
        first = producer.ask(name + "p", name=name + "p", prompt=tokens, max_tokens=1, params=given)
        if is_stored and self._answer(first, tokens, 1) not in ("answered", "lost_with_killed_engine"):
            return "wrong"
        incarnation = consumer.incarnations
        second = consumer.ask(name, name=name, prompt=tokens, max_tokens=3, params=taken)
        if is_aborted:
            consumer.tell(name=name, abort=True)
        outcome = self._answer(second, tokens, 3, may_be_short=is_aborted)
        with self._changed:
            if consumer.incarnations == incarnation:
                consumer.num_answered += outcome == "answered"
                consumer.num_aborted += outcome == "aborted_by_client"
        if not is_stored and self._answer(first, tokens, 1) == "wrong":
            return "wrong"
        return outcome

    def _answer(self, future, tokens, num_tokens, *, may_be_short=False):
        try:
            found = future.result(BOUND_S)["tokens"]
        except LostError:
            return "lost_with_killed_engine"
        expected = answered(tokens, num_tokens, num_layers=len(LAYERS))
        if found == expected:
            return "answered"
        if may_be_short and found == expected[: len(found)]:
            return "aborted_by_client"
        self._fail("wrong", f"{found} instead of {expected}, of a prompt of {len(tokens)} tokens")
        return "wrong"

    def _pick(self, rng, engines):
        """One that is up; waits while all of them start."""
        with self._changed:
            is_up = self._changed.wait_for(lambda: any(each.is_up for each in engines), BOUND_S)
        if not is_up:
            raise TimeoutError
        return rng.choice([each for each in engines if each.is_up] or engines)

    def _count(self, name):
        if name != "wrong":  # which has been counted with its reason
            with self._changed:
                self.outcomes.count(name)

    def _fail(self, name, reason):
        with self._changed:
            self.outcomes.fail(name, reason)

    # --- faults

    def _make_faults(self, is_over, rng, targets):
        """Attacks one engine of a group at a time: what a request needs is there, or comes back."""
        order = []
        while not is_over.is_set():
            wanted = self._num_ended + rng.randint(1, MOST_BETWEEN)
            with self._changed:
                self._changed.wait_for(lambda wanted=wanted: self._num_ended >= wanted or is_over.is_set(), BOUND_S)
            if is_over.is_set():
                return
            if not order:
                order = [
                    (fault, each) for fault in (self._kill, self._stop, self._cut, self._stall) for each in targets
                ]
                order += [(self._flip, each) for each in targets if each is self._prefill[0]] * 2
                rng.shuffle(order)
            fault, target = order.pop()
            self._progress.line(f"{self._num_ended} requests, {fault.__name__.strip('_')} {target.name}")
            fault(target, rng)

    def _kill(self, target, _rng):
        if target.has_died:
            self._fail("dead", f"{target.name} has ended by itself")
        self._count("killed")
        target.kill()
        with self._changed:
            if target in (*self._decode, *self._stored):
                self._check_results(target, is_at_rest=False)
            target.start()
        if target is not self._server:
            try:
                target.await_start()
            except StartError as error:
                self._fail("unrecovered", str(error))
        with self._changed:
            self._changed.notify_all()

    def _stop(self, target, rng):
        self._count("stopped")
        target.signal(signal.SIGSTOP)
        time.sleep(LONGEST_PAUSE_S * rng.random() ** 2)
        target.signal(signal.SIGCONT)

    def _cut(self, target, _rng):
        self._count("cut")
        self._relay.cut(target.ports)

    def _stall(self, target, rng):
        self._count("stalled")
        self._relay.stall(target.ports, is_stalled=True)
        time.sleep(LONGEST_PAUSE_S * rng.random() ** 2)
        self._relay.stall(target.ports, is_stalled=False)

    def _flip(self, target, rng):
        """Changes bytes. All frames of this engine's sessions are encrypted, so that any change is seen."""
        self._relay.flip(target.ports, rng.randint(1, MOST_FLIPPED))

    # --- the end

    def _check_results(self, consumer, *, is_at_rest):
        """Compares what an engine has counted with what its clients have got.

        Each answer is of a counted handoff. At rest those that clients have aborted are counted, too; through the store
        only those that were computed before.
        """
        counted, answered = consumer.results.total(), consumer.num_answered
        ended = answered + consumer.num_aborted
        least = ended if is_at_rest and consumer in self._decode else answered
        if counted < least or (is_at_rest and counted > ended):
            self._fail(
                "uncounted",
                f"{consumer.name} counts {dict(consumer.results)}; {answered} requests were answered, "
                f"{consumer.num_aborted} aborted",
            )

    def _visit_all(self, *, must_be_full=False):
        """A handoff of each pair, without faults."""
        self._relay.flip(self._prefill[0].ports, 0)
        for number, (producer, consumer) in enumerate((p, d) for p in self._prefill for d in self._decode):
            handoff, tokens = secrets.token_hex(16), [2000 + number, *secrets.SystemRandom().choices(range(1000), k=70)]
            before = self._look_at(consumer) if must_be_full else {}
            name = secrets.token_hex(8)
            try:
                asked = [
                    producer.ask(f"{name}p", name=f"{name}p", prompt=tokens, max_tokens=1, params=produce(handoff)),
                    consumer.ask(name, name=name, prompt=tokens, params=consume(handoff, producer.address)),
                ]
                for each, num_tokens in zip(asked, (1, 3), strict=True):
                    self._answer(each, tokens, num_tokens)
            except TimeoutError:
                self._fail("late", f"a request from {producer.name} to {consumer.name} has no end")
            consumer.num_answered += 1
            if must_be_full:
                after = self._look_at(consumer)
                if after["results"].get("full", 0) != before["results"].get("full", 0) + 1:
                    self._fail("unrecovered", f"{producer.name} to {consumer.name}: {after['results']}")

    def _look(self):
        """Resources of each engine, at rest."""
        return {each.name: self._look_at(each) for each in self._engines}

    def _look_at(self, each):
        nothing = {"results": {}, "lost_blocks": 0, "descriptors": 0, "threads": 0, "bytes": 0}
        try:
            return each.ask("look", look=True).result(REST_S)
        except TimeoutError:
            self._fail("leaked", f"{each.name} does not come to rest: requests or leases are left")
        except LostError:
            self._fail("dead", f"{each.name} has ended by itself")
        return nothing

    def _compare(self, before, after):
        for each in self._engines:
            old, new = before[each.name], after[each.name]
            for what, more in (("descriptors", MORE_DESCRIPTORS), ("threads", 0), ("bytes", MORE_BYTES)):
                if new[what] > old[what] + more:
                    self._fail("leaked", f"{each.name} has {new[what]} {what}, {old[what]} before")
            if new["lost_blocks"]:
                self._fail("leaked", f"{each.name} holds {new['lost_blocks']} blocks")
        for each in (*self._decode, *self._stored):
            each.results = Counter(after[each.name]["results"])
            self._check_results(each, is_at_rest=True)
            for result, number in (each.past_results + each.results).items():
                self.outcomes.count(result, number)
        found = self.outcomes
        ends = found.answered + found.aborted_by_client + found.late + found.wrong
        if ends < found.requests:
            self._fail("uncounted", f"{found.requests} requests, and {ends} have ended")
