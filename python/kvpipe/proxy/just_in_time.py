"""When D gets its request: so long before the predicted end of P's prefill as D takes to admit it.

A prediction that is wrong, late or missing costs time only: at the latest D is asked when P has answered.
"""

import time
from dataclasses import dataclass
from typing import Literal

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.control import Control
from kvpipe.proxy.failures import FailureLog

# What is assumed of an instance that has not been measured.
_FIRST_ADMISSION_S = 0.18
# For the steps between admission and select, and for what prefill has ready to be moved.
_MARGIN_S = 0.02
_LONGEST_S = 5.0
# Of a new measurement in the average.
_WEIGHT = 0.2

Trigger = Literal["due", "finished", "answer"]


class Leads:
    """How long before the end of prefill each D is asked, from its admission times: post to watch."""

    def __init__(self) -> None:
        self._admission_s: dict[str, float] = {}

    def lead_s(self, url: str) -> float:
        """The average admission time of a D and a margin, 5 s at most."""
        admission_s = self._admission_s.get(url, _FIRST_ADMISSION_S)
        return min(admission_s + _MARGIN_S, _LONGEST_S)

    def measured(self, url: str, admission_s: float) -> None:
        """Take one more measurement, 0 or more seconds; the first one counts as it is."""
        bounded_s = min(admission_s, _LONGEST_S)
        average_s = self._admission_s.get(url, bounded_s)
        self._admission_s[url] = average_s + _WEIGHT * (bounded_s - average_s)


@dataclass(slots=True)
class Timing:
    """How one handoff was timed. Instants are those of `time.monotonic`, in seconds.

    Attributes:
        lead_s: how long before the predicted end D was to be asked.
        trigger: what D was asked on: `due` or `finished` from P's control port, or P's `answer`.
        reason: why the control port had nothing to say.
        admission_s: from asking D until it watched the handoff.
        predicted_at_s: when P was to be ready by the prediction that made it due.
        answered_at_s: when P answered.
    """

    lead_s: float
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

    def begin(self, decode_url: str) -> Timing:
        """The timing of a handoff to that D."""
        return Timing(self.leads.lead_s(decode_url))

    async def is_due(self, timing: Timing, address: str, handoff: str) -> bool:
        """Wait until D is to be asked; False when only P's answer will tell."""
        try:
            moment = await self._control.subscribe(address, handoff, timing.lead_s, self._timeout_s)
        except (KVPipeError, OSError) as error:
            return self._falls_back(timing, address, str(error) or type(error).__name__)
        if moment.kind == "due":
            timing.predicted_at_s = time.monotonic() + (moment.remaining_s or 0.0)
            timing.trigger = "due"
        elif moment.kind == "finished":
            timing.trigger = "finished"
        else:
            return self._falls_back(timing, address, moment.reason)
        return True

    def _falls_back(self, timing: Timing, address: str, reason: str) -> bool:
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
            self.leads.measured(decode_url, timing.admission_s)
