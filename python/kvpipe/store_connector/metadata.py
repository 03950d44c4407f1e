"""Messages between the two roles of one engine, one a step each way. Ids are bytes, times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class Load:
    """Chunks to load into the blocks of a request.

    Attributes:
        request_id: vLLM's id.
        chunk_ids: The chunks, in the order of the prompt.
        first: Blocks of the first chunk that this engine has already, and that others may use.
        block_ids: Destination of the other blocks. Nobody else uses them before the end of the load is reported.
        limit_s: Seconds that the load may take.
    """

    request_id: str
    chunk_ids: list[bytes]
    first: int
    block_ids: list[int]
    limit_s: float


@dataclass(frozen=True)
class Save:
    """A chunk that is complete after the forward pass of this step.

    Attributes:
        chunk_id: The chunk.
        block_ids: Its blocks.
    """

    chunk_id: bytes
    block_ids: list[int]


@dataclass
class StoreStepMetadata(KVConnectorMetadata):
    """Scheduler role to worker role, for one step.

    Attributes:
        namespace: What the namespaces of the ranks have in common; empty before the workers have reported.
        loads: Loads to begin.
        cancels: Requests whose loads nobody needs any more.
        saves: Chunks to save after the forward pass.
        restores: Blocks that get back after the forward pass the bytes that they have before it: each is the last one
            of a loaded prompt, and the pass computes the prompt's last token in it.
    """

    namespace: bytes = b""
    loads: list[Load] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    restores: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LoadOutcome:
    """How a load ended.

    Attributes:
        num_loaded: Chunks in front that were loaded.
        reason: Why others were not: `missing`, `corrupt`, `foreign`, `short`, `timeout`, `cancelled`, `lost` or
            `error`; empty if all were.
    """

    num_loaded: int
    reason: str = ""

    def merged(self, other: LoadOutcome) -> LoadOutcome:
        """Returns the outcome of both ranks: what both have loaded counts."""
        return min(self, other, key=lambda outcome: outcome.num_loaded)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker role to scheduler role, for one step.

    Attributes:
        properties: By rank, what the rank adds to the engine's fingerprint; only in a rank's first report.
        outcomes: Loads that ended, by request id.
    """

    properties: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    outcomes: dict[str, LoadOutcome] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Merges the reports of two ranks."""
        outcomes = dict(self.outcomes)
        for request_id, theirs in getattr(other, "outcomes", {}).items():
            ours = outcomes.get(request_id)
            outcomes[request_id] = theirs if ours is None else ours.merged(theirs)
        return WorkerReport({**self.properties, **getattr(other, "properties", {})}, outcomes)
