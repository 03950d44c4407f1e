"""The KV cache of a worker as bytes: blocks of all layers are gathered into a chunk, and scattered from one.

A cache on a GPU is copied through page-locked memory, which all streams of the process share (docs/gpu.md).
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from kvpipe import _kvpipe
from kvpipe.exceptions import ConfigError
from kvpipe.vllm.layer_cache import LayerCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np


class CacheBytes:
    """The KV cache of each layer, as rows of bytes. Copies release the GIL.

    Args:
        kv_caches: The cache of each layer, `[num_blocks, …]`, in host memory, where the blocks of a layer are
            contiguous; or on a GPU, where the parts of a block are.
        num_blocks: Blocks of vLLM's cache manager.

    Attributes:
        blocks: The blocks of each layer that has a cache, `[num_blocks, …]`.
        num_layers: Rows of blocks: layers, or parts of those.
        block_bytes: Bytes of a block in all layers.
        digest: Identifies layers, shapes and types, 16 bytes.

    Raises:
        ConfigError: The blocks of a cache are not contiguous.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self.blocks: list[torch.Tensor] = []
        self._rows: list[tuple[Any, int, int]] = []
        facts: list[tuple[Any, ...]] = []
        for name, cache in kv_caches.items():
            if cache.device.type == "cpu":
                self.blocks.append(cache)
                self._rows.append(_row(name, cache))
                facts.append((name, tuple(cache.shape[1:]), str(cache.dtype)))
                continue
            layer = LayerCache.of(name, cache, num_blocks)
            layout = layer.layout
            self.blocks.append(layer.blocks)
            self._rows += [(layer.memory(at), layout.stride_bytes, layout.block_bytes) for at in layout.offsets]
            facts.append((name, tuple(layer.blocks.shape[1:]), str(cache.dtype), layout.order))
        self._layers = _kvpipe.CacheLayers(self._rows)
        self.num_layers = len(self._rows)
        self.block_bytes = sum(block_bytes for _, _, block_bytes in self._rows)
        self.digest = hashlib.sha256(repr(facts).encode()).digest()[:16]

    def make_pages(self, layer: int) -> None:
        """Has the kernel make the pages of a layer, which otherwise the first load into each of them waits for."""
        with suppress(OSError):
            self._layers.make_pages(layer)

    def gather(self, block_ids: Sequence[int], out: np.ndarray) -> None:
        """Copies blocks into a chunk.

        Args:
            block_ids: The chunk's blocks.
            out: `[len(block_ids) * block_bytes]`, uint8, contiguous: layer by layer, and in each block by block.
        """
        self._layers.gather(block_ids, out)

    def scatter(self, chunk: np.ndarray, block_ids: Sequence[int], first: int) -> None:
        """Copies the last blocks of a chunk into the cache.

        Args:
            chunk: As `out` of `gather`.
            block_ids: Destination of the blocks, from the block `first` of the chunk on.
            first: Blocks of the chunk that are left out.
        """
        self._layers.scatter(chunk, block_ids, first)

    def parts(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        """Returns the memory of blocks in a cache of the host, in the order of a chunk.

        What lies side by side is one part.
        """
        parts = []
        for memory, stride, block_bytes in self._rows:
            begin = end = block_ids[0] * stride
            for block_id in block_ids:
                if block_id * stride != end:
                    parts.append(memory[begin:end])
                    begin = block_id * stride
                end = block_id * stride + block_bytes
            parts.append(memory[begin:end])
        return parts


def _row(name: str, cache: torch.Tensor) -> tuple[np.ndarray, int, int]:
    """Returns a layer's host memory as bytes, the distance of two blocks in it, and the bytes of a block."""
    if not cache[0].is_contiguous():
        message = f"layer {name}: its blocks are not contiguous (strides {cache.stride()}), and cannot be moved"
        raise ConfigError(message)
    block_bytes = cache[0].numel() * cache.element_size()
    stride = cache.stride(0) * cache.element_size()
    offset = cache.storage_offset() * cache.element_size()
    num_bytes = (cache.shape[0] - 1) * stride + block_bytes
    memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage(), offset, (num_bytes,), (1,))
    return memory.numpy(), stride, block_bytes
