"""Measurements of each request, and the phases of its hand-over from the trace."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from bench.results import Row, summarize, summarize_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.trace import Event

# Time before P's first token in which D may work; earlier, its CPU time delays P.
_LAST_S = 0.2
PHASES = ("asked", "admitted", "moved", "resumed")


@dataclass(frozen=True)
class Exposed:
    """The hand-over: time from P's first token to D's first forward pass with the KV, by phase.

    Attributes:
        total_ms: The whole time.
        phases_ms: Until D's scheduler has the request; until its worker begins to load; until all KV is verified and
            the token has arrived; until the forward pass. A phase that ended before P's token is 0.
        last_block_ms: From P's token to the arrival of the last block, 0 if it was earlier; `None` without a trace.
    """

    total_ms: float
    phases_ms: tuple[float, ...]
    last_block_ms: float | None


def exposed(events: Sequence[Event]) -> Exposed | None:
    """Computes the hand-over from the events of a handoff; `None` if D's first step did not use P's KV."""
    ends = {event.name: event.ended_s for event in events}
    admitted = [event.process for event in events if event.name == "admitted"]
    steps = [event.began_s for event in events if event.name == "first step"]
    if not (admitted and steps and {"sampled", "load", "loaded"} <= ends.keys()):
        return None
    asked = next(event.ended_s for event in events if (event.name, event.process) == ("queued", admitted[0]))
    phases_ms, until_s = [], ends["sampled"]
    for mark_s in (asked, ends["load"], _both_here_s(ends), steps[0]):
        phases_ms.append(1e3 * max(0.0, mark_s - until_s))
        until_s = max(until_s, mark_s)
    last = 1e3 * max(0.0, ends["arrived"] - ends["sampled"]) if "arrived" in ends else None
    return Exposed(1e3 * (until_s - ends["sampled"]), tuple(phases_ms), last)


def _both_here_s(ends: dict[str, float]) -> float:
    """When D had blocks and token; for NIXL, which moves no token, the blocks."""
    if "verified" in ends and "finished" in ends:
        return max(ends["verified"], ends["finished"])
    return ends["loaded"]


@dataclass(frozen=True)
class Sample:
    """One request.

    Attributes:
        subject: The subject that answered it.
        num_tokens: Length of its prompt.
        first_ms: From the request to the first token.
        second_ms: From the request to the second one.
        cpu_s: CPU of the vLLM instances from the request to the last token.
        decode_share: D's CPU time from the request to 200 ms before P's first token, in per cent; `None` if that time
            was too short, or there is no D.
        exposed: The hand-over; `None` if there was none, or KV was missing.
        handoff: Id of the handoff; empty without one.
    """

    subject: str
    num_tokens: int
    first_ms: float
    second_ms: float
    cpu_s: float
    decode_share: float | None
    exposed: Exposed | None
    handoff: str


def prefill_span(asked_s: float, events: Sequence[Event]) -> tuple[float, float]:
    """The time from the request to 200 ms before P's first token."""
    sampled = [event.ended_s for event in events if event.name == "sampled"]
    return asked_s, (sampled[0] if sampled else asked_s) - _LAST_S


def rows_of(samples: Sequence[Sample], kv_bytes_per_token: int) -> list[Row]:
    """Returns a row for each subject and length.

    Its figures are:
        first_ms: To the first token.
        ratio: Its median over that of the undivided instance.
        second_ms: To the second token.
        exposed_ms: The hand-over.
        phases_ms: Medians of its phases.
        last_block_ms: From P's sampling to the last block.
        decode_share: D's CPU time while P computes.
        cpu_s_per_gib: CPU time of both, minus that of the undivided instance, for each GiB of KV.
        num_full: Handoffs with all KV from P.
        num_handoffs: All handoffs.
    """
    keys = dict.fromkeys((sample.num_tokens, sample.subject) for sample in samples)
    return [_row(num_tokens, name, samples, kv_bytes_per_token) for num_tokens, name in keys]


def _row(num_tokens: int, name: str, samples: Sequence[Sample], kv_bytes_per_token: int) -> Row:
    here = [sample for sample in samples if sample.num_tokens == num_tokens]
    own = [sample for sample in here if sample.subject == name]
    base = [sample for sample in here if sample.subject == "undivided"]
    handed = [sample for sample in own if sample.handoff]
    handovers = [sample.exposed for sample in handed if sample.exposed]
    first = summarize([sample.first_ms for sample in own])
    cpu_s = None
    if base and handed:
        extra_s = median(s.cpu_s for s in handed) - median(s.cpu_s for s in base)
        cpu_s = extra_s / (num_tokens * kv_bytes_per_token / (1 << 30))
    return Row(
        {"subject": name, "num_tokens": num_tokens},
        {
            "first_ms": first,
            "ratio": first.median / median(s.first_ms for s in base) if base else None,
            "second_ms": summarize([sample.second_ms for sample in own]),
            "exposed_ms": summarize_known(it.total_ms for it in handovers),
            "phases_ms": [median(column) for column in zip(*(it.phases_ms for it in handovers), strict=True)],
            "last_block_ms": summarize_known(it.last_block_ms for it in handovers),
            "decode_share": summarize_known(s.decode_share for s in handed),
            "cpu_s_per_gib": cpu_s,
            "num_full": len(handovers),
            "num_handoffs": len(handed),
        },
    )
