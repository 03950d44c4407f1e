"""Names of chunks: what differs in KV differs in name. And what a chunk says of itself."""

import mmap
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import MultiModalConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvpipe.exceptions import ConfigError
from kvpipe.store import RemoteStore, StoreServer
from kvpipe.vllm.layer_cache import LayerCache
from kvpipe.vllm.store.cache_bytes import CacheBytes
from kvpipe.vllm.store.chunk import HEADER_BYTES, fault, seal
from kvpipe.vllm.store.config import StoreConnectorConfig
from kvpipe.vllm.store.keys import (
    CHUNK_ID_BYTES,
    KEY_BYTES,
    Feature,
    chunk_ids,
    engine_namespace,
    entry_id,
    rank_namespace,
)
from kvpipe.vllm.store.scheduler import StoreSchedulerRole
from tests.vllm.handoff.conftest import REPOSITORY
from tests.vllm.handoff.engine import BLOCK
from tests.vllm.store.engine import CHUNK, Engine, answered, store_config
from tests.vllm.store.test_engine import prompt, stored

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


TOKENS = [1, 2, 3, 70_000]
IMAGE = Feature("a1b2", 1, 3)


def ids(token_ids: list[int] | None = None, **facts: Any) -> list[bytes]:
    return chunk_ids(token_ids or TOKENS, **{"num_chunks": 2, "chunk_size": 2} | facts)


def test_keys_stay_what_they_are() -> None:
    # With other keys, stored KV is not found, and instances that have not been updated yet do not share it.
    engine = engine_namespace(PROPERTIES, **FACTS)
    assert rank_namespace(engine, 1).hex() == "aecac0809d282e993e87704d275c0100"
    assert [each.hex() for each in ids()] == [
        "94d43dbc713f94ec90eadfbfc862ab9393705abb1a48ce6e6a06325d87c5d323",
        "ebec0b8100bcc4c55276990177d1571e74eeb0728bb211b665a284b831eb70ff",
    ]
    assert [each.hex() for each in ids(adapter="adapter", salt="salt", features=[IMAGE])] == [
        "db3e6eee866c44b9478538513c708dfb841a763696efe8861727817f675fa10a",
        "23182f578cb30260f2577c9627da002fd02eafc999f9f9ee3f5ed80d8978869e",
    ]
    assert entry_id(bytes(16)).hex() == "c447f99ec7eb688cad84459bc9d4d8da4482ea5330cac794a7f12ff139389261"


def test_a_chunk_is_named_by_all_tokens_up_to_its_end() -> None:
    first, second = ids()
    assert ids([1, 2, 4, 4])[0] == first
    others = [*ids([2, 1, 3, 70_000]), *ids([1, 2, 70_000, 3])[1:], *ids([1, 2, 3, 4])[1:], *ids(chunk_size=1)]
    assert not {first, second} & set(others)
    assert ids(num_chunks=1) == [first]


@pytest.mark.parametrize(
    "facts",
    [
        {"adapter": "0123"},
        {"salt": "0123"},
        {"features": [IMAGE]},
        {"embeddings": lambda first, end: b"%d %d" % (first, end)},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_a_chunk_is_named_by_what_else_decides_its_kv(facts: dict[str, Any]) -> None:
    assert not set(ids(**facts)) & set(ids())


def test_an_image_is_named_by_its_content_and_its_place_from_its_first_chunk_on() -> None:
    plain = ids()
    names = [ids(features=[each]) for each in (IMAGE, Feature("c3d4", 1, 3), Feature("a1b2", 0, 3))]
    assert len({tuple(each) for each in names}) == 3
    [first, second] = ids(features=[Feature("a1b2", 2, 4)])
    assert first == plain[0]
    assert second != plain[1]


def test_an_adapter_and_a_salt_are_not_mixed_up() -> None:
    assert ids(adapter="a", salt="b") != ids(adapter="ab") != ids(adapter="b", salt="a")


def test_the_embeddings_of_a_prompt_and_their_places_are_part_of_its_names(engine: Engine) -> None:
    def named(values: list[float], is_token: list[bool] | None = None) -> bytes:
        request = SimpleNamespace(
            prompt_token_ids=[0] * CHUNK,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=torch.tensor(values * CHUNK, dtype=torch.bfloat16).reshape(CHUNK, -1),
            prompt_is_token_ids=is_token,
        )
        return engine.role._names.chunk_ids(request, 1, "")[0]

    mask = [True] + [False] * (CHUNK - 1)
    assert len({named([1, 2]), named([1, 3]), named([1, 2], mask), named([1, 2], mask[::-1])}) == 4
    assert named([1, 2]) == named([1, 2])


@pytest.mark.parametrize(
    ("cache_gb", "has_prefix_caching", "is_named"), [(0, False, False), (0, True, True), (4, False, True)]
)
def test_images_that_vllm_numbers_have_no_names_which_is_said_at_the_start(
    tiny_model: str, log: pytest.LogCaptureFixture, *, cache_gb: float, has_prefix_caching: bool, is_named: bool
) -> None:
    config = store_config(tiny_model, "images")
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)
    config.cache_config.enable_prefix_caching = has_prefix_caching
    settings = StoreConnectorConfig.parse(config.kv_transfer_config.kv_connector_extra_config, BLOCK)
    role = StoreSchedulerRole(config, settings)
    assert ("store.unnamed requests with images" in log.text) is not is_named
    image = MultiModalFeatureSpec(None, "image", "renderer0-mm-1-image-0", PlaceholderRange(offset=1, length=4))
    sampling = SamplingParams(max_tokens=1)
    for features in ([], [image]):
        role.on_new_request(Request(f"{len(features)}", prompt(3 * CHUNK), sampling, None, mm_features=features))
    assert list(role._prompts) == (["0", "1"] if is_named else ["0"])
    stats = role.drain_stats()
    assert (stats.data if stats else {}).get("decisions") == (None if is_named else {"multimodal": 1})
    role.close()


PROCESS = """
import sys
from tests.vllm.store.engine import CHUNK, Engine, answered
from tests.vllm.store.test_engine import prompt

engine, tokens = Engine(sys.argv[1], sys.argv[2], lookup_timeout_s=20), prompt(3 * CHUNK)
assert engine.answer(tokens) == answered(tokens)
engine.saved()
print(engine.count("loaded"), engine.count("saved"))
engine.close()
"""


@pytest.mark.slow
def test_processes_with_other_hash_seeds_share(tiny_model: str) -> None:
    with StoreServer(token="t") as server:
        counts = []
        for seed in ({}, {"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "8"}):
            env = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
            command = [sys.executable, "-W", "ignore", "-c", PROCESS, tiny_model, server.url]
            told = subprocess.run(
                command, env=env | {"KVPIPE_TOKEN": "t"} | seed, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE
            )
            counts.append(told.stdout.decode().splitlines()[-1].split())
    assert counts == [["0", "3"], ["3", "0"], ["3", "0"]]


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


def cache_bytes(kv_caches: dict[str, torch.Tensor]) -> CacheBytes:
    return CacheBytes(kv_caches, next(iter(kv_caches.values())).shape[0])


def caches(num_blocks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As on vLLM's CPU build: one allocation, layer by layer."""
    storage = torch.randn(3, num_blocks, 2, 4, 6).to(dtype)
    return {f"layer.{index}": storage[index] for index in range(3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_that_are_gathered_and_scattered_are_the_same_elsewhere(dtype: torch.dtype) -> None:
    ours, theirs = caches(9, dtype), caches(7, dtype)
    source, destination = cache_bytes(ours), cache_bytes(theirs)
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
    cache = cache_bytes(ours)
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
    parts = cache_bytes({"layer": storage[:, 0]}).parts([2, 3])
    assert np.array_equal(np.stack(parts), storage[[2, 3], 0].numpy())


def test_the_first_use_of_a_page_is_over_once_the_pages_of_a_layer_are_made() -> None:
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)).reshape(64, -1)
    cache = cache_bytes({"layer": memory})
    cache.make_pages(0)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.fill_(1)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100  # of 1,024


def test_a_cache_whose_blocks_are_apart_is_copied_and_what_is_between_them_is_kept() -> None:
    storage = torch.zeros(5, 2, 64, dtype=torch.uint8)
    cache = cache_bytes({"layer": storage[:, 0]})
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
    cache = cache_bytes(ours)
    with pytest.raises(ConfigError, match="is not in the cache, or the chunk ends before it"):
        cache.scatter(np.ones(cache.block_bytes, np.uint8), [block_id], first)
    assert all(torch.equal(ours[name], before[name]) for name in ours)
    with pytest.raises(ConfigError):
        cache.gather([0, 1], np.zeros(cache.block_bytes, np.uint8))


def test_layouts_of_other_shapes_types_and_layers_differ() -> None:
    plain = caches(4, torch.float32)
    wider = {name: torch.zeros(4, 2, 4, 12) for name in plain}
    renamed = {f"{name}x": cache for name, cache in plain.items()}
    digests = {cache_bytes(each).digest for each in (plain, wider, renamed, caches(4, torch.bfloat16))}
    assert len(digests) == 4


def test_the_cache_of_a_gpu_is_known_by_the_blocks_of_vllms_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device `meta`, whose tensors have no memory."""

    def memory(layer: LayerCache, _: int) -> np.ndarray:
        return np.zeros((len(layer.blocks) - 1) * layer.layout.stride_bytes + layer.layout.block_bytes, np.uint8)

    monkeypatch.setattr(LayerCache, "memory", memory)

    def of(*shape: int, num_blocks: int) -> CacheBytes:
        cache = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return CacheBytes({"layer": cache}, num_blocks)

    # A backend takes two blocks for each one of the manager; K and V are apart.
    in_kernels, apart, larger = of(8, 2, 6, num_blocks=4), of(2, 4, 3, 6, num_blocks=4), of(2, 9, 3, 6, num_blocks=9)
    assert [tuple(blocks.shape) for blocks in in_kernels.blocks] == [(4, 2, 2, 6)]
    assert (in_kernels.num_layers, in_kernels.block_bytes) == (1, 2 * 2 * 6 * 2)
    assert (apart.num_layers, apart.block_bytes) == (2, 2 * 3 * 6 * 2)
    assert apart.digest == larger.digest != in_kernels.digest
