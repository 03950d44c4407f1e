"""Predicts the end of the current step from the layers that are done.

The speed of earlier steps predicts little where a prompt is one step: on a shared machine the same step takes 0.7 to
1.3 s, but its last layers take as long as the layers before them. This holds on CPUs, where vLLM calls a layer's hook
after computing the layer.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe.config import resolve_token
from kvpipe.exceptions import KVPipeError

if TYPE_CHECKING:
    from kvpipe.vllm.handoff.metadata import StepMetadata

logger = logging.getLogger("vllm.kvpipe.worker")

# Layers in the median, so that one delayed layer does not count.
_NUM_RECENT = 3
# A prediction is reported again when it moves by more than this and by more than a tenth of the time left. Each report
# takes CPU from the forward pass, and there is time for a better one. A steady prediction is repeated at half of the
# time left, because the first report may have been late.
_APART_S = 0.005
_SHARE = 0.1
_TIMEOUT_S = 5.0
_NEVER_S = float("-inf")


class StepPace:
    """Remaining time of a step with `num_layers` layers, which begins now. Times are seconds of one monotonic clock."""

    def __init__(self, num_layers: int, began_s: float) -> None:
        self._num_layers = num_layers
        self._began_s = began_s
        self._saved_at_s: list[float] = []

    def layer_saved(self, now_s: float) -> float | None:
        """Notes that one more layer's attention is done.

        Layers are timed from attention to attention. What is left after the last attention is a layer less the first
        layer's part up to its attention. Logits and sampling are not counted: they are of one token a request.

        Returns:
            Seconds until the end of the step, 0 or more; `None` before enough layers are done.
        """
        self._saved_at_s.append(now_s)
        recent = self._saved_at_s[-_NUM_RECENT - 1 :]
        if len(recent) <= _NUM_RECENT:
            return None
        pace_s = median(later - earlier for earlier, later in pairwise(recent))
        first_s = self._saved_at_s[0] - self._began_s
        return max(0, self._num_layers - len(self._saved_at_s)) * pace_s + max(0.0, pace_s - first_s)


class Progress:
    """Reports to the control port of its own engine when prefills will end.

    Args:
        engine_id: Id of its engine.
        is_silent: True if another rank reports.
    """

    def __init__(self, engine_id: str, *, is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._engine_id = engine_id
        self._client: _kvpipe.Control | None = None
        self._step: StepMetadata | None = None
        self._pace = StepPace(0, 0.0)
        self._reported_s = _NEVER_S
        self._reported_left_s = 0.0

    def begin_step(self, step: StepMetadata, num_layers: int, now_s: float) -> None:
        """Starts a step, before its forward pass."""
        self._step = None if self._is_silent or not step.progress else step
        self._pace = StepPace(num_layers, now_s)
        self._reported_s = _NEVER_S

    def layer_saved(self, now_s: float) -> None:
        """Updates the prediction after a layer's attention."""
        if self._step is None:
            return
        left_s = self._pace.layer_saved(now_s)
        if left_s is None or not self._has_changed(now_s + left_s, left_s):
            return
        self._reported_s, self._reported_left_s = now_s + left_s, left_s
        try:
            self._report(self._step, left_s)
        except KVPipeError as error:
            # Must not fail the forward pass: without a prediction a request is only slower.
            logger.warning("progress.end ends are predicted by steps from now on, not by layers: %s", error)
            self._is_silent, self._step = True, None

    def _has_changed(self, ends_at_s: float, left_s: float) -> bool:
        has_moved = abs(ends_at_s - self._reported_s) > max(_APART_S, _SHARE * left_s)
        return has_moved or left_s <= self._reported_left_s / 2

    def _report(self, step: StepMetadata, left_s: float) -> None:
        if self._client is None:
            # Made on demand, so that an instance that only decodes has no thread for it.
            self._client = _kvpipe.Control(None, resolve_token(), self._engine_id)
        for rest in step.progress:
            self._client.report_progress(step.control, rest.handoff, left_s + rest.beyond_s, _TIMEOUT_S)

    def close(self) -> None:
        """Closes the session with the control port."""
        if self._client is not None:
            self._client.close()
