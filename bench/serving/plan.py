"""How many requests each rate gets, and how long that takes. No clock, no input, no output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Fewer requests say nothing about a tail.
LEAST_REQUESTS = 8
# From SIGCONT to the first arrival: time to settle, a short request for each instance, and vLLM's spinning readers.
BEFORE_CELL_S = 4.0
# kvpipe and chunks of 128 tokens are saturated before the baseline is; what waits then is answered after the window.
_SATURATED_AT = 0.6
_MOST_WINDOW_S = 7200.0


@dataclass(frozen=True)
class Pace:
    """What is known of the machine's speed.

    Attributes:
        saturation: Requests/s of the baseline when it is saturated.
        answer_s: Seconds of a request that is alone.
    """

    saturation: float
    answer_s: float

    def cell_s(self, rate: float, num_requests: int) -> float:
        """Seconds of one subject at one rate in one round: window, queue and the last answers."""
        behind = max(1.0, rate / (_SATURATED_AT * self.saturation))
        return BEFORE_CELL_S + behind * num_requests / rate + 2 * self.answer_s


@dataclass(frozen=True)
class Offer:
    """One rate.

    Attributes:
        rate: Requests/s.
        num_requests: Requests of each subject in each round.
    """

    rate: float
    num_requests: int


def total_s(offers: Sequence[Offer], num_cells: int, pace: Pace) -> float:
    """Seconds of all rates; `num_cells` is subjects times rounds."""
    return num_cells * sum(pace.cell_s(offer.rate, offer.num_requests) for offer in offers)


def offers(rates: Sequence[float], num_cells: int, budget_s: float, pace: Pace) -> list[Offer]:
    """Gives each rate the same window, the longest that fits into a time, and at least `LEAST_REQUESTS`."""
    low, high = 0.0, _MOST_WINDOW_S
    while high - low > 1:
        middle = (low + high) / 2
        fits = total_s(_with_window(rates, middle), num_cells, pace) <= budget_s
        low, high = (middle, high) if fits else (low, middle)
    return _with_window(rates, low)


def _with_window(rates: Sequence[float], window_s: float) -> list[Offer]:
    return [Offer(rate, max(LEAST_REQUESTS, math.floor(rate * window_s))) for rate in rates]
