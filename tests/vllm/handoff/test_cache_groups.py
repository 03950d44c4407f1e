"""KV cache groups: the blocks of a prompt that the next token needs, as vLLM's managers keep them; what is refused."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpipe.exceptions import ConfigError
from kvpipe.vllm.handoff.cache_groups import CacheGroup, CacheGroups, Kind
from tests.vllm.handoff.engine import BLOCK, SHAPE

pytestmark = pytest.mark.vllm

FULL = FullAttentionSpec(**SHAPE)
STATE = MambaSpec(block_size=BLOCK, shapes=((4, 8), (4, 8, 8)), dtypes=(torch.bfloat16, torch.float32))


def window(reach: int, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**SHAPE, sliding_window=reach, **more)


def chunk(reach: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=reach)


def groups(*specs: Any, num_shards: int = 1) -> CacheGroups:
    found = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return CacheGroups.of(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=found), num_shards)


def group(spec: Any) -> CacheGroup:
    return groups(spec)[0]


@pytest.mark.parametrize(
    ("spec", "manager"),
    [
        (FULL, FullAttentionManager),
        (window(65), SlidingWindowManager),
        (window(64, extra_retained_tokens=3), SlidingWindowManager),
        (chunk(96), ChunkedLocalAttentionManager),
        (STATE, MambaManager),
    ],
    ids=["full", "window", "window that keeps more", "chunk", "state"],
)
def test_a_group_needs_the_blocks_that_vllm_keeps(spec: Any, manager: Any) -> None:
    """Of vLLM's managers only the rule is asked, so that they are not made."""
    keeping = object.__new__(manager)
    keeping.sliding_window = getattr(spec, "sliding_window", 0)
    keeping.extra_retained_tokens = getattr(spec, "extra_retained_tokens", 0)
    keeping.attention_chunk_size = getattr(spec, "attention_chunk_size", 0)
    for num_tokens in random.Random(0).sample(range(1, 600), 200):
        kept = keeping.get_num_skipped_tokens(num_tokens) // BLOCK
        assert group(spec).first_needed(num_tokens) == kept, num_tokens


def test_ranks_of_decode_context_parallelism_share_a_block_of_full_attention_as_in_vllms_manager() -> None:
    pool = BlockPool(8, enable_caching=False, hash_block_size=BLOCK)
    manager = FullAttentionManager(
        FULL,
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=2 * BLOCK,
        dcp_world_size=2,
    )
    found = groups(FULL, STATE, num_shards=2)
    assert [each.block_size for each in found] == [manager.block_size, BLOCK] == [2 * BLOCK, BLOCK]


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (FULL, Kind.FULL),
        (MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32), Kind.FULL),
        (UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": FULL, "b": FULL}), Kind.FULL),
        (window(64), Kind.WINDOW),
        (chunk(64), Kind.CHUNK),
        (STATE, Kind.STATE),
    ],
)
def test_the_kinds_of_vllm_are_known(spec: Any, kind: Kind) -> None:
    assert group(spec).kind is kind


@pytest.mark.parametrize(
    "spec",
    [
        CrossAttentionSpec(**SHAPE),
        SinkFullAttentionSpec(**SHAPE, sink_len=BLOCK),
        UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": window(64), "b": window(128)}),
    ],
    ids=["cross attention", "sinks", "windows of two sizes in one group"],
)
def test_a_cache_that_is_kept_in_another_way_is_refused_with_its_name(spec: Any) -> None:
    inner = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
    with pytest.raises(ConfigError, match=f"does not hand over KV caches of {type(inner).__name__}"):
        groups(FULL, spec)


def of_model(num_heads: int, num_ranks: int = 1, *, use_mla: bool = False, num_shards: int = 1) -> Any:
    """What a configuration says of a model's heads."""
    model = SimpleNamespace(use_mla=use_mla, get_total_num_kv_heads=lambda: num_heads)
    parallel = SimpleNamespace(tensor_parallel_size=num_ranks, decode_context_parallel_size=num_shards)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


def test_blocks_have_slices_by_head_if_each_layer_has_its_ranks_part_of_the_models_heads() -> None:
    heads = SHAPE["num_kv_heads"]
    assert groups(FULL, window(64)).num_heads(of_model(heads)) == heads
    assert groups(FULL).num_heads(of_model(2 * heads, 2)) == 2 * heads
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)
    assert groups(latent).num_heads(of_model(16, 4, use_mla=True)) == 1
    more = FullAttentionSpec(**SHAPE | {"num_kv_heads": 2 * heads})
    apart = FullAttentionSpec(**SHAPE, num_head_slots=heads)
    for specs in ((FULL, more), (FULL, STATE), (apart,)):
        assert groups(*specs).num_heads(of_model(heads)) == 0
    assert groups(FULL).num_heads(of_model(heads, num_shards=2)) == 0, "other tokens of the same head"


def test_states_of_all_blocks_are_refused_with_the_mode_that_is_not() -> None:
    state = MambaSpec(BLOCK, shapes=STATE.shapes, dtypes=STATE.dtypes, mamba_cache_mode="all")
    with pytest.raises(ConfigError, match=r"mamba_cache_mode=all: .* --mamba-cache-mode align"):
        groups(FULL, state)


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache that could be handed over"):
        groups()


def test_blocks_are_ready_when_they_are_full_and_the_last_one_when_the_prompt_is_complete() -> None:
    length = 5 * BLOCK + 7
    for spec, half, whole in [
        (FULL, range(3), range(6)),
        (window(2 * BLOCK), range(3, 3), range(3, 6)),
        (chunk(2 * BLOCK), range(4, 3), range(4, 6)),
        (STATE, range(5, 3), range(5, 6)),
    ]:
        assert group(spec).ready(length, 3 * BLOCK + 1) == half
        assert group(spec).ready(length, length) == whole


def test_a_state_is_one_block_for_both_whatever_tokens_its_block_stands_for() -> None:
    aligned = group(STATE)
    plain = group(MambaSpec(block_size=4096, shapes=STATE.shapes, dtypes=STATE.dtypes))
    assert aligned.describe() == plain.describe()
    for length in (1, BLOCK, BLOCK + 1, 300):
        assert len(aligned.ready(length, length)) == len(plain.ready(length, length)) == 1
        for each in (aligned, plain):
            assert each.ready(length, length).start == each.num_uncounted(length)


def test_the_last_token_can_be_repeated_if_all_that_it_reads_is_kept_beyond_it() -> None:
    """It reads one token more than the next one: the first of its window, which may have been alone in its block."""
    reach = 2 * BLOCK
    unrepeatable = [length for length in range(1, 8 * BLOCK) if not group(window(reach)).can_repeat_last(length)]
    assert unrepeatable == [reach - 1 + num * BLOCK for num in range(1, 7)]
    unrepeatable = [length for length in range(1, 8 * BLOCK) if not group(chunk(reach)).can_repeat_last(length)]
    assert unrepeatable == [num * reach for num in range(1, 4)]
    assert all(group(FULL).can_repeat_last(length) for length in range(1, 200))
    assert not any(group(STATE).can_repeat_last(length) for length in range(1, 200))
    assert groups(FULL, FULL).can_repeat_last(100)
    assert not groups(FULL, STATE).can_repeat_last(100)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (groups(window(64)), groups(window(128))),
        (groups(FULL), groups(window(64))),
        (groups(FULL, window(64)), groups(window(64), FULL)),
        (groups(STATE), groups(MambaSpec(block_size=BLOCK, shapes=STATE.shapes, dtypes=(torch.float32,) * 2))),
        (groups(FULL), CacheGroups([CacheGroup(kind=Kind.FULL, block_size=BLOCK, layer_names=("other",))])),
    ],
    ids=["reach", "kind", "order", "dtype of the state", "layers"],
)
def test_groups_that_differ_are_described_otherwise(ours: CacheGroups, theirs: CacheGroups) -> None:
    assert ours.describe() != theirs.describe()


def test_only_full_attention_alone_has_parts_that_are_of_use_without_the_others() -> None:
    assert groups(FULL).has_parts
    assert not any(found.has_parts for found in (groups(FULL, FULL), groups(window(64)), groups(STATE)))


def test_the_layers_of_a_group_are_in_the_models_order_whatever_vllms_is() -> None:
    names = ["model.layers.10.attn", "model.layers.2.attn", "model.layers.9.mamba", "model.layers.9.attn"]
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, FULL)])
    ordered = ("model.layers.2.attn", "model.layers.9.attn", "model.layers.9.mamba", "model.layers.10.attn")
    assert CacheGroups.of(config).layers() == [ordered]
