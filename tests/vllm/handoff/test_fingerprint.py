"""Comparison of two engines before one reads the other's KV: any difference that matters has a name and two values."""

import copy
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from vllm.config import LoadConfig, LoRAConfig, ModelConfig, MultiModalConfig, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvpipe import _kvpipe
from kvpipe.control import ControlClient
from kvpipe.vllm.fingerprint import _length_scaling, attention_properties, fingerprint
from kvpipe.vllm.handoff.cache_groups import CacheGroups
from kvpipe.vllm.handoff.metadata import HandshakeMetadata
from kvpipe.vllm.handoff.scheduler import SchedulerRole
from kvpipe.vllm.model_files import find_files, hash_weights
from kvpipe.vllm.rank_properties import merge_layers, merge_ranks
from tests.vllm.handoff.engine import cache_config, engine_config

pytestmark = pytest.mark.vllm

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"


class Repository:
    """A model of the hub in its cache, as if it had been downloaded."""

    def __init__(self) -> None:
        self.id = f"tests/tiny-{secrets.token_hex(4)}"
        self._path = Path(os.environ["HF_HUB_CACHE"]) / f"models--{self.id.replace('/', '--')}"

    def add(self, commit: str, source: Path, *, is_main: bool = True) -> Path:
        """Adds a revision with the files of a folder."""
        for name in ("refs", "blobs", f"snapshots/{commit}"):
            (self._path / name).mkdir(parents=True, exist_ok=True)
        snapshot = self._path / "snapshots" / commit
        for file in source.iterdir():
            blob = self._path / "blobs" / secrets.token_hex(20)
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        if is_main:
            (self._path / "refs" / "main").write_text(commit)
        return snapshot


@pytest.fixture
def hub(tiny_model: str, tmp_path: Path) -> Repository:
    """A model of two revisions, of which the newer has one other value in its weights."""
    repository = Repository()
    repository.add(OLD, Path(tiny_model), is_main=False)
    repository.add(NEW, other_weights(tiny_model, tmp_path / "newer"))
    return repository


def other_weights(model: str, folder: Path) -> Path:
    """A copy of a model whose tensors are all a little larger."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor * 1.01 for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return folder


def of_model(config: VllmConfig, model: str, **more: Any) -> list[tuple[str, str]]:
    """The fingerprint of an engine that has a model by this name, which vLLM does not replace by a folder."""
    other = copy.copy(config)
    other.model_config = ModelConfig(**{"model": model, "dtype": "float32", "max_model_len": 2048} | more)
    return fingerprint(other)


def difference(ours: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    return {name: (value, dict(theirs)[name]) for name, value in ours if dict(theirs)[name] != value}


def test_a_hub_id_and_the_path_of_its_snapshot_are_the_same_model(config: VllmConfig, hub: Repository) -> None:
    by_id = of_model(config, hub.id)
    assert dict(by_id)["model"] == dict(by_id)["tokenizer"] == f"{hub.id}@{NEW}"
    assert by_id == of_model(config, str(find_files(hub.id).folder))
    # With HF_HUB_OFFLINE vLLM replaces the id itself.
    offline = engine_config(hub.id)
    assert offline.model_config.model != hub.id
    assert by_id == fingerprint(offline)


def test_two_revisions_of_one_hub_id_are_not_the_same_model(config: VllmConfig, hub: Repository) -> None:
    newer, older = of_model(config, hub.id), of_model(config, hub.id, revision=OLD)
    found = difference(newer, older)
    assert found["model"] == (f"{hub.id}@{NEW}", f"{hub.id}@{OLD}")
    assert found.keys() == {"model", "weights", "tokenizer", "generation config"}
    assert older == of_model(config, str(find_files(hub.id, OLD).folder))


def test_another_revision_of_the_tokenizer_is_named(config: VllmConfig, hub: Repository) -> None:
    found = difference(of_model(config, hub.id), of_model(config, hub.id, tokenizer_revision=OLD))
    assert found == {"tokenizer": (f"{hub.id}@{NEW}", f"{hub.id}@{OLD}")}


def test_other_code_of_a_model_that_brings_its_own_is_named(
    config: VllmConfig, hub: Repository, tmp_path: Path
) -> None:
    brings_code = SimpleNamespace(auto_map={"AutoModel": "modeling.Model"})
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "modeling.py").write_text("VERSION = 1")

    def of(folder: str, **more: Any) -> str:
        other = copy.copy(config)
        other.model_config = copy.copy(config.model_config)
        other.model_config.__dict__ |= {"model": folder, "trust_remote_code": True, **more}
        other.model_config.hf_config = copy.copy(config.model_config.hf_config)
        other.model_config.hf_config.auto_map = brings_code.auto_map
        return dict(fingerprint(other))["model code"]

    assert of(hub.id) == of(str(find_files(hub.id).folder)) == f"{hub.id}@{NEW}"
    assert of(hub.id, code_revision=OLD) == f"{hub.id}@{OLD}"
    first = of(str(tmp_path / "code"))
    (tmp_path / "code" / "modeling.py").write_text("VERSION = 2")
    assert of(str(tmp_path / "code")) != first


def test_a_copy_of_local_files_is_the_same_model_and_other_weights_are_not(
    config: VllmConfig, tiny_model: str, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "copy")
    ours = of_model(config, tiny_model)
    assert ours == of_model(config, str(tmp_path / "copy"))
    assert dict(ours)["model"] == "local files"
    theirs = of_model(config, str(other_weights(tiny_model, tmp_path / "other")))
    assert difference(ours, theirs).keys() == {"weights"}


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_weights_in_shards_of_pytorch_are_sampled(tiny_model: str, tmp_path: Path, form: str) -> None:
    tensors = safetensors.torch.load_file(Path(tiny_model) / "model.safetensors")

    def folder(name: str, factor: float) -> Path:
        path = tmp_path / name / "files"  # a record in the archive is named after its file
        path.mkdir(parents=True)
        names = sorted(tensors)
        for shard, part in enumerate((names[:5], names[5:])):
            values = {name: tensors[name] * factor for name in part}
            torch.save(values, path / f"pytorch_model-{shard}-of-2.bin", _use_new_zipfile_serialization=form == "zip")
        (path / "training_args.bin").write_bytes(name.encode())  # vLLM does not load it
        return path

    hashes = [hash_weights(find_files(str(folder(*which))), "auto") for which in (("a", 1), ("b", 1), ("c", 1.01))]
    assert hashes[0] != hashes[2]
    if form == "zip":  # the older form writes addresses of this process into the file
        assert hashes[0] == hashes[1]


def test_of_two_sets_of_weights_the_one_that_vllm_loads_is_compared(tiny_model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    before = hash_weights(find_files(str(folder)), "auto")
    torch.save({}, folder / "pytorch_model.bin")
    assert hash_weights(find_files(str(folder)), "auto") == before
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    weight_map = dict.fromkeys(safetensors.torch.load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert hash_weights(find_files(str(folder)), "hf") == before


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"PK\x05\x06"])
def test_damaged_weights_do_not_end_the_engine_here(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "model.pt").write_bytes(content)
    assert len(hash_weights(find_files(str(tmp_path)), "auto")) == 16
    assert len(hash_weights(find_files(str(tmp_path)), "pt")) == 16


@pytest.mark.parametrize("load_format", ["dummy", "runai_streamer", "tensorizer", "gguf"])
def test_weights_that_are_loaded_otherwise_are_said_not_to_be_compared(
    config: VllmConfig, log: pytest.LogCaptureFixture, load_format: str
) -> None:
    other = copy.copy(config)
    other.load_config = dataclasses.replace(LoadConfig(), load_format=load_format)
    said = f"not compared: loaded by load_format={load_format}"
    assert dict(fingerprint(other))["weights"] == said
    SchedulerRole(other, SimpleNamespace(allowed_producers="", trace=""), CacheGroups.of(cache_config()))
    assert f"fingerprint.incomplete weights is {said}" in log.text


def test_a_model_that_is_not_on_this_disk_is_said_not_to_be_compared() -> None:
    files = find_files("tests/nowhere", "v1")
    assert hash_weights(files, "auto") == files.name == "not compared: tests/nowhere@v1 is not on this disk"
    assert find_files("no/hub/id").folder is None


def test_weights_in_a_download_folder_of_their_own_are_found(
    config: VllmConfig, tiny_model: str, tmp_path: Path
) -> None:
    repository = Repository()
    repository._path = tmp_path / repository._path.name
    repository.add(NEW, Path(tiny_model))
    assert find_files(repository.id, None, (str(tmp_path), None)).name == f"{repository.id}@{NEW}"
    assert find_files(repository.id).folder is None


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_factors_of_longrope_that_vllm_chooses_by_length_are_compared(
    config: VllmConfig, tiny_model: str, *, is_nested: bool
) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 1024}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    rope = {"full_attention": longrope} if is_nested else longrope
    of_length = [
        of_model(config, tiny_model, max_model_len=length, hf_overrides={"rope_parameters": rope})
        for length in (512, 1024, 2048)
    ]
    assert difference(of_length[0], of_length[1]) == {}
    assert difference(of_length[1], of_length[2]) == {"length scaling": ("longrope short", "longrope long")}


def test_the_attention_that_vllm_tunes_for_long_contexts_is_compared() -> None:
    text = SimpleNamespace(rope_parameters={"rope_type": "default"})
    scaling = [
        _length_scaling(SimpleNamespace(hf_text_config=text, architectures=[name], max_model_len=length))
        for name in ("Llama4ForCausalLM", "LlamaForCausalLM")
        for length in (32768, 32769)
    ]
    assert scaling == ["attention plain", "attention tuned", "None", "None"]


def test_settings_of_adapters_that_change_the_kv_are_compared(config: VllmConfig) -> None:
    def with_lora(**settings: Any) -> list[tuple[str, str]]:
        other = copy.copy(config)
        other.lora_config = LoRAConfig(lora_dtype=torch.float32, **settings)
        return fingerprint(other)

    alike = with_lora(target_modules=["q_proj", "k_proj"])
    assert difference(alike, with_lora(target_modules=["k_proj", "q_proj"], max_loras=2)) == {}
    for settings in ({}, {"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", "k_proj"], "max_lora_rank": 64}):
        assert difference(alike, with_lora(**settings)).keys() == {"lora"}


def test_settings_of_the_multimodal_processor_are_compared(config: VllmConfig) -> None:
    def with_processor(**settings: Any) -> list[tuple[str, str]]:
        other = copy.copy(config)
        other.model_config = copy.copy(config.model_config)
        other.model_config.multimodal_config = MultiModalConfig(mm_processor_kwargs=settings)
        return fingerprint(other)

    found = [with_processor(num_crops=number) for number in (4, 4, 16)]
    assert difference(found[0], found[1]) == {}
    assert difference(found[1], found[2]).keys() == {"multimodal processor"}


def test_the_dtype_of_the_kv_is_named_however_it_was_chosen(config: VllmConfig, tiny_model: str) -> None:
    by_model = dict(fingerprint(config))["kv cache dtype"]
    assert by_model == "float32"
    for name, dtype in {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}.items():
        quantized = engine_config(tiny_model, {"kv_cache_dtype": name})
        found = difference(fingerprint(config), fingerprint(quantized))
        assert list(found) == ["kv cache dtype", "vllm version"], "the first is named, and is the cause of the second"
        assert found["kv cache dtype"] == ("float32", dtype)


class OtherBackend(CPUAttentionBackend):
    """Another backend, as another platform or setting has it."""

    @staticmethod
    def get_name() -> str:
        return "OTHER_ATTN"


class Layer(AttentionLayerBase):
    """A layer as vLLM's model runner finds it."""

    def __init__(self, backend: type[CPUAttentionBackend] = CPUAttentionBackend, k_scale: float = 1.0) -> None:
        self._backend = backend
        self._k_scale, self._v_scale = torch.tensor(k_scale), torch.tensor(1.0)

    def get_attn_backend(self) -> type[CPUAttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


def properties(config: VllmConfig, *layers: Layer) -> dict[str, str]:
    other = copy.copy(config)
    other.compilation_config = copy.copy(config.compilation_config)
    other.compilation_config.static_forward_context = {str(number): layer for number, layer in enumerate(layers)}
    return dict(attention_properties(other))


def test_the_attention_backend_that_vllm_selected_is_named(config: VllmConfig) -> None:
    backend = properties(config, Layer(), Layer())["attention backend"]
    assert backend.startswith("CPU_ATTN ")
    mixed = properties(config, Layer(), Layer(OtherBackend))["attention backend"]
    assert mixed == f"{backend}; OTHER_ATTN {backend.removeprefix('CPU_ATTN ')}"


def test_the_scales_of_the_kv_are_compared(config: VllmConfig) -> None:
    plain, scaled, other = (properties(config, Layer(), Layer(k_scale=scale)) for scale in (1.0, 0.5, 0.25))
    assert plain["kv cache scales"] == "1.0"
    assert len({plain["kv cache scales"], scaled["kv cache scales"], other["kv cache scales"]}) == 3


COMPARED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")


@pytest.fixture
def of_version(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """The fingerprint of an engine as another vLLM would have it; fields replace those of its model's configuration."""

    def of(config: VllmConfig, version: str, **fields: Any) -> dict[str, str]:
        monkeypatch.setattr("vllm.__version__", version)
        other = copy.copy(config)
        other.model_config = copy.copy(config.model_config)
        other.model_config.__dict__ |= fields
        return dict(fingerprint(other))

    return of


def test_compared_versions_of_vllm_have_one_fingerprint(config: VllmConfig, of_version: Any) -> None:
    found = [of_version(config, version) for version in COMPARED]
    assert found[0]["vllm version"] == "0.30.0, 0.31.0, 0.32.0, 0.33.0"
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("version", ["0.29.0", "0.32.1", "0.34.0", "0.32.0+corporate", "0.32.0rc1", "0.33.1.dev5+g1"])
def test_another_version_of_vllm_is_equal_to_itself_alone(config: VllmConfig, of_version: Any, version: str) -> None:
    assert of_version(config, version)["vllm version"] == version


def uncompared() -> list[dict[str, Any]]:
    """Properties of models whose KV was not compared between versions."""
    window = SimpleNamespace(sliding_window=256, rope_parameters=None)
    return [
        {"_architecture": "Gemma3ForCausalLM"},
        {"_architecture": "TransformersForCausalLM"},
        {"trust_remote_code": True},
        {"quantization": "fp8"},
        {"multimodal_config": MultiModalConfig()},
        {"hf_text_config": window},
    ]


@pytest.mark.parametrize("fields", uncompared(), ids=lambda fields: next(iter(fields)))
def test_a_model_that_was_not_compared_needs_the_same_vllm(
    config: VllmConfig, of_version: Any, fields: dict[str, Any]
) -> None:
    found = [of_version(config, version, **fields) for version in COMPARED]
    assert [each["vllm version"] for each in found] == list(COMPARED)


def test_quantized_kv_and_adapters_need_the_same_vllm(config: VllmConfig, tiny_model: str, of_version: Any) -> None:
    quantized, adapted = engine_config(tiny_model, {"kv_cache_dtype": "fp8_e4m3"}), copy.copy(config)
    adapted.lora_config = LoRAConfig(lora_dtype=torch.float32)
    for other in (quantized, adapted):
        found = [of_version(other, version) for version in COMPARED]
        assert [each["vllm version"] for each in found] == list(COMPARED)


class FlashBackend(CPUAttentionBackend):
    """The backend of most GPUs, by name."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


@pytest.mark.parametrize(
    ("backends", "num_compared"),
    [
        ((CPUAttentionBackend,), 3),
        ((FlashBackend,), 4),
        ((FlashBackend, CPUAttentionBackend), 3),
        ((OtherBackend,), 0),
        ((FlashBackend, OtherBackend), 0),
    ],
)
def test_versions_whose_backends_write_a_block_alike_are_named(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    backends: tuple[type[CPUAttentionBackend], ...],
    num_compared: int,
) -> None:
    found = []
    for version in COMPARED:
        monkeypatch.setattr("vllm.__version__", version)
        found.append(properties(config, *map(Layer, backends))["attention version"])
    alike, alone = set(found[:num_compared]), set(found[num_compared:])
    assert (len(alike), len(alone)) == (min(1, num_compared), len(COMPARED) - num_compared)
    assert alike.isdisjoint(alone)
    assert all(version in names for version in COMPARED[:num_compared] for names in alike)


def test_ranks_that_differ_are_all_named() -> None:
    ranks = [[("attention backend", "A"), ("kv cache scales", "1.0")], [("attention backend", "B")]]
    assert merge_ranks(ranks) == [("attention backend", "A; B"), ("kv cache scales", "1.0")]
    assert merge_ranks([[("weights", "a; b")], [("weights", "a")]]) == [("weights", "a; b; a")]
    assert merge_ranks([]) == []


def test_ranks_with_some_of_the_layers_have_together_what_a_rank_with_all_of_them_has(config: VllmConfig) -> None:
    layers = [Layer(), Layer(OtherBackend)]
    stages = [list(properties(config, *of_stage).items()) for of_stage in (layers[1:], layers, layers[:1])]
    whole = list(properties(config, *layers).items())
    assert merge_layers(stages) == merge_layers([whole]) == whole
    sizes = [[("tensor parallel size", size)] for size in ("any", "2")]
    assert merge_layers(sizes) == sizes[1]
    assert merge_layers(sizes[:1] * 2) == sizes[0]


def test_what_the_workers_selected_is_in_the_fingerprint_that_peers_compare(
    config: VllmConfig, new_engine: Callable[..., Any]
) -> None:
    engine = new_engine()
    selected = [("attention backend", "FLASH_ATTN")]
    role = SchedulerRole(config, engine.role._config, engine.role._groups)
    role.set_workers({(0, 0): HandshakeMetadata("127.0.0.1:1", bytes(16), properties=selected)})
    other = _kvpipe.Control("127.0.0.1:0", b"", "other", [*engine.role._fingerprint, ("attention backend", "TRITON")])
    client = ControlClient("")
    try:
        assert client.describe(role.address).wait(5)["fingerprint"]["attention backend"] == "FLASH_ATTN"
        reason = client.check(role.address, other.address).wait(5)
        assert 'attention backend is "FLASH_ATTN" here and "TRITON" there' in reason
    finally:
        client.close()
        other.close()
        role.close()
