"""State of requests that take part in a handoff, as the scheduler role keeps it."""

from __future__ import annotations

import copy
import hashlib
import secrets
import time
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import LoadParams, ProduceParams, SaveParams, parse

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.connector.allowed_producers import AllowedProducers


class LossReason(StrEnum):
    """Why a consumer did not get all KV of a handoff, as metrics count it. The text of a result says more."""

    NONE = "none"
    CACHED = "cached"
    NOT_SCHEDULED = "not_scheduled"
    NO_PRODUCER = "no_producer"
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
class Produced:
    """A request whose KV another engine reads.

    Attributes:
        handoff: The handoff's id.
        num_prompt_tokens: Length of the prompt.
        num_cached_tokens: Prompt tokens found in this engine's prefix cache.
        num_announced: Blocks that the worker role announces or has announced.
        announced_ids: Those blocks.
        is_open: Whether the handoff is open: the request is scheduled, and consumers know that.
        is_leased: Whether the request has finished and its blocks are leased.
        num_leased_blocks: Blocks that are leased.
        is_withdrawn: Whether the blocks are withdrawn: no consumer may read them.
    """

    handoff: bytes
    num_prompt_tokens: int
    num_cached_tokens: int | None = None
    num_announced: int = 0
    announced_ids: set[int] = field(default_factory=set)
    is_open: bool = False
    is_leased: bool = False
    num_leased_blocks: int = 0
    is_withdrawn: bool = False

    def num_ready(self, num_tokens: int, block_size: int) -> int:
        """Returns how many blocks are ready after `num_tokens`: full ones, and the last one with the prompt's end."""
        if num_tokens >= self.num_prompt_tokens:
            return -(-self.num_prompt_tokens // block_size)
        return num_tokens // block_size

    def announce(self, block_ids: list[int]) -> list[tuple[bytes, int, list[int]]]:
        """Returns the announcement of the next blocks: `(handoff, first, block_ids)`, or none."""
        first = self.num_announced
        self.num_announced += len(block_ids)
        self.announced_ids.update(block_ids)
        return [(self.handoff, first, block_ids)] if block_ids else []


@dataclass
class Consumed:
    """A request whose KV another engine computes.

    `phase`: `waiting` (for the producer to open) → `opened` → `loading` → `done`; `ended` from the first two. In
    `ended` and `done` this engine computes missing KV, unless a failed load is set to fail its request.

    Attributes:
        handoff: The handoff's id.
        producer: Control address of the producer.
        num_prompt_tokens: Length of the prompt.
        request: vLLM's request.
        arrived_at: When it arrived, by `time.monotonic`.
        steps_s: Time of the engine's steps until its load had begun, see `Consuming`; 0 before that, or if none begins.
        opening: The producer's message that opened the handoff.
        is_same_prompt: Whether the producer computes the same prompt; compared once.
        has_state: Whether the sequence state has arrived.
        first_token: The token that the producer sampled, once it is known.
        unsupported_reason: Why that token cannot be forced here; empty if it can.
        is_exact: Whether it is the request's first one: it was forced, or the request continues after it.
        num_local_tokens: Tokens found in this engine's prefix cache when the load was claimed.
        num_computed: Prompt tokens that this engine has computed since the last preemption.
        num_preemptions: Preemptions that this object has processed.
        verified: Outcomes, one a rank, of a load that lacks only the sequence state.
        outcome: The workers' merged outcome of the load.
        last_block_id: The prompt's last block, from the start of a load until a step computes in it; `None` if the load
            misses blocks.
        reason: Why KV is missing.
        loss: The same for metrics, as far as the scheduler role knows.
        is_leased: Whether the producer leases its blocks to this request.
        is_lost: Whether the KV to load cannot arrive any more.
        is_reported: Whether the result has been reported.
        ending: How the request ended before its prompt was computed: `aborted` or `failed`; empty if it did not.
    """

    handoff: bytes
    producer: str
    num_prompt_tokens: int
    request: Request
    arrived_at: float = field(default_factory=time.monotonic)
    steps_s: float = 0.0
    phase: str = "waiting"
    first_token: int | None = None
    unsupported_reason: str = ""
    is_exact: bool = False
    opening: dict[str, Any] | None = None
    is_same_prompt: bool | None = None
    has_state: bool = False
    num_local_tokens: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    verified: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    last_block_id: int | None = None
    reason: str = ""
    loss: LossReason = LossReason.NONE
    is_leased: bool = False
    is_lost: bool = False
    is_reported: bool = False
    ending: str = ""

    def note_preemptions(self) -> None:
        """After a preemption, allows a second load if the producer still leases its blocks.

        A complete load is not repeated: its blocks are acknowledged, and this engine's prefix cache has most of them.
        """
        if self.request.num_preemptions == self.num_preemptions:
            return
        self.num_preemptions, self.num_computed = self.request.num_preemptions, 0
        if self.phase == "done" and self.is_leased:
            self.phase = "opened"

    def awaits_first_token(self) -> bool:
        """Whether the producer may still send the first token."""
        return not self.has_state and self.first_token is None and not self.unsupported_reason

    def report(self) -> dict[str, Any]:
        """Returns the handoff's result, for the control port and the log."""
        outcome = self.outcome or {}
        return {
            "handoff": self.handoff.hex(),
            "result": self._result(is_loaded=bool(outcome.get("is_loaded"))),
            "prompt_tokens": self.num_prompt_tokens,
            "local_tokens": self.num_local_tokens,
            "computed_tokens": self.num_computed,
            # For its logits vLLM computes the last prompt token, if the request does not continue after the first one.
            "recomputed_tokens": max(0, self.num_computed - 1),
            "blocks_received": outcome.get("num_received", 0),
            "blocks_missing": outcome.get("num_missing", 0),
            "blocks_retried": outcome.get("num_retried", 0),
            "blocks_validated": outcome.get("num_validated", 0),
            "checksums_compared": outcome.get("num_compared", 0),
            "checksums_differed": outcome.get("num_corrupt", 0),
            "bytes": outcome.get("num_bytes", 0),
            "transport": outcome.get("transport", ""),
            "steps_ms": round(self.steps_s * 1000, 3),
            "backlog_ms": round(outcome.get("backlog_s", 0.0) * 1000, 3),
            "transfer_ms": round(outcome.get("elapsed_s", 0.0) * 1000, 3),
            "handover_ms": round((time.monotonic() - self.arrived_at) * 1000, 3),
            "reason": outcome.get("reason") or self.reason,
            "first_token": "exact" if self.is_exact else "sampled",
            "first_token_reason": "" if self.is_exact else self.unsupported_reason or "the producer's is not known",
        }

    def loss_reason(self) -> LossReason:
        """Returns why KV is missing, for metrics: the first failure counts."""
        outcome = self.outcome or {}
        if outcome.get("is_loaded"):
            return LossReason.NONE
        cause = outcome.get("cause", "")
        # A cancelled load fails for the reason of its cancellation.
        return LossReason(cause) if cause not in ("", "cancelled") else self.loss

    def _result(self, *, is_loaded: bool) -> str:
        if is_loaded:
            return "full"
        if self.ending:
            return self.ending
        if self.num_computed >= self.num_prompt_tokens:
            return "missing"
        return "partial" if self.outcome else "local"


class _HasHandoff(Protocol):
    handoff: bytes


T = TypeVar("T", bound=_HasHandoff)


class Handoffs(Generic[T]):
    """Requests of one role, by request id and by handoff. Each handoff belongs to one request."""

    def __init__(self) -> None:
        self._by_request: dict[str, T] = {}
        self._request_ids: dict[bytes, str] = {}

    def add(self, request_id: str, item: T) -> None:
        """Adds a request.

        Raises:
            ConfigError: Its handoff belongs to another request (n > 1, or a reused id).
        """
        if item.handoff in self._request_ids:
            message = f"handoff {item.handoff.hex()} belongs to request {self._request_ids[item.handoff]}"
            raise ConfigError(message)
        self._by_request[request_id] = item
        self._request_ids[item.handoff] = request_id

    def get(self, request_id: str) -> T | None:
        """Returns the request with this id."""
        return self._by_request.get(request_id)

    def of(self, handoff: bytes) -> T | None:
        """Returns the request of this handoff."""
        return self._by_request.get(self._request_ids.get(handoff, ""))

    def pop(self, request_id: str) -> T | None:
        """Removes and returns a request."""
        item = self._by_request.pop(request_id, None)
        if item is not None:
            del self._request_ids[item.handoff]
        return item

    def values(self) -> list[T]:
        """Returns all requests."""
        return list(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)


def read_params(request: Request, allowed: AllowedProducers) -> Produced | Consumed | None:
    """Reads a request's parameters; returns `None` if it takes part in no handoff, or in one through a store.

    Raises:
        ConfigError: The parameters are wrong. Any client may have sent them.
    """
    params = parse(request.kv_transfer_params)
    if params is None or isinstance(params, SaveParams | LoadParams):
        return None
    if request.prompt_token_ids is None:
        message = "a prompt of embeddings has no token ids, which both engines compare"
        raise ConfigError(message)
    if isinstance(params, ProduceParams):
        if request.max_tokens != 1:
            message = f"max_tokens={request.max_tokens}: a request with do_remote_decode has max_tokens=1"
            raise ConfigError(message)
        if params.handoff is None:
            _drop_min_tokens(request)
        return Produced(params.handoff or secrets.token_bytes(16), request.num_prompt_tokens)
    consumed = Consumed(
        params.handoff, params.producer, request.num_prompt_tokens, request, first_token=params.first_token
    )
    if params.producer:
        allowed.check(params.host)
    else:
        consumed.phase, consumed.reason, consumed.loss = "ended", "no producer was named", LossReason.NO_PRODUCER
    return consumed


def _drop_min_tokens(request: Request) -> None:
    """Lets a prefill sample any first token, as most clients do.

    Routers that know NixlConnector's fields only drop a client's `min_tokens`, or send 1 whatever the client sent.
    """
    if request.sampling_params is not None and request.sampling_params.min_tokens:
        request.sampling_params = copy.copy(request.sampling_params)
        request.sampling_params.min_tokens = 0


def prompt_hash(request: Request) -> bytes:
    """Hashes what a prompt's KV depends on besides the model and its adapter: token ids, images."""
    digest = hashlib.sha256(array("I", request.prompt_token_ids or ()).tobytes())
    for feature in request.mm_features or ():
        digest.update(repr((feature.identifier, feature.mm_position.offset)).encode())
    return digest.digest()
