"""Just-in-time dispatch: D gets a request shortly before the predicted end of P's prefill.

The lead is the time until D has read what is ready (`Leads`). A wrong, late or missing prediction costs only time: at
the latest D is asked when P has answered.
"""

import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.control import Control, FailureLog

# Assumed for an instance that has not been measured.
_FIRST_ADMISSION_S = 0.18
# Assumed for D's steps, and the least that they count: an idle D has short ones. No step of streams takes a second.
_LEAST_STEPS_S, _MOST_STEPS_S = 0.01, 1.0
# Prediction errors and backlogs never extend the lead beyond this and D's steps, because an early D takes CPU from P.
# A D with long steps is busy anyway.
_BOUND_S = 0.2
_LONGEST_S = 5.0
# Added to a request's bytes, because a short request takes time too, and predicts little about a long one.
_BASE_BYTES = 4096
# Samples in the rolling median: a first outlier loses its effect after two more, a change takes over after five.
_NUM_REMEMBERED = 8
# Mean deviations added to the median.
_NUM_DEVIATIONS = 2

Trigger = Literal["due", "finished", "answer"]


class RollingMedian:
    """Rolling median of the last 8 measurements, with their deviation; a single outlier has little effect.

    Args:
        assumed_s: value before the first measurement.
    """

    def __init__(self, assumed_s: float = 0.0) -> None:
        self._assumed_s = assumed_s
        self._latest_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def median_s(self) -> float:
        """Median of the measurements."""
        return median(self._latest_s) if self._latest_s else self._assumed_s

    @property
    def deviation_s(self) -> float:
        """Mean distance from the median without the largest one; 0 before the second measurement."""
        around_s = self.median_s
        *distances_s, _ = sorted(abs(each - around_s) for each in self._latest_s) or [0.0]
        return fmean(distances_s) if distances_s else 0.0

    @property
    def upper_s(self) -> float:
        """Median plus two mean deviations: few measurements are longer."""
        return self.median_s + _NUM_DEVIATIONS * self.deviation_s

    def add(self, seconds: float) -> None:
        """Add a measurement."""
        self._latest_s.append(seconds)


class Leads:
    """Learns the lead: how long before the end of the prefill each D is asked.

    A lead is the sum of D's admission (until it watches the handoff), D's steps (until the end of the one with which
    its load begins), D's backlog (until it has read the blocks that were ready by then) and the error of P's
    prediction, each with twice its mean deviation. The backlog begins within that step, so that the sum is generous.
    A backlog grows with the prompt, of which the proxy knows the request's bytes, so backlogs are learned by the byte.
    """

    def __init__(self) -> None:
        self._admissions: dict[str, RollingMedian] = {}
        self._steps: dict[str, RollingMedian] = {}
        self._backlogs_by_byte: dict[str, RollingMedian] = {}
        self._errors: dict[str, RollingMedian] = {}

    def lead_s(self, prefill: str, decode: str, num_bytes: int) -> float:
        """Lead for a request of `num_bytes`: up to D's steps and 200 ms, or D's admission if that is longer; or 5 s."""
        admission = self._admissions.get(decode, RollingMedian(_FIRST_ADMISSION_S))
        steps = self._steps.get(decode, RollingMedian())
        backlog_s = (_BASE_BYTES + num_bytes) * self._backlogs_by_byte.get(decode, RollingMedian()).upper_s
        error = self._errors.get(prefill, RollingMedian())
        wanted_s = max(_LEAST_STEPS_S, steps.upper_s) + admission.upper_s + backlog_s + error.upper_s
        bound_s = max(_BOUND_S, admission.median_s) + max(_LEAST_STEPS_S, steps.median_s)
        return max(0.0, min(wanted_s, bound_s, _LONGEST_S))

    def admitted(self, decode: str, admission_s: float) -> None:
        """Add the time from a D's request to its watch, 0 or more seconds."""
        self._admissions.setdefault(decode, RollingMedian()).add(min(admission_s, _LONGEST_S))

    def stepped(self, decode: str, steps_s: float) -> None:
        """Add how long a D's steps took until a load had begun, 0 or more seconds."""
        self._steps.setdefault(decode, RollingMedian()).add(min(steps_s, _MOST_STEPS_S))

    def moved(self, decode: str, backlog_s: float, num_bytes: int) -> None:
        """Add the time in which a D read its backlog, 0 or more seconds; `num_bytes` as in `lead_s`."""
        by_byte_s = min(backlog_s, _LONGEST_S) / (_BASE_BYTES + num_bytes)
        self._backlogs_by_byte.setdefault(decode, RollingMedian()).add(by_byte_s)

    def answered(self, prefill: str, error_s: float) -> None:
        """Add the error of a P's prediction, in seconds: above 0 when the prefill ended before the predicted time."""
        self._errors.setdefault(prefill, RollingMedian()).add(max(-_LONGEST_S, min(error_s, _LONGEST_S)))


@dataclass(slots=True)
class Timing:
    """Timing of one handoff. Instants are those of `time.monotonic`, in seconds.

    Attributes:
        lead_s: planned time between asking D and the predicted end.
        num_bytes: size of the client's request.
        trigger: event on which D was asked: `due` or `finished` from P's control port, or P's `answer`.
        reason: reason for which the control port reported neither.
        admission_s: time from asking D until it watched the handoff.
        predicted_at_s: predicted end of the prefill.
        answered_at_s: time of P's answer.
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
        """Predicted end minus P's answer: below 0 when the prediction was too early."""
        if self.predicted_at_s is None or self.answered_at_s is None:
            return None
        return self.predicted_at_s - self.answered_at_s

    def report(self) -> dict[str, str | float]:
        """The known facts, for the log and `/status`."""
        times = {"lead_ms": self.lead_s, "admission_ms": self.admission_s, "prediction_error_ms": self.error_s}
        known = {name: round(seconds * 1000, 3) for name, seconds in times.items() if seconds is not None}
        return {"trigger": self.trigger} | known | ({"reason": self.reason} if self.reason else {})


class JustInTime:
    """Waits for the predicted end at P's control port, and measures predictions and admissions.

    Args:
        control: client of control ports.
        failures: log of ports that do not answer.
        timeout_s: limit for P's prefill.
    """

    def __init__(self, control: Control, failures: FailureLog, timeout_s: float) -> None:
        self._control = control
        self._failures = failures
        self._timeout_s = timeout_s
        self.leads = Leads()

    def begin(self, prefill: str, decode: str, num_bytes: int) -> Timing:
        """Timing of a handoff from P to D for a request of `num_bytes`."""
        return Timing(self.leads.lead_s(prefill, decode, num_bytes), num_bytes)

    async def is_due(self, timing: Timing, address: str, handoff: str) -> bool:
        """Wait until D should be asked; False if D has to wait for P's answer."""
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

    async def measure(self, timing: Timing, decode: str, address: str, handoff: str) -> None:
        """Measure D's admission: from now until D watches the handoff at P's control port."""
        asked_at_s = time.monotonic()
        try:
            moment = await self._control.watched(address, handoff, self._timeout_s)
        except (KVPipeError, OSError) as error:
            self._failures.note("control", address, f"watched: {error or type(error).__name__}", time.monotonic())
            return
        if moment.kind == "watched":
            timing.admission_s = time.monotonic() - asked_at_s
            self.leads.admitted(decode, timing.admission_s)

    def answered(self, timing: Timing, prefill: str) -> None:
        """Note P's answer, and learn the prediction's error."""
        timing.answered_at_s = time.monotonic()
        if timing.error_s is not None:
            self.leads.answered(prefill, timing.error_s)
