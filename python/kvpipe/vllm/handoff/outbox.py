"""Outgoing messages of the scheduler role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpipe.vllm.handoff.metadata import StepMetadata
from kvpipe.vllm.handoff.stats import KVPipeStats

if TYPE_CHECKING:
    from kvpipe import _kvpipe


@dataclass
class Outbox:
    """Outgoing messages of the scheduler role: control commands, trace events, and metadata of the next step.

    Attributes:
        control: The control plane. It begins when the workers have: its peers compare fingerprints, which name what
            only the workers know.
        address: This engine's control port, as other instances reach it.
        local_address: The same, as its own workers reach it.
        trace: The trace of handoffs.
        step: Metadata for the workers, sent before the next step's forward pass.
        stats: What metrics are to count after this step.
    """

    trace: _kvpipe.Trace
    control: _kvpipe.Control = field(init=False)
    address: str = ""
    local_address: str = ""
    step: StepMetadata = field(default_factory=StepMetadata)
    stats: KVPipeStats = field(default_factory=KVPipeStats)

    def take_step(self) -> StepMetadata:
        """Returns the metadata collected since the last call."""
        step, self.step = self.step, StepMetadata()
        return step

    def take_stats(self) -> KVPipeStats | None:
        """Returns what has been counted since the last call; `None` if nothing was."""
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, KVPipeStats()
        return stats
