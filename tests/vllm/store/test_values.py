"""Chunks as values: each serde, and what must not be used."""

import time

import numpy as np
import pytest
import torch

from kvpipe.exceptions import ConfigError
from kvpipe.store.serde import SERDES, Serde
from kvpipe.vllm.device import HostOrder
from kvpipe.vllm.store.cache_bytes import CacheBytes
from kvpipe.vllm.store.client import StoreClient
from kvpipe.vllm.store.keys import KEY_BYTES
from kvpipe.vllm.store.saving import Saved, Saver
from kvpipe.vllm.store.values import ChunkValues, layout_of

pytestmark = pytest.mark.vllm

KEY = b"k" * KEY_BYTES
CHUNK_BLOCKS = 2
LOSSY = [name for name in SERDES if name != "naive"]
# Of the largest magnitude: 4 bits of cachegen and 2 of KIVI are coarse.
TOLERANCE = {"naive": 0.0, "int8": 0.01, "fp8": 0.07, "kivi4": 0.1, "kivi2": 0.4, "cachegen": 0.2}


def caches(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """As on vLLM's CPU build: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`."""
    generator = torch.Generator().manual_seed(7)
    return {f"layer.{index}": torch.randn(5, 2, 32, 64, generator=generator) * scale for index in range(3)}


def values_of(name: str, kv_caches: dict[str, torch.Tensor]) -> tuple[CacheBytes, ChunkValues]:
    cache, serde = CacheBytes(kv_caches, next(iter(kv_caches.values())).shape[0]), Serde.parse(name)
    layout = None if serde.is_lossless else layout_of(kv_caches.values(), CHUNK_BLOCKS, "vec")
    return cache, ChunkValues(serde, layout, cache.digest, CHUNK_BLOCKS, cache.block_bytes)


def value(name: str) -> tuple[ChunkValues, np.ndarray]:
    cache, values = values_of(name, caches())
    slot = np.zeros(values.slot_bytes, np.uint8)
    cache.gather([1, 4], slot[-CHUNK_BLOCKS * cache.block_bytes :])
    return values, values.value_of(slot, KEY, CHUNK_BLOCKS).copy()


def ended(saver: Saver) -> Saved:
    """The chunk that its thread is done with."""
    give_up_s = time.monotonic() + 10
    while not (found := saver.ended(0.0)):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    return found[0]


@pytest.mark.parametrize("name", SERDES)
def test_a_chunk_is_restored_from_its_value(name: str) -> None:
    source, target = caches(), {layer: torch.zeros_like(cache) for layer, cache in caches().items()}
    cache, values = values_of(name, target)
    _, stored = value(name)
    slot = np.zeros(values.slot_bytes, np.uint8)
    memory = values.buffer_for(stored.nbytes, slot, CHUNK_BLOCKS)
    assert memory is not None
    memory[:] = stored
    assert values.restore(memory, KEY, slot, CHUNK_BLOCKS) == ""
    cache.scatter(slot[-CHUNK_BLOCKS * cache.block_bytes :], [2, 3], 0)
    for layer, restored in target.items():
        expected = source[layer][[1, 4]]
        assert (restored[[2, 3]] - expected).abs().max() <= TOLERANCE[name] * expected.abs().max()
    assert name == "naive" or stored.nbytes < values.slot_bytes * 0.6


@pytest.mark.parametrize("name", SERDES)
@pytest.mark.parametrize("at", [0, 60, 200, -1])
def test_a_changed_byte_makes_a_value_useless(name: str, at: int) -> None:
    values, stored = value(name)
    stored[at] ^= 1
    assert values.restore(stored, KEY, np.zeros(values.slot_bytes, np.uint8), CHUNK_BLOCKS) in ("foreign", "corrupt")


@pytest.mark.parametrize("name", SERDES)
def test_a_value_of_another_size_is_not_read(name: str) -> None:
    values, _ = value(name)
    slot = np.zeros(values.slot_bytes, np.uint8)
    for num_bytes in (0, 128, 1 << 40):
        assert values.buffer_for(num_bytes, slot, CHUNK_BLOCKS) is None


@pytest.mark.parametrize("name", LOSSY)
def test_kv_that_is_not_finite_is_not_saved_by_a_serde_that_loses_precision(name: str) -> None:
    cache, values = values_of(name, caches(float("inf")))
    infinite = np.full(values.slot_bytes // 4, np.inf, np.float32).tobytes()
    with pytest.raises(ConfigError, match="naive"):
        values.value_of(np.frombuffer(infinite, np.uint8), KEY, CHUNK_BLOCKS)
    client = StoreClient("local://", 1.0)
    saver = Saver(client, cache, values, HostOrder(), staging_bytes=1 << 24, num_threads=1)
    assert saver.save(KEY, [1, 2], 0.0) == ""
    assert ended(saver).result == "not_finite"
    assert saver.close(10.0)
    assert saver.breaker_state == "closed"
    client.close()


def test_layers_that_differ_are_for_the_naive_serde_only() -> None:
    mixed = caches() | {"other": torch.zeros(5, 2, 32, 128)}
    with pytest.raises(ConfigError, match="naive"):
        values_of("int8", mixed)
    assert isinstance(values_of("naive", mixed)[1], ChunkValues)


def test_an_unknown_packing_is_refused_by_name() -> None:
    layout = layout_of(caches().values(), CHUNK_BLOCKS, "amx")
    with pytest.raises(ConfigError, match=r"amx.*naive"):
        ChunkValues(Serde.parse("fp8"), layout, b"l" * 16, CHUNK_BLOCKS, layout.num_bytes // CHUNK_BLOCKS)


def test_a_local_store_has_what_a_saver_wrote() -> None:
    cache, values = values_of("int8", caches())
    client = StoreClient("local://", 1.0)
    saver = Saver(client, cache, values, HostOrder(), staging_bytes=1 << 24, num_threads=1)
    assert saver.save(KEY, [1, 4], 0.0) == ""
    saved = ended(saver)
    assert saved.result == "saved"
    assert saver.close(10.0)
    found = client.run(lambda store: store.select(KEY))
    assert found.num_bytes == saved.num_bytes == value("int8")[1].nbytes
    client.close()
