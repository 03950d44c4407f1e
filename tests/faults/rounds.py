"""One round: a peer at a stage, a fault, and how long the survivor took to know."""

import contextlib
import gc
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpipe import CapacityError, LookupBuffer, PeerLostError, Pipe, TransferTimeoutError
from tests.faults.stages import FATAL, HARMLESS, SERVERS, TIMEOUT_S, Place, _open, saying_garbage
from tests.peers import MIB, status_bytes

KILL_WITHIN_S = 0.03
DEADLINE_S = 0.5
LOCAL = Place()


def kill(stage, rng, place=LOCAL):
    """Kills the peer at a random moment; seconds until the survivor knew, or had served another."""
    with stage(place) as situation:
        killed_at = situation.child.kill_after(rng.uniform(0, KILL_WITHIN_S))
        if stage in HARMLESS:
            begun = time.monotonic()
            situation.operate(None)
            return time.monotonic() - begun
        with contextlib.suppress(PeerLostError):
            while True:
                situation.operate(None)
        return time.monotonic() - killed_at[0]


def stop(stage, rng, place=LOCAL):
    """Stops the peer until after the survivor's deadline; seconds by which that was late, or to serve another."""
    with stage(place) as situation:
        time.sleep(rng.uniform(0, KILL_WITHIN_S))
        process = situation.child.process
        situation.child.stop()
        late_s = _lateness(situation, is_harmless=stage in HARMLESS)
        process.send_signal(signal.SIGCONT)
        if situation.server:
            situation.reach_again()
        _goes_on(process)
        return late_s


def partition(stage, rng, place):
    """Cuts the network until after the survivor's deadline; seconds by which that was late."""
    with stage(place) as situation:
        time.sleep(rng.uniform(0, KILL_WITHIN_S))
        place.cable.cut(rng.choice((0, 1)))
        try:
            late_s = _lateness(situation, is_harmless=False)
        finally:
            place.cable.join()
        if situation.server:
            situation.reach_again()
        return late_s


def _lateness(situation, *, is_harmless):
    begun = time.monotonic()
    if is_harmless:
        situation.operate(None)
        return time.monotonic() - begun
    # A reader of the peer's memory (CMA) can still get its offers.
    with contextlib.suppress(TransferTimeoutError, PeerLostError):
        situation.operate(DEADLINE_S)
    return max(0.0, time.monotonic() - begun - DEADLINE_S)


def _goes_on(process):
    """A stopped peer that continues may fail with an error of ours, and by no signal."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None or process.poll() >= 0, f"ended by signal {-process.poll()}"


def restart(stage, rng, place=LOCAL):
    """Kills a server and starts another at its address; seconds until it is reached from the same process."""
    with stage(place) as situation:
        situation.child.kill_after(rng.uniform(0, KILL_WITHIN_S))
        with contextlib.suppress(PeerLostError):
            while True:
                situation.operate(None)
        situation.child.process.wait()  # it may still listen
        again = situation.server.start(situation.server.address)
        try:
            assert again.read() == situation.server.address
            return situation.reach_again()
        finally:
            again.end()


def garbage(_stage, rng, place=LOCAL):
    """A peer says anything to a port; seconds until another has been served there."""
    with saying_garbage(place, rng.getrandbits(32)) as situation:
        time.sleep(rng.uniform(0, KILL_WITHIN_S))
        begun = time.monotonic()
        situation.operate(None)
        return time.monotonic() - begun


NUM_SLOW, NUM_SMALL_BETWEEN, SLOW_BYTES = 12, 20, 8 * MIB
AWAKE_S, ASLEEP_S = 0.02, 0.2


def slow(_stage, rng, place=LOCAL):
    """A receiver sleeps most of the time. All arrives, in order, nothing piles up; the longest that a send took."""
    child = place.start("receive_in_order")
    over = threading.Event()
    pulses = threading.Thread(target=_pulse, args=(child.process, over))
    took = []
    try:
        with _open(Pipe.connect(child.read())) as sender:
            pulses.start()
            before = status_bytes("RssAnon")
            for number in range(NUM_SLOW * (1 + NUM_SMALL_BETWEEN)):
                size = SLOW_BYTES if number % (1 + NUM_SMALL_BETWEEN) == 0 else rng.randrange(1, 1000)
                begun = time.monotonic()
                sender.send_tensor(np.full(size // 8 + 1, number), timeout=20)
                took.append(time.monotonic() - begun)
            grown = status_bytes("RssAnon") - before
            assert grown < 4 * SLOW_BYTES, f"{grown >> 20} MiB more for a receiver that is slow"
            sender.close(timeout=20)
        over.set()
        pulses.join()
        assert int(child.read()) == len(took)
        return max(took)
    finally:
        over.set()
        child.end()


def _pulse(process, over):
    while not over.is_set():
        process.send_signal(signal.SIGSTOP)
        over.wait(ASLEEP_S)
        process.send_signal(signal.SIGCONT)
        over.wait(AWAKE_S)


CAPACITY_BYTES, FULL_AFTER = 4 * MIB, 8
# A tensor, and the number of the entry.
ENTRY_BYTES = MIB + 8


def consumer_killed(child):
    """The consumer of a full buffer is gone."""
    child.process.kill()


def consumer_stopped(child):
    """The consumer of a full buffer takes nothing any more."""
    child.process.send_signal(signal.SIGSTOP)


def full(stage, _rng, place=LOCAL):
    """Fills a buffer whose consumer fails, until an insert is refused; by how much that was late."""
    with LookupBuffer(CAPACITY_BYTES) as server:
        server.serve(place.near)
        child = place.start("consume_numbered", server.address)
        try:
            assert child.read() == "ready"
            with LookupBuffer.connect(server.address) as producer:
                _insert(producer, 0, TIMEOUT_S)
                assert child.read() == "0"
                stage(child)
                return statistics.mean(_fill(server, buffer) for buffer in (server, producer))
        finally:
            child.end()


def _fill(server, buffer):
    """Seconds by which the refusal was late. Once there is place, it goes on."""
    for _ in range(FULL_AFTER):
        stats = server.stats()
        has_place = stats.num_bytes + ENTRY_BYTES <= stats.capacity_bytes
        begun = time.monotonic()
        try:
            # An insert that is to be taken is not timed: on a busy machine its transfer may be slow.
            _insert(buffer, 1, TIMEOUT_S if has_place else DEADLINE_S)
        except CapacityError:
            late_s = time.monotonic() - begun - DEADLINE_S
            while server.drop_select(None, None, timeout=0)[0] is not None:
                pass
            _insert(buffer, 2, TIMEOUT_S)
            return max(0.0, late_s)
    message = "a full buffer took everything"
    raise AssertionError(message)


def _insert(buffer, number, within_s):
    tensor = np.full(MIB // 8, number)
    buffer.insert(np.array([number]), None, tensor, None, None, timeout=within_s)


@dataclass(frozen=True)
class Fault:
    """A fault of a peer, its stages, and the limits of its detection by the survivor: in most rounds, and in all."""

    strike: Callable
    stages: tuple
    most_s: float
    all_s: float
    needs_cable: bool = False


FAULTS = {
    "kill": Fault(kill, (*HARMLESS, *FATAL), 2.0, 2.0),
    "stop": Fault(stop, (*HARMLESS, *FATAL), 0.1, 1.0),
    "partition": Fault(partition, FATAL, 0.1, 1.0, needs_cable=True),
    "restart": Fault(restart, SERVERS, 2.0, 5.0),
    "garbage": Fault(garbage, (saying_garbage,), 1.0, 5.0),
    "slow": Fault(slow, (slow,), 5.0, 20.0),
    "full": Fault(full, (consumer_killed, consumer_stopped), 0.1, 1.0),
}


@dataclass(frozen=True)
class Holdings:
    """Resources of this process. Memory registered for RDMA is pinned; for other transports that costs nothing."""

    num_descriptors: int
    num_threads: int
    num_bytes: int
    num_pinned_bytes: int

    @classmethod
    def settled(cls, before):
        """Its resources once ending threads have ended, with their files."""
        give_up_at = time.monotonic() + 2
        while time.monotonic() < give_up_at:
            now = cls.now()
            if now.num_threads <= before.num_threads and now.num_descriptors <= before.num_descriptors + 1:
                return now
            time.sleep(0.01)
        return cls.now()

    @classmethod
    def now(cls):
        """Counts them."""
        gc.collect()
        counts = (len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task"))
        return cls(*counts, status_bytes("RssAnon"), status_bytes("VmPin", "VmLck"))
