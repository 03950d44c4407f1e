"""A request whose KV another engine computes, and why that KV did not come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvpipe.vllm.handoff.consumer.state_machine import Event, HandoffLoad, Phase
from kvpipe.vllm.handoff.metadata import LoadOutcome

if TYPE_CHECKING:
    from vllm.v1.request import Request


class LossReason(StrEnum):
    """Reason for which a consumer lacks KV of a handoff, as metrics count it. The text of a result says more."""

    NONE = "none"
    CACHED = "cached"
    NOT_SCHEDULED = "not_scheduled"
    GAVE_WAY = "gave_way"
    NO_PRODUCER = "no_producer"
    UNFORCED = "unforced"
    OTHER_PROMPT = "other_prompt"
    OTHER_ADAPTER = "other_adapter"
    ABORTED = "aborted"
    # The kinds of failures that the native part tells (`FailureCause`), except for `cancelled`.
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    LOST = "lost"
    TIMEOUT = "timeout"
    ENDED = "ended"
    CORRUPT = "corrupt"
    OTHER = "other"


@dataclass
class Consumed:
    """A request whose KV another engine computes.

    Attributes:
        handoff: The handoff's id.
        producer: Control address of the producer.
        num_prompt_tokens: Length of the prompt.
        request: vLLM's request.
        load: State of the handoff.
        arrived_at: Time of its arrival, by `time.monotonic`.
        steps_s: Time of the engine's steps until its load had begun, see `ConsumerScheduler`; 0 before that, or without
            a load.
        prompt_hash: Hash of its prompt; empty if no producer is asked.
        opening: The producer's message that opened the handoff.
        is_same_prompt: True if the producer computes the same prompt; compared once.
        given_tokens: The answer's first tokens, if the request brought them. A client may have them already.
        first_token: The first of them, or the token that the producer sampled, once it is known.
        unsupported_reason: Reason for which these tokens cannot be forced here; empty if they can.
        is_exact: True if that is the request's first one: it was forced, or the request continues after it.
        num_local_tokens: Tokens found in this engine's prefix cache when the load was claimed; without a load, when the
            scheduler asked last.
        num_computed: Prompt tokens that this engine has computed since the last preemption.
        num_preemptions: Preemptions that this object has processed.
        last_blocks: The prompt's last block of each KV cache group that has one, from the start of a load until a step
            computes in it; none if the load misses blocks.
        is_behind_others: True if vLLM was told to look at other requests first, after its last load has failed.
        reason: Reason for missing KV.
        loss: The same for metrics, as far as the scheduler role knows.
    """

    handoff: bytes
    producer: str
    num_prompt_tokens: int
    request: Request
    load: HandoffLoad = field(default_factory=HandoffLoad)
    arrived_at: float = field(default_factory=time.monotonic)
    steps_s: float = 0.0
    given_tokens: tuple[int, ...] = ()
    first_token: int | None = None
    unsupported_reason: str = ""
    is_exact: bool = False
    prompt_hash: bytes = b""
    opening: dict[str, Any] | None = None
    is_same_prompt: bool | None = None
    num_local_tokens: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    last_blocks: list[tuple[int, int]] = field(default_factory=list)
    is_behind_others: bool = False
    reason: str = ""
    loss: LossReason = LossReason.NONE

    @property
    def num_forced(self) -> int:
        """Number of outputs that are forced, if they can be."""
        return max(1, len(self.given_tokens))

    def note_preemptions(self) -> bool:
        """After a preemption, allows a second load if the producer still leases its blocks. Whether there was one.

        A complete load is not repeated: its blocks are acknowledged, and this engine's prefix cache has most of them.
        """
        if self.request.num_preemptions == self.num_preemptions:
            return False
        self.num_preemptions, self.num_computed = self.request.num_preemptions, 0
        self.load.on(Event.PREEMPTED)
        return True

    def awaits_first_token(self) -> bool:
        """True if the producer may still send the first token."""
        return self.load.phase is Phase.OPENED and self.first_token is None and not self.unsupported_reason

    def report(self) -> dict[str, Any]:
        """Returns the handoff's result, for the control port and the log."""
        outcome = self.load.outcome or LoadOutcome(is_loaded=False)
        return {
            "handoff": self.handoff.hex(),
            "result": self._result(),
            "prompt_tokens": self.num_prompt_tokens,
            "local_tokens": self.num_local_tokens,
            "computed_tokens": self.num_computed,
            # For its logits vLLM computes the last prompt token, if the request does not continue after the first one.
            "recomputed_tokens": max(0, self.num_computed - 1),
            "blocks_received": outcome.num_received,
            "blocks_missing": outcome.num_missing,
            "blocks_retried": outcome.num_retried,
            "blocks_validated": outcome.num_validated,
            "checksums_compared": outcome.num_compared,
            "checksums_differed": outcome.num_corrupt,
            "bytes": outcome.num_bytes,
            "transport": outcome.transport,
            "transport_reason": outcome.transport_reason,
            "steps_ms": round(self.steps_s * 1000, 3),
            "backlog_ms": round(outcome.backlog_s * 1000, 3),
            "transfer_ms": round(outcome.elapsed_s * 1000, 3),
            "handover_ms": round((time.monotonic() - self.arrived_at) * 1000, 3),
            "reason": outcome.reason or self.reason,
            "first_token": "exact" if self.is_exact else "sampled",
            "first_token_reason": "" if self.is_exact else self.unsupported_reason or "the producer's is not known",
        }

    def loss_reason(self) -> LossReason:
        """Returns the reason for missing KV, for metrics: the first failure counts."""
        if self.load.has_all_blocks:
            return LossReason.NONE
        cause = "" if self.load.outcome is None else self.load.outcome.cause
        # A cancelled load fails for the reason of its cancellation.
        return LossReason(cause) if cause not in ("", "cancelled") else self.loss

    def _result(self) -> str:
        if self.load.has_all_blocks:
            return "full"
        if self.load.phase is Phase.FORGOTTEN:
            return "failed" if self.request.status == RequestStatus.FINISHED_ERROR else "aborted"
        if self.num_computed >= self.num_prompt_tokens:
            return "missing"
        return "partial" if self.load.outcome else "local"
