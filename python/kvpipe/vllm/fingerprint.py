"""The fingerprint of an engine: properties that must match before one engine reads another's KV.

A mismatch is an error that names the property and both values.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from kvpipe.vllm.model_files import NOT_COMPARED, ModelFiles, find_files, hash_weights
from kvpipe.vllm.rank_properties import joined
from kvpipe.vllm.versions import attention_version, version_of_kv

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
# Above it vLLM tunes Llama 4's attention (`models/llama4.py`).
_LLAMA4_TUNED_FROM = 32768
# Two names of one type: `vllm/config/cache.py` says "fp8 (=fp8_e4m3)".
_DTYPE_ALIASES = {"fp8": "fp8_e4m3"}
# Keys that transformers adds to a configuration when it reads it: the source, and the version of transformers.
_KEYS_OF_ITS_SOURCE = ("_name_or_path", "_commit_hash", "auto_map", "transformers_version")


def fingerprint(config: VllmConfig) -> list[tuple[str, str]]:
    """Returns the properties of an engine that its configuration determines, in the order of their comparison."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    caches = (config.load_config.download_dir, None) if config.load_config.download_dir else (None,)
    files = find_files(model.model, model.revision, caches)
    tokenizer = find_files(str(model.tokenizer), model.tokenizer_revision, caches)
    kv_cache_dtype = _kv_cache_dtype(config)
    fields: list[tuple[str, Any]] = [
        ("model", files.name),
        ("model config", _hash_json(model.hf_config.to_dict())),
        ("model code", _code(model, files)),
        ("weights", _weights(config, files)),
        ("tokenizer", tokenizer.hash(_TOKENIZER_FILES)),
        ("generation config", _generation_config(model, files)),
        ("dtype", model.dtype),
        ("quantization", _quantization(model)),
        ("kv cache dtype", kv_cache_dtype),
        ("block size", cache.block_size),
        ("kv cache layout", cache.kv_cache_layout),
        ("decode context parallel size", parallel.decode_context_parallel_size),
        ("lora", _lora(config)),
        ("multimodal processor", _multimodal_processor(model)),
        ("length scaling", _length_scaling(model)),
        # Behind what it depends on: a difference is named by its cause.
        ("vllm version", version_of_kv(config, kv_cache_dtype)),
    ]
    return [(name, str(value)) for name, value in fields]


def attention_properties(config: VllmConfig) -> list[tuple[str, str]]:
    """Returns properties that only a worker with its model knows: the attention backends, and the scales of the KV."""
    from vllm.config import get_layers_from_vllm_config  # noqa: PLC0415 - once
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: PLC0415

    layers: dict[str, Any] = get_layers_from_vllm_config(config, AttentionLayerBase)
    if not layers:
        return []
    backends = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
    scales = {name: _scales(layer) for name, layer in sorted(layers.items())}
    is_scaled = any(scale != 1.0 for values in scales.values() for scale in values)
    return [
        ("attention backend", joined(f"{name} {instruction_set(config)}".rstrip() for name in backends)),
        ("attention version", joined(map(attention_version, backends))),
        ("kv cache scales", _hash_json(scales) if is_scaled else "1.0"),
    ]


def _scales(layer: Any) -> list[float]:
    """The scales by which a layer's keys and values were divided. A layer without attention has none."""
    tensors = [getattr(layer, name, None) for name in ("_k_scale", "_v_scale")]
    return [scale for tensor in tensors if tensor is not None for scale in tensor.flatten().tolist()]


def instruction_set(config: VllmConfig) -> str:
    """Returns the instruction set that determines, on CPUs, the layout inside a block; empty elsewhere."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - CPU builds only

    model, cache = config.model_config, config.cache_config
    return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def _weights(config: VllmConfig, files: ModelFiles) -> str:
    if config.model_config.model_weights:
        return f"{NOT_COMPARED}: {config.model_config.model_weights}"
    return hash_weights(files, str(config.load_config.load_format))


def _code(model: ModelConfig, files: ModelFiles) -> str:
    """Identifies the code of a model that brings its own."""
    if not model.trust_remote_code:
        return "vLLM's"
    classes = (getattr(model.hf_config, "auto_map", None) or {}).values()
    names = [name for entry in classes for name in (entry if isinstance(entry, list | tuple) else [entry]) if name]
    repositories = {name.partition("--")[0] if "--" in name else model.model for name in names}
    found = set()
    for repository in repositories:
        own = repository == model.model
        code = files if own and not model.code_revision else find_files(repository, model.code_revision)
        modules = sorted(path.name for path in code.folder.glob("*.py")) if code.folder else []
        found.add(code.hash(modules))
    return ", ".join(sorted(found)) or "vLLM's"


def _lora(config: VllmConfig) -> str:
    """Identifies what is applied of an adapter."""
    lora = config.lora_config
    if lora is None:
        return "None"
    modules = "all modules" if lora.target_modules is None else f"modules {', '.join(sorted(lora.target_modules))}"
    return f"ranks up to {lora.max_lora_rank} in {lora.lora_dtype}, {modules}"


def _multimodal_processor(model: ModelConfig) -> str:
    """Identifies the engine's own settings of the processor: identifiers of images do not depend on them."""
    settings = model.multimodal_config
    return _hash_json(settings.mm_processor_kwargs) if settings and settings.mm_processor_kwargs else "None"


def _length_scaling(model: ModelConfig) -> str:
    """Returns which of its scalings vLLM 0.32 has chosen for a model by `max_model_len`; `None` if it has no choice."""
    found = {
        f"longrope {'long' if model.max_model_len > original else 'short'}"
        for original in _longrope_lengths(getattr(model.hf_text_config, "rope_parameters", None))
    }
    if any(name.startswith("Llama4For") for name in model.architectures):
        found.add(f"attention {'tuned' if model.max_model_len > _LLAMA4_TUNED_FROM else 'plain'}")
    return ", ".join(sorted(found)) or "None"


def _longrope_lengths(parameters: Any) -> set[int]:
    """Returns up to which lengths rotary parameters use short factors; they may differ by type of layer."""
    if not isinstance(parameters, dict):
        return set()
    if parameters.get("rope_type") == "longrope":
        return {int(parameters["original_max_position_embeddings"])}
    return {length for nested in parameters.values() for length in _longrope_lengths(nested)}


def _generation_config(model: ModelConfig, files: ModelFiles) -> str:
    """Identifies the defaults of sampling: producer and consumer sample tokens of one answer."""
    names = ("generation_config.json",)
    source = model.generation_config
    value = source if source == "vllm" else (files if source == "auto" else find_files(source)).hash(names)
    overrides = model.override_generation_config
    return f"{value} with {_hash_json(overrides)}" if overrides else value


def _quantization(model: ModelConfig) -> str:
    settings = model.quantization_config
    return f"{model.quantization} {_hash_json(settings)}" if settings is not None else str(model.quantization)


def _kv_cache_dtype(config: VllmConfig) -> str:
    cache = config.cache_config
    dtype = str(config.model_config.dtype).removeprefix("torch.") if cache.cache_dtype == "auto" else cache.cache_dtype
    dtype = _DTYPE_ALIASES.get(dtype, dtype)
    skipped = cache.kv_cache_dtype_skip_layers
    return f"{dtype} except in {', '.join(map(str, skipped))}" if skipped else dtype


def _hash_json(value: object) -> str:
    plain = json.loads(json.dumps(value, sort_keys=True, default=str))
    return hashlib.sha256(json.dumps(_without_source(plain), sort_keys=True).encode()).hexdigest()[:16]


def _without_source(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_source(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_source(item) for name, item in value.items() if name not in _KEYS_OF_ITS_SOURCE}
