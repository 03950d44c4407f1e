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

from vllm.v1.request import RequestStatus

from kvpipe.connector.load import Event, HandoffLoad, LoadOutcome, Phase
from kvpipe.connector.metadata import ReadyRange
from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import LoadParams, ProduceParams, SaveParams, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvpipe.connector.allowed_producers import AllowedProducers


class LossReason(StrEnum):
    """Why a consumer did not get all KV of a handoff, as metrics count it. The text of a result says more."""

    NONE = "none"
    CACHED = "cached"
    NOT_SCHEDULED = "not_scheduled"
    GAVE_WAY = "gave_way"
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
        request: vLLM's request.
        num_cached_tokens: Prompt tokens found in this engine's prefix cache.
        num_announced: Blocks that the worker role announces or has announced.
        announced_ids: Those blocks.
        is_open: Whether the handoff is open: the request is scheduled, and consumers know that.
        is_leased: Whether the request has finished and its blocks are leased.
        num_leased_blocks: Blocks that are leased.
        is_withdrawn: Whether the blocks are withdrawn: no consumer may read them.
    """

    handoff: bytes
    request: Request
    num_cached_tokens: int | None = None
    num_announced: int = 0
    announced_ids: set[int] = field(default_factory=set)
    is_open: bool = False
    is_leased: bool = False
    num_leased_blocks: int = 0
    is_withdrawn: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.request.num_prompt_tokens)

    def num_ready(self, num_tokens: int, block_size: int) -> int:
        """Returns how many blocks are ready after `num_tokens`: full ones, and the last one with the prompt's end."""
        if num_tokens >= self.num_prompt_tokens:
            return -(-self.num_prompt_tokens // block_size)
        return num_tokens // block_size

    def announce(self, block_ids: list[int]) -> list[ReadyRange]:
        """Returns the announcement of the next blocks, or none."""
        first = self.num_announced
        self.num_announced += len(block_ids)
        self.announced_ids.update(block_ids)
        return [ReadyRange(self.handoff, first, block_ids)] if block_ids else []


@dataclass
class Consumed:
    """A request whose KV another engine computes.

    Attributes:
        handoff: The handoff's id.
        producer: Control address of the producer.
        num_prompt_tokens: Length of the prompt.
        request: vLLM's request.
        load: Where the handoff is.
        arrived_at: When it arrived, by `time.monotonic`.
        steps_s: Time of the engine's steps until its load had begun, see `Consuming`; 0 before that, or if none begins.
        opening: The producer's message that opened the handoff.
        is_same_prompt: Whether the producer computes the same prompt; compared once.
        given_tokens: The answer's first tokens, if the request brought them. A client may have them already.
        first_token: The first of them, or the token that the producer sampled, once it is known.
        unsupported_reason: Why these tokens cannot be forced here; empty if they can.
        is_exact: Whether that is the request's first one: it was forced, or the request continues after it.
        num_local_tokens: Tokens found in this engine's prefix cache when the load was claimed.
        num_computed: Prompt tokens that this engine has computed since the last preemption.
        num_preemptions: Preemptions that this object has processed.
        last_block_id: The prompt's last block, from the start of a load until a step computes in it; `None` if the load
            misses blocks.
        reason: Why KV is missing.
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
    opening: dict[str, Any] | None = None
    is_same_prompt: bool | None = None
    num_local_tokens: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    last_block_id: int | None = None
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
            "steps_ms": round(self.steps_s * 1000, 3),
            "backlog_ms": round(outcome.backlog_s * 1000, 3),
            "transfer_ms": round(outcome.elapsed_s * 1000, 3),
            "handover_ms": round((time.monotonic() - self.arrived_at) * 1000, 3),
            "reason": outcome.reason or self.reason,
            "first_token": "exact" if self.is_exact else "sampled",
            "first_token_reason": "" if self.is_exact else self.unsupported_reason or "the producer's is not known",
        }

    def loss_reason(self) -> LossReason:
        """Returns why KV is missing, for metrics: the first failure counts."""
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


class _HasHandoff(Protocol):
    handoff: bytes
    request: Request


T = TypeVar("T", bound=_HasHandoff)


class Handoffs(Generic[T]):
    """Requests of one role, by request id and by handoff. Each handoff belongs to one request."""

    def __init__(self) -> None:
        self._by_request: dict[str, T] = {}
        self._request_ids: dict[bytes, str] = {}
        # Those that `scheduled` yields.
        self._in_steps: dict[str, T] = {}

    def add(self, request_id: str, item: T) -> None:
        """Adds a request.

        Raises:
            ConfigError: Its handoff belongs to another request (n > 1, or a reused id).
        """
        if item.handoff in self._request_ids:
            message = f"handoff {item.handoff.hex()} belongs to request {self._request_ids[item.handoff]}"
            raise ConfigError(message)
        self._by_request[request_id] = self._in_steps[request_id] = item
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
            self._in_steps.pop(request_id, None)
        return item

    def settle(self, item: T) -> None:
        """Has `scheduled` leave a request out, until it is unsettled."""
        self._in_steps.pop(item.request.request_id, None)

    def unsettle(self, item: T) -> None:
        """Has `scheduled` yield a request again."""
        self._in_steps[item.request.request_id] = item

    def scheduled(self, output: SchedulerOutput) -> Iterator[tuple[T, int, int]]:
        """Yields `(request, tokens computed before, tokens of this step)` for those that a step computes.

        Settled ones are left out. A step may have a thousand other requests, so that those here are looked up in it.
        """
        counts = output.num_scheduled_tokens
        for request_id, item in list(self._in_steps.items()):
            if request_id in counts:
                # vLLM counts the tokens of this step after it has called the connector.
                yield item, item.request.num_computed_tokens, counts[request_id]

    def values(self) -> list[T]:
        """Returns all requests."""
        return list(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)


def read_params(request: Request, allowed: AllowedProducers, max_model_len: int) -> Produced | Consumed | None:
    """Reads a request's parameters; returns `None` if it takes part in no handoff, or in one through a store.

    Raises:
        ConfigError: The parameters are wrong. Any client may have sent them.
    """
    params = parse(request.kv_transfer_params, max_model_len=max_model_len)
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
        return Produced(params.handoff or secrets.token_bytes(16), request)
    consumed = Consumed(
        params.handoff,
        params.producer,
        request.num_prompt_tokens,
        request,
        given_tokens=params.tokens,
        first_token=params.tokens[0] if params.tokens else None,
    )
    if params.producer:
        allowed.check(params.host)
    else:
        consumed.load = HandoffLoad.without_producer()
        consumed.reason, consumed.loss = "no producer was named", LossReason.NO_PRODUCER
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
