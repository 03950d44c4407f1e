"""Names of chunks: what differs in KV differs in name. And what a chunk says of itself."""

import mmap
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpipe.exceptions import ConfigError
from kvpipe.store import RemoteStore, StoreServer
from kvpipe.store_connector.chunk import HEADER_BYTES, fault, seal
from kvpipe.store_connector.keys import CHUNK_ID_BYTES, KEY_BYTES, chunk_ids, engine_namespace, rank_namespace
from kvpipe.store_connector.layout import CacheBytes
from tests.store_connector.engine import CHUNK, Engine, answered
from tests.store_connector.test_engine import prompt, stored

pytestmark = pytest.mark.vllm

FACTS = {"num_ranks": 1, "chunk_size": 64, "serde": "naive", "namespace": ""}
PROPERTIES = [("model", "a"), ("weights", "1")]
LAYOUT, KEY = bytes(16), b"k" * KEY_BYTES
CHUNK_ID = bytes(CHUNK_ID_BYTES)


@pytest.mark.parametrize(
    "other", [{"num_ranks": 2}, {"chunk_size": 128}, {"serde": "int8"}, {"namespace": "mine"}], ids=str
)
def test_a_namespace_differs_with_what_decides_the_bytes(other: dict[str, Any]) -> None:
    assert engine_namespace(PROPERTIES, **FACTS) != engine_namespace(PROPERTIES, **FACTS | other)


def test_a_namespace_differs_with_each_property_and_rank() -> None:
    engine = engine_namespace(PROPERTIES, **FACTS)
    assert engine != engine_namespace([("model", "a"), ("weights", "2")], **FACTS)
    assert engine != engine_namespace([("model", "a=weights"), ("1", "")], **FACTS)
    assert rank_namespace(engine, 0) != rank_namespace(engine, 1)


def test_ranks_of_an_engine_have_one_quota_in_a_store_server() -> None:
    engine, other = (engine_namespace(PROPERTIES, **FACTS | {"namespace": own}) for own in ("mine", "other"))
    with StoreServer(quota_bytes=3000, token="t") as server, RemoteStore.open(server.url, token="t") as store:
        keys = [rank_namespace(namespace, rank) + CHUNK_ID for namespace in (other, engine) for rank in (0, 1)]
        for key in keys:
            assert store.put(key, bytes(2000))
        assert store.exists(keys) == [False, True, False, True]


def test_a_chunk_is_named_by_its_last_block_hash_the_adapter_and_the_epoch() -> None:
    hashes = [bytes([number]) * 32 for number in range(5)]
    facts: dict[str, Any] = {"num_chunks": 2, "hashes_in_chunk": 2, "adapter": "", "epoch": b""}
    plain = chunk_ids(hashes, **facts)
    assert len(set(plain)) == 2
    assert chunk_ids(hashes[:1] + hashes[1:4], **facts) == plain
    assert chunk_ids([hashes[0], hashes[4], *hashes[2:4]], **facts)[0] != plain[0]
    assert not set(chunk_ids(hashes, **facts | {"adapter": "lora (1234)"})) & set(plain)
    assert not set(chunk_ids(hashes, **facts | {"epoch": b"after a reset"})) & set(plain)


def test_two_models_in_one_store_never_mix(tiny_model: str, store: Any, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(tiny_model, other)
    [weights] = other.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor + 0.001 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    tokens = prompt(3 * CHUNK)
    engines = [Engine(model, store.name) for model in (tiny_model, str(other))]
    for engine in engines:
        stored(engine, tokens)
        assert engine.count("loaded") == 0
        engine.close()
    assert len(store.keys) == 6


def test_the_same_model_elsewhere_has_the_same_names(tiny_model: str, store: Any, tmp_path: Path) -> None:
    other = tmp_path / "moved"
    shutil.copytree(tiny_model, other)
    tokens = prompt(3 * CHUNK)
    first, second = Engine(tiny_model, store.name), Engine(str(other), store.name)
    stored(first, tokens)
    assert second.answer(tokens) == answered(tokens)
    assert second.count("loaded") == 3
    first.close()
    second.close()


def sealed() -> np.ndarray:
    memory = np.arange(HEADER_BYTES + 512, dtype=np.int64).astype(np.uint8)
    seal(memory, KEY, LAYOUT)
    return memory


def test_a_sealed_chunk_is_without_fault() -> None:
    assert fault(sealed(), KEY, LAYOUT) == ""


def test_every_changed_byte_is_a_fault() -> None:
    for at in range(HEADER_BYTES + 512):
        memory = sealed()
        memory[at] ^= 1
        assert fault(memory, KEY, LAYOUT) == ("foreign" if at < 24 or 32 <= at < HEADER_BYTES else "corrupt")


def test_another_key_layout_or_length_is_foreign() -> None:
    assert fault(sealed(), b"j" * KEY_BYTES, LAYOUT) == "foreign"
    assert fault(sealed(), KEY, b"l" * 16) == "foreign"
    assert fault(sealed()[:-1], KEY, LAYOUT) == "foreign"


def caches(num_blocks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As on vLLM's CPU build: one allocation, layer by layer."""
    storage = torch.randn(3, num_blocks, 2, 4, 6).to(dtype)
    return {f"layer.{index}": storage[index] for index in range(3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_that_are_gathered_and_scattered_are_the_same_elsewhere(dtype: torch.dtype) -> None:
    ours, theirs = caches(9, dtype), caches(7, dtype)
    source, destination = CacheBytes(ours), CacheBytes(theirs)
    assert source.digest == destination.digest
    chunk = np.zeros(4 * source.block_bytes, np.uint8)
    source.gather([5, 6, 0, 8], chunk)
    before = {name: cache.clone() for name, cache in theirs.items()}
    destination.scatter(chunk, [3, 1], 2)
    for name, cache in theirs.items():
        assert torch.equal(cache[[3, 1]].view(torch.uint8), ours[name][[0, 8]].view(torch.uint8))
        others = [0, 2, 4, 5, 6]
        assert torch.equal(cache[others].view(torch.uint8), before[name][others].view(torch.uint8))


@pytest.mark.parametrize(("block_ids", "num_parts"), [([5, 6, 0, 8], 3), ([0, 1, 2], 1), ([8, 7], 2), ([3], 1)])
def test_the_parts_of_blocks_are_their_memory_in_the_order_of_a_chunk(block_ids: list[int], num_parts: int) -> None:
    ours = caches(9, torch.float32)
    cache = CacheBytes(ours)
    chunk = np.zeros(len(block_ids) * cache.block_bytes, np.uint8)
    cache.gather(block_ids, chunk)
    parts = cache.parts(block_ids)
    assert len(parts) == 3 * num_parts
    assert np.array_equal(np.concatenate(parts), chunk)
    for part in parts:
        part[:] = 0
    assert not any(each[block_ids].any() for each in ours.values()), "it is the cache itself"


def test_blocks_that_are_apart_are_parts_of_their_own() -> None:
    storage = torch.arange(5 * 2 * 64, dtype=torch.uint8).reshape(5, 2, 64)
    parts = CacheBytes({"layer": storage[:, 0]}).parts([2, 3])
    assert np.array_equal(np.stack(parts), storage[[2, 3], 0].numpy())


def test_the_first_use_of_a_page_is_over_once_the_pages_of_a_layer_are_made() -> None:
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)).reshape(64, -1)
    cache = CacheBytes({"layer": memory})
    cache.make_pages(0)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.fill_(1)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100  # of 1,024


def test_a_cache_whose_blocks_are_apart_is_copied_and_what_is_between_them_is_kept() -> None:
    storage = torch.zeros(5, 2, 64, dtype=torch.uint8)
    cache = CacheBytes({"layer": storage[:, 0]})
    cache.scatter(np.arange(2 * 64, dtype=np.uint8), [4, 1], 0)
    assert torch.equal(storage[4, 0], torch.arange(64, dtype=torch.uint8))
    assert torch.equal(storage[1, 0], torch.arange(64, 128, dtype=torch.uint8))
    assert not storage[:, 1].any()
    assert not storage[[0, 2, 3]].any()
    chunk = np.zeros(64, np.uint8)
    cache.gather([1], chunk)
    assert torch.equal(torch.from_numpy(chunk), storage[1, 0])


@pytest.mark.parametrize(("block_id", "first"), [(9, 0), (1 << 62, 0), (0, 1), (0, 1 << 62)])
def test_a_block_outside_the_cache_or_the_chunk_is_refused(block_id: int, first: int) -> None:
    ours = caches(9, torch.float32)
    before = {name: cache.clone() for name, cache in ours.items()}
    cache = CacheBytes(ours)
    with pytest.raises(ConfigError, match="is not in the cache, or the chunk ends before it"):
        cache.scatter(np.ones(cache.block_bytes, np.uint8), [block_id], first)
    assert all(torch.equal(ours[name], before[name]) for name in ours)
    with pytest.raises(ConfigError):
        cache.gather([0, 1], np.zeros(cache.block_bytes, np.uint8))


def test_layouts_of_other_shapes_types_and_layers_differ() -> None:
    plain = caches(4, torch.float32)
    wider = {name: torch.zeros(4, 2, 4, 12) for name in plain}
    renamed = {f"{name}x": cache for name, cache in plain.items()}
    digests = {CacheBytes(each).digest for each in (plain, wider, renamed, caches(4, torch.bfloat16))}
    assert len(digests) == 4
