"""When D gets its request: so long before the predicted end of P's prefill as D takes to admit it.

A prediction that is wrong, late or missing costs time only: at the latest D is asked when P has answered.
"""

import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.control import Control, FailureLog

# What is assumed of an instance that has not been measured.
_FIRST_ADMISSION_S = 0.18
# For D's steps between its watch and its load.
_MARGIN_S = 0.01
# Errors of prediction and backlogs never have D asked earlier than this: until then its CPU is P's.
_BOUND_S = 0.2
_LONGEST_S = 5.0
# What a request's bytes are counted with: a short one takes its time too, and says little of what a long one takes.
_BASE_BYTES = 4096
# Of these the median is taken: two after a first one that is far out, it is forgotten; five make a change the median.
_NUM_REMEMBERED = 8
# How many mean deviations a time is expected to stray.
_NUM_DEVIATIONS = 2

Trigger = Literal["due", "finished", "answer"]


class RollingMedian:
    """What a time usually is, and how far it strays, by the last 8 measurements; a single one far out hardly counts.

    Args:
        assumed_s: what it is before the first measurement, which replaces that.
    """

    def __init__(self, assumed_s: float = 0.0) -> None:
        self._assumed_s = assumed_s
        self._latest_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def median_s(self) -> float:
        """The middle of the measurements."""
        return median(self._latest_s) if self._latest_s else self._assumed_s

    @property
    def deviation_s(self) -> float:
        """The average distance from the median, the furthest measurement left out; 0 before the second one."""
        around_s = self.median_s
        *distances_s, _ = sorted(abs(each - around_s) for each in self._latest_s) or [0.0]
        return fmean(distances_s) if distances_s else 0.0

    @property
    def upper_s(self) -> float:
        """What few go beyond."""
        return self.median_s + _NUM_DEVIATIONS * self.deviation_s

    def add(self, seconds: float) -> None:
        """Take one more measurement."""
        self._latest_s.append(seconds)


class Leads:
    """How long before the end of prefill each D is asked.

    It covers the time until D watches the handoff (admission) and has what was final by then (backlog), both D's, and
    how much too late P's prediction of its end is, with twice the mean deviation of each. A backlog is as long as its
    prompt, of which the proxy knows the request's bytes: it is learned by the byte.
    """

    def __init__(self) -> None:
        self._admissions: dict[str, RollingMedian] = {}
        self._backlogs_by_byte: dict[str, RollingMedian] = {}
        self._errors: dict[str, RollingMedian] = {}

    def lead_s(self, prefill_url: str, decode_url: str, num_bytes: int) -> float:
        """For a request of so many bytes: up to 200 ms, to 5 s where D's admission alone usually takes longer."""
        admission = self._admissions.get(decode_url, RollingMedian(_FIRST_ADMISSION_S))
        backlog_s = (_BASE_BYTES + num_bytes) * self._backlogs_by_byte.get(decode_url, RollingMedian()).upper_s
        error = self._errors.get(prefill_url, RollingMedian())
        wanted_s = _MARGIN_S + admission.upper_s + backlog_s + error.upper_s
        bound_s = max(_BOUND_S, _MARGIN_S + admission.median_s)
        return max(0.0, min(wanted_s, bound_s, _LONGEST_S))

    def admitted(self, decode_url: str, admission_s: float) -> None:
        """Take one more time from a D's request to its watch, 0 or more seconds."""
        self._admissions.setdefault(decode_url, RollingMedian()).add(min(admission_s, _LONGEST_S))

    def moved(self, decode_url: str, backlog_s: float, num_bytes: int) -> None:
        """Take one more time in which a D read what was final before, 0 or more seconds; bytes as of `lead_s`."""
        by_byte_s = min(backlog_s, _LONGEST_S) / (_BASE_BYTES + num_bytes)
        self._backlogs_by_byte.setdefault(decode_url, RollingMedian()).add(by_byte_s)

    def answered(self, prefill_url: str, error_s: float) -> None:
        """Take one more error of a P's prediction, in seconds: above 0 when it ended earlier than was predicted."""
        self._errors.setdefault(prefill_url, RollingMedian()).add(max(-_LONGEST_S, min(error_s, _LONGEST_S)))


@dataclass(slots=True)
class Timing:
    """How one handoff was timed. Instants are those of `time.monotonic`, in seconds.

    Attributes:
        lead_s: how long before the predicted end D was to be asked.
        num_bytes: of the client's request.
        trigger: what D was asked on: `due` or `finished` from P's control port, or P's `answer`.
        reason: why the control port had nothing to say.
        admission_s: from asking D until it watched the handoff.
        predicted_at_s: when P was to be ready by the prediction that made it due.
        answered_at_s: when P answered.
    """

    lead_s: float
    num_bytes: int
    trigger: Trigger = "answer"
    reason: str = ""
    admission_s: float | None = None
    predicted_at_s: float | None = None
    answered_at_s: float | None = None

    @property
    def error_s(self) -> float | None:
        """Predicted end less P's answer: below 0 when the prediction was too early."""
        if self.predicted_at_s is None or self.answered_at_s is None:
            return None
        return self.predicted_at_s - self.answered_at_s

    def report(self) -> dict[str, str | float]:
        """What is known, for the log and `/status`."""
        times = {"lead_ms": self.lead_s, "admission_ms": self.admission_s, "prediction_error_ms": self.error_s}
        known = {name: round(seconds * 1000, 3) for name, seconds in times.items() if seconds is not None}
        return {"trigger": self.trigger} | known | ({"reason": self.reason} if self.reason else {})


class JustInTime:
    """Asks P's control port when the time has come.

    Args:
        control: control ports.
        failures: where a port that does not answer is logged.
        timeout_s: how long P may take.
    """

    def __init__(self, control: Control, failures: FailureLog, timeout_s: float) -> None:
        self._control = control
        self._failures = failures
        self._timeout_s = timeout_s
        self.leads = Leads()

    def begin(self, prefill_url: str, decode_url: str, num_bytes: int) -> Timing:
        """The timing of a handoff from that P to that D, of a request of so many bytes."""
        return Timing(self.leads.lead_s(prefill_url, decode_url, num_bytes), num_bytes)

    async def is_due(self, timing: Timing, address: str, handoff: str) -> bool:
        """Wait until D is to be asked; False when only P's answer will tell."""
        try:
            moment = await self._control.subscribe(address, handoff, timing.lead_s, self._timeout_s)
        except (KVPipeError, OSError) as error:
            return self._fall_back(timing, address, str(error) or type(error).__name__)
        if moment.kind == "due":
            timing.predicted_at_s = time.monotonic() + (moment.remaining_s or 0.0)
            timing.trigger = "due"
        elif moment.kind == "finished":
            timing.trigger = "finished"
            if moment.remaining_s is not None:
                timing.predicted_at_s = time.monotonic() + moment.remaining_s
        else:
            return self._fall_back(timing, address, moment.reason)
        return True

    def _fall_back(self, timing: Timing, address: str, reason: str) -> bool:
        timing.reason = reason
        self._failures.note("control", address, f"subscribe: {reason}; sequential dispatch instead", time.monotonic())
        return False

    async def measure(self, timing: Timing, decode_url: str, address: str, handoff: str) -> None:
        """From now, when D is asked, until it watches the handoff at P's control port."""
        asked_at_s = time.monotonic()
        try:
            moment = await self._control.watched(address, handoff, self._timeout_s)
        except (KVPipeError, OSError) as error:
            self._failures.note("control", address, f"watched: {error or type(error).__name__}", time.monotonic())
            return
        if moment.kind == "watched":
            timing.admission_s = time.monotonic() - asked_at_s
            self.leads.admitted(decode_url, timing.admission_s)

    def answered(self, timing: Timing, prefill_url: str) -> None:
        """P has answered: how far off its prediction was."""
        timing.answered_at_s = time.monotonic()
        if timing.error_s is not None:
            self.leads.answered(prefill_url, timing.error_s)
