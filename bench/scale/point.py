"""One sample of one point: a process of its own, so that nothing of another point is in it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.processes import until
from kvpipe.exceptions import TransferTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

_TASKS, _DESCRIPTORS = Path("/proc/self/task"), Path("/proc/self/fd")
# Nothing that is waited for here takes as long, also on a busy machine.
_WITHIN_S = 60.0
_LOOK_EVERY_S = 50e-6
# For the reactor to notice what it was asked, before it counts as asleep again.
_SETTLE_S = 150e-6


@dataclass(frozen=True)
class Point:
    """How much is under way beside the operation that is measured.

    Attributes:
        num_peers: Sessions of the measured side.
        num_loads: Handoffs under way on it, spread over the peers.
    """

    num_peers: int
    num_loads: int

    @property
    def label(self) -> str:
        """Label of the point, such as `16 x 100`."""
        return f"{self.num_peers} x {self.num_loads}"


class ReactorThread:
    """The thread of one reactor: what it alone costs, whatever runs beside it.

    Callers of `wait` would run the reactor themselves, so that what is measured is waited for by looking at it.
    """

    def __init__(self, thread_id: int) -> None:
        # Linux's clock of a thread: its id inverted, CPUCLOCK_PERTHREAD_MASK (4) and CPUCLOCK_SCHED (2)
        self._clock = (~thread_id << 3) | 6
        self._stat = _TASKS / str(thread_id) / "stat"

    @classmethod
    def made_by(cls, make: Callable[[], None]) -> ReactorThread:
        """The one thread that `make` starts."""
        before = set(_TASKS.iterdir())
        make()
        (task,) = set(_TASKS.iterdir()) - before
        return cls(int(task.name))

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used."""
        return time.clock_gettime(self._clock)

    def is_asleep(self) -> bool:
        """True if it waits."""
        return self._stat.read_text().rpartition(")")[2].split()[0] == "S"

    def settle(self) -> None:
        """Waits until it has done what there is to do."""
        time.sleep(_SETTLE_S)
        wait(self.is_asleep)

    def cost_us(self, act: Callable[[], object], is_done: Callable[[], bool] | None = None) -> float:
        """Microseconds of CPU that an operation takes of it, until it is done and the thread sleeps again."""
        self.settle()
        before = self.cpu_s()
        act()
        wait(is_done or (lambda: self.cpu_s() > before))
        self.settle()
        return 1e6 * (self.cpu_s() - before)


def wait(is_so: Callable[[], bool]) -> None:
    """Waits until something is so, without running a reactor.

    Raises:
        TransferTimeoutError: It takes too long.
    """
    if not until(is_so, _WITHIN_S, _LOOK_EVERY_S):
        message = f"nothing happened within {_WITHIN_S:.0f} s"
        raise TransferTimeoutError(message)


def num_descriptors() -> int:
    """Descriptors of this process."""
    return sum(1 for _ in _DESCRIPTORS.iterdir())


def threads() -> set[str]:
    """The threads of this process."""
    return {task.name for task in _TASKS.iterdir()}
