"""A model of a few kernels: each layer's KV is known by its seed, and is written after a pause of the GPU."""

import torch

from kvpipe.vllm.handoff.config import ConnectorConfig
from kvpipe.vllm.handoff.worker import WorkerEngine, WorkerRole
from kvpipe.vllm.layer_cache import LayerCache

LAYERS, BLOCKS = 4, 64
HEADS, TOKENS, CONTENT = 8, 16, 128
# About 20 ms of an H100 or H200 at 1.8 GHz: longer than a read of all blocks takes.
PAUSE_CYCLES = 36_000_000


def new_caches(form: str) -> dict[str, torch.Tensor]:
    """Caches as vLLM 0.32 views them: `together` is layout LBNHC, `inside` BLHNC, `apart` K and V in two halves."""
    if form == "apart":
        storage = torch.zeros(LAYERS, 2, BLOCKS, TOKENS, HEADS, CONTENT, dtype=torch.bfloat16, device="cuda:0")
        views = list(storage)
    elif form == "inside":
        storage = torch.zeros(BLOCKS, LAYERS, HEADS, TOKENS, 2 * CONTENT, dtype=torch.bfloat16, device="cuda:0")
        views = [storage[:, layer] for layer in range(LAYERS)]
    else:
        storage = torch.zeros(LAYERS, BLOCKS, TOKENS, HEADS, 2 * CONTENT, dtype=torch.bfloat16, device="cuda:0")
        views = [layer.transpose(1, 2) for layer in storage]
    return {f"layer.{layer}": view for layer, view in enumerate(views)}


class Instance:
    """A worker role with its caches on the GPU, of a form `together`, or `together with checksum` for its integrity."""

    def __init__(self, form: str) -> None:
        form, _, integrity = form.partition(" with ")
        caches = new_caches(form)
        engine = WorkerEngine(
            rank=0,
            engine_id=f"engine {form}",
            kv_role="kv_both",
            num_blocks=BLOCKS,
            groups=[list(caches)],
            num_hooked_layers=len(caches),
            device="cuda",
        )
        self.worker = WorkerRole(engine, ConnectorConfig(silence_s=20, integrity=integrity or "auto"))
        self.worker.register(caches)
        self.order = self.worker._order
        self.layers = list(caches)
        self.blocks = [LayerCache.of(name, cache, BLOCKS).blocks.view(torch.int16) for name, cache in caches.items()]

    def values(self, layer: int, seed: torch.Tensor | int, num_blocks: int) -> torch.Tensor:
        """KV of a prompt of this seed in some blocks of a layer."""
        shape = (num_blocks, *self.blocks[layer].shape[1:])
        numbers = torch.arange(torch.Size(shape).numel(), device="cuda:0").view(shape)
        return ((numbers * 40503 + layer * 7919 + seed * 104729) & 0x7FFF).to(torch.int16)

    def fill(self, value: int) -> None:
        """Writes the same into all blocks, and waits for it."""
        for blocks in self.blocks:
            blocks.fill_(value)
        torch.cuda.synchronize()

    def compute(self, layer: int, seed: torch.Tensor | int, block_ids: torch.Tensor) -> None:
        """Launches a layer: a pause, then its KV."""
        torch.cuda._sleep(PAUSE_CYCLES)
        self.blocks[layer].index_copy_(0, block_ids, self.values(layer, seed, len(block_ids)))

    def has(self, seed: int, block_ids: list[int]) -> list[bool]:
        """True if blocks hold the KV of a seed, layer by layer."""
        at = torch.tensor(block_ids, device="cuda:0")
        equal = [torch.equal(blocks[at], self.values(layer, seed, len(at))) for layer, blocks in enumerate(self.blocks)]
        return [bool(each) for each in equal]
