"""Runs the phases in order: all groups but NIXL's together, then NIXL's alone; or kvpipe's under faults."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.instances.servers import ServerPool
from bench.processes import SubjectError
from bench.serving import plan, run
from bench.serving.faults import Faults, FaultyRun
from bench.serving.plan import Offer, Pace
from bench.serving.results import slo_of
from bench.serving.run import Run, rate_text
from bench.serving.subjects import BASELINE
from bench.serving.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.progress import Progress
    from bench.serving.metrics import Slo
    from bench.serving.run import Cell, Timeline
    from bench.serving.subjects import Setting
    from bench.serving.workload import Mix

# Two instances that start at once, with two cores.
START_PAIR_S = 90.0
# Of a timeline, by the time of a request of the mix that is alone.
TIMELINE_ANSWERS = 4
# A request of the mix that is alone, as a guess before it is measured.
ANSWER_S = 15.0
NIXL_REQUESTS = 32
_FAULTS_TIMES = 2


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    Attributes:
        names: Subjects.
        mix: Lengths of prompts and outputs.
        seed: Of arrivals, lengths and prompts.
        rates: Requests/s; empty for `loads`.
        loads: Rates as shares of the baseline's saturation.
        num_requests: Requests of each rate; `None` for as many as fit into the time.
        rounds: How often arrivals are repeated.
        idle_requests: Requests of the idle phase.
        minutes: Time for everything.
        slo_ttft_ms: Limit of the TTFT; `None` for 4 times that of an idle baseline.
        slo_itl_ms: Limit of the TPOT; `None` for twice the ITL of an idle baseline.
        limit_s: Seconds after which a request is given up.
        has_timeline: Whether a stream beside a long prompt is measured.
        fault_interval_s: Seconds between two kills, in a run under faults.
    """

    names: Sequence[str]
    mix: Mix
    seed: int
    rates: Sequence[float]
    loads: Sequence[float]
    num_requests: int | None
    rounds: int
    idle_requests: int
    minutes: float
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    limit_s: float
    has_timeline: bool
    fault_interval_s: float


@dataclass(frozen=True)
class Measured:
    """What was measured; `error` is why it ended early."""

    slo: Slo | None
    cells: list[Cell]
    timelines: list[Timeline]
    faults: Faults | None = None
    error: str = ""


class Measurement:
    """A measurement.

    Args:
        wanted: What to measure.
        setting: Of all instances.
        progress: Where progress is shown.
        report: Prints a line, also where a bar is shown.
        save: Is called with what was measured so far.
    """

    def __init__(
        self,
        wanted: Wanted,
        setting: Setting,
        progress: Progress,
        report: Callable[[str], None],
        save: Callable[[Measured], None],
    ) -> None:
        self._wanted, self._setting, self._progress = wanted, setting, progress
        self._report, self._save = report, save
        self._end_at = time.monotonic() + 60 * wanted.minutes
        self._cells: list[Cell] = []
        self._timelines: list[Timeline] = []

    def estimate(self) -> str:
        """How long it will take, as far as that is known before the machine's speed is."""
        wanted = self._wanted
        if wanted.num_requests is None:
            return f"about {wanted.minutes:.0f} minutes"
        if not wanted.rates:
            return "a time that is known when the rates are known"
        offers = [Offer(rate, wanted.num_requests) for rate in wanted.rates]
        pairs_s = (START_PAIR_S + (wanted.idle_requests + wanted.has_timeline * TIMELINE_ANSWERS) * ANSWER_S) * len(
            wanted.names
        )
        load_s = plan.total_s(offers, len(wanted.names) * wanted.rounds, Pace(max(wanted.rates), ANSWER_S))
        return f"about {(pairs_s + load_s) / 60:.0f} minutes"

    def measure(self) -> Measured:
        """Measures all subjects. After Ctrl-C or an error, what was measured before is returned.

        Raises:
            SubjectError: A server did not start, or does not answer, and nothing was measured before.
        """
        wanted = self._wanted
        together = [name for name in wanted.names if name != "nixl"]
        offers: list[Offer] = []
        try:
            if together:
                offers = self._together(together)
            if "nixl" in wanted.names:
                self._alone(offers)
        except (KeyboardInterrupt, SubjectError) as error:
            if not self._cells:
                raise
            return replace(self._measured(), error=str(error) or "interrupted")
        return self._measured()

    def measure_faults(self) -> Measured:
        """Measures kvpipe with and without faults, with the same arrivals."""
        wanted = self._wanted
        with ServerPool() as pool:
            running = self._start(pool, ["kvpipe"])
            pace = self._pace(running, "kvpipe")
            left_s = self._end_at - time.monotonic()
            offers = self._offers(pace, _FAULTS_TIMES, left_s)[:1]
            self._announce(offers, _FAULTS_TIMES, pace)
            (offer,) = offers
            workload = Workload.draw(wanted.seed, offer.rate, offer.num_requests, wanted.mix)
            faulty = FaultyRun(running.groups[0], wanted.fault_interval_s, wanted.limit_s, self._progress)
            cells, faults = faulty.measure(workload)
            self._progress.end()
        return Measured(None, [*running.cells, *cells], [], faults)

    def _measured(self) -> Measured:
        wanted = self._wanted
        idle = [it for cell in self._cells if (cell.phase, cell.subject) == ("idle", BASELINE) for it in cell.outcomes]
        return Measured(slo_of(idle, wanted.slo_ttft_ms, wanted.slo_itl_ms), self._cells, self._timelines)

    def _start(self, pool: ServerPool, names: Sequence[str]) -> Run:
        wanted = self._wanted
        groups = run.start(pool, self._setting, names, wanted.mix, self._report)
        return Run(groups, wanted.mix, wanted.seed, wanted.limit_s, self._progress, self._cells, self._timelines)

    def _together(self, names: Sequence[str]) -> list[Offer]:
        """Measures the groups that are in memory together; returns the rates."""
        wanted = self._wanted
        baseline = BASELINE if BASELINE in names else names[0]
        with ServerPool() as pool:
            running = self._start(pool, names)
            pace = self._pace(running, baseline)
            num_cells = len(running.names) * wanted.rounds
            left_s = self._end_at - time.monotonic()
            if wanted.has_timeline:
                left_s -= TIMELINE_ANSWERS * pace.answer_s * len(running.names)
            offers = self._offers(pace, num_cells, left_s)
            if wanted.has_timeline:
                running.timeline()
            self._announce(offers, num_cells, pace)
            self._rounds(running, offers)
        return offers

    def _rounds(self, running: Run, offers: Sequence[Offer]) -> None:
        for number in range(1, self._wanted.rounds + 1):
            began_s = time.monotonic()
            for offer in offers:
                running.load(offer, number)
                self._save(self._measured())
            now_s = time.monotonic()
            has_time = now_s + 0.7 * (now_s - began_s) < self._end_at or self._wanted.num_requests is not None
            if number < self._wanted.rounds and not has_time:
                self._report(f"the time is over after {number} of {self._wanted.rounds} rounds")
                break
        self._progress.end()

    def _pace(self, running: Run, name: str) -> Pace:
        """Measures idle requests, and the baseline's saturation unless the rates are given."""
        wanted = self._wanted
        running.idle(wanted.idle_requests)
        if wanted.rates:
            return Pace(max(wanted.rates), running.answer_s(name))
        self._progress.expect(run.BURST_REQUESTS)
        running.burst(name)
        self._progress.end()
        pace = Pace(running.saturation(name), running.answer_s(name))
        self._report(f"{name} is saturated at {pace.saturation:.3g} requests/s")
        return pace

    def _offers(self, pace: Pace, num_cells: int, left_s: float) -> list[Offer]:
        wanted = self._wanted
        rates = wanted.rates or [share * pace.saturation for share in wanted.loads]
        if wanted.num_requests is not None:
            return [Offer(rate, wanted.num_requests) for rate in rates]
        return plan.offers(rates, num_cells, left_s, pace)

    def _announce(self, offers: Sequence[Offer], num_cells: int, pace: Pace) -> None:
        minutes = plan.total_s(offers, num_cells, pace) / 60
        at = time.strftime("%H:%M", time.localtime(time.time() + 60 * minutes))
        shown = ", ".join(f"{offer.num_requests} requests at {rate_text(offer.rate)}" for offer in offers)
        self._report(f"{num_cells} times {shown}: about {minutes:.0f} minutes, until {at}")
        self._progress.expect(num_cells * sum(offer.num_requests for offer in offers))

    def _alone(self, offers: Sequence[Offer]) -> None:
        """Measures NIXL: idle, and at the lowest rate."""
        wanted = self._wanted
        lowest = min(offers or [Offer(rate, wanted.num_requests or NIXL_REQUESTS) for rate in wanted.rates], key=_rate)
        offer = Offer(lowest.rate, min(lowest.num_requests, NIXL_REQUESTS))
        with ServerPool() as pool:
            running = self._start(pool, ["nixl"])
            running.idle(wanted.idle_requests)
            self._announce([offer], 1, Pace(offer.rate, running.answer_s("nixl")))
            running.load(offer, 1)
            self._progress.end()


def _rate(offer: Offer) -> float:
    return offer.rate
