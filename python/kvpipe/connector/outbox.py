"""Outgoing messages of the scheduler role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpipe.connector.metadata import StepMetadata

if TYPE_CHECKING:
    from kvpipe import _kvpipe


@dataclass
class Outbox:
    """Outgoing messages of the scheduler role: control commands, trace events, and metadata of the next step.

    Attributes:
        control: The control plane. It begins when the workers have: its peers compare fingerprints, which name what
            only the workers know.
        trace: The trace of handoffs.
        step: Metadata for the workers, sent before the next step's forward pass.
    """

    trace: _kvpipe.Trace
    control: _kvpipe.Control = field(init=False)
    step: StepMetadata = field(default_factory=StepMetadata)

    def take_step(self) -> StepMetadata:
        """Returns the metadata collected since the last call."""
        step, self.step = self.step, StepMetadata()
        return step
