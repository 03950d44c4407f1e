"""A layer's KV cache as regions: where the bytes of its blocks are, by its shape and its strides.

vLLM 0.32 gives connectors one view a layer, `[num_blocks, num_heads, num_states, content]`, of an allocation that all
layers share (`v1/kv_cache_interface.py:create_kv_cache_views`). Its layout (`v1/kv_cache_layout.py`) is an order of
memory, in which layers may be inside of a block, and heads outside of it. K and V are in one `content`, or in two head
slots. Where a backend needs smaller blocks than vLLM's cache manager, dimension 0 counts those: each block is several
of them (`v1/worker/utils.py:prepare_kernel_block_sizes`). Earlier backends have K and V apart, `[2, num_blocks, …]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from kvpipe import _cuda
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpipe import _kvpipe

# Parts of a block that are apart from each other are regions of their own. More are a view that leaves bytes out.
_MAX_PARTS = 16
# Blocks, heads, tokens, content.
_VIEW_DIMS = 4


@dataclass(frozen=True)
class CacheLayout:
    """A layer's cache as regions of equal blocks.

    Attributes:
        block_bytes: Bytes of a block in one region.
        stride_bytes: From a block to the next one in one region.
        offsets: Start of each region, in bytes from the first one of the view.
        order: The shape of a block, and its dimensions from the outermost in memory: two engines must share them.
        is_by_head: True if a block has its KV heads one after the other. The order then leaves their number out.
    """

    block_bytes: int
    stride_bytes: int
    offsets: tuple[int, ...]
    order: str
    is_by_head: bool = False

    @classmethod
    def of(
        cls, layer: str, shape: Sequence[int], strides: Sequence[int], itemsize: int, num_heads: int = 0
    ) -> CacheLayout:
        """Returns the layout of a view `[num_blocks, …]`. `strides` count elements.

        `num_heads` is the size of dimension 1 if that counts KV heads, and 0 if not.

        Raises:
            ConfigError: Bytes of a block are not dense, or blocks overlap; the message names the layer.
        """
        inner = [(stride, size, dim) for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)) if dim > 0]
        inner = sorted(each for each in inner if each[1] > 1)
        num_dense = 1
        apart: list[tuple[int, int]] = []
        for step, size, _ in inner:
            if step == num_dense and not apart:
                num_dense *= size
            else:
                apart.append((step, size))
        num_parts = math.prod(size for _, size in apart)
        stride = strides[0] if shape[0] > 1 else num_dense
        view = f"(shape {tuple(shape)}, strides {tuple(strides)})"
        if min([stride, *(each for each, _ in apart)]) < num_dense:
            message = f"layer {layer}: the bytes of its blocks are not dense, and cannot be moved {view}"
            raise ConfigError(message)
        if num_parts > _MAX_PARTS:
            message = (
                f"layer {layer}: its blocks are not dense: each is in {num_parts} parts, and {_MAX_PARTS} at most are "
                f"moved; set another VLLM_KV_CACHE_LAYOUT {view}"
            )
            raise ConfigError(message)
        outermost = inner[-1][2] if inner else 1
        is_by_head = num_parts == 1 and num_heads == shape[1] and (num_heads == 1 or outermost == 1)
        dims = " ".join(str(dim - 1) for _, _, dim in reversed(inner) if not (is_by_head and dim == 1))
        sizes = ", ".join(["heads" if is_by_head else str(shape[1]), *map(str, shape[2:])])
        steps = product(*([step * at for at in range(size)] for step, size in reversed(apart)))
        return cls(
            block_bytes=num_dense * itemsize,
            stride_bytes=stride * itemsize,
            offsets=tuple(sum(each) * itemsize for each in steps),
            order=f"[{sizes}] stored {'by head ' if is_by_head else ''}{dims}",
            is_by_head=is_by_head,
        )


@dataclass(frozen=True)
class LayerCache:
    """The KV cache of a layer.

    Attributes:
        name: Name of the layer.
        blocks: A view `[num_blocks, …]`.
        layout: Location of the bytes of its blocks.
    """

    name: str
    blocks: torch.Tensor
    layout: CacheLayout

    @classmethod
    def of(cls, name: str, cache: torch.Tensor, num_blocks: int, num_heads: int = 0) -> LayerCache:
        """Describes a layer's cache as vLLM's model runner passes it to connectors.

        Args:
            name: Name of the layer.
            cache: Its cache.
            num_blocks: Blocks of vLLM's cache manager.
            num_heads: KV heads of a block; 0 if they cannot be divided.

        Raises:
            ConfigError: Its blocks cannot be moved; the message names the layer.
        """
        blocks = _view_blocks(name, cache, num_blocks)
        # In other views dimension 1 counts K and V, or kernel blocks.
        num_heads = num_heads if blocks is cache and blocks.dim() == _VIEW_DIMS else 0
        return cls(name, blocks, CacheLayout.of(name, blocks.shape, blocks.stride(), blocks.itemsize, num_heads))

    def register(self, agent: _kvpipe.Agent) -> list[_kvpipe.Region]:
        """Registers it: as one region, or one for each part of its blocks. The regions keep its memory alive."""
        regions = []
        for number, offset in enumerate(self.layout.offsets):
            part = self.name if len(self.layout.offsets) == 1 else f"{self.name} part {number}"
            registered = agent.register(part, self.memory(offset), self.layout.block_bytes, self.layout.stride_bytes)
            registered.wait(None)
            regions.append(registered.result())
        return regions

    def memory(self, offset: int) -> Any:
        """Returns the bytes of the blocks' part that begins at an offset, with what lies between them.

        `[num_bytes]`, uint8, or in the memory of a GPU its description. They keep the cache alive.
        """
        num_bytes = (self.blocks.shape[0] - 1) * self.layout.stride_bytes + self.layout.block_bytes
        if self.blocks.is_cuda:
            return _cuda.of_range(self.blocks, offset, num_bytes)
        begin = self.blocks.storage_offset() * self.blocks.itemsize + offset
        return torch.empty(0, dtype=torch.uint8).set_(self.blocks.untyped_storage(), begin, (num_bytes,)).numpy()


def _view_blocks(layer: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns a view `[num_blocks, …]` of a cache.

    Raises:
        ConfigError: None of its dimensions counts blocks, or equal parts of them.
    """
    shape = tuple(cache.shape)
    if shape[0] >= num_blocks and shape[0] % num_blocks == 0:
        return cache if shape[0] == num_blocks else cache.unflatten(0, (num_blocks, -1))
    if len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0:  # noqa: PLR2004 - K and V
        by_block: torch.Tensor = cache.unflatten(1, (num_blocks, -1)).transpose(0, 1)
        return by_block
    message = f"layer {layer}: its cache of shape {shape} cannot be divided into {num_blocks} blocks"
    raise ConfigError(message)
