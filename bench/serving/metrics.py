"""Figures of a run: what users call TTFT, ITL, TPOT and goodput. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.serving.generator import Outcome

Figures = dict[str, float]
_QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True)
class Slo:
    """What a good request meets: a limit of its TTFT, and one of its mean time of a token after the first (TPOT)."""

    ttft_ms: float
    itl_ms: float

    def is_met(self, outcome: Outcome) -> bool:
        """True if a request was answered in full, and within both limits."""
        return self._is_begun_in_time(outcome) and 1e3 * (outcome.tpot_s or 0.0) <= self.itl_ms

    def is_met_by_each_gap(self, outcome: Outcome) -> bool:
        """The same with the limit for each gap between tokens."""
        return self._is_begun_in_time(outcome) and 1e3 * max(outcome.gaps_s, default=0.0) <= self.itl_ms

    def _is_begun_in_time(self, outcome: Outcome) -> bool:
        return not outcome.error and outcome.ttft_s is not None and 1e3 * outcome.ttft_s <= self.ttft_ms


def quantiles(name: str, values_s: Sequence[float]) -> Figures:
    """`name_p50_ms`, p90, p99 and max; nothing if there are no values."""
    if not values_s:
        return {}
    return {f"{name}_{key}_ms": 1e3 * float(np.percentile(values_s, share)) for key, share in _QUANTILES.items()}


def gaps_beside_prompts(begun: Sequence[Outcome]) -> list[float]:
    """Later gaps of streams, of those during which another request waited for its first text."""
    waits_s = [(outcome.request.at_s, outcome.chunks_s[0]) for outcome in begun]
    found = []
    for index, outcome in enumerate(begun):
        others = [wait for place, wait in enumerate(waits_s) if place != index]
        for from_s, to_s in pairwise(outcome.chunks_s[1:]):
            if any(due_s < to_s and first_s > from_s for due_s, first_s in others):
                found.append(to_s - from_s)
    return found


def figures(outcomes: Sequence[Outcome], rate: float, slo: Slo | None, cpu_s: Mapping[str, float]) -> Figures:
    """Figures of one subject at one rate in one round.

    Args:
        outcomes: All requests.
        rate: Requests/s that were offered; infinite when all came at once, 0 when they came one after the other.
        slo: Limits for goodput; without them there is none.
        cpu_s: CPU by part.
    """
    answered = [outcome for outcome in outcomes if not outcome.error]
    begun = [outcome for outcome in outcomes if outcome.chunks_s]
    ends_s = [outcome.end_s for outcome in outcomes]
    duration_s = max(ends_s) if rate else sum(ends_s)
    found: Figures = {
        "num_requests": len(outcomes),
        "num_lost": sum(1 for outcome in outcomes if outcome.error and not outcome.chunks_s),
        "num_cut": sum(1 for outcome in outcomes if outcome.error and outcome.chunks_s),
        "duration_s": duration_s,
        "requests_per_s": len(answered) / duration_s,
        "tokens_per_s": sum(outcome.num_output for outcome in answered) / duration_s,
        **quantiles("ttft", [outcome.ttft_s for outcome in begun if outcome.ttft_s is not None]),
        **quantiles("second", [gap for outcome in begun for gap in outcome.gaps_s[:1]]),
        **quantiles("itl", [gap for outcome in begun for gap in outcome.gaps_s]),
        **quantiles("later", [gap for outcome in begun for gap in outcome.gaps_s[1:]]),
        **quantiles("beside", gaps_beside_prompts(begun)),
        **quantiles("tpot", [outcome.tpot_s for outcome in answered if outcome.tpot_s is not None]),
        **quantiles("e2e", [outcome.end_s - outcome.request.at_s for outcome in answered]),
        **quantiles("lag", [outcome.sent_s - outcome.request.at_s for outcome in outcomes]),
        **{f"cpu {part}": seconds for part, seconds in cpu_s.items()},
    }
    if slo is not None:
        shares = (sum(map(is_met, outcomes)) / len(outcomes) for is_met in (slo.is_met, slo.is_met_by_each_gap))
        found["good_share"], found["good_share_each_gap"] = shares
        found["goodput"] = found["good_share"] * rate
    return found


def medians(rounds: Iterable[Figures]) -> Figures:
    """The median of each figure over the rounds that have it."""
    rounds = list(rounds)
    names = dict.fromkeys(name for found in rounds for name in found)
    return {name: median(found[name] for found in rounds if name in found) for name in names}
