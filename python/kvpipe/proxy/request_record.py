"""The proxy's knowledge of one request of a client: its log line, and its share of the metrics."""

import logging
import time
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.upstream import Answer, InstanceError
from kvpipe.proxy.usage import Usage

_EVENT_END = b"\n\n"
_LAST_EVENT = b"[DONE]\n\n"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AttemptRecord:
    """One attempt at a request.

    Attributes:
        handoff: id of the handoff; empty where an instance works alone.
        prefill: name of P; empty if none was asked.
        decode: name of D; empty if none was to be asked.
        reason: reason for giving it up; empty for the last one.
    """

    handoff: str
    prefill: str
    decode: str
    reason: str = ""

    def report(self) -> dict[str, str]:
        """The known facts, for `/status`."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(slots=True)
class RequestRecord:
    """One request: its attempts, tokens and times. Instants are those of `time.monotonic`, in seconds.

    Attributes:
        path: API path.
        metrics: metrics that count the times of a stream.
        request_id: the client's name for it, its header `X-Request-Id`.
        outcome: its outcome; the default applies when the client leaves.
        status: HTTP status of the answer; 0 if none was sent.
        attempts: attempts in their order.
        alone: reason for which D gets the request alone; empty if it does not.
        usage: tokens of prompt and answer.
        num_choices: choices of a complete answer; 0 if unknown.
        error: reason for which the answer is an error, or broke off.
    """

    path: str
    metrics: Metrics
    request_id: str = ""
    outcome: str = "client_left"
    status: int = 0
    attempts: list[AttemptRecord] = field(default_factory=list)
    alone: str = ""
    usage: Usage = field(default_factory=Usage)
    num_choices: int = 0
    error: str = ""
    _begun_at_s: float = field(default_factory=time.monotonic)
    _ttft_s: float | None = None
    _sent_at_s: float = 0.0

    def begin_attempt(self, handoff: str, prefill: str, decode: str) -> None:
        """Add an attempt, with the names of its instances; what an earlier P has found does not count any more."""
        self.attempts.append(AttemptRecord(handoff, prefill, decode))
        self.usage.prefilled(None, None)

    def continue_attempt(self, handoff: str, prefill: str, decode: str) -> None:
        """Add an attempt that goes on from what P has computed."""
        self.attempts.append(AttemptRecord(handoff, prefill, decode))

    def replaced(self, error: InstanceError) -> None:
        """Note why the latest attempt was given up."""
        self.attempts[-1].reason = error.reason

    def sent(self, piece: bytes) -> None:
        """Count the events of a stream that went to the client; their distance is the time between tokens."""
        now_s = time.monotonic()
        if self._ttft_s is None:
            self._ttft_s = now_s - self._begun_at_s
            self.metrics.first_token_sent(self._ttft_s)
        else:
            num_events = piece.count(_EVENT_END) - piece.endswith(_LAST_EVENT)
            if num_events <= 0:
                return
            self.metrics.events_sent(num_events, now_s - self._sent_at_s)
        self._sent_at_s = now_s

    def answered(self, answer: Answer) -> None:
        """Set status and outcome from an answer that has been relayed."""
        self.status = answer.status
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.outcome = "failed"
            self.error = self.error or (self.attempts[-1].reason if self.attempts else "")
        elif answer.status >= HTTPStatus.BAD_REQUEST:
            self.outcome = "refused"
        else:
            self.outcome = "answered" if answer.is_complete else "broken_off"

    def refused(self, status: int, error: str) -> None:
        """Set status and outcome of a request that is the client's fault."""
        self.outcome, self.status, self.error = "refused", status, error

    def failed(self, status: int, error: str) -> None:
        """Set status and outcome of a request that no instance answered."""
        self.outcome, self.status, self.error = "failed", status, error

    def end(self) -> None:
        """Count the request, and log it."""
        self.metrics.request_ended(self.outcome)
        if logger.isEnabledFor(logging.INFO):
            logger.info("request.end %s", " ".join(f"{name}={value}" for name, value in self._facts().items()))

    def _facts(self) -> dict[str, Any]:
        last = self.attempts[-1] if self.attempts else AttemptRecord("", "", "")
        facts = {
            "request_id": repr(self.request_id) if self.request_id else "",
            "handoff": last.handoff,
            "path": self.path,
            "status": self.status or None,
            "outcome": self.outcome,
            "prefill": last.prefill,
            "decode": last.decode,
            "attempts": len(self.attempts),
            "alone": self.alone,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "output_tokens": self.usage.output_tokens,
            "ttft_ms": None if self._ttft_s is None else round(self._ttft_s * 1000, 3),
            "duration_ms": round((time.monotonic() - self._begun_at_s) * 1000, 3),
            "error": repr(self.error) if self.error else "",
        }
        return {name: value for name, value in facts.items() if value not in (None, "")}
