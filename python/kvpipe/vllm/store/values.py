"""Conversion of a chunk in staging memory to a value of the store, and back: header, serde, verification."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvpipe.exceptions import CorruptDataError
from kvpipe.store.serde import Layout, Serde
from kvpipe.vllm.store.chunk import HEADER_BYTES, fault, is_whole, seal
from kvpipe.vllm.store.staging import page_aligned

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np
    import torch

# K and V of a head lie side by side: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`.
_NUM_DIMENSIONS = 4


class ChunkValues:
    """Chunks of one rank as values, and the KV of entries, which has fewer blocks. Any thread may call.

    Args:
        serde: Encoding of KV.
        layout: Layout of a chunk; `None` for a lossless serde, which needs none.
        digest: Identifies the layout of this rank's cache, 16 bytes.
        chunk_blocks: Blocks of a chunk.
        block_bytes: Size of a block in all layers of the cache.

    Attributes:
        slot_bytes: Staging memory of a chunk: the header, then the bytes of its blocks.
        is_plain: True if a value has just these bytes.

    Raises:
        ConfigError: The serde cannot write such KV; the message has the remedy.
    """

    def __init__(self, serde: Serde, layout: Layout | None, digest: bytes, chunk_blocks: int, block_bytes: int) -> None:
        self._serde = serde
        self._layout = layout
        self._digest = digest
        self._block_bytes = block_bytes
        self.slot_bytes = HEADER_BYTES + chunk_blocks * block_bytes
        self.is_plain = layout is None
        self._max_bytes = self.slot_bytes if layout is None else HEADER_BYTES + serde.max_bytes(layout)

    def content(self, slot: np.ndarray, num_blocks: int) -> np.ndarray:
        """Returns the part of staging memory that has so many blocks."""
        return slot[HEADER_BYTES : HEADER_BYTES + num_blocks * self._block_bytes]

    def value_of(self, slot: np.ndarray, key: bytes, num_blocks: int) -> np.ndarray:
        """Returns the value of blocks in staging memory, which it may be a part of.

        Raises:
            ConfigError: The KV is not finite, and the serde is lossy: it is not to be stored.
        """
        content = self.content(slot, num_blocks)
        value, layout = slot[: HEADER_BYTES + content.nbytes], self._layout_of(num_blocks)
        if layout is not None:
            value = page_aligned(self._max_bytes)
            encoded = self._serde.encode(content.data, layout, value[HEADER_BYTES:].data)
            value = value[: HEADER_BYTES + encoded.nbytes]
        seal(value, key, self._digest)
        return value

    def buffer_for(self, num_bytes: int, slot: np.ndarray, num_blocks: int) -> np.ndarray | None:
        """Returns the destination for reading a value of this size; `None` if no value of ours has it."""
        if self._layout_of(num_blocks) is None:
            own_bytes = HEADER_BYTES + num_blocks * self._block_bytes
            return slot[:own_bytes] if num_bytes == own_bytes else None
        return page_aligned(num_bytes) if HEADER_BYTES < num_bytes <= self._max_bytes else None

    def is_whole(self, header: np.ndarray, checksum: int, key: bytes) -> bool:
        """True if a plain value with this header and this checksum is the chunk that its name says."""
        return is_whole(header, self.slot_bytes - HEADER_BYTES, checksum, key, self._digest)

    def restore(self, value: np.ndarray, key: bytes, slot: np.ndarray, num_blocks: int) -> str:
        """Verifies a value, and decodes it into staging memory.

        Returns:
            Why it must not be used: `foreign` or `corrupt`; empty if the slot has the blocks.
        """
        reason = fault(value, key, self._digest)
        layout = self._layout_of(num_blocks)
        if not reason and layout is not None:
            try:
                self._serde.decode(value[HEADER_BYTES:].data, layout, self.content(slot, num_blocks).data)
            except CorruptDataError:
                return "corrupt"
        return reason

    def _layout_of(self, num_blocks: int) -> Layout | None:
        """Returns the layout that the serde needs; `None` if the bytes are stored as they are, or if there are none."""
        if self._layout is None or not num_blocks:
            return None
        return replace(self._layout, num_blocks=num_blocks)


def layout_of(caches: Collection[torch.Tensor], chunk_blocks: int, packing: str) -> Layout:
    """Returns the layout of a rank's chunks.

    Args:
        caches: The cache of each layer.
        chunk_blocks: Blocks of a chunk.
        packing: The instruction set by which vLLM's CPU attention packs a block.

    Raises:
        ConfigError: The layers differ, or their shape is not that of the CPU's attention: the serde has to be `naive`.
    """
    shapes = {(tuple(cache.shape[1:]), str(cache.dtype).removeprefix("torch.")) for cache in caches}
    [(shape, dtype), *others] = sorted(shapes)
    if others or len(shape) != _NUM_DIMENSIONS - 1 or shape[2] % 2:
        # `Serde.check` refuses a packing that it does not know, with the remedy.
        return Layout(
            dtype=dtype, num_layers=1, num_blocks=1, num_kv_heads=1, block_size=1, head_size=1, packing="mixed"
        )
    num_kv_heads, block_size, width = shape
    return Layout(
        dtype=dtype,
        num_layers=len(caches),
        num_blocks=chunk_blocks,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_size=width // 2,
        packing=packing,
    )
