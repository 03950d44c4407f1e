"""Outgoing messages of the scheduler role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.vllm.handoff.metadata import StepMetadata
from kvpipe.vllm.handoff.stats import KVPipeStats
from kvpipe.vllm.outbox import Outbox

if TYPE_CHECKING:
    from kvpipe import _kvpipe


class HandoffOutbox(Outbox[StepMetadata, KVPipeStats]):
    """Outgoing messages of the scheduler role: control commands and trace events besides those of each step.

    Args:
        trace: The trace of handoffs.

    Attributes:
        control: The control plane. It begins when the workers have: its peers compare fingerprints, which name what
            only the workers know.
        address: This engine's control port, as other instances reach it.
        local_address: The same, as its own workers reach it.
        trace: The trace of handoffs.
    """

    control: _kvpipe.Control

    def __init__(self, trace: _kvpipe.Trace) -> None:
        super().__init__(StepMetadata, KVPipeStats)
        self.trace = trace
        self.address = self.local_address = ""
