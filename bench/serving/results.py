"""The figures of the benchmark: limits, rows, and what the JSON file has of each request."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from bench.results import Findings, Row
from bench.serving.metrics import Slo, figures, medians

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.serving.generator import Outcome
    from bench.serving.measure import Measured
    from bench.serving.run import Cell

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


def rows_of(cells: Sequence[Cell], slo: Slo | None) -> list[Row]:
    """A row for each phase, rate and subject, in this order; its `figures` are the medians of those of its `rounds`."""
    keys = dict.fromkeys((cell.phase, cell.rate, cell.subject) for cell in cells)
    rows = []
    for phase, rate, subject in keys:
        own = [cell for cell in cells if (cell.phase, cell.rate, cell.subject) == (phase, rate, subject)]
        rounds = [
            figures(cell.outcomes, rate, slo if rate not in (0.0, float("inf")) else None, cell.cpu_s) for cell in own
        ]
        labels = {"phase": phase, "subject": subject, "rate": _plain(rate)}
        rows.append(Row(labels, {"figures": medians(rounds), "rounds": rounds}))
    return rows


def findings_of(facts: Mapping[str, Any], skipped: Mapping[str, str], measured: Measured) -> Findings:
    """The findings; times of requests are in ms."""
    requests = [_request(cell, outcome) for cell in measured.cells for outcome in cell.outcomes]
    details = {
        "slo": measured.slo,
        "timelines": measured.timelines,
        "faults": measured.faults,
        "requests": requests,
    }
    return Findings(facts, rows_of(measured.cells, measured.slo), skipped, details)


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
