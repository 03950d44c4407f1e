"""Messages between the two roles of one engine, one a step each way. Ids are bytes, times are seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class StoreLoad:
    """Chunks to load into the blocks of a request, and the KV in its entry, which follows them.

    Attributes:
        request_id: vLLM's id.
        chunk_ids: The chunks, in the order of the prompt.
        first: Blocks of the first chunk, or without chunks of the entry, that this engine has already, and that others
            may use.
        block_ids: Destination of the other blocks. vLLM reserves them until the end of the load is reported.
        limit_s: Seconds that the load may take.
        entry_id: The request's entry; empty if it is not loaded.
        record: The record that the entry has to have.
    """

    request_id: str
    chunk_ids: list[bytes]
    first: int
    block_ids: list[int]
    limit_s: float
    entry_id: bytes = b""
    record: bytes = b""

    @property
    def part_ids(self) -> list[bytes]:
        """Ids of all that is loaded, in the order of the prompt."""
        return [*self.chunk_ids, self.entry_id] if self.entry_id else self.chunk_ids


@dataclass(frozen=True)
class Save:
    """A chunk that is complete after the forward pass of this step.

    Attributes:
        chunk_id: The chunk.
        block_ids: Its blocks.
        hold: Number by which the workers report that they have copied them; 0 if they copy before the hook returns.
    """

    chunk_id: bytes
    block_ids: list[int]
    hold: int = 0


@dataclass(frozen=True)
class EntryCopy:
    """The KV of a request's entry, which is complete after the forward pass of this step. It waits for `EntrySave`.

    Attributes:
        request_id: vLLM's id.
        block_ids: The blocks after the prompt's last full chunk.
        hold: As of `Save`.
    """

    request_id: str
    block_ids: list[int]
    hold: int = 0


@dataclass(frozen=True)
class EntrySave:
    """A request's entry, whose KV was copied in an earlier step.

    Attributes:
        request_id: vLLM's id.
        entry_id: The entry; empty if it is not saved: the copy is dropped.
        record: Its record.
    """

    request_id: str
    entry_id: bytes = b""
    record: bytes = b""


@dataclass
class StoreStepMetadata(KVConnectorMetadata):
    """Scheduler role to worker role, for one step.

    Attributes:
        namespace: Common part of the ranks' namespaces; empty before the workers have reported.
        identification: Unless it is 0, the workers report anew their additions to the fingerprint. A number for each
            reset.
        loads: Loads to begin.
        cancels: Requests whose loads are obsolete.
        saves: Chunks to save after the forward pass.
        copies: Copies for entries after the forward pass.
        entries: Entries to save.
        first_tokens: Token id by handoff, for the requests in this step that have outputs left to force. The workers
            have the tokens after the first in the request's parameters.
        restores: Blocks that get back after the forward pass the bytes that they have before it: each is the last one
            of a loaded prompt, and the pass computes the prompt's last token in it.
    """

    namespace: bytes = b""
    identification: int = 0
    loads: list[StoreLoad] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    copies: list[EntryCopy] = field(default_factory=list)
    entries: list[EntrySave] = field(default_factory=list)
    first_tokens: dict[bytes, int] = field(default_factory=dict)
    restores: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StoreLoadOutcome:
    """Outcome of a load.

    Attributes:
        num_loaded: Chunks in front that were loaded; an entry counts as one.
        reason: Reason for which others were not: `missing`, `corrupt`, `foreign`, `short`, `timeout`, `cancelled`,
            `device`, `lost` or `error`; empty if all were.
    """

    num_loaded: int
    reason: str = ""

    def merged(self, other: StoreLoadOutcome) -> StoreLoadOutcome:
        """Returns the outcome of both ranks: a chunk counts if both have loaded it."""
        return min(self, other, key=lambda outcome: outcome.num_loaded)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker role to scheduler role, for one step.

    Attributes:
        properties: By rank, what the rank adds to the engine's fingerprint; in a rank's first report, and when asked.
        identification: The step's that the properties answer; 0 at the start.
        unforced: Ranks whose sampler cannot apply `StoreStepMetadata.first_tokens`; as `properties`.
        outcomes: Loads that ended, by request id.
        copied: Number of ranks that have copied the blocks of a hold, or that will not, by its number.
    """

    properties: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    outcomes: dict[str, StoreLoadOutcome] = field(default_factory=dict)
    unforced: list[int] = field(default_factory=list)
    identification: int = 0
    copied: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Merges the reports of two ranks."""
        outcomes = dict(self.outcomes)
        for request_id, theirs in getattr(other, "outcomes", {}).items():
            ours = outcomes.get(request_id)
            outcomes[request_id] = theirs if ours is None else ours.merged(theirs)
        return WorkerReport(
            {**self.properties, **getattr(other, "properties", {})},
            outcomes,
            [*self.unforced, *getattr(other, "unforced", ())],
            max(self.identification, getattr(other, "identification", 0)),
            dict(Counter(self.copied) + Counter(getattr(other, "copied", {}))),
        )
