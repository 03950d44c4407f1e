"""Decides whether a load is worth it: it has to be faster than computing the same tokens, both as measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Weight of a load relative to the next one.
_KEPT = 0.8
# Every so often a load is tried though it was slow: the store, or the network, may have recovered.
PROBE_INTERVAL_S = 15.0
# A load gets this long at least, so that a pause of the machine does not end every load of a short prompt.
SHORTEST_LIMIT_S = 0.25


class Reason(StrEnum):
    """Reason for loading or computing stored KV."""

    ALWAYS = "always"
    UNMEASURED = "unmeasured"
    FASTER = "faster"
    PROBE = "probe"
    SLOWER = "slower"


@dataclass(frozen=True)
class Decision:
    """Decision to load or to compute stored chunks.

    Attributes:
        is_load: True if they are loaded.
        reason: Reason of the decision.
        limit_s: Seconds that the load may take.
    """

    is_load: bool
    reason: Reason
    limit_s: float


class LoadClock:
    """Measures the duration of loads, as a time for each load and a time for each of its chunks."""

    def __init__(self) -> None:
        # Weighted sums over loads: 1, chunks, seconds, chunks squared, chunks times seconds.
        self._sums = [0.0] * 5

    def loaded(self, num_chunks: int, elapsed_s: float) -> None:
        """Adds a load that has ended. One that moved nothing counts as one chunk."""
        chunks = float(max(1, num_chunks))
        terms = (1.0, chunks, elapsed_s, chunks * chunks, chunks * elapsed_s)
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, terms, strict=True)]

    def predict_s(self, num_chunks: int) -> float | None:
        """Predicts how long a load takes; `None` before the first one was measured."""
        weight, chunks, seconds, squares, products = self._sums
        if not weight:
            return None
        spread = weight * squares - chunks * chunks
        # Loads of one size say nothing of what a chunk alone costs.
        if spread < 0.01 * squares:
            return seconds / chunks * num_chunks
        each_s = min(seconds / chunks, max(0.0, (weight * products - chunks * seconds) / spread))
        return (seconds - each_s * chunks) / weight + each_s * num_chunks


class BreakEven:
    """Decides about loads. Times are seconds of one monotonic clock.

    Args:
        is_always: Loads whatever was measured.
        timeout_s: The longest time that a load may take.
    """

    def __init__(self, *, is_always: bool, timeout_s: float) -> None:
        self._is_always = is_always
        self._timeout_s = timeout_s
        self._clock = LoadClock()
        self._tried_s = float("-inf")

    def decide(self, num_tokens: int, num_chunks: int, tokens_per_s: float | None, now_s: float) -> Decision:
        """Decides about the chunks of a request.

        Args:
            num_tokens: Tokens that need not be computed after the load.
            num_chunks: Chunks that are read for it.
            tokens_per_s: The engine's measured speed of prefill; `None` if it is not known.
            now_s: The current time.
        """
        if self._is_always:
            return Decision(is_load=True, reason=Reason.ALWAYS, limit_s=self._timeout_s)
        if tokens_per_s is None:
            return self._load(Reason.UNMEASURED, self._timeout_s, now_s)
        compute_s = num_tokens / tokens_per_s
        limit_s = min(self._timeout_s, max(SHORTEST_LIMIT_S, compute_s))
        load_s = self._clock.predict_s(num_chunks)
        if load_s is None:
            return self._load(Reason.UNMEASURED, limit_s, now_s)
        if load_s <= compute_s:
            return self._load(Reason.FASTER, limit_s, now_s)
        if now_s - self._tried_s >= PROBE_INTERVAL_S:
            return self._load(Reason.PROBE, limit_s, now_s)
        return Decision(is_load=False, reason=Reason.SLOWER, limit_s=0.0)

    def _load(self, reason: Reason, limit_s: float, now_s: float) -> Decision:
        self._tried_s = now_s
        return Decision(is_load=True, reason=reason, limit_s=limit_s)

    def loaded(self, num_chunks: int, elapsed_s: float) -> None:
        """Adds a load that has ended, with the chunks that it loaded."""
        self._clock.loaded(num_chunks, elapsed_s)
