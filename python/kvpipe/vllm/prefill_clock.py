"""Predicts the end of a prefill from its remaining tokens and the engine's measured speed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Weight of a step relative to the next one: after four steps, two fifths remain.
_KEPT = 0.8
# A step that appears faster than this multiple of the known speed was not measured from its start.
_MOST_SPEED_UP = 2.0
# Steps that vLLM can have under way. With more, it does not report their ends.
_MAX_UNDER_WAY = 8


@dataclass(slots=True)
class _Step:
    num_tokens: int
    scheduled_at_s: float


class PrefillClock:
    """Measures the speed of one engine's steps, and predicts from it. Times are seconds of one monotonic clock.

    Steps end in the order of their scheduling. Asynchronous scheduling schedules the next step before the end.
    """

    def __init__(self) -> None:
        self._under_way: deque[_Step] = deque(maxlen=_MAX_UNDER_WAY)
        self._ended_at_s = float("-inf")
        self._num_tokens = 0.0
        self._elapsed_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Measured speed; `None` before a step of more than one token has been measured."""
        return self._num_tokens / self._elapsed_s if self._elapsed_s > 0 else None

    def scheduled(self, num_tokens: int, now_s: float) -> None:
        """Adds a step of `num_tokens`, of all requests together. It begins when the steps before it have ended."""
        if num_tokens > 0:
            self._under_way.append(_Step(num_tokens, now_s))

    def ended(self, now_s: float) -> None:
        """Notes that the oldest step under way has ended. Does nothing without one."""
        if not self._under_way:
            return
        step = self._under_way.popleft()
        elapsed_s = now_s - max(step.scheduled_at_s, self._ended_at_s)
        self._ended_at_s = now_s
        # A step of a single token is a decode step, and does not measure prefill.
        if step.num_tokens > 1 and elapsed_s > 0:
            self._measured(step.num_tokens, elapsed_s)

    def _measured(self, num_tokens: int, elapsed_s: float) -> None:
        if (known := self.tokens_per_s) is not None:
            elapsed_s = max(elapsed_s, num_tokens / (known * _MOST_SPEED_UP))
        self._num_tokens = self._num_tokens * _KEPT + num_tokens
        self._elapsed_s = self._elapsed_s * _KEPT + elapsed_s

    def remaining_s(self, num_left: int, num_in_step: int, now_s: float) -> float | None:
        """Predicts how long a prefill takes that is part of the step scheduled last.

        Args:
            num_left: Prompt tokens that were not computed before that step; 1 or more.
            num_in_step: Prompt tokens that the step computes; 1 or more.
            now_s: The current time.

        Returns:
            Seconds, 0 or more; `None` without a measured speed or a step.
        """
        speed = self.tokens_per_s
        if speed is None or not self._under_way:
            return None
        num_share = self._under_way[-1].num_tokens / num_in_step
        num_ahead = sum(step.num_tokens for step in self._under_way) - self._under_way[-1].num_tokens
        begun_s = now_s - max(self._under_way[0].scheduled_at_s, self._ended_at_s)
        # Requests share steps; later steps are assumed to give this request the same share.
        return max(0.0, (num_ahead + num_left * num_share) / speed - begun_s)

    def beyond_s(self, num_left: int, num_in_step: int) -> float | None:
        """Predicts how long such a prefill takes beyond the step scheduled last.

        Returns:
            Seconds, 0 if it ends with that step; `None` if it does not and no speed is known, or without a step.
        """
        if num_left <= num_in_step:
            return 0.0
        speed = self.tokens_per_s
        if speed is None or not self._under_way:
            return None
        return (num_left - num_in_step) * (self._under_way[-1].num_tokens / num_in_step) / speed
