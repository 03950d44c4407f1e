"""What was measured of each request, and what follows from the trace."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpipe.bench.trace import Event

# Before P's first token: what decode does earlier than that is in prefill's way.
_LAST_S = 0.2
PHASES = ("asked", "admitted", "moved", "resumed")


@dataclass(frozen=True)
class Exposed:
    """How long after P sampled the first token D began its first forward pass with the KV, and why.

    Attributes:
        total_ms: All of it.
        phases_ms: Until D's scheduler has the request; until its worker begins to load; until all KV is there and
            proved, and the token too; until the forward pass. What was over before P sampled is 0.
        last_block_ms: From P's sampling to the last block's arrival, 0 if it was there; `None` where no trace tells.
    """

    total_ms: float
    phases_ms: tuple[float, ...]
    last_block_ms: float | None


def exposed(life: Sequence[Event]) -> Exposed | None:
    """From the life of a handoff; `None` if D's first step was not one with P's KV."""
    ends = {event.name: event.ended_s for event in life}
    admitted = [event.process for event in life if event.name == "admitted"]
    steps = [event.began_s for event in life if event.name == "first step"]
    if not (admitted and steps and {"sampled", "load", "loaded"} <= ends.keys()):
        return None
    asked = next(event.ended_s for event in life if (event.name, event.process) == ("queued", admitted[0]))
    phases_ms, until_s = [], ends["sampled"]
    for mark_s in (asked, ends["load"], _both_here_s(ends), steps[0]):
        phases_ms.append(1e3 * max(0.0, mark_s - until_s))
        until_s = max(until_s, mark_s)
    last = 1e3 * max(0.0, ends["arrived"] - ends["sampled"]) if "arrived" in ends else None
    return Exposed(1e3 * (until_s - ends["sampled"]), tuple(phases_ms), last)


def _both_here_s(ends: dict[str, float]) -> float:
    """When D had blocks and token; of NIXL, which moves no token, the blocks."""
    if "verified" in ends and "finished" in ends:
        return max(ends["verified"], ends["finished"])
    return ends["loaded"]


@dataclass(frozen=True)
class Sample:
    """One request.

    Attributes:
        subject: Who answered it.
        num_tokens: Length of its prompt.
        first_ms: From the request to the first token.
        second_ms: From the request to the second one.
        cpu_s: CPU of the vLLM instances from the request to the last token.
        decode_share: CPU of D from the request to 200 ms before P's first token, per cent of one; `None` if that was
            too short, or there is no D.
        exposed: The hand-over; `None` if there was none, or not all KV came.
        handoff: Its id; empty where there is none to be.
    """

    subject: str
    num_tokens: int
    first_ms: float
    second_ms: float
    cpu_s: float
    decode_share: float | None
    exposed: Exposed | None
    handoff: str


def prefill_span(asked_s: float, life: Sequence[Event]) -> tuple[float, float]:
    """From the request to 200 ms before P sampled the first token."""
    sampled = [event.ended_s for event in life if event.name == "sampled"]
    return asked_s, (sampled[0] if sampled else asked_s) - _LAST_S


@dataclass(frozen=True)
class Spread:
    """Median and largest of some figures."""

    median: float
    largest: float
    num_samples: int


def spread(figures: Iterable[float | None]) -> Spread | None:
    """Of those that are there; `None` of none."""
    known = [figure for figure in figures if figure is not None]
    return Spread(median(known), max(known), len(known)) if known else None


@dataclass(frozen=True)
class Row:
    """A subject at one length of prompts.

    Attributes:
        subject: Who.
        num_tokens: The length.
        first_ms: To the first token.
        ratio: Its median to that of the undivided instance.
        second_ms: To the second token.
        exposed_ms: The hand-over.
        phases_ms: Medians of its phases.
        last_block_ms: From P's sampling to the last block.
        decode_share: D's CPU while P computes.
        cpu_s_per_gib: CPU of both beyond that of the undivided instance, for each GiB of KV.
        num_full: Handoffs with all KV from P.
        num_handoffs: Of so many.
    """

    subject: str
    num_tokens: int
    first_ms: Spread
    ratio: float | None
    second_ms: Spread
    exposed_ms: Spread | None
    phases_ms: tuple[float, ...]
    last_block_ms: Spread | None
    decode_share: Spread | None
    cpu_s_per_gib: float | None
    num_full: int
    num_handoffs: int


def rows(samples: Sequence[Sample], kv_bytes_per_token: int) -> list[Row]:
    """A row for each subject and length."""
    keys = dict.fromkeys((sample.num_tokens, sample.subject) for sample in samples)
    return [_row(num_tokens, name, samples, kv_bytes_per_token) for num_tokens, name in keys]


def _row(num_tokens: int, name: str, samples: Sequence[Sample], kv_bytes_per_token: int) -> Row:
    here = [sample for sample in samples if sample.num_tokens == num_tokens]
    own = [sample for sample in here if sample.subject == name]
    base = [sample for sample in here if sample.subject == "undivided"]
    handed = [sample for sample in own if sample.handoff]
    handovers = [sample.exposed for sample in handed if sample.exposed]
    first, second = spread(s.first_ms for s in own), spread(s.second_ms for s in own)
    assert first is not None  # noqa: S101 - for mypy: the subject has samples
    assert second is not None  # noqa: S101 - for mypy
    cpu_s = None
    if base and handed:
        extra_s = median(s.cpu_s for s in handed) - median(s.cpu_s for s in base)
        cpu_s = extra_s / (num_tokens * kv_bytes_per_token / (1 << 30))
    return Row(
        subject=name,
        num_tokens=num_tokens,
        first_ms=first,
        ratio=first.median / median(s.first_ms for s in base) if base else None,
        second_ms=second,
        exposed_ms=spread(it.total_ms for it in handovers),
        phases_ms=tuple(median(column) for column in zip(*(it.phases_ms for it in handovers), strict=True)),
        last_block_ms=spread(it.last_block_ms for it in handovers),
        decode_share=spread(s.decode_share for s in handed),
        cpu_s_per_gib=cpu_s,
        num_full=len(handovers),
        num_handoffs=len(handed),
    )
