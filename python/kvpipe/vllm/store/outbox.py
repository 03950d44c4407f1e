"""Outgoing messages of the scheduler role."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpipe.vllm.store.metadata import StoreStepMetadata
from kvpipe.vllm.store.stats import KVStoreStats


@dataclass
class StoreOutbox:
    """Outgoing messages of the scheduler role.

    Attributes:
        step: Metadata for the workers, sent before the next step's forward pass.
        stats: What metrics are to count after this step.
    """

    step: StoreStepMetadata = field(default_factory=StoreStepMetadata)
    stats: KVStoreStats = field(default_factory=KVStoreStats)

    def take_step(self) -> StoreStepMetadata:
        """Returns the metadata collected since the last call."""
        step, self.step = self.step, StoreStepMetadata()
        return step

    def take_stats(self) -> KVStoreStats | None:
        """Returns what has been counted since the last call; `None` if nothing was."""
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, KVStoreStats()
        return stats
