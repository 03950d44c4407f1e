"""The KV cache of a worker as bytes: blocks of all layers are gathered into a chunk, and scattered from one."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CacheBytes:
    """The KV cache of each layer, as rows of bytes.

    Copies are numpy's: torch would start a team of OpenMP threads for each thread that copies.

    Args:
        kv_caches: The cache of each layer, `[num_blocks, …]`, in host memory; the blocks of a layer are contiguous.

    Attributes:
        block_bytes: Bytes of a block in all layers.
        digest: Identifies layers, shapes and types, 16 bytes.

    Raises:
        ConfigError: A cache is elsewhere, or its blocks are not contiguous.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._layers = [_rows(name, cache) for name, cache in kv_caches.items()]
        self.block_bytes = sum(layer.shape[1] for layer in self._layers)
        facts = [(name, tuple(cache.shape[1:]), str(cache.dtype)) for name, cache in kv_caches.items()]
        self.digest = hashlib.sha256(repr(facts).encode()).digest()[:16]

    def gather(self, block_ids: Sequence[int], out: np.ndarray) -> None:
        """Copies blocks into a chunk.

        Args:
            block_ids: The chunk's blocks.
            out: `[len(block_ids) * block_bytes]`, uint8, contiguous: layer by layer, and in each block by block.
        """
        for layer, part in self._parts(out, len(block_ids)):
            np.take(layer, block_ids, axis=0, out=part, mode="clip")

    def scatter(self, chunk: np.ndarray, block_ids: Sequence[int], first: int) -> None:
        """Copies the last blocks of a chunk into the cache.

        Args:
            chunk: As `out` of `gather`.
            block_ids: Where the blocks go, from the block `first` of the chunk on.
            first: Blocks of the chunk that are left out.
        """
        for layer, part in self._parts(chunk, first + len(block_ids)):
            layer[block_ids] = part[first:]

    def _parts(self, chunk: np.ndarray, num_blocks: int) -> list[tuple[np.ndarray, np.ndarray]]:
        parts, offset = [], 0
        for layer in self._layers:
            end = offset + num_blocks * layer.shape[1]
            parts.append((layer, chunk[offset:end].reshape(num_blocks, layer.shape[1])))
            offset = end
        return parts


def _rows(name: str, cache: torch.Tensor) -> np.ndarray:
    """Returns a layer's cache as `[num_blocks, block_bytes]`, uint8, in the same memory."""
    if cache.device.type != "cpu":
        message = f"KV cache is on {cache.device}; kvpipe supports vLLM's CPU build only"
        raise ConfigError(message)
    if not cache[0].is_contiguous():
        message = f"layer {name}: its blocks are not contiguous (strides {cache.stride()}), and cannot be moved"
        raise ConfigError(message)
    block_bytes = cache[0].numel() * cache.element_size()
    stride = cache.stride(0) * cache.element_size()
    offset = cache.storage_offset() * cache.element_size()
    shape, strides = (cache.shape[0], block_bytes), (stride, 1)
    rows = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage(), offset, shape, strides)
    found: np.ndarray = rows.numpy()
    return found
