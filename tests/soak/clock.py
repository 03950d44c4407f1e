"""Lateness of the machine itself, beside a late detection: threads wait for a CPU, and for Python."""

import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

TICK_S = 0.002
# Ticks that are remembered: more than one fault takes.
NUM_TICKS = 10_000


@dataclass(frozen=True)
class Tick:
    """Due time of a tick, its lateness, and the part of that spent waiting for a CPU."""

    due: float
    late_s: float
    queued_s: float


@dataclass(frozen=True)
class Waits:
    """Waiting times of a thread with next to nothing to do: the longest, all together, and of those for a CPU."""

    longest_s: float
    total_s: float
    queued_s: float

    def __str__(self):
        longest, total, queued = (f"{each * 1e3:.0f}" for each in (self.longest_s, self.total_s, self.queued_s))
        return f"waited {total} ms ({longest} at once, {queued} for a CPU)"


class Clock:
    """A thread that only notes its own late wake-ups. Other threads wait as long."""

    def __init__(self):
        self._ticks = deque(maxlen=NUM_TICKS)
        threading.Thread(target=self._tick, name="clock", daemon=True).start()

    def waits(self, since, until):
        """Its waiting times in this period. Work of several threads waits more often than one does."""
        ticks = [tick for tick in tuple(self._ticks) if tick.due <= until and tick.due + tick.late_s >= since]
        late = [tick.late_s for tick in ticks]
        return Waits(max(late, default=0.0), sum(late), sum(tick.queued_s for tick in ticks))

    def _tick(self):
        schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        queued_s = _queued_s(schedstat)
        due = time.monotonic() + TICK_S
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            woken = time.monotonic()
            before, queued_s = queued_s, _queued_s(schedstat)
            self._ticks.append(Tick(due, woken - due, queued_s - before))
            # The time until here, which reads a file, counts as late, too.
            due = woken + TICK_S


def _queued_s(schedstat):
    """Seconds that a thread has been ready to run without a CPU."""
    return int(schedstat.read_text().split()[1]) / 1e9
