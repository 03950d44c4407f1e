"""Outcomes of a run."""

from dataclasses import dataclass
from typing import ClassVar

from bench.chaos import Counts


@dataclass
class Outcomes(Counts):
    """Each request is answered, aborted by its client, or lost with its engine, which was killed.

    From `full` to `stored_sampled` results of handoffs as their consumers count them: those of pairs, and those through
    the store, by their first token. One that is killed has reported them with its last answer.
    """

    VIOLATIONS: ClassVar = ("wrong", "late", "dead", "uncounted", "unrecovered", "leaked")

    requests: int = 0
    answered: int = 0
    aborted_by_client: int = 0
    lost_with_killed_engine: int = 0
    full: int = 0
    partial: int = 0
    local: int = 0
    missing: int = 0
    aborted: int = 0
    failed: int = 0
    stored_exact: int = 0
    stored_sampled: int = 0
    killed: int = 0
    stopped: int = 0
    cut: int = 0
    stalled: int = 0
    chunks_flipped: int = 0
    longest_request_ms: int = 0
    wrong: int = 0
    late: int = 0
    dead: int = 0
    uncounted: int = 0
    unrecovered: int = 0
    leaked: int = 0
