"""The LoRA adapter that computes a request: its name, and the content of its files."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from kvpipe.vllm.model_files import NOT_COMPARED, find_files

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

_CONFIG = "adapter_config.json"
# vLLM loads the first that exists.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Paths of adapters that one engine remembers.
_CACHE_CAP = 4096

_Stamp = tuple[tuple[str, int, int], ...]


class Adapters:
    """Identifies the adapters of requests.

    Once the files of a path have changed, an engine may have either in memory and in its prefix cache. So the adapter
    is not compared from then on.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[_Stamp, str]] = {}

    def note(self, request: Request) -> None:
        """Reads the files of the adapter that a new request uses if it is the first: vLLM loads them now."""
        adapter = request.lora_request
        if adapter is not None and adapter.lora_path not in self._first:
            self._content(adapter)

    def describe(self, request: Request) -> str:
        """Returns name and content hash of the adapter that a request uses; empty without one."""
        adapter = request.lora_request
        return "" if adapter is None else f"{adapter.lora_name} ({self._content(adapter)})"

    def content(self, request: Request) -> str:
        """Returns the content hash of the adapter that a request uses, whatever its name; empty without one."""
        adapter = request.lora_request
        return "" if adapter is None else self._content(adapter)

    def _content(self, adapter: LoRARequest) -> str:
        try:
            return self._compared(adapter.lora_path)
        except OSError as error:
            return f"{NOT_COMPARED}: {error.filename or adapter.lora_path}: {error.strerror or type(error).__name__}"

    def _compared(self, lora_path: str) -> str:
        files = find_files(os.path.expanduser(lora_path))  # noqa: PTH111 - as vLLM does, which knows no failure of it
        if files.folder is None:
            return files.name
        paths = [files.folder / _CONFIG]
        paths += [files.folder / name for name in _WEIGHTS if (files.folder / name).is_file()][:1]
        stamp = _stamp(paths)
        if lora_path not in self._first:
            if len(self._first) >= _CACHE_CAP:
                return f"{NOT_COMPARED}: this engine has used {_CACHE_CAP} adapters"
            self._first[lora_path] = stamp, _hash(paths)
        first, content = self._first[lora_path]
        return content if stamp == first else f"{NOT_COMPARED}: its files have changed since its first use here"


def _stamp(paths: list[Path]) -> _Stamp:
    found = [(path, path.stat()) for path in paths]
    return tuple((path.name, status.st_mtime_ns, status.st_size) for path, status in found)


def _hash(paths: list[Path]) -> str:
    """Hashes whole files: in a shared store an adapter has no other name, and its author may want another one's KV."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
