"""Which LoRA adapter computes a request: its name, and what is in its files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvpipe.connector.model_files import find_files, sample_files

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

_CONFIG = "adapter_config.json"
# vLLM loads the first that exists.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Adapters come and go while an engine runs.
_CACHE_CAP = 1024

_Stamp = tuple[tuple[str, int, int], ...]


class Adapters:
    """Identifies the adapters of requests. The files of an adapter are read again when they have changed."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str, _Stamp], str] = {}

    def describe(self, request: Request) -> str:
        """Returns name and content hash of the adapter that a request uses; empty without one."""
        adapter = request.lora_request
        return "" if adapter is None else f"{adapter.lora_name} ({self._content(adapter)})"

    def _content(self, adapter: LoRARequest) -> str:
        files = find_files(adapter.lora_path)
        if files.folder is None:
            return files.name
        paths = [files.folder / _CONFIG]
        paths += [files.folder / name for name in _WEIGHTS if (files.folder / name).is_file()][:1]
        try:
            key = str(files.folder), _stamp(paths)
            if key not in self._hashes:
                if len(self._hashes) >= _CACHE_CAP:
                    self._hashes.clear()
                self._hashes[key] = _hash(paths)
        except OSError as error:
            return f"not compared: {error.filename}: {error.strerror}"
        return self._hashes[key]


def _stamp(paths: list[Path]) -> _Stamp:
    found = [(path, path.stat()) for path in paths]
    return tuple((path.name, status.st_mtime_ns, status.st_size) for path, status in found)


def _hash(paths: list[Path]) -> str:
    config, *weights = paths
    digest = hashlib.sha256(config.read_bytes())
    digest.update(sample_files(weights).encode())
    return digest.hexdigest()[:16]
