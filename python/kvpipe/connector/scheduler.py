"""The scheduler role: which requests produce or consume a handoff, and what has become of it.

Runs on EngineCore's main thread. Sockets, deadlines and leases live in the Rust thread of `Control`; a hook only hands
commands to it and drains its events.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvpipe import _kvpipe
from kvpipe.config import resolve_token
from kvpipe.connector.fingerprint import fingerprint
from kvpipe.connector.metadata import HandshakeMetadata, Load, StepMetadata
from kvpipe.control import parse_handoff
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.connector.config import ConnectorConfig

# A child of vLLM's logger: vLLM gives handlers to that one only.
logger = init_logger("vllm.kvpipe.scheduler")

_FINISH_REASONS = {
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_STOPPED: "stop",
}


@dataclass
class Produced:
    """A request whose KV another engine will read.

    Attributes:
        handoff: The handoff's id.
        num_prompt_tokens: Length of the prompt.
        num_cached_tokens: Prompt tokens that were in the own prefix cache.
        num_announced: Blocks that the worker was told to announce.
        is_open: Whether consumers have been told that it is scheduled.
        is_held: Whether it has finished and its blocks are held.
    """

    handoff: bytes
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_announced: int = 0
    is_open: bool = False
    is_held: bool = False


@dataclass
class Consumed:
    """A request whose KV comes from another engine.

    `phase`: `new` → `waiting` (for the producer to open) → `opened` → `loading` → `done`; `gone` from any of the first
    three. In `gone` and `done` decode computes whatever it lacks.

    Attributes:
        handoff: The handoff's id.
        producer: Control address of the producer.
        num_prompt_tokens: Length of the prompt.
        num_local_tokens: Tokens found in the own prefix cache when the load was claimed.
        block_ids: Destination of the load.
        num_external_tokens: Tokens that were asked of the producer.
        num_computed: Prompt tokens that this engine computed itself.
        outcome: The worker's word on the load.
        reason: Why nothing, or not everything, came.
        is_reported: Whether the result has been reported.
        is_finished: Whether the request was aborted during the load.
    """

    handoff: bytes
    producer: str
    num_prompt_tokens: int
    arrived_at: float = field(default_factory=time.monotonic)
    phase: str = "new"
    opening: dict[str, Any] | None = None
    has_state: bool = False
    num_local_tokens: int = 0
    num_external_tokens: int = 0
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    reason: str = ""
    is_reported: bool = False
    is_finished: bool = False

    def report(self) -> dict[str, Any]:
        """The handoff's result, for the control port and the log."""
        outcome = self.outcome or {}
        is_loaded = bool(outcome.get("is_loaded"))
        return {
            "handoff": self.handoff.hex(),
            "result": self._result(is_loaded=is_loaded),
            "prompt_tokens": self.num_prompt_tokens,
            "local_tokens": self.num_local_tokens,
            "computed_tokens": self.num_computed,
            "bytes": outcome.get("num_bytes", 0),
            "transport": outcome.get("transport", ""),
            "transfer_ms": round(outcome.get("elapsed_s", 0.0) * 1000, 3),
            "handover_ms": round((time.monotonic() - self.arrived_at) * 1000, 3),
            "reason": outcome.get("reason") or self.reason,
        }

    def _result(self, *, is_loaded: bool) -> str:
        if is_loaded:
            return "full"
        if self.num_computed >= self.num_prompt_tokens:
            return "missing"
        return "partial" if self.outcome else "local"


class SchedulerRole:
    """Handoffs of one engine, as its scheduler sees them."""

    def __init__(self, vllm_config: VllmConfig, config: ConnectorConfig) -> None:
        self._block_size = vllm_config.cache_config.block_size
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._role = str(vllm_config.kv_transfer_config.kv_role)
        self._manager: KVCacheManager | None = None
        self._ranks: list[tuple[str, bytes]] = []
        self._produced: dict[str, Produced] = {}
        self._consumed: dict[str, Consumed] = {}
        self._step = StepMetadata()
        self._fingerprint = fingerprint(vllm_config)
        self._control = _kvpipe.Control(
            config.listen,
            resolve_token(),
            self._engine_id,
            self._fingerprint,
            silence=config.silence_s,
            lease=config.lease_s,
            open_timeout=config.open_timeout_s,
            handoff_timeout=config.handoff_timeout_s,
        )
        logger.info(
            "control.listen address=%s engine_id=%s role=%s",
            self.address,
            self._engine_id,
            self._role,
        )

    @property
    def address(self) -> str:
        """The control port, as `host:port`."""
        return self._control.address or ""

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Takes the manager, which knows the blocks of each request."""
        self._manager = manager

    def set_workers(self, workers: dict[int, HandshakeMetadata]) -> None:
        """Takes the addresses of this engine's workers, by tensor-parallel rank."""
        self._ranks = [(workers[rank].address, workers[rank].incarnation) for rank in sorted(workers)]
        description = {
            "engine_id": self._engine_id,
            "role": self._role,
            "ranks": [address for address, _ in self._ranks],
            "fingerprint": dict(self._fingerprint),
        }
        self._control.describe_as(json.dumps(description))

    # --- requests

    def on_new_request(self, request: Request) -> None:
        """Notes what the proxy wants with a request; without its parameters the request is none of ours."""
        params = (request.kv_transfer_params or {}).get("kvpipe")
        if params is None:
            return
        try:
            self._note(request, params)
        except (ConfigError, AttributeError) as error:
            logger.warning("request.ignored request_id=%s: %s", request.request_id, error)

    def _note(self, request: Request, params: dict[str, Any]) -> None:
        handoff, role = parse_handoff(params.get("handoff")), params.get("role")
        if role == "produce":
            if request.max_tokens != 1:
                message = f"max_tokens={request.max_tokens}: a producing request has max_tokens=1"
                raise ConfigError(message)
            self._produced[request.request_id] = Produced(handoff, request.num_prompt_tokens)
        elif role == "consume" and isinstance(params.get("producer"), str):
            self._consumed[request.request_id] = Consumed(handoff, params["producer"], request.num_prompt_tokens)
        else:
            message = f"kvpipe parameters {params!r}: expected role produce, or consume with a producer"
            raise ConfigError(message)

    # --- consumer

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens come from the producer: `(None, False)` as long as it has not opened the handoff."""
        consumed = self._consumed.get(request.request_id)
        if consumed is None:
            return 0, False
        if consumed.phase == "new":
            consumed.phase = "waiting"
            self._control.watch(consumed.handoff, consumed.producer)
        self._take_events()
        if consumed.phase == "waiting":
            return None, False
        if consumed.phase != "opened":
            return 0, False
        if consumed.opening is not None and consumed.opening["prompt_hash"] != prompt_hash(request):
            self._give_up(consumed, "the producer computed another prompt")
            return 0, False
        # vLLM computes the last prompt token itself in any case: alone, it is nothing to move.
        wanted = request.num_prompt_tokens - num_local_tokens
        if wanted <= 1 or request.num_tokens != request.num_prompt_tokens:
            self._give_up(consumed, "everything was in the own prefix cache")
            return 0, False
        consumed.num_local_tokens = num_local_tokens
        return wanted, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks have been allocated: opens a producing request's handoff, or begins a consuming one's load."""
        produced = self._produced.get(request.request_id)
        if produced is not None and not produced.is_open:
            produced.is_open = True
            hashed = prompt_hash(request)
            self._control.open(produced.handoff, hashed, request.num_prompt_tokens, 0, self._ranks)
        consumed = self._consumed.get(request.request_id)
        if consumed is None or consumed.phase != "opened" or consumed.opening is None:
            return
        if num_external_tokens == 0:
            self._give_up(consumed, "the scheduler did not want it")
            return
        first = consumed.num_local_tokens // self._block_size
        end = -(-(consumed.num_local_tokens + num_external_tokens) // self._block_size)
        consumed.block_ids = list(blocks.get_block_ids()[0][first:end])
        consumed.num_external_tokens = num_external_tokens
        consumed.phase = "loading"
        self._step.loads.append(
            Load(
                request_id=request.request_id,
                handoff=consumed.handoff,
                generation=consumed.opening["generation"],
                first=first,
                block_ids=consumed.block_ids,
                ranks=consumed.opening["ranks"],
                is_committed=consumed.has_state,
            )
        )

    def _give_up(self, consumed: Consumed, reason: str) -> None:
        consumed.phase, consumed.reason = "gone", reason
        self._control.unwatch(consumed.handoff, False)  # noqa: FBT003 - a native method

    # --- every step

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the worker role has to know before this step's forward pass."""
        self._take_events()
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        for request_id, num_before, num_new in _scheduled(output):
            self._produce(request_id, num_before, num_new)
            self._count(request_id, num_before, num_new)
        step, self._step = self._step, StepMetadata()
        return step

    def _produce(self, request_id: str, num_before: int, num_new: int) -> None:
        """Announces the blocks that are final after this step."""
        produced = self._produced.get(request_id)
        if produced is None or not produced.is_open or self._manager is None:
            return
        if produced.num_announced == 0:
            produced.num_cached_tokens = num_before
        num_tokens = num_before + num_new
        is_complete = num_tokens >= produced.num_prompt_tokens
        num_final = (
            -(-produced.num_prompt_tokens // self._block_size) if is_complete else num_tokens // self._block_size
        )
        if num_final > produced.num_announced:
            block_ids = self._manager.get_block_ids(request_id)[0][produced.num_announced : num_final]
            self._step.finals.append((produced.handoff, 0, produced.num_announced, list(block_ids)))
            produced.num_announced = num_final

    def _preempted(self, request_id: str) -> None:
        produced = self._produced.pop(request_id, None)
        if produced is not None:
            self._withdraw(produced, "the producer preempted the request")

    def _withdraw(self, produced: Produced, reason: str) -> None:
        """Before blocks may change: consumers are told, and the worker stops announcing them."""
        self._control.withdraw(produced.handoff, reason)
        self._step.ended.append((produced.handoff, reason))

    def _count(self, request_id: str, num_before: int, num_new: int) -> None:
        """Counts the prompt tokens that a consuming request computes itself; reports when its prompt is done."""
        consumed = self._consumed.get(request_id)
        if consumed is None or consumed.is_reported:
            return
        consumed.num_computed += max(0, min(num_before + num_new, consumed.num_prompt_tokens) - num_before)
        if num_before + num_new >= consumed.num_prompt_tokens:
            self._report(consumed)

    def _report(self, consumed: Consumed) -> None:
        consumed.is_reported = True
        report = consumed.report()
        self._control.set_result(consumed.handoff, json.dumps(report))
        fields = " ".join(f"{name}={value}" for name, value in report.items() if value != "")
        logger.info("handoff.end %s", fields)

    def update(self, output: KVConnectorOutput) -> None:
        """Takes the worker role's word on the loads that ended in this step."""
        outcomes = getattr(output.kv_connector_worker_meta, "outcomes", {})
        for request_id in output.finished_recving or ():
            consumed = self._consumed.get(request_id)
            if consumed is None:
                continue
            consumed.outcome = outcomes.get(request_id)
            is_loaded = consumed.outcome is not None and consumed.outcome["is_loaded"]
            consumed.phase = "done"
            self._control.unwatch(consumed.handoff, is_loaded)
            if consumed.is_finished:
                self._consumed.pop(request_id)
        for request_id in output.finished_sending or ():
            self._produced.pop(request_id, None)

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished: whether its blocks are held for a consumer, and what its answer says about it."""
        consumed = self._consumed.get(request.request_id)
        if consumed is not None:
            self._consumed_finished(request.request_id, consumed)
        produced = self._produced.get(request.request_id)
        if produced is None:
            return False, None
        reason = _FINISH_REASONS.get(request.status)
        if reason is None or not produced.is_open:
            self._produced.pop(request.request_id)
            self._withdraw(produced, f"the producer ended the request: {request.status.name}")
            return False, None
        produced.is_held = True
        self._step.held.append((produced.handoff, request.request_id))
        self._control.finish(produced.handoff, list(request.output_token_ids), reason, produced.num_cached_tokens)
        return True, {"kvpipe": {"handoff": produced.handoff.hex(), "num_tokens": produced.num_prompt_tokens}}

    def _consumed_finished(self, request_id: str, consumed: Consumed) -> None:
        if consumed.phase == "loading":
            # The worker still writes into the blocks: vLLM frees them when it reports the end of the load.
            consumed.is_finished = True
            self._step.cancels.append((consumed.handoff, "the request was aborted"))
            return
        self._consumed.pop(request_id)
        if consumed.phase in ("waiting", "opened"):
            self._give_up(consumed, "the request was aborted")

    # --- what the Rust thread has to say

    def _take_events(self) -> None:
        for event in self._control.drain():
            handler = getattr(self, f"_on_{event['event']}")
            handler(event)

    def _on_log(self, event: dict[str, Any]) -> None:
        logger.info("%s", event["text"])

    def _on_released(self, event: dict[str, Any]) -> None:
        """Nobody will read a produced request's blocks (any more)."""
        found = next((item for item in self._produced.items() if item[1].handoff == event["handoff"]), None)
        if found is None:
            return
        request_id, produced = found
        self._step.ended.append((produced.handoff, event["reason"]))
        if not produced.is_held:
            self._produced.pop(request_id)

    def _on_opened(self, event: dict[str, Any]) -> None:
        for consumed in self._watching(event["handoff"]):
            consumed.phase, consumed.opening = "opened", event

    def _on_finished(self, event: dict[str, Any]) -> None:
        for consumed in self._of(event["handoff"]):
            consumed.has_state = True
            if consumed.phase == "loading":
                self._step.commits.append(consumed.handoff)

    def _on_gone(self, event: dict[str, Any]) -> None:
        for consumed in self._of(event["handoff"]):
            if consumed.phase == "loading":
                self._step.cancels.append((consumed.handoff, event["reason"]))
            elif consumed.phase in ("waiting", "opened"):
                consumed.phase, consumed.reason = "gone", event["reason"]

    def _of(self, handoff: bytes) -> list[Consumed]:
        return [consumed for consumed in self._consumed.values() if consumed.handoff == handoff]

    def _watching(self, handoff: bytes) -> list[Consumed]:
        return [consumed for consumed in self._of(handoff) if consumed.phase == "waiting"]

    def close(self) -> None:
        """Ends the control plane; consumers are told."""
        self._control.close()


def prompt_hash(request: Request) -> bytes:
    """What a prompt's KV depends on besides the model: token ids, LoRA adapter, images."""
    digest = hashlib.sha256(array("I", request.prompt_token_ids or ()).tobytes())
    lora = request.lora_request
    digest.update(repr(lora.lora_name if lora is not None else None).encode())
    for feature in request.mm_features or ():
        digest.update(repr((feature.identifier, feature.mm_position.offset)).encode())
    return digest.digest()


def _scheduled(output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """`(request_id, computed before, computed in this step)` of every scheduled request."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, counts.get(new.req_id, 0)
    cached = output.scheduled_cached_reqs
    for request_id, num_before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, num_before, counts.get(request_id, 0)
