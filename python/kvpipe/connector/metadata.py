"""Messages between the two roles of one engine, one a step each way. Ids are bytes, times are seconds."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Load:
    """Consumer: blocks to read from a producer.

    Attributes:
        request_id: vLLM's id on this engine.
        handoff: The handoff's id.
        first: Position in the prompt of the first block to read.
        block_ids: Destination blocks, one for each position.
        ranks: `(address, incarnation)` of the producer's workers, by tensor-parallel rank.
        is_committed: Whether the sequence state has arrived.
        refusal: Why no block can be loaded; empty if they can.
    """

    request_id: str
    handoff: bytes
    first: int
    block_ids: list[int]
    ranks: list[tuple[str, bytes]]
    is_committed: bool
    refusal: str = ""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler role to worker role, for one step.

    Attributes:
        loads: Consumer: loads to begin.
        commits: Consumer: handoffs whose sequence state has arrived before all blocks were verified. The worker role
            reports their end.
        committed: Consumer: handoffs whose blocks are verified and whose sequence state has arrived. The worker role
            acknowledges them to the producer; the scheduler role reports them to vLLM.
        cancels: Consumer: `(handoff, reason, is_withdrawn)` of loads to cancel. With `is_withdrawn` all blocks count as
            missing: the producer has withdrawn them, or their request was aborted.
        ended: Producer: `(handoff, reason)` of handoffs whose blocks may change from this step on.
        cached: Producer: as `ready`, for blocks that are ready before this step's forward pass.
        ready: Producer: `(handoff, first, block_ids)` of blocks that this step's forward pass completes.
        leased: Producer: `(handoff, request_id)` of finished requests whose blocks are leased to a consumer.
        progress: Producer: `(handoff, seconds)` of prefills whose end the worker role can predict: their time beyond
            this step.
        control: This engine's control port, which receives the predictions; empty without `progress`.
        first_tokens: Consumer: token id by handoff, for the requests in this step that have no output yet.
        first_steps: Consumer: handoffs whose prompt is complete with this step, for the trace.
        restores: Consumer: blocks that get back after this step's forward pass the bytes that they have before it. Each
            is the last block of a prompt, verified by a load; the pass computes the prompt's last token in it alone.
    """

    loads: list[Load] = field(default_factory=list)
    commits: list[bytes] = field(default_factory=list)
    committed: list[bytes] = field(default_factory=list)
    cancels: list[tuple[bytes, str, bool]] = field(default_factory=list)
    ended: list[tuple[bytes, str]] = field(default_factory=list)
    cached: list[tuple[bytes, int, list[int]]] = field(default_factory=list)
    ready: list[tuple[bytes, int, list[int]]] = field(default_factory=list)
    leased: list[tuple[bytes, str]] = field(default_factory=list)
    progress: list[tuple[bytes, float]] = field(default_factory=list)
    control: str = ""
    first_tokens: dict[bytes, int] = field(default_factory=dict)
    first_steps: list[bytes] = field(default_factory=list)
    restores: list[int] = field(default_factory=list)


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker role to scheduler role, once.

    Attributes:
        address: Address of this rank's agent.
        incarnation: Incarnation of that agent.
        forces_first_tokens: Whether this rank's sampler applies `StepMetadata.first_tokens`.
        properties: What this rank adds to the engine's fingerprint.
    """

    address: str
    incarnation: bytes
    forces_first_tokens: bool = False
    properties: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class WorkerOutcomes(KVConnectorWorkerMetadata):
    """Worker role to scheduler role: loads that ended, and loads that lack only the sequence state, by request id.

    Each outcome has `is_loaded`, `transport`, `elapsed_s`, `backlog_s`, `reason`, `cause` (the kind of the reason) and
    `num_bytes`; the block counts `num_received`, `num_missing`, `num_retried` and `num_validated`; and the checksum
    counts `num_compared` and `num_corrupt`. A load in `verified` has one such outcome for each rank. The worker role
    reports nothing more of a handoff in `acknowledged`.
    """

    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    verified: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    acknowledged: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerOutcomes:
        """Merges the reports of two ranks, see `merge`."""
        merged = dict(self.outcomes)
        for request_id, theirs in getattr(other, "outcomes", {}).items():
            ours = merged.get(request_id)
            merged[request_id] = theirs if ours is None else merge(ours, theirs)
        verified = dict(self.verified)
        for request_id, ranks in getattr(other, "verified", {}).items():
            verified[request_id] = [*verified.get(request_id, []), *ranks]
        # All ranks receive a commit in the same step.
        return WorkerOutcomes(merged, verified, self.acknowledged)


_MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "num_bytes": operator.add,
    "num_validated": operator.add,
    "num_compared": operator.add,
    "num_corrupt": operator.add,
    "num_received": min,
    "num_missing": max,
    "num_retried": max,
    "elapsed_s": max,
    "backlog_s": max,
}


def merge(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Merges two ranks' outcomes of one load: it is loaded if both are, bytes add up, the longer time counts."""
    return {
        "is_loaded": ours["is_loaded"] and theirs["is_loaded"],
        **{name: how(ours[name], theirs[name]) for name, how in _MERGED.items()},
        "transport": ours["transport"] or theirs["transport"],
        "reason": ours["reason"] or theirs["reason"],
        "cause": ours["cause"] or theirs["cause"],
    }
