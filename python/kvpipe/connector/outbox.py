"""Where the scheduler role says things."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpipe.connector.metadata import StepMetadata

if TYPE_CHECKING:
    from kvpipe import _kvpipe


@dataclass
class Outbox:
    """To other engines, to the trace, and to its own workers with the next step.

    Attributes:
        control: The control plane.
        trace: The life of handoffs.
        step: What the workers are told before the next step's forward pass.
    """

    control: _kvpipe.Control
    trace: _kvpipe.Trace
    step: StepMetadata = field(default_factory=StepMetadata)

    def take_step(self) -> StepMetadata:
        """What has been said to the workers since the last call."""
        step, self.step = self.step, StepMetadata()
        return step
