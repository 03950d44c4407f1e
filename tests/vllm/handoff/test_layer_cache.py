"""Location of the bytes of blocks, for the views that vLLM's attention backends have of their caches."""

import itertools

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, MLAAttentionSpec, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvpipe import _kvpipe
from kvpipe._transport import transport
from kvpipe.exceptions import ConfigError
from kvpipe.vllm.layer_cache import CacheLayout, LayerCache
from tests.vllm.handoff.test_worker import role

pytestmark = pytest.mark.vllm

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 3, 7, 4, 16, 8
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16)
PAGE = SPEC.page_size_bytes
MLA = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
# ROCM_ATTN and ROCM_AITER_FA have K and V in two head slots (v1/attention/backends/rocm_attn.py:225, :237), B12X too
# (b12x.py:160, :249).
APART = FullAttentionSpec(
    block_size=TOKENS,
    num_kv_heads=HEADS,
    head_size=SIZE,
    dtype=torch.bfloat16,
    num_head_slots=2,
    state_content_bytes=PAGE // TOKENS // 2,
)


def views(
    layout: KVCacheLayout, spec: FullAttentionSpec = SPEC, kernel_block_size: int | None = None, padding: int = 0
) -> list[torch.Tensor]:
    """The views that vLLM makes for its layers (v1/worker/utils.py:allocate_kv_cache), with random content."""
    page = spec.page_size_bytes + padding
    sizes = dict(zip("LBHNC", (LAYERS, BLOCKS, spec.num_heads, TOKENS, spec.state_content_size_bytes), strict=True))
    order = layout.name
    inside = {dim: page if set(order[order.index(dim) + 1 :]) == set("HNC") else 0 for dim in "LB"}
    strides = {
        dim: inside[dim] or int(torch.tensor([sizes[each] for each in order[order.index(dim) + 1 :]]).prod())
        for dim in "LB"
    }
    for dim, other in (("L", "B"), ("B", "L")):
        if inside[other] and order.index(dim) < order.index(other):
            strides[dim] = sizes[other] * page
    raw = torch.randint(0, 127, (LAYERS * BLOCKS * page + 64,), dtype=torch.int8)
    tensor = KVCacheTensor(
        size=raw.numel(),
        layers=[f"layer.{index}" for index in range(LAYERS)],
        layer_stride=strides["L"],
        block_stride=strides["B"],
        offset=32,
    )
    return create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_block_size)


def moved(sources: list[torch.Tensor], targets: list[torch.Tensor], block_ids: tuple[list[int], list[int]]) -> None:
    """Registers the caches of two sides, and reads blocks of the one into the other."""
    owner, reader = (_kvpipe.Agent("127.0.0.1:0", b"", transport()) for _ in range(2))
    there = [LayerCache.of(f"layer.{index}", cache, BLOCKS).register(owner) for index, cache in enumerate(sources)]
    here = [LayerCache.of(f"layer.{index}", cache, BLOCKS).register(reader) for index, cache in enumerate(targets)]
    assert [len(each) for each in there] == [len(each) for each in here]
    connected = reader.connect(owner.address)
    connected.wait(10)
    names = [name for name, *_ in connected.result().regions()]
    for name, region in zip(names, itertools.chain(*here), strict=True):
        plan = reader.prepare(connected.result(), region, block_ids[1], name, block_ids[0])
        work = reader.read(plan)
        work.wait(10)
        work.result()
    reader.close()
    owner.close()


@pytest.mark.parametrize("spec", [SPEC, MLA, APART], ids=["K and V together", "MLA", "K and V apart"])
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_blocks_of_every_layout_arrive_and_no_other_byte_is_touched(
    layout: KVCacheLayout, spec: FullAttentionSpec
) -> None:
    sources, targets = views(layout, spec), views(layout, spec)
    raw = torch.empty(0, dtype=torch.int8).set_(targets[0].untyped_storage())
    before, overwritten = raw.clone(), [target[[5, 1]] for target in targets]
    moved(sources, targets, ([2, 6], [5, 1]))
    for source, target, replaced in zip(sources, targets, overwritten, strict=True):
        assert torch.equal(source[[2, 6]], target[[5, 1]])
        target[[5, 1]] = replaced
    assert torch.equal(raw, before)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_a_block_whose_heads_and_tokens_are_together_is_in_one_region(layout: str) -> None:
    cache = LayerCache.of("layer", views(KVCacheLayout[layout])[1], BLOCKS)
    assert (cache.layout.block_bytes, cache.layout.offsets) == (PAGE, (0,))


def test_k_and_v_that_are_apart_are_two_regions() -> None:
    cache = LayerCache.of("layer", views(KVCacheLayout.LHBNC, APART)[1], BLOCKS)
    assert (cache.layout.block_bytes, cache.layout.offsets) == (PAGE // 2, (0, BLOCKS * PAGE // 2))
    plain = torch.zeros(2, BLOCKS, TOKENS, HEADS, SIZE)
    cache = LayerCache.of("layer", plain, BLOCKS)
    assert cache.layout.offsets == (0, plain.nbytes // 2)
    assert torch.equal(cache.blocks[:, :, 0], plain.transpose(0, 1))


def test_padded_blocks_are_moved_without_their_padding() -> None:
    cache = LayerCache.of("layer", views(KVCacheLayout.LBNHC, padding=64)[1], BLOCKS)
    assert (cache.layout.block_bytes, cache.layout.stride_bytes) == (PAGE, PAGE + 64)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_a_block_of_several_kernel_blocks_is_all_of_them(layout: str) -> None:
    sources = views(KVCacheLayout[layout], kernel_block_size=TOKENS // 4)
    targets = views(KVCacheLayout[layout], kernel_block_size=TOKENS // 4)
    assert sources[0].shape[0] == 4 * BLOCKS
    moved(sources, targets, ([3], [0]))
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source[12:16], target[:4])
    assert LayerCache.of("layer", sources[0], BLOCKS).layout.block_bytes == PAGE


def test_what_two_engines_must_share_names_the_order_of_a_block_and_its_kernel_blocks() -> None:
    orders = [LayerCache.of("layer", views(layout)[0], BLOCKS).layout.order for layout in KVCacheLayout]
    orders.append(LayerCache.of("layer", views(KVCacheLayout.LBNHC, SPEC, TOKENS // 4)[0], BLOCKS).layout.order)
    by_head = "[4, 16, 16] stored 0 1 2"
    by_token = "[4, 16, 16] stored 1 0 2"
    assert dict(zip([layout.name for layout in KVCacheLayout], orders, strict=False)) == {
        "LBHNC": by_head,
        "LBNHC": by_token,
        "LHBNC": by_head,
        "BLHNC": by_head,
        "BLNHC": by_token,
        "BHLNC": by_head,
    }
    assert orders[-1] == "[4, 4, 4, 16] stored 0 2 1 3"


def test_blocks_are_by_head_where_a_slice_of_one_has_some_of_its_heads() -> None:
    found = {layout.name: LayerCache.of("layer", views(layout)[0], BLOCKS, HEADS).layout for layout in KVCacheLayout}
    assert {name for name, layout in found.items() if layout.is_by_head} == {"LBHNC", "BLHNC"}
    assert found["LBHNC"].order == "[heads, 16, 16] stored by head 1 2"
    one_head = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=SIZE, dtype=torch.bfloat16)
    other = LayerCache.of("layer", views(KVCacheLayout.LBHNC, one_head)[0], BLOCKS, 1).layout
    assert other.is_by_head
    assert other.order == found["LBHNC"].order, "another number of heads is no other order"
    kernel_blocks = views(KVCacheLayout.LBHNC, SPEC, TOKENS // 4)[0]
    assert not LayerCache.of("layer", kernel_blocks, BLOCKS, HEADS).layout.is_by_head
    apart = torch.zeros(2, BLOCKS, TOKENS, HEADS, SIZE)
    assert not LayerCache.of("layer", apart, BLOCKS, 2).layout.is_by_head


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((BLOCKS, 4, 64, 32), (4 * 64 * 64, 64 * 64, 64, 1)),  # half of each row
        ((BLOCKS, 4, 64, 32), (4 * 64 * 32, 64 * 32, 32, 0)),  # one element for all
        ((BLOCKS, 64, 32), (64, 32, 1)),  # blocks that overlap
    ],
)
def test_blocks_that_are_not_dense_are_refused_with_layer_shape_and_strides(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        CacheLayout.of("layer.5", shape, strides, 2)
    assert all(text in str(error.value) for text in ("layer layer.5", "not dense", str(shape), str(strides)))


def test_more_heads_apart_than_regions_are_made_for_are_refused_with_the_remedy() -> None:
    tokens_of_all_heads = BLOCKS * 16 * 32
    with pytest.raises(ConfigError, match=r"layer\.5: .* in 32 parts, and 16 at most .* another VLLM_KV_CACHE_LAYOUT"):
        CacheLayout.of("layer.5", (BLOCKS, 32, 16, 32), (16 * 32, tokens_of_all_heads, 32, 1), 2)


@pytest.mark.parametrize("shape", [(BLOCKS + 1, 4), (4, BLOCKS, 4), (3,)])
def test_a_cache_without_a_dimension_of_blocks_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"layer layer\.5: its cache of shape .* divided into 7 blocks"):
        LayerCache.of("layer.5", torch.zeros(shape), BLOCKS)


def test_a_worker_adds_the_form_of_its_blocks_to_the_fingerprint() -> None:
    worker = role(num_blocks=BLOCKS, groups=[["layer.0", "layer.1"]])
    worker.register(
        {"layer.0": views(KVCacheLayout.LBNHC)[0], "layer.1": views(KVCacheLayout.LBHNC)[1]},
        [("attention backend", "A")],
    )
    properties = worker.handshake().properties
    worker.close()
    forms = "[4, 16, 16] stored 0 1 2; [4, 16, 16] stored 1 0 2"
    expected = [("attention backend", "A"), ("kv block", forms), ("tensor parallel size", "1")]
    assert properties == expected


def test_caches_on_several_devices_are_refused_with_their_names() -> None:
    worker = role(num_blocks=BLOCKS)
    caches = {"layer.0": torch.zeros(BLOCKS, 4), "layer.1": torch.zeros(BLOCKS, 4, device="meta")}
    with pytest.raises(ConfigError, match="KV caches on cpu, meta: those of one worker must be on one device"):
        worker.register(caches)
    worker.close()
