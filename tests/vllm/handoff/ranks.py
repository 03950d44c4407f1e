"""Workers of an engine with tensor parallelism: real agents, each with its KV heads of one cache."""

from dataclasses import dataclass
from typing import Any

import torch

from kvpipe.vllm.handoff.config import ConnectorConfig
from kvpipe.vllm.handoff.metadata import Load, ReadyRange, StepMetadata
from kvpipe.vllm.handoff.worker import WorkerEngine, WorkerRole
from tests.vllm.handoff.test_rank_sources import heads_of


@dataclass(frozen=True)
class CacheShape:
    """The KV cache of a model.

    Attributes:
        num_layers: Its layers.
        num_blocks: Blocks of each layer.
        num_heads: KV heads of each layer.
        block_size: Tokens of a block.
        content: Bytes of a token in a head.
    """

    num_layers: int = 2
    num_blocks: int = 8
    num_heads: int = 4
    block_size: int = 4
    content: int = 16

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return [f"layer.{index}" for index in range(self.num_layers)]

    def fill(self, seed: int) -> torch.Tensor:
        """Returns random KV: `[layers, blocks, heads, tokens, content]`."""
        sizes = (self.num_layers, self.num_blocks, self.num_heads, self.block_size, self.content)
        return torch.randint(256, sizes, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class EngineOfRanks:
    """The workers of an engine, whose caches are parts of one with all heads."""

    def __init__(self, num_ranks: int, shape: CacheShape, *, seed: int) -> None:
        self.shape = shape
        self.whole = shape.fill(seed)
        self.heads = [heads_of(rank, num_ranks, shape.num_heads) for rank in range(num_ranks)]
        self.caches = [self.whole[:, :, heads].contiguous() for heads in self.heads]
        self.workers = [self._worker(rank, num_ranks) for rank in range(num_ranks)]

    def _worker(self, rank: int, num_ranks: int) -> WorkerRole:
        engine = WorkerEngine(
            rank=rank,
            engine_id=f"rank {rank}",
            kv_role="kv_both",
            num_blocks=self.shape.num_blocks,
            groups=[self.shape.layers],
            num_ranks=num_ranks,
            num_heads=self.shape.num_heads,
            num_hooked_layers=self.shape.num_layers,
        )
        worker = WorkerRole(engine, ConnectorConfig(silence_s=5))
        worker.register(dict(zip(self.shape.layers, self.caches[rank], strict=True)))
        assert ("tensor parallel size", "any") in worker.handshake().properties
        return worker

    @property
    def ranks(self) -> list[tuple[str, bytes]]:
        """What the control port tells of them."""
        handshakes = [worker.handshake() for worker in self.workers]
        return [(each.address, each.incarnation) for each in handshakes]

    def announce(self, handoff: bytes, block_ids: list[int], first: int = 0) -> None:
        """A step of each worker, with blocks that it computes."""
        for worker in self.workers:
            worker.begin_step(StepMetadata(ready=[ReadyRange(handoff, first, block_ids)]))
            for name in self.shape.layers:
                worker.save_layer(name)
            worker.end_forward()

    def load(self, producer: "EngineOfRanks", handoff: bytes, block_ids: list[int], *, has_state: bool = True) -> None:
        """A step of each worker, with a load."""
        load = Load("consuming", handoff, [(0, block_ids)], producer.ranks, has_state)
        for worker in self.workers:
            worker.begin_step(StepMetadata(loads=[load]))

    def step(self, **fields: Any) -> None:
        """A step of each worker, with these fields of its metadata."""
        for worker in self.workers:
            worker.prepare_step(StepMetadata(**fields))
            worker.begin_step(StepMetadata(**fields))

    def has(self, producer: "EngineOfRanks", ours: list[int], theirs: list[int]) -> bool:
        """True if each rank has its heads of the producer's blocks."""
        return all(
            torch.equal(cache[:, ours], producer.whole[:, theirs][:, :, heads])
            for cache, heads in zip(self.caches, self.heads, strict=True)
        )

    def close(self) -> None:
        """Closes the agents."""
        for worker in self.workers:
            worker.close()
