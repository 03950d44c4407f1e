"""What the worker role tells a trace of its steps; the rest of a handoff's life is told where it happens, in Rust."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe.connector.metadata import StepMetadata

if TYPE_CHECKING:
    from kvpipe.connector.config import ConnectorConfig


class WorkerTrace:
    """Layers that prefill computes and the first step of decode, as spans; costs nothing without a file.

    Attributes:
        lines: Where they go.
    """

    def __init__(self, config: ConnectorConfig, process: str) -> None:
        self.lines = _kvpipe.Trace(config.trace, process)
        self._step = StepMetadata()
        self._began_s = self._since_s = 0.0
        self._num_layers = 0

    def begin_step(self, step: StepMetadata) -> None:
        """Before the forward pass."""
        if self.lines.is_on:
            self._step = step
            self._began_s = self._since_s = time.monotonic()
            self._num_layers = 0

    def layers_computed(self) -> None:
        """All since the last call, for each handoff of this step."""
        if self.lines.is_on:
            for handoff, _, first, block_ids in self._step.ready:
                facts = {"layer": self._num_layers, "first": first, "blocks": len(block_ids)}
                self.lines.span("computed", handoff, self._since_s, **facts)
            self._since_s = time.monotonic()
            self._num_layers += 1

    def end_forward(self) -> None:
        """After the forward pass."""
        for handoff in self._step.first_tokens:
            self.lines.span("first step", handoff, self._began_s)
        self._step = StepMetadata()
