"""Actors of a round. Each goes on until the round is over, and raises when something is wrong."""

import contextlib
import itertools
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvpipe import Agent, LookupBuffer, PeerLostError, Pipe, TransferTimeoutError
from tests.faults.forked import Forked
from tests.faults.rounds import FAULTS
from tests.faults.stages import Place
from tests.peers import LOOPBACK, MIB
from tests.soak.clock import Clock, Waits
from tests.soak.healthy import DISTURBERS, HEALTHY, INTEGRITIES, Pair
from tests.soak.late import LATE

DTYPES = ("uint8", "int16", "float32", "complex128")
LARGEST_BYTES = 16 * MIB
NUM_BLOCKS, BLOCK_BYTES = 64, 256 << 10
CAPACITY_BYTES = 64 * MIB
TIMEOUT_S = 30.0
FAULT_EVERY = 12
PAUSE_S = 0.3
LOST_WITHIN_S = 2.0
# A detection that took longer is told of, with what the machine was late meanwhile.
LATE_S = 0.25
# In a process that does other things too, how much memory a sender takes says nothing.
STRUCK = [name for name, fault in FAULTS.items() if not fault.needs_cable and name != "slow"]


@dataclass(frozen=True)
class Late:
    """A fault of which the survivor knew late, and what the machine had to do with it."""

    what: str
    seconds: float
    waits: Waits
    gone_after_s: float | None

    def __str__(self):
        gone = "" if self.gone_after_s is None else f", the peer was gone after {self.gone_after_s * 1e3:.0f} ms"
        return f"{self.what}: {self.seconds * 1e3:.0f} ms{gone}; a thread that only looks at the clock {self.waits}"


@dataclass
class Round:
    """State that the actors of a round share with their observer."""

    ends_at: float
    counts: Counter
    times: dict
    clock: Clock
    late: list
    hits: list = field(default_factory=list)
    pair: Pair | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    done_at: dict = field(default_factory=dict)

    def goes_on(self, actor, **counts):
        """Tells that something was done; whether to go on."""
        with self.lock:
            self.counts.update(counts)
        self.done_at[actor] = time.monotonic()
        return time.monotonic() < self.ends_at

    def took(self, fault, seconds):
        with self.lock:
            self.times.setdefault(fault, []).append(seconds)
            self.counts["faults"] += 1


def _size(rng):
    """Small ones often, large ones sometimes."""
    return int(LARGEST_BYTES ** rng.random())


def _bytes(rng, size):
    return np.frombuffer(rng.randbytes(min(size, MIB)) * (size // MIB + 1), np.uint8)[:size]


def _raw(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _same(received, sent, what):
    is_alike = received.dtype == sent.dtype and received.shape == sent.shape
    if not is_alike or not np.array_equal(_raw(received), _raw(sent)):  # as bytes: no number equals NaN
        message = f"wrong bytes: {what} of {sent.nbytes} bytes, seen as {received.dtype} {received.shape}"
        raise AssertionError(message)


@contextlib.contextmanager
def _hurt(child, rng, shared):
    """Now and then a peer is killed, or stopped for a moment, while something goes on with it."""
    fate = rng.randrange(FAULT_EVERY)
    if fate == 0:
        child.kill_after(rng.uniform(0, 0.02))
        shared.took("killed under work", 0.0)
    elif fate == 1:
        child.process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(rng.uniform(0, PAUSE_S), child.process.send_signal, (signal.SIGCONT,))
        timer.start()
        shared.took("paused under work", 0.0)
    try:
        yield
    finally:
        if fate == 1:
            timer.join()


def _with_peers(meet, shared, name):
    """Meets one peer after the other: one that was killed is lost, and no more than that."""
    while shared.goes_on(name):
        with contextlib.suppress(PeerLostError):
            meet()
        shared.goes_on(name, reconnects=1)


def tensors(rng, shared):
    """Tensors of any size and type go to an echo and come back; every other echo validates them."""
    integrities = itertools.cycle(INTEGRITIES)
    _with_peers(lambda: _echo(rng, shared, next(integrities)), shared, "tensors")


def _echo(rng, shared, integrity):
    with contextlib.ExitStack() as stack:
        child = Forked("echo", LOOPBACK, integrity)
        stack.callback(child.end)
        receiver = stack.enter_context(Pipe.listen())
        sender = Pipe.connect(child.read(), timeout=TIMEOUT_S, integrity=integrity)
        stack.callback(_close, sender)
        child.tell(receiver.address)
        sender.send_tensor(None, timeout=TIMEOUT_S)
        receiver.recv_tensor(timeout=TIMEOUT_S)  # it has connected: from now on its loss is one
        while shared.goes_on("tensors"):
            dtype = np.dtype(rng.choice(DTYPES))
            tensor = _bytes(rng, _size(rng) // dtype.itemsize * dtype.itemsize).view(dtype)
            with _hurt(child, rng, shared):
                sent = sender.isend_tensor(tensor)
                _same(receiver.recv_tensor(timeout=TIMEOUT_S), tensor, "a tensor")
                sent.wait(TIMEOUT_S)
            num_validated = 2 * (integrity == "validate")
            shared.goes_on("tensors", tensors=1, validated_tensors=num_validated, bytes=2 * tensor.nbytes)


def _close(pipe):
    with contextlib.suppress(PeerLostError, TransferTimeoutError):
        pipe.close(timeout=1)


def blocks(rng, shared):
    """Blocks are written to another agent, and read back."""
    _with_peers(lambda: _write_and_read(rng, shared), shared, "blocks")


def _write_and_read(rng, shared):
    with contextlib.ExitStack() as stack:
        child = Forked("serve_blocks", NUM_BLOCKS, BLOCK_BYTES)
        stack.callback(child.end)
        agent = stack.enter_context(Agent())
        memory = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        region = agent.register(memory, "own", BLOCK_BYTES)
        peer = agent.connect(child.read(), timeout=TIMEOUT_S)
        while shared.goes_on("blocks"):
            count = rng.randrange(1, NUM_BLOCKS // 2)
            ours, back = (rng.sample(range(half, half + NUM_BLOCKS // 2), count) for half in (0, NUM_BLOCKS // 2))
            theirs = rng.sample(range(NUM_BLOCKS), count)
            memory[: NUM_BLOCKS // 2] = _bytes(rng, MIB).reshape(-1, BLOCK_BYTES)[[0, 1, 2, 3] * (NUM_BLOCKS // 8)]
            memory[:, 0] = rng.randrange(256)
            memory[ours, 1] = np.arange(count)
            with _hurt(child, rng, shared):
                peer.write_blocks(region, ours, "kv", theirs).wait(TIMEOUT_S)
                peer.read_blocks(region, back, "kv", theirs).wait(TIMEOUT_S)
            _same(memory[back], memory[ours], "blocks")
            shared.goes_on("blocks", blocks=2 * count, bytes=2 * count * BLOCK_BYTES)


def lookups(rng, shared):
    """Entries are inserted by a client and taken by another, though consumers die: each once, and none is lost."""
    with LookupBuffer(CAPACITY_BYTES) as server:
        server.serve()
        with (
            LookupBuffer.connect(server.address, timeout=TIMEOUT_S) as producer,
            LookupBuffer.connect(server.address, timeout=TIMEOUT_S) as consumer,
        ):
            while shared.goes_on("lookups"):
                _insert_and_consume(rng, shared, (server, producer, consumer))


def _insert_and_consume(rng, shared, buffers):
    """The entry of a killed consumer comes back when its loss is known, unless it was consumed: one at most."""
    server, producer, consumer = buffers
    entries = {number: _bytes(rng, 1 + _size(rng) // 4) for number in rng.sample(range(1 << 40), rng.randrange(1, 12))}
    for number, key in entries.items():
        rng.choice((server, producer)).insert(np.array([number, 7]), None, key, None, None, timeout=TIMEOUT_S)
    left = dict(entries)
    is_hurt = rng.randrange(4 * FAULT_EVERY) == 0
    if is_hurt:
        _die_while_taking(rng, server, shared)
    wanted = list(entries)
    rng.shuffle(wanted)
    for number in wanted:
        query = np.array([number])
        found = rng.choice((server, consumer)).drop_select(query, None, timeout=0 if is_hurt else TIMEOUT_S)
        if found[0] is not None:
            assert found[0][0] == number, f"delivered: entry {found[0][0]} instead of {number}"
            _same(found[2], left.pop(number), "an entry")
    _wait_for_those_that_come_back(server, left, LOST_WITHIN_S if is_hurt else 0)
    assert len(left) <= is_hurt, f"lost: entries {list(left)}"
    shared.goes_on("lookups", entries=len(entries), bytes=sum(key.nbytes for key in entries.values()))


def _wait_for_those_that_come_back(server, left, within_s):
    give_up_at = time.monotonic() + within_s
    while True:
        found = server.drop_select(None, None, timeout=0.05 if left else 0)
        if found[0] is not None:
            number = int(found[0][0])
            assert number in left, f"delivered twice: entry {number}"
            _same(found[2], left.pop(number), "an entry")
        elif not left or time.monotonic() >= give_up_at:
            return


def _die_while_taking(rng, server, shared):
    """A consumer is killed while it takes one."""
    child = Forked("consume_one", server.address)
    try:
        assert child.read() == "ready"
        time.sleep(rng.uniform(0, 0.01))
    finally:
        child.end()
    shared.took("killed while it takes", 0.0)


def faults(rng, shared):
    """One fault after the other, each with peers of its own. A machine that let a thread wait is no fault of ours."""
    while shared.goes_on("faults"):
        name = rng.choice(STRUCK)
        fault = FAULTS[name]
        stage = rng.choice(fault.stages)
        children = []
        seconds = fault.strike(stage, rng, Place(start=_remembered(children)))
        shared.took(name, seconds)
        if seconds > LATE_S:
            late = _late(f"{name} {stage.__name__}", seconds, children, shared.clock)
            shared.late.append(late)
            assert seconds - late.waits.total_s < fault.all_s, f"known late: {late}"


def _remembered(children):
    def start(*arguments):
        children.append(Forked(*arguments))
        return children[-1]

    return start


def _late(what, seconds, children, clock):
    now = time.monotonic()
    killed = next((child.killed_at for child in children if len(child.killed_at) > 1), None)
    return Late(what, seconds, clock.waits(now - seconds, now), killed and killed[1] - killed[0])


ACTORS = (tensors, blocks, lookups, faults, *HEALTHY, *DISTURBERS, *LATE)


def begin(actor, seed, shared, failures):
    """Starts an actor; what goes wrong is added to the failures."""

    def act():
        try:
            actor(random.Random(seed), shared)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the soak has failed
            failures.append((actor.__name__, error))

    thread = threading.Thread(target=act, name=actor.__name__, daemon=True)
    thread.start()
    return thread
