"""The fingerprint of an engine: properties that must match before one engine reads another's KV.

A mismatch is an error that names the property and both values.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Bytes sampled from the middle of each weight tensor: they distinguish checkpoints, and 100,000 tensors stay cheap.
_SAMPLE_BYTES = 16
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
)


def fingerprint(config: VllmConfig) -> list[tuple[str, str]]:
    """Returns an engine's properties, in the order of their comparison."""
    from vllm import __version__  # noqa: PLC0415 - the version alone

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    folder = Path(model.model)
    fields: list[tuple[str, Any]] = [
        ("vllm version", __version__),
        ("model config", _hash_json(model.hf_config.to_dict())),
        ("weights", _hash_weights(folder)),
        ("tokenizer", _hash_files(folder, _TOKENIZER_FILES)),
        ("generation config", _hash_files(folder, ("generation_config.json",))),
        ("dtype", model.dtype),
        ("quantization", model.quantization),
        ("kv cache dtype", cache.cache_dtype),
        ("block size", cache.block_size),
        ("attention", _attention(config)),
        ("tensor parallel size", parallel.tensor_parallel_size),
        ("pipeline parallel size", parallel.pipeline_parallel_size),
        ("max lora rank", config.lora_config.max_lora_rank if config.lora_config else None),
    ]
    return [(name, str(value)) for name, value in fields]


def _attention(config: VllmConfig) -> str:
    """Names what determines the layout inside a block: on CPUs also the instruction set."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        return str(current_platform.device_type)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - CPU builds only

    model, cache = config.model_config, config.cache_config
    return f"cpu {_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)}"


def _hash_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    # The path of the files does not matter.
    plain = json.loads(text)
    if isinstance(plain, dict):
        plain.pop("_name_or_path", None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _hash_files(folder: Path, names: tuple[str, ...]) -> str:
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        return "not local"
    digest = hashlib.sha256()
    for path in found:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _hash_weights(folder: Path) -> str:
    """Hashes the header and a few bytes of every tensor of local safetensors files."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return "not local"
    digest = hashlib.sha256()
    for path in files:
        _sample(path, digest)
    return digest.hexdigest()[:16]


def _sample(path: Path, digest: Any) -> None:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            digest.update(b"damaged")
            return
        header = file.read(length)
        digest.update(header)
        for entry in json.loads(header).values():
            start, end = entry.get("data_offsets", (0, 0))
            at = 8 + length + (start + end - _SAMPLE_BYTES) // 2 if end - start > _SAMPLE_BYTES else 8 + length + start
            file.seek(at, os.SEEK_SET)
            digest.update(file.read(min(_SAMPLE_BYTES, end - start)))
