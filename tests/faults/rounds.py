"""One round: a peer at a stage, a fault, and how long the survivor took to know."""

import contextlib
import gc
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from kvpipe import PeerLostError, TransferTimeoutError
from tests.faults.stages import HARMLESS
from tests.peers import resident_bytes

KILL_WITHIN_S = 0.03
DEADLINE_S = 0.5


@dataclass(frozen=True)
class Bound:
    """How long an answer may take: after the loss of a peer, and after a deadline."""

    lost_s: float = 2.0
    late_s: float = 1.0


def kill(stage, rng):
    """Kills the peer at a random moment; seconds until the survivor knew, or had served another."""
    with stage() as situation:
        killed_at = situation.child.kill_after(rng.uniform(0, KILL_WITHIN_S))
        if stage in HARMLESS:
            begun = time.monotonic()
            situation.operate(None)
            return time.monotonic() - begun
        with contextlib.suppress(PeerLostError):
            while True:
                situation.operate(None)
        return time.monotonic() - killed_at[0]


def stop(stage, rng):
    """Stops the peer until after the survivor's deadline; seconds by which that was late, or to serve another."""
    with stage() as situation:
        time.sleep(rng.uniform(0, KILL_WITHIN_S))
        process = situation.child.process
        process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        if stage in HARMLESS:
            situation.operate(None)
        else:
            # What the peer has offered, a reader of its memory (CMA) can still get.
            with contextlib.suppress(TransferTimeoutError, PeerLostError):
                situation.operate(DEADLINE_S)
            begun += DEADLINE_S
        late_s = max(0.0, time.monotonic() - begun)
        process.send_signal(signal.SIGCONT)
        _goes_on(process)
        return late_s


def _goes_on(process):
    """A stopped peer that continues may fail with an error of ours, and by no signal."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None or process.poll() >= 0, f"ended by signal {-process.poll()}"


FAULTS = {"kill": kill, "stop": stop}


@dataclass(frozen=True)
class Holdings:
    """What this process holds."""

    num_descriptors: int
    num_threads: int
    num_bytes: int

    @classmethod
    def settled(cls, before):
        """What it holds once threads that were ending have ended."""
        give_up_at = time.monotonic() + 2
        while (now := cls.now()).num_threads > before.num_threads and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return now

    @classmethod
    def now(cls):
        """Counts them."""
        gc.collect()
        counts = (len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task"))
        return cls(*counts, resident_bytes())
