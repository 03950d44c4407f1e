"""When will a prefill end? From the tokens still to compute and the speed that this engine has shown."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# What a step weighs against the next one: four steps later, two fifths.
_KEPT = 0.8
# A step that seems faster than this many times the known speed was not measured from its beginning.
_MOST_SPEED_UP = 2.0
# Steps that vLLM may have under way. More than these: it reports no ends.
_MAX_UNDER_WAY = 8


@dataclass(slots=True)
class _Step:
    num_tokens: int
    scheduled_at_s: float


class PrefillClock:
    """The speed of one engine's steps, and what follows from it. Times are seconds of one monotonic clock.

    Steps end in the order in which they were scheduled; with asynchronous scheduling the next one is scheduled before.
    """

    def __init__(self) -> None:
        self._under_way: deque[_Step] = deque(maxlen=_MAX_UNDER_WAY)
        self._ended_at_s = float("-inf")
        self._num_tokens = 0.0
        self._elapsed_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The measured speed; `None` before a step of more than one token has been measured."""
        return self._num_tokens / self._elapsed_s if self._elapsed_s > 0 else None

    def scheduled(self, num_tokens: int, now_s: float) -> None:
        """A step that computes so many tokens, of all requests together, begins when those before it have ended."""
        if num_tokens > 0:
            self._under_way.append(_Step(num_tokens, now_s))

    def ended(self, now_s: float) -> None:
        """The oldest step that is under way has ended; without one this says nothing."""
        if not self._under_way:
            return
        step = self._under_way.popleft()
        elapsed_s = now_s - max(step.scheduled_at_s, self._ended_at_s)
        self._ended_at_s = now_s
        # A single token is a decode step, whose time says nothing of a prefill.
        if step.num_tokens > 1 and elapsed_s > 0:
            self._measured(step.num_tokens, elapsed_s)

    def _measured(self, num_tokens: int, elapsed_s: float) -> None:
        if (known := self.tokens_per_s) is not None:
            elapsed_s = max(elapsed_s, num_tokens / (known * _MOST_SPEED_UP))
        self._num_tokens = self._num_tokens * _KEPT + num_tokens
        self._elapsed_s = self._elapsed_s * _KEPT + elapsed_s

    def remaining_s(self, num_left: int, num_in_step: int, now_s: float) -> float | None:
        """How long until a prefill ends that takes part in the step scheduled last.

        Args:
            num_left: its prompt tokens that were not computed before that step; 1 or more.
            num_in_step: those that this step computes; 1 or more.
            now_s: the present.

        Returns:
            Seconds, 0 or more; `None` without a measured speed or a step.
        """
        speed = self.tokens_per_s
        if speed is None or not self._under_way:
            return None
        num_share = self._under_way[-1].num_tokens / num_in_step
        num_ahead = sum(step.num_tokens for step in self._under_way) - self._under_way[-1].num_tokens
        begun_s = now_s - max(self._under_way[0].scheduled_at_s, self._ended_at_s)
        # Others share the steps: later ones are taken to give it what this one does.
        return max(0.0, (num_ahead + num_left * num_share) / speed - begun_s)

    def beyond_s(self, num_left: int, num_in_step: int) -> float | None:
        """How long such a prefill takes beyond the step scheduled last.

        Returns:
            Seconds, 0 if it ends with that step; `None` if it does not and no speed is known, or without a step.
        """
        if num_left <= num_in_step:
            return 0.0
        speed = self.tokens_per_s
        if speed is None or not self._under_way:
            return None
        return (num_left - num_in_step) * (self._under_way[-1].num_tokens / num_in_step) / speed
