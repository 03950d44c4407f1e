"""Healthy operations between peers that stay alive, beside others on the same sessions that are late or cancelled.

A healthy operation has a generous deadline. It must not fail, not be later than that, and not be tried again: whatever
else happens, happens to others. One to which it happens all the same is a hit. Late tensors and entries, and what is
healthy beside them: tests/soak/late.py.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from dataclasses import dataclass

import numpy as np

from kvpipe import AuthenticationError, KVPipeError, LookupBuffer, Pipe, TransferTimeoutError, _kvpipe
from kvpipe._transport import transport
from kvpipe.work import Work
from tests.peers import LOOPBACK, MIB
from tests.soak.clock import Waits
from tests.strangers import strangers

DEADLINE_S = 20.0
PAUSE_S = 0.005
# Each block has one actor: healthy reads, loads, loads that are cancelled, late reads, and writes, which are not read
# meanwhile.
NUM_BLOCKS = 64
READ, LOADED, CANCELLED, LATE, WRITTEN = range(8), range(8, 12), range(12, 16), range(16, 60), range(60, 64)
# The longest deadline of a late read. Half of them have a quarter of it at most, so that some are late on any machine.
LATEST_S = 0.05
CROWD = 100
# With the crowd, these are more than may prove the token at one time. Impostors have another token.
NUM_STRANGERS, NUM_IMPOSTORS = 200, 10
CAPACITY_BYTES = 32 * MIB
HEALTHY_TOKEN = 1  # the first of each healthy entry
INTEGRITIES = ("checksum", "validate")


@dataclass(frozen=True)
class Hit:
    """A healthy operation that was hit, and what the machine let a thread wait meanwhile."""

    what: str
    why: str
    waits: Waits | None = None

    def __str__(self):
        waits = f"; a thread that only looks at the clock {self.waits}" if self.waits else ""
        return f"{self.what}: {self.why}{waits}"


class Pair:
    """Two agents of this process, an undisturbed pipe and one that has late tensors, and a lookup buffer."""

    def __init__(self, integrity=INTEGRITIES[0]):
        self._numbers = itertools.count()
        self._ended, self._lock = {}, threading.Lock()
        # The producer decides how blocks of handoffs are verified.
        (self.producer, self._leased, self.theirs), (self.consumer, self.region, self.ours) = (
            self._open(of_side) for of_side in (integrity, "auto")
        )
        self.theirs[:] = np.random.default_rng(0).integers(256, size=self.theirs.shape, dtype=np.uint8)
        self.is_validated = integrity == "validate"
        (self.receiver, self.sender), (self.late_receiver, self.late_sender) = (
            self._connect(integrity) for _ in range(2)
        )
        self.server = LookupBuffer(CAPACITY_BYTES)
        self.server.serve()
        self.client = LookupBuffer.connect(self.server.address)

    @staticmethod
    def _connect(integrity):
        receiver = Pipe.listen()
        return receiver, Pipe.connect(receiver.address, integrity=integrity)

    @staticmethod
    def _open(integrity):
        agent = _kvpipe.Agent(LOOPBACK, b"", transport(), integrity=integrity)
        memory = np.zeros((NUM_BLOCKS, MIB), np.uint8)
        registered = agent.register("kv", memory.reshape(-1), MIB, MIB, is_writable=True)
        return agent, _result(registered), memory

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pipes = self.sender, self.receiver, self.late_sender, self.late_receiver
        for one in (*pipes, self.client, self.server, self.consumer, self.producer):
            with contextlib.suppress(KVPipeError):
                one.close()

    def plan(self, ours, theirs):
        """Blocks of the consumer beside blocks of the producer, on the session that is there now."""
        peer = _result(self.consumer.connect(self.producer.address))
        return self.consumer.prepare(peer, self.region, list(ours), "kv", list(theirs))

    def load(self, blocks, num_ready):
        """Begins to load a handoff of which so many blocks are ready."""
        handoff = next(self._numbers).to_bytes(16)
        self.mark_ready(handoff, blocks, 0, num_ready)
        incarnation, parts = self.producer.incarnation, [([self.region], 0, list(blocks))]
        self.consumer.load(handoff, self.producer.address, incarnation, parts, is_committed=True)
        return handoff

    def mark_ready(self, handoff, blocks, first, num_ready):
        """More blocks of a handoff are ready."""
        ready = _kvpipe.ReadyBlocks([(handoff, first, list(blocks)[first : first + num_ready])])
        self.producer.mark_ready(ready, [self._leased])

    def load_end(self, handoff, within_s=DEADLINE_S):
        """Outcome of a load; `None` if it has not ended in time. Several threads may ask."""
        give_up_at = time.monotonic() + within_s
        while time.monotonic() < give_up_at:
            with self._lock:
                for event in self.consumer.drain():
                    if event["event"].startswith("load_"):
                        self._ended[event["handoff"]] = event
                self.producer.drain()
                if handoff in self._ended:
                    return self._ended.pop(handoff)
            time.sleep(0.001)
        return None


def _result(work, within_s=DEADLINE_S):
    assert work.wait(within_s), f"no end within {within_s} s"
    return work.result()


def healthy(shared, what, operate):
    """Counts a healthy operation, and why it was hit if it was."""
    begun = time.monotonic()
    try:
        why = operate()
    except (KVPipeError, AssertionError) as error:
        why = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - begun
    if not why and took_s > DEADLINE_S:
        why = f"it took {took_s:.1f} s"
    if why:
        waits = shared.clock and shared.clock.waits(begun, begun + took_s)
        shared.hits.append(Hit(what, str(why), waits))
    goes_on = shared.goes_on(what, healthy=1)
    time.sleep(PAUSE_S)
    return goes_on


def healthy_blocks(rng, shared):
    """Reads and writes with generous deadlines; all bytes are compared."""
    pair = shared.pair

    def read():
        theirs = rng.sample(READ, rng.randrange(1, len(READ)))
        ours = rng.sample(READ, len(theirs))
        _result(pair.consumer.read(pair.plan(ours, theirs), None, DEADLINE_S))
        assert np.array_equal(pair.ours[ours], pair.theirs[theirs]), "wrong bytes"

    def write():
        pair.ours[list(WRITTEN), 0] = rng.randrange(256)
        _result(pair.consumer.write(pair.plan(WRITTEN, WRITTEN), None, DEADLINE_S))
        assert np.array_equal(pair.ours[list(WRITTEN)], pair.theirs[list(WRITTEN)]), "wrong bytes"

    while healthy(shared, "healthy_blocks", rng.choice((read, write))):
        pass


def healthy_loads(_rng, shared):
    """Handoffs that are ready are loaded at once, without a second try."""
    pair, blocks = shared.pair, list(LOADED)

    def load():
        pair.ours[blocks] = 0
        end = pair.load_end(pair.load(blocks, len(blocks)))
        if end is None or end["event"] != "load_completed":
            return end and end["reason"]
        assert np.array_equal(pair.ours[blocks], pair.theirs[blocks]), "wrong bytes"
        assert bool(end["num_validated"]) == pair.is_validated, f"{end['num_validated']} blocks were validated"
        shared.goes_on("healthy_loads", validated_loads=pair.is_validated)
        return end["num_retried"] and f"{end['num_retried']} blocks were read twice"

    while healthy(shared, "healthy_loads", load):
        pass


def healthy_tensors(rng, shared):
    """Tensors go through an undisturbed pipe."""
    pair = shared.pair

    def move():
        tensor = np.full(rng.randrange(1, 4 * MIB), rng.randrange(256), np.uint8)
        move_tensor(pair.sender, pair.receiver, tensor)
        shared.goes_on("healthy_tensors", validated_tensors=pair.is_validated)

    while healthy(shared, "healthy_tensors", move):
        pass


def move_tensor(sender, receiver, tensor):
    """Sends a tensor and receives it, with generous deadlines; all bytes are compared."""
    sent = sender.isend_tensor(tensor, timeout=DEADLINE_S)
    assert np.array_equal(receiver.recv_tensor(timeout=DEADLINE_S), tensor), "wrong bytes"
    sent.wait(DEADLINE_S)


def healthy_entries(rng, shared):
    """Entries go through the lookup buffer, at its server or its client; each is delivered once, with all its bytes."""
    numbers, buffers = itertools.count(), (shared.pair.server, shared.pair.client)

    def deliver():
        tokens = np.array([HEALTHY_TOKEN, next(numbers)])
        key = np.full(rng.randrange(1, MIB), rng.randrange(256), np.uint8)
        select = rng.choice(buffers).idrop_select(tokens, None) if rng.randrange(2) else None
        rng.choice(buffers).insert(tokens, None, key, None, None, timeout=DEADLINE_S)
        check_entry(select.wait(DEADLINE_S) if select else select_entry(buffers, rng, tokens), tokens, key)
        check_consumed(buffers, rng, tokens)

    while healthy(shared, "healthy_entries", deliver):
        pass


def select_entry(buffers, rng, tokens, timeout=DEADLINE_S):
    """Selects an entry at a server or at its client."""
    return rng.choice(buffers).drop_select(tokens, None, timeout=timeout)


def check_entry(found, tokens, key):
    """Asserts that this entry was found."""
    assert found[0] is not None, "the entry is lost"
    assert np.array_equal(found[0], tokens), f"entry {found[0]} instead of {tokens}"
    assert np.array_equal(found[2], key), "wrong bytes"


def check_consumed(buffers, rng, tokens):
    """Asserts that an entry is there no more."""
    assert select_entry(buffers, rng, tokens, timeout=0)[0] is None, "the entry was delivered twice"


def late_reads(rng, shared):
    """Large reads that have 0 to 50 ms, and large reads whose end is not awaited after that."""
    pair = shared.pair
    while shared.goes_on("late_reads"):
        late_s, is_cancelled = LATEST_S * rng.random() ** 2, bool(rng.randrange(2))
        read = pair.consumer.read(pair.plan(LATE, LATE), None, DEADLINE_S if is_cancelled else late_s)
        work = Work(read, int)
        is_late = not asyncio.run(_is_awaited(work, late_s)) if is_cancelled else _fails_late(work)
        # Its blocks are its own until it has ended.
        work.settled(DEADLINE_S)
        shared.goes_on("late_reads", late_reads=is_late, timely_reads=not is_late)


def _fails_late(work):
    try:
        work.wait(DEADLINE_S)
    except TransferTimeoutError:
        assert work.is_completed(), f"no end within {DEADLINE_S} s"
        return True
    return False


async def _is_awaited(work, within_s):
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, within_s)
    return work.is_completed()


def cancelled_loads(rng, shared):
    """Loads of which some blocks never become ready are cancelled at any moment."""
    pair, blocks = shared.pair, list(CANCELLED)
    while shared.goes_on("cancelled_loads"):
        handoff = pair.load(blocks, rng.randrange(len(blocks)))
        time.sleep(rng.uniform(0, 0.02))
        pair.consumer.cancel(handoff, "cancelled", bool(rng.randrange(2)))
        end = pair.load_end(handoff)
        assert end is not None, f"a load that was cancelled had not ended within {DEADLINE_S} s"
        pair.producer.end(handoff, "over")
        shared.goes_on("cancelled_loads", cancelled_loads=1)


def crowds(rng, shared):
    """Many agents connect at one instant, and leave again: each gets in, though strangers without the token do too."""
    address = shared.pair.producer.address
    while shared.goes_on("crowds"):
        agents = [_kvpipe.Agent(LOOPBACK, b"", transport()) for _ in range(CROWD)]
        impostors = [_kvpipe.Agent(LOOPBACK, b"another", transport()) for _ in range(NUM_IMPOSTORS)]
        with strangers(address, NUM_STRANGERS):
            refused = [impostor.connect(address) for impostor in impostors]
            connects = [agent.connect(address) for agent in agents]
            for connect in connects:
                healthy(shared, "crowds", lambda connect=connect: _result(connect) and None)
            for connect in refused:
                _check_refused(connect)
        agents += impostors
        rng.shuffle(agents)
        for agent in agents:
            agent.close()
        shared.goes_on("crowds", crowds=1)
        time.sleep(rng.uniform(0.5, 2))


def _check_refused(connect):
    with contextlib.suppress(AuthenticationError):
        message = f"connected to {_result(connect).address} with another token"
        raise AssertionError(message)


HEALTHY = (healthy_blocks, healthy_loads, healthy_tensors, healthy_entries)
DISTURBERS = (late_reads, cancelled_loads, crowds)
