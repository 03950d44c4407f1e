"""Everything that a run measured, as rows and as JSON. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.serving.metrics import Figures, Slo, figures, medians

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.serving.faults import Faults
    from bench.serving.generator import Outcome
    from bench.serving.run import Cell, Timeline

_SLO_TTFT, _SLO_ITL = 4.0, 2.0


def slo_of(idle: Sequence[Outcome], ttft_ms: float | None, itl_ms: float | None) -> Slo | None:
    """The limits: those given, else 4 times the median TTFT and twice the median gap of requests that were alone."""
    ttfts = [1e3 * outcome.ttft_s for outcome in idle if outcome.ttft_s is not None]
    gaps = [1e3 * gap for outcome in idle for gap in outcome.gaps_s]
    if ttft_ms is None and ttfts:
        ttft_ms = _SLO_TTFT * median(ttfts)
    if itl_ms is None and gaps:
        itl_ms = _SLO_ITL * median(gaps)
    return None if ttft_ms is None or itl_ms is None else Slo(ttft_ms, itl_ms)


@dataclass(frozen=True)
class Row:
    """A subject at one rate.

    Attributes:
        phase: As in `Cell`, or `faults`.
        subject: Its name.
        rate: Requests/s; infinite in a burst, 0 when idle.
        figures: Medians of the rounds.
        rounds: Figures of each round.
    """

    phase: str
    subject: str
    rate: float
    figures: Figures
    rounds: list[Figures]


def rows_of(cells: Sequence[Cell], slo: Slo | None) -> list[Row]:
    """A row for each phase, rate and subject, in this order."""
    keys = dict.fromkeys((cell.phase, cell.rate, cell.subject) for cell in cells)
    rows = []
    for phase, rate, subject in keys:
        own = [cell for cell in cells if (cell.phase, cell.rate, cell.subject) == (phase, rate, subject)]
        rounds = [
            figures(cell.outcomes, rate, slo if rate not in (0.0, float("inf")) else None, cell.cpu_s) for cell in own
        ]
        rows.append(Row(phase, subject, rate, medians(rounds), rounds))
    return rows


@dataclass(frozen=True)
class Findings:
    """All results.

    Attributes:
        facts: About the machine and the run.
        skipped: Subjects that were left out, each with the reason.
        slo: Limits of goodput; `None` without the baseline.
        cells: What was measured.
        timelines: Timelines by subject.
        faults: What was killed when, and leased blocks; `None` without faults.
    """

    facts: Mapping[str, Any]
    skipped: Mapping[str, str]
    slo: Slo | None
    cells: Sequence[Cell]
    timelines: Sequence[Timeline]
    faults: Faults | None = None
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        """Makes the rows."""
        object.__setattr__(self, "rows", rows_of(self.cells, self.slo))

    def as_json(self) -> dict[str, Any]:
        """The findings with plain types; times of requests in ms."""
        return {
            "machine": dict(self.facts),
            "skipped": dict(self.skipped),
            "slo": asdict(self.slo) if self.slo else None,
            "rows": [asdict(row) | {"rate": _plain(row.rate)} for row in self.rows],
            "timelines": [asdict(timeline) for timeline in self.timelines],
            "faults": asdict(self.faults) if self.faults else None,
            "requests": [_request(cell, outcome) for cell in self.cells for outcome in cell.outcomes],
        }


def _plain(rate: float) -> float | None:
    """A rate for JSON, which knows no infinity: `None` when all requests came at once."""
    return None if rate == float("inf") else rate


def _request(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    return {
        "phase": cell.phase,
        "subject": cell.subject,
        "rate": _plain(cell.rate),
        "round": cell.number,
        "number": outcome.request.number,
        "num_prompt": outcome.request.num_prompt,
        "num_wanted": outcome.request.num_output,
        "num_output": outcome.num_output,
        "planned_ms": _ms(outcome.request.at_s),
        "sent_ms": _ms(outcome.sent_s),
        "chunks_ms": [_ms(at_s) for at_s in outcome.chunks_s],
        "end_ms": _ms(outcome.end_s),
        "error": outcome.error,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
