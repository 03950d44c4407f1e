"""Outgoing messages of a connector's scheduler role."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class _Stats(Protocol):
    def is_empty(self) -> bool: ...


Step = TypeVar("Step")
Stats = TypeVar("Stats", bound=_Stats)


class Outbox(Generic[Step, Stats]):
    """Outgoing messages of the scheduler role, which vLLM drains once a step.

    Args:
        step_type: Class of the metadata.
        stats_type: Class of the counts.

    Attributes:
        step: Metadata for the workers, sent before the next step's forward pass.
        stats: Counts for metrics after this step.
    """

    def __init__(self, step_type: type[Step], stats_type: type[Stats]) -> None:
        self._step_type, self._stats_type = step_type, stats_type
        self.step, self.stats = step_type(), stats_type()

    def drain_step(self) -> Step:
        """Returns the metadata collected since the last call."""
        step, self.step = self.step, self._step_type()
        return step

    def drain_stats(self) -> Stats | None:
        """Returns the counts since the last call; `None` if there are none."""
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, self._stats_type()
        return stats
