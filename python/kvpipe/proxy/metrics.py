"""Metrics of the proxy, in Prometheus' text format. `/status/ID` has the same facts for one handoff."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest

from kvpipe.proxy.bodies import BodyError
from kvpipe.proxy.just_in_time import Timing
from kvpipe.proxy.upstream import Answer, Fault, Role

# From one step of an engine to the longest lead.
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_REFUSALS = (BodyError, web.HTTPClientError, web.RequestPayloadError)


class Outcome:
    """Outcome of a client's request; the default applies when the client leaves."""

    def __init__(self) -> None:
        self.name = "client_left"

    def is_of(self, answer: Answer) -> None:
        """Set the outcome from an answer that has been relayed."""
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.name = "failed"
        elif answer.status >= HTTPStatus.BAD_REQUEST:
            self.name = "refused"
        else:
            self.name = "answered" if answer.is_complete else "broken_off"


class Metrics:
    """Metrics of one application, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests of clients for completions, by how they ended.", "outcome")
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
        about = "Instances replaced by another one for a handoff: they failed, or contradicted the early token."
        self._replaced = self._counter("replaced_instances", about, "role", "reason")

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"kvpipe_{name}", about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, *labels: str) -> Histogram:
        return Histogram(f"kvpipe_{name}", about, labels, registry=self._registry, buckets=_SECONDS)

    @contextmanager
    def request(self) -> Iterator[Outcome]:
        """Count one request of a client when it ends."""
        outcome = Outcome()
        try:
            yield outcome
        except _REFUSALS:
            outcome.name = "refused"
            raise
        except ConnectionError:
            raise
        except Exception:
            outcome.name = "failed"
            raise
        finally:
            self._requests.labels(outcome.name).inc()

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

    def replaced(self, role: Role, reason: Fault) -> None:
        """Count an instance that is replaced by another one."""
        self._replaced.labels(role, reason).inc()

    def response(self) -> web.Response:
        """All metrics as an HTTP response."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
