"""What the two roles of one engine tell each other, once a step. Plain values only: ids are bytes, times seconds."""

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
    """Consumer: blocks to be read.

    Attributes:
        request_id: vLLM's id on this engine.
        handoff: The handoff's id.
        generation: Of the producer's blocks.
        first: Position in the prompt of the first block to read.
        block_ids: Destination blocks, one a position.
        ranks: `(address, incarnation)` of the producer's workers, by tensor-parallel rank.
        is_committed: Whether the sequence state is here.
        refusal: Why none of them can come; empty if they can.
    """

    request_id: str
    handoff: bytes
    generation: int
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
        commits: Consumer: handoffs whose sequence state has come, before all blocks were known to be here: the worker
            role reports when they are.
        committed: Consumer: handoffs of which the scheduler role knows both to be here. The producer is to be told,
            and vLLM not: the scheduler role does that.
        cancels: Consumer: `(handoff, reason, is_withdrawn)` of loads to end. Of what its producer has withdrawn nothing
            counts that is here.
        ended: Producer: `(handoff, reason)` of handoffs whose blocks may change from this step on.
        cached: Producer: as `finals`; final before this step's forward pass.
        finals: Producer: `(handoff, generation, first, block_ids)`; final when this step's forward pass is done.
        held: Producer: `(handoff, request_id)` of finished requests whose blocks are held.
        progress: Producer: `(handoff, seconds)` of prefills whose end the worker role can foresee: how long they take
            beyond this step.
        control: Where it tells that: this engine's control port; empty without `progress`.
        first_tokens: Consumer: token id by handoff, of the requests in this step that have no output yet.
    """

    loads: list[Load] = field(default_factory=list)
    commits: list[bytes] = field(default_factory=list)
    committed: list[bytes] = field(default_factory=list)
    cancels: list[tuple[bytes, str, bool]] = field(default_factory=list)
    ended: list[tuple[bytes, str]] = field(default_factory=list)
    cached: list[tuple[bytes, int, int, list[int]]] = field(default_factory=list)
    ready: list[tuple[bytes, int, int, list[int]]] = field(default_factory=list)
    leased: list[tuple[bytes, str]] = field(default_factory=list)
    progress: list[tuple[bytes, float]] = field(default_factory=list)
    control: str = ""
    first_tokens: dict[bytes, int] = field(default_factory=dict)


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker role to scheduler role, once.

    Attributes:
        address: Where this rank's agent listens.
        incarnation: Its life.
        forces_first_tokens: Whether this rank's sampler heeds `StepMetadata.first_tokens`.
    """

    address: str
    incarnation: bytes
    forces_first_tokens: bool = False


@dataclass
class WorkerOutcomes(KVConnectorWorkerMetadata):
    """Worker role to scheduler role: how loads ended, and which lack the sequence state only, by request id.

    Each outcome, and what each rank says of one that is `whole`, has `is_loaded`, `transport`, `elapsed_s`,
    `backlog_s`, `reason`, `num_bytes`; of the blocks `num_received`, `num_missing` and `num_retried`; of their
    checksums in each region `num_compared` and `num_corrupt`. Of handoffs that are `taken` nothing
    more will be said.
    """

    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    verified: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    acknowledged: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerOutcomes:
        """Merges two ranks: loaded if both are, a block received if it is on both, bytes added, the longer time."""
        merged = dict(self.outcomes)
        for request_id, theirs in getattr(other, "outcomes", {}).items():
            ours = merged.get(request_id)
            merged[request_id] = theirs if ours is None else merge(ours, theirs)
        verified = dict(self.verified)
        for request_id, ranks in getattr(other, "verified", {}).items():
            verified[request_id] = [*verified.get(request_id, []), *ranks]
        # All ranks are told in the same step.
        return WorkerOutcomes(merged, verified, self.acknowledged)


_MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "num_bytes": operator.add,
    "num_compared": operator.add,
    "num_corrupt": operator.add,
    "num_received": min,
    "num_missing": max,
    "num_retried": max,
    "elapsed_s": max,
    "backlog_s": max,
}


def merge(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Two ranks' words on one load."""
    return {
        "is_loaded": ours["is_loaded"] and theirs["is_loaded"],
        **{name: how(ours[name], theirs[name]) for name, how in _MERGED.items()},
        "transport": ours["transport"] or theirs["transport"],
        "reason": ours["reason"] or theirs["reason"],
    }
