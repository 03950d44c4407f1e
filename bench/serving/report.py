"""Tables of the benchmark in Markdown."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from bench.report import markdown, number
from bench.report import text as text_of
from bench.serving.run import rate_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.results import Findings, Row
    from bench.serving.faults import Faults
    from bench.serving.run import Timeline

_QUANTILES = ("p50", "p90", "p99", "max")
_NOTES = """\
All times are in ms: p50 / p90 / p99 / max over tokens or requests of a round, and of each the median of the rounds.
TTFT: from when a request was due, so that waiting in the generator counts, to the first text.
first to second: the first gap between texts. ITL: all gaps of all streams. later: ITL without the first gaps.
beside prompts: later gaps during which another request waited for its first text.
tokens/s: of requests that were answered, from the beginning to the end of the last one.
goodput: requests/s offered, times the share of requests that were answered in full with TTFT and mean time of a token
  after the first (TPOT) within the limits. each gap: that share with the limit for each gap instead of the mean.
E2E: from when a request was due to the end of its answer.
lost: failed before the first text. cut: failed after it.
lag: from when a request was due until the generator sent it, p99 / max.
CPU: seconds of all requests of a round. The generator, API servers, EngineCores, proxy, broker and its workers share
  the two cores with vLLM's workers, whose threads have a core each.
While a subject is measured the instances of others are stopped (SIGSTOP). All subjects have the same requests and
  arrivals."""
_NIXL_NOTE = """\
nixl: its workers spin, also when idle, so that on these two cores it is measured idle and at one rate only, with 32
  requests at most, when the others have ended. The generator does what a proxy would do."""


def text(found: Findings) -> str:
    """The findings as text."""
    parts, slo = [], found.details["slo"]
    if slo:
        parts.append(f"SLO: TTFT {number(slo.ttft_ms)} ms, TPOT {number(slo.itl_ms)} ms")
    phases = dict.fromkeys(row["phase"] for row in found.rows)
    for phase in phases:
        rows = [row for row in found.rows if row["phase"] == phase]
        parts.append(_latencies(phase, rows))
        if phase != "idle":
            parts += [_throughput(phase, rows), _cpu(phase, rows)]
    if timelines := found.details["timelines"]:
        parts.append(_timelines(timelines))
    if faults := found.details["faults"]:
        parts.append(_faults(faults))
    has_nixl = any(row["subject"] == "nixl" for row in found.rows)
    return text_of(found, parts, _NOTES + (f"\n{_NIXL_NOTE}" if has_nixl else ""))


def _where(row: Row) -> str:
    rate = row["rate"]
    return "alone" if rate == 0 else rate_text(float("inf") if rate is None else rate)


def _latencies(phase: str, rows: Sequence[Row]) -> str:
    columns = {
        "TTFT": "ttft",
        "first to second": "second",
        "ITL": "itl",
        "later": "later",
        "beside prompts": "beside",
        "TPOT": "tpot",
        "E2E": "e2e",
    }
    lines = [[_where(row), row["subject"], *(_quantiles(row, name) for name in columns.values())] for row in rows]
    return markdown([phase, "subject", *columns], lines)


def _quantiles(row: Row, name: str) -> str:
    values = [row["figures"].get(f"{name}_{quantile}_ms") for quantile in _QUANTILES]
    return " / ".join(f"{value:.0f}" for value in values if value is not None)


def _throughput(phase: str, rows: Sequence[Row]) -> str:
    header = [phase, "subject", "rounds", "requests", "tokens/s", "requests/s", "goodput", "good", "each gap"]
    lines = [
        [
            _where(row),
            row["subject"],
            str(len(row["rounds"])),
            f"{row['figures']['num_requests']:.0f}",
            number(row["figures"]["tokens_per_s"]),
            number(row["figures"]["requests_per_s"]),
            _known(row, "goodput"),
            _share(row, "good_share"),
            _share(row, "good_share_each_gap"),
            f"{sum(figures['num_lost'] for figures in row['rounds']):.0f}",
            f"{sum(figures['num_cut'] for figures in row['rounds']):.0f}",
            f"{row['figures']['lag_p99_ms']:.1f} / {row['figures']['lag_max_ms']:.1f}",
        ]
        for row in rows
    ]
    return markdown([*header, "lost", "cut", "lag"], lines)


def _known(row: Row, name: str) -> str:
    return number(row["figures"][name]) if name in row["figures"] else ""


def _share(row: Row, name: str) -> str:
    return f"{100 * row['figures'][name]:.0f} %" if name in row["figures"] else ""


def _cpu(phase: str, rows: Sequence[Row]) -> str:
    parts = list(dict.fromkeys(key for row in rows for key in row["figures"] if key.startswith("cpu ")))
    if not parts:
        return ""
    lines = []
    for row in rows:
        own = {part: row["figures"][part] for part in parts if part in row["figures"]}
        busy = 100 * sum(own.values()) / row["figures"]["duration_s"]
        shown = (f"{own[part]:.1f}" if part in own else "" for part in parts)
        lines.append([_where(row), row["subject"], *shown, f"{row['figures']['duration_s']:.0f}", f"{busy:.0f} %"])
    names = [part.removeprefix("cpu ") for part in parts]
    return markdown([f"{phase}, CPU s", "subject", *names, "of seconds", "of a core"], lines)


def _timelines(timelines: Sequence[Timeline]) -> str:
    lines = []
    for timeline in timelines:
        before, after = (
            [later - at for at, later in timeline.gaps if (at >= 0) is is_after] for is_after in (False, True)
        )
        shown = [1e3 * value for value in (median(before), max(after), timeline.first_s)]
        lines.append([timeline.subject, *(f"{value:.0f}" for value in shown)])
    header = ["a long prompt beside a stream", "gap before, median ms", "longest gap after, ms", "its first token, ms"]
    return markdown(header, lines)


def _faults(faults: Faults) -> str:
    lines = [
        [fault.instance, f"{fault.killed_s:.0f}", f"{fault.back_s:.0f}" if fault.back_s is not None else "not yet"]
        for fault in faults.faults
    ]
    killed = markdown(["killed", "after s", "back after s"], lines)
    samples = [
        [name, f"{max(it[1] for it in found):.0f}", f"{found[-1][1]:.0f}"] for name, found in faults.leased.items()
    ]
    return f"{killed}\n\n{markdown(['leased blocks', 'most', 'last'], samples)}"
