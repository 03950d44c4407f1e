"""Blocks that get back, after a forward pass, the bytes they had before it.

vLLM computes the last token of a loaded prompt again, for its logits, and writes that token's KV anew. Computed alone,
it rounds differently than within the producer's prompt. Later tokens would then differ from those of one instance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


class KeptBlocks:
    """Copies of blocks in every layer, from before a forward pass until after it.

    Copies are of whole blocks, so that the layout of a block does not matter. They are made and put back by torch on
    its current stream: on a device, in order with the forward pass between them.

    Args:
        caches: For each KV cache group, the cache of each layer, `[num_blocks, …]`.
    """

    def __init__(self, caches: Sequence[Sequence[torch.Tensor]] = ()) -> None:
        self._caches = caches
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, block_ids: Iterable[tuple[int, int]]) -> None:
        """Copies these blocks, each named by its group and its id, and forgets others."""
        blocks = [cache[block_id] for group, block_id in block_ids for cache in self._caches[group]]
        self._copies = [(block, block.clone()) for block in blocks]

    def put_back(self) -> None:
        """Writes the copies to their blocks, and forgets them."""
        for block, copy in self._copies:
            block.copy_(copy)
        self._copies = []
