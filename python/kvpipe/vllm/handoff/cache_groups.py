"""KV cache groups of an engine: which blocks of a prompt a later token needs, and which layers have them.

vLLM gives each group of layers a list of blocks for each request, in which null blocks stand for those that no later
token needs. Sources: `vllm/v1/kv_cache_interface.py` and `vllm/v1/core/single_type_kv_cache_manager.py` of vLLM 0.32.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from kvpipe.exceptions import ConfigError
from kvpipe.vllm.versions import is_sharded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


class Kind(StrEnum):
    """Tokens that the next one needs."""

    FULL = "full attention"  # all of them
    WINDOW = "sliding window"  # the last ones
    CHUNK = "chunked local attention"  # those of its own chunk
    STATE = "recurrent state"  # none but the state after the last one: Mamba, gated delta networks and the like


# Kind of vLLM's classes, and their attribute with the tokens of a window or chunk. A class that is not here keeps its
# blocks in another way, also if it is a subclass of one that is.
_KINDS = {
    "FullAttentionSpec": (Kind.FULL, ""),
    "MLAAttentionSpec": (Kind.FULL, ""),
    "SlidingWindowSpec": (Kind.WINDOW, "sliding_window"),
    "ChunkedLocalAttentionSpec": (Kind.CHUNK, "attention_chunk_size"),
    "MambaSpec": (Kind.STATE, ""),
}


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share the block list of a request.

    Attributes:
        kind: Tokens that the next one needs.
        block_size: Tokens of a block.
        reach: Tokens of the window or chunk; 0 for other kinds.
        layer_names: The layers, in the model's order.
        num_heads: KV heads in a block of this rank; 0 if layers differ, or have no slot for each.
        content: Contents of a block that the layers' shapes and the cache's dtype do not tell.
    """

    kind: Kind
    block_size: int
    reach: int = 0
    layer_names: tuple[str, ...] = ()
    num_heads: int = 0
    content: str = ""

    @classmethod
    def of(cls, group: KVCacheGroupSpec, num_shards: int) -> CacheGroup:
        """Reads a group of vLLM.

        Args:
            group: The group.
            num_shards: Ranks that share the tokens of a block, if its layers are of a kind that shares them.

        Raises:
            ConfigError: vLLM keeps its blocks in a way that kvpipe does not know.
        """
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
        found = {_kind(each) for each in specs}
        if len(found) != 1 or None in found:
            names = ", ".join(sorted({type(each).__name__ for each in specs}))
            message = f"model unsupported: kvpipe does not hand over KV caches of {names}"
            raise ConfigError(message)
        if any(getattr(each, "mamba_cache_mode", "") == "all" for each in specs):
            message = "mamba_cache_mode=all: kvpipe was not tested with it; start vLLM with --mamba-cache-mode align"
            raise ConfigError(message)
        kind, reach = found.pop() or (Kind.FULL, 0)
        is_shared = is_sharded(spec, is_full=kind is Kind.FULL)
        return cls(
            kind=kind,
            block_size=spec.block_size * (num_shards if is_shared else 1),
            reach=reach,
            layer_names=tuple(sorted(group.layer_names, key=_layer_order)),
            num_heads=_num_heads(specs),
            content=_content(specs) if kind is Kind.STATE else "",
        )

    def first_needed(self, num_tokens: int) -> int:
        """Returns the position of the first block that the token after `num_tokens` computed ones needs."""
        num_skipped = {
            Kind.FULL: 0,
            Kind.WINDOW: max(0, num_tokens - self.reach + 1),
            Kind.CHUNK: num_tokens - num_tokens % (self.reach or 1),
            Kind.STATE: max(0, num_tokens - 1),
        }[self.kind]
        return num_skipped // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Returns the number of blocks of so many tokens, in vLLM's list."""
        return -(-num_tokens // self.block_size)

    def ready(self, num_prompt_tokens: int, num_tokens: int) -> range:
        """Returns positions of the blocks that a consumer needs and that will not change after `num_tokens` tokens.

        These are full blocks, and the last one when the prompt is complete; of a recurrent state only this.
        """
        is_complete = num_tokens >= num_prompt_tokens
        end = self.num_blocks(num_prompt_tokens) if is_complete else num_tokens // self.block_size
        return range(self.first_needed(num_prompt_tokens), end)

    def num_uncounted(self, num_prompt_tokens: int) -> int:
        """Returns the position of the block that producer and consumer count as the first.

        A recurrent state is one block for both, whatever tokens its position stands for in either.
        """
        return self.first_needed(num_prompt_tokens) if self.kind is Kind.STATE else 0

    def can_repeat_last(self, num_tokens: int) -> bool:
        """True if the last of `num_tokens` computed tokens can be computed again from the blocks that are needed then.

        A recurrent state has that token already. A window may have left the block with its first token behind.
        """
        return self.kind is not Kind.STATE and self.first_needed(num_tokens) == self.first_needed(num_tokens - 1)

    def moves_state(self, num_tokens: int) -> bool:
        """True if a step that computes the last of these tokens again begins by moving the state to its next block."""
        return self.kind is Kind.STATE and num_tokens > 1 and (num_tokens - 1) % self.block_size == 0

    def describe(self) -> str:
        """Returns what another engine's group must share."""
        reach = f" of {self.reach}" if self.reach else ""
        blocks = self.content if self.kind is Kind.STATE else f"in blocks of {self.block_size}"
        layers = hashlib.sha256(" ".join(self.layer_names).encode()).hexdigest()[:8]
        return f"{self.kind}{reach} {blocks}, {len(self.layer_names)} layers {layers}"


class CacheGroups(tuple[CacheGroup, ...]):
    """All groups of an engine, in the order of vLLM's block lists."""

    __slots__ = ()

    @classmethod
    def of(cls, config: KVCacheConfig, num_shards: int = 1) -> CacheGroups:
        """Reads vLLM's configuration of the KV cache.

        Args:
            config: The configuration.
            num_shards: Ranks of decode context parallelism.

        Raises:
            ConfigError: The cache has no group, or one that kvpipe does not hand over.
        """
        if not config.kv_cache_groups:
            message = "model unsupported: it has no KV cache that could be handed over"
            raise ConfigError(message)
        return cls(CacheGroup.of(group, num_shards) for group in config.kv_cache_groups)

    @property
    def has_parts(self) -> bool:
        """True if some blocks of a prompt are of use without the others: those before the first missing one."""
        return len(self) == 1 and self[0].kind is Kind.FULL

    @property
    def has_state(self) -> bool:
        """True if some layers keep a recurrent state."""
        return any(group.kind is Kind.STATE for group in self)

    @property
    def num_attention_layers(self) -> int:
        """Layers that read the KV of tokens."""
        return sum(len(group.layer_names) for group in self if group.kind is not Kind.STATE)

    def num_heads(self, config: VllmConfig) -> int:
        """Returns the KV heads of the model, and 1 if all ranks have the same latent KV.

        Returns 0 if blocks have no slices by head: some layer does not have its rank's part of those heads, as a
        recurrent state, or ranks of decode context parallelism have other tokens of the same head.
        """
        parallel = config.parallel_config
        num_heads = 1 if config.model_config.use_mla else int(config.model_config.get_total_num_kv_heads())
        own = max(1, num_heads // parallel.tensor_parallel_size)
        is_by_head = all(group.num_heads == own for group in self) and parallel.decode_context_parallel_size == 1
        return num_heads if is_by_head else 0

    def can_repeat_last(self, num_tokens: int) -> bool:
        """True if all groups can compute the last of `num_tokens` tokens again."""
        return all(group.can_repeat_last(num_tokens) for group in self)

    def moves_state(self, num_tokens: int) -> bool:
        """True if some group does."""
        return any(group.moves_state(num_tokens) for group in self)

    def layers(self) -> list[tuple[str, ...]]:
        """Returns the layers of each group."""
        return [group.layer_names for group in self]

    def of_stages(self, stages: Sequence[Sequence[Sequence[str]]]) -> CacheGroups:
        """Returns the groups of an engine whose pipeline's stages have these layers of each.

        vLLM gives the scheduler the layers of the first stage only.
        """
        layers = (tuple(itertools.chain(*of_group)) for of_group in zip(*stages, strict=True))
        return CacheGroups(replace(group, layer_names=names) for group, names in zip(self, layers, strict=True))

    def describe(self) -> str:
        """Returns what another engine's groups must share."""
        return "; ".join(group.describe() for group in self)


def _kind(spec: KVCacheSpec) -> tuple[Kind, int] | None:
    kind, reach = _KINDS.get(type(spec).__name__, (None, ""))
    if kind is None:
        return None
    # Tokens that are kept below a window.
    num_more: int = getattr(spec, "extra_retained_tokens", 0)
    return kind, (getattr(spec, reach) + num_more if reach else 0)


def _layer_order(name: str) -> list[tuple[int, str]]:
    """The order of layers in a model, which vLLM's groups need not have: numbers in a name count by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _num_heads(specs: Iterable[Any]) -> int:
    """KV heads of the layers, if they have the same number, and the view of a block has a slot for each."""
    heads = {getattr(spec, "num_kv_heads", 0) if getattr(spec, "num_head_slots", None) is None else 0 for spec in specs}
    return heads.pop() if len(heads) == 1 else 0


def _content(specs: Iterable[Any]) -> str:
    """Shapes and dtypes of recurrent states, of which vLLM's view of the cache has bytes only."""
    states = {
        " ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        for spec in specs
    }
    return ", ".join(sorted(states)).replace("torch.", "")
