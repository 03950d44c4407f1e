"""A circuit breaker: a store that fails again and again is left alone, and tried again from time to time."""

from __future__ import annotations

NUM_FAILURES = 3
FIRST_OPEN_S = 2.0
LONGEST_OPEN_S = 60.0


class Breaker:
    """Decides whether a store is used. Times are seconds of one monotonic clock.

    `closed`: it is used. `open`: it is not, after `NUM_FAILURES` in a row. `half-open`: one probe is under way, and its
    result decides; every failed probe doubles the time until the next one.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._open_s = FIRST_OPEN_S
        self._until_s: float | None = None
        self._is_probing = False

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        if self._until_s is None:
            return "closed"
        return "half-open" if self._is_probing else "open"

    def allows(self, now_s: float) -> bool:
        """True if the store may be used now. In the open state the first call after its end is the probe."""
        if self._until_s is None:
            return True
        if now_s < self._until_s:
            return False
        # A probe whose result never comes does not keep the breaker open for ever.
        self._is_probing, self._until_s = True, now_s + self._open_s
        return True

    def succeeded(self) -> None:
        """Notes that the store did what it was asked."""
        self._num_failures, self._open_s = 0, FIRST_OPEN_S
        self._until_s, self._is_probing = None, False

    def failed(self, now_s: float) -> None:
        """Notes that the store failed, or did not answer in time."""
        self._num_failures += 1
        if self._is_probing:
            self._open_s = min(LONGEST_OPEN_S, 2 * self._open_s)
        if self._is_probing or self._num_failures >= NUM_FAILURES:
            self._is_probing, self._until_s = False, now_s + self._open_s
