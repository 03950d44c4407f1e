"""Messages between the two roles of one engine, one a step each way. Ids are bytes, times are seconds.

They are pickled in each step. Classes with slots that are not frozen cost the least there. They need no vLLM, whose
abstract classes `kvpipe.vllm.handoff.connector` registers them with.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Load:
    """Consumer: blocks to read from a producer.

    Attributes:
        request_id: vLLM's id on this engine.
        handoff: The handoff's id.
        parts: `(first, block_ids)` for each KV cache group: position in the prompt of the first block to read, and
            destination blocks, one for each position.
        ranks: `(address, incarnation)` of the producer's workers, by pipeline-parallel rank, then by tensor-parallel
            rank.
        has_state: True if the sequence state has arrived: the end of the blocks ends the load.
        refusal: Reason for which no block can be loaded; empty if they can.
        stages: For each stage of the producer's pipeline, the number of layers of each KV cache group; empty if there
            is one.
    """

    request_id: str
    handoff: bytes
    parts: list[tuple[int, list[int]]]
    ranks: list[tuple[str, bytes]]
    has_state: bool
    refusal: str = ""
    stages: list[list[int]] = field(default_factory=list)

    @property
    def block_ids(self) -> list[int]:
        """The destination blocks of all groups."""
        return [block_id for _, block_ids in self.parts for block_id in block_ids]


@dataclass(slots=True)
class Cancel:
    """Consumer: a load to end.

    Attributes:
        handoff: The handoff's id.
        reason: Reason for the end.
        is_withdrawn: True if all blocks count as missing: the producer has withdrawn them, or their request has ended.
    """

    handoff: bytes
    reason: str
    is_withdrawn: bool


@dataclass(slots=True)
class HandoffEnd:
    """Producer: a handoff whose blocks may change from this step on.

    Attributes:
        handoff: The handoff's id.
        reason: Reason for the end.
    """

    handoff: bytes
    reason: str


@dataclass(slots=True)
class ReadyRange:
    """Producer: blocks of a handoff that are ready.

    Attributes:
        handoff: The handoff's id.
        first: Position in the prompt of the first one.
        block_ids: The blocks.
        group: Index of their KV cache group.
    """

    handoff: bytes
    first: int
    block_ids: list[int]
    group: int = 0


@dataclass(slots=True)
class HandoffLease:
    """Producer: a finished request whose blocks are leased to a consumer.

    Attributes:
        handoff: The handoff's id.
        request_id: vLLM's id on this engine.
    """

    handoff: bytes
    request_id: str


@dataclass(slots=True)
class PrefillRest:
    """Producer: what is left of a prefill after this step.

    Attributes:
        handoff: The handoff's id.
        beyond_s: Its predicted time beyond this step.
    """

    handoff: bytes
    beyond_s: float


@dataclass
class StepMetadata:
    """Scheduler role to worker role, for one step.

    Attributes:
        loads: Consumer: loads to begin.
        states: Consumer: handoffs whose sequence state has arrived before all blocks were verified. The worker role
            reports their end.
        committed: Consumer: handoffs whose blocks are verified and whose sequence state has arrived. The worker role
            acknowledges them to the producer; the scheduler role reports them to vLLM.
        cancels: Consumer: loads to cancel.
        ended: Producer: handoffs whose blocks may change.
        cached: Producer: blocks computed by a step before this one, which may still be running on the device. A worker
            announces them when it is over.
        ready: Producer: blocks that this step's forward pass completes.
        leased: Producer: finished requests whose blocks are leased.
        progress: Producer: prefills whose end the worker role can predict.
        control: This engine's control port, which receives the predictions; empty without `progress`.
        first_tokens: Consumer: token id by handoff, for the requests in this step that have outputs left to force. The
            workers have the tokens after the first in the request's parameters.
        first_steps: Consumer: handoffs whose prompt is complete with this step, for the trace.
        restores: Consumer: `(group, block id)` of blocks that get back after this step's forward pass the bytes that
            they have before it. Each is the last block of a prompt in its KV cache group, verified by a load; the pass
            computes the prompt's last token in it alone.
    """

    loads: list[Load] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    committed: list[bytes] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    ended: list[HandoffEnd] = field(default_factory=list)
    cached: list[ReadyRange] = field(default_factory=list)
    ready: list[ReadyRange] = field(default_factory=list)
    leased: list[HandoffLease] = field(default_factory=list)
    progress: list[PrefillRest] = field(default_factory=list)
    control: str = ""
    first_tokens: dict[bytes, int] = field(default_factory=dict)
    first_steps: list[bytes] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)

    def is_empty(self) -> bool:
        """True if it has nothing for the worker role, which still has to clear what the step before has set."""
        return self == _EMPTY_STEP

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickles most steps, which are empty, as a call without arguments."""
        return (StepMetadata, ()) if self.is_empty() else super().__reduce_ex__(protocol)


_EMPTY_STEP = StepMetadata()


@dataclass
class HandshakeMetadata:
    """Worker role to scheduler role, once.

    Attributes:
        address: Address of this rank's agent.
        incarnation: Incarnation of that agent.
        forces_first_tokens: True if this rank's sampler applies `StepMetadata.first_tokens`.
        properties: This rank's additions to the engine's fingerprint.
        layers: This rank's layers of each KV cache group.
        machine: This rank's machine, see `kvpipe._machine`.
    """

    address: str
    incarnation: bytes
    forces_first_tokens: bool = False
    properties: list[tuple[str, str]] = field(default_factory=list)
    layers: list[tuple[str, ...]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class LoadOutcome:
    """Outcome of a load on one rank, or on all of them together. Times are seconds.

    Attributes:
        is_loaded: True if all blocks are here.
        num_bytes: Bytes that were read, repeated reads included.
        num_received: Blocks that are here and verified.
        num_missing: Blocks that are not.
        num_retried: Blocks that were read again.
        num_validated: Blocks that the producer was asked after.
        num_compared: Checksums that were compared.
        num_corrupt: Checksums that differed.
        transport: The data path of the bytes.
        transport_reason: Why that is slower than this host allows, and the remedy.
        elapsed_s: Time of the load.
        backlog_s: Time that it waited for other loads.
        reason: Reason for missing blocks.
        cause: The kind of that reason.
    """

    is_loaded: bool
    num_bytes: int = 0
    num_received: int = 0
    num_missing: int = 0
    num_retried: int = 0
    num_validated: int = 0
    num_compared: int = 0
    num_corrupt: int = 0
    transport: str = ""
    transport_reason: str = ""
    elapsed_s: float = 0.0
    backlog_s: float = 0.0
    reason: str = ""
    cause: str = ""

    @classmethod
    def of(cls, event: Mapping[str, Any], *, is_loaded: bool) -> LoadOutcome:
        """Reads an event of the agent, which has more fields than these."""
        return cls(is_loaded, **{name: event[name] for name in _FACTS if name in event})

    def merged(self, other: LoadOutcome) -> LoadOutcome:
        """Returns the outcome of both ranks: loaded if both are. Bytes add up, and the longer time counts.

        The transport is that of the rank that has a reason for it, if there is one.
        """
        slower = max((self, other), key=lambda each: (bool(each.transport_reason), bool(each.transport)))
        return LoadOutcome(
            is_loaded=self.is_loaded and other.is_loaded,
            num_bytes=self.num_bytes + other.num_bytes,
            num_received=min(self.num_received, other.num_received),
            num_missing=max(self.num_missing, other.num_missing),
            num_retried=max(self.num_retried, other.num_retried),
            num_validated=self.num_validated + other.num_validated,
            num_compared=self.num_compared + other.num_compared,
            num_corrupt=self.num_corrupt + other.num_corrupt,
            transport=slower.transport,
            transport_reason=slower.transport_reason,
            elapsed_s=max(self.elapsed_s, other.elapsed_s),
            backlog_s=max(self.backlog_s, other.backlog_s),
            reason=self.reason or other.reason,
            cause=self.cause or other.cause,
        )


_FACTS = tuple(each.name for each in fields(LoadOutcome) if each.name != "is_loaded")


@dataclass
class WorkerOutcomes:
    """Worker role to scheduler role: what became of loads.

    Attributes:
        outcomes: Loads that ended, by request id.
        verified: Loads that lack only the sequence state, by request id; one outcome for each rank.
        acknowledged: Committed handoffs of which the worker role reports nothing more.
        broken: Requests whose load was verified on a rank and has failed there since. That rank ends the load when the
            scheduler role has cancelled it.
    """

    outcomes: dict[str, LoadOutcome] = field(default_factory=dict)
    verified: dict[str, list[LoadOutcome]] = field(default_factory=dict)
    acknowledged: list[bytes] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def aggregate(self, other: object) -> WorkerOutcomes:
        """Merges the reports of two ranks."""
        if not isinstance(other, WorkerOutcomes):
            return self
        outcomes, verified = dict(self.outcomes), dict(self.verified)
        for request_id, theirs in other.outcomes.items():
            ours = outcomes.get(request_id)
            outcomes[request_id] = theirs if ours is None else ours.merged(theirs)
        for request_id, ranks in other.verified.items():
            verified[request_id] = [*verified.get(request_id, ()), *ranks]
        # All ranks receive a commit in the same step, but vLLM 0.33 adds what a failed worker has said before.
        acknowledged = list(dict.fromkeys([*self.acknowledged, *other.acknowledged]))
        return WorkerOutcomes(outcomes, verified, acknowledged, self.broken | other.broken)
