"""Metrics of the proxy, in Prometheus' text format. `/status/ID` has the same facts for one handoff."""

from collections.abc import Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest

from kvpipe.proxy.just_in_time import Timing
from kvpipe.proxy.upstream import InstanceError

# From one step of an engine to the longest lead.
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# Those of vLLM's metrics of the same names.
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTERVAL_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Metrics:
    """Metrics of one application, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests of clients, by how they ended.", "outcome")
        self._handoffs = self._counter("handoffs", "Attempts at a handoff that have ended, by their result.", "result")
        self._bytes = self._counter("handoff_received_bytes", "Bytes of KV that decode has received.")
        self._recomputed = self._counter(
            "handoff_recomputed_tokens", "Prompt tokens that decode computed although prefill had computed them."
        )
        self._triggers = self._counter(
            "dispatches", "Just-in-time dispatches, by the event on which decode was asked.", "trigger"
        )
        self._lead = self._histogram(
            "dispatch_lead_seconds", "How long before the predicted end decode was to be asked."
        )
        about = (
            "Time between the predicted end of a prefill and its answer; early: the prediction was before the answer."
        )
        self._error = self._histogram("prediction_error_seconds", about, "was")
        self._early_tokens = self._counter(
            "early_tokens", "Tokens of prefill that were sent to the client before decode's stream."
        )
        about = "Instances replaced by another one for a request: they failed, froze, or contradicted the early token."
        self._replaced = self._counter("replaced_instances", about, "role", "reason")
        self._denied = self._counter(
            "denied_retries", "Failed requests that were not sent to another instance.", "reason"
        )
        self._fallbacks = self._counter(
            "prefill_fallbacks", "Requests sent to decode alone because no prefill was left."
        )
        self._alone = self._counter(
            "decode_alone", "Requests sent to decode alone without asking prefill, by the reason.", "reason"
        )
        about = "Time from a request's arrival to the first bytes of its stream."
        self._first_tokens = self._histogram("time_to_first_token_seconds", about, buckets=_FIRST_TOKEN_SECONDS)
        about = "Time between the events of a stream, each of which is about one token."
        self._intervals = self._histogram("inter_token_latency_seconds", about, buckets=_INTERVAL_SECONDS)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"kvpipe_{name}", about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"kvpipe_{name}", about, labels, registry=self._registry, buckets=buckets)

    def request_ended(self, outcome: str) -> None:
        """Count a request of a client."""
        self._requests.labels(outcome).inc()

    def first_token_sent(self, seconds: float) -> None:
        """Record the time from a request's arrival to the first bytes of its stream."""
        self._first_tokens.observe(seconds)

    def events_sent(self, num_events: int, seconds: float) -> None:
        """Record events of a stream that were sent together, so long after the previous ones."""
        for _ in range(num_events):
            self._intervals.observe(seconds / num_events)

    def handoff_ended(self, result: dict[str, Any] | None) -> None:
        """Count a handoff by its result; None if no instance knows it."""
        known = result or {}
        self._handoffs.labels(known.get("result", "unknown")).inc()
        self._bytes.inc(known.get("bytes", 0))
        self._recomputed.inc(known.get("recomputed_tokens", 0))

    def dispatched(self, timing: Timing) -> None:
        """Count a just-in-time dispatch."""
        self._triggers.labels(timing.trigger).inc()
        self._lead.observe(timing.lead_s)

    def prefill_answered(self, timing: Timing) -> None:
        """Record the prediction's error, if there was a prediction."""
        if timing.error_s is not None:
            self._error.labels("early" if timing.error_s < 0 else "late").observe(abs(timing.error_s))

    def early_token_sent(self) -> None:
        """Count an early token."""
        self._early_tokens.inc()

    def replaced(self, error: InstanceError) -> None:
        """Count an instance that is replaced by another one."""
        reason = error.failure if error.failure in ("contradicted", "frozen") else "failed"
        self._replaced.labels(error.role, reason).inc()

    def retry_denied(self, reason: str) -> None:
        """Count a failed request that is not sent to another instance, although one of the role is left."""
        self._denied.labels(reason).inc()

    def fell_back(self) -> None:
        """Count a request that decode gets alone because no prefill is left."""
        self._fallbacks.inc()

    def went_to_decode_alone(self, reason: str) -> None:
        """Count a request that decode gets alone although there may be a prefill."""
        self._alone.labels(reason).inc()

    def response(self) -> web.Response:
        """All metrics as an HTTP response."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
