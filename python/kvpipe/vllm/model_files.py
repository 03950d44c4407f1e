"""The files of a model or an adapter on this disk: where they are, which revision they are, and what is in them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Prefix of a value, or text in its brackets, that gives the reason for which something is not compared.
NOT_COMPARED = "not compared"
# Bytes sampled from the middle of each weight tensor: they distinguish checkpoints, and 100,000 tensors stay cheap.
_SAMPLE_BYTES = 16
# Samples of a file whose tensors cannot be told apart.
_NUM_SAMPLES = 1024
# Errors of files that are not of the form that their names say.
_DAMAGED = (
    *(AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError),
    *(struct.error, zipfile.BadZipFile),
)
# vLLM's own name for the files of each way to load them, in the order in which it looks for them.
_PATTERNS = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
    "sharded_state": ("*.safetensors",),
}


@dataclass(frozen=True)
class ModelFiles:
    """Files of a model.

    Attributes:
        folder: Folder of the files; `None` if they are not on this disk.
        name: `owner/name@commit` of a snapshot of the hub, else `local files`, or the reason for which they cannot be
            compared.
        is_snapshot: True if the name determines the content of each file.
    """

    folder: Path | None
    name: str
    is_snapshot: bool = False

    def hash(self, names: Iterable[str]) -> str:
        """Identifies the content of some files: by the commit where it is known, else by a hash of those that exist.

        A snapshot has only the files that were requested so far, so that a hash would tell equal snapshots apart.
        """
        if self.folder is None or self.is_snapshot:
            return self.name
        found = [self.folder / name for name in names if (self.folder / name).is_file()]
        digest = hashlib.sha256()
        for path in found:
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16] if found else "no such files"


def find_files(model: str, revision: str | None = None, cache_dirs: Sequence[str | None] = (None,)) -> ModelFiles:
    """Finds the files of a model without the network.

    Args:
        model: A folder, or the id of a model on the hub.
        revision: Branch, tag or commit of that id; `None`: `main`.
        cache_dirs: Caches of the hub to look into; `None`: the default one.
    """
    path = Path(model)
    if path.is_dir():
        return _local(path)
    from vllm import envs  # noqa: PLC0415 - where vLLM is

    wanted = f"{model}@{revision or 'main'}"
    if envs.VLLM_USE_MODELSCOPE:
        return ModelFiles(None, f"{NOT_COMPARED}: {wanted} is from ModelScope")
    for cache_dir in cache_dirs:
        folder = _snapshot(model, revision, cache_dir)
        if folder is not None:
            return _local(folder)
    return ModelFiles(None, f"{NOT_COMPARED}: {wanted} is not on this disk")


def _local(folder: Path) -> ModelFiles:
    resolved = folder.resolve()
    repository = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and repository.startswith("models--"):
        name = repository.removeprefix("models--").replace("--", "/")
        return ModelFiles(resolved, f"{name}@{resolved.name}", is_snapshot=True)
    return ModelFiles(resolved, "local files")


def _snapshot(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - where vLLM is
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        # Without files to look for, a snapshot that has some of them will do.
        folder = snapshot_download(
            model, revision=revision, cache_dir=cache_dir, local_files_only=True, ignore_patterns="*"
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(folder)


def hash_weights(files: ModelFiles, load_format: str) -> str:
    """Identifies the weights that vLLM loads: by their names and shapes, and some bytes of every tensor."""
    if files.folder is None:
        return files.name
    if load_format != "auto" and load_format not in _PATTERNS:
        return f"{NOT_COMPARED}: loaded by load_format={load_format}"
    found = _weight_files(files.folder, load_format)
    return sample_files(found) if found else f"{NOT_COMPARED}: no weights for load_format={load_format}"


def _weight_files(folder: Path, load_format: str) -> list[Path]:
    """The files that vLLM loads. Source: `model_executor/model_loader/default_loader.py` of vLLM 0.32."""
    from vllm.model_executor.model_loader import weight_utils  # noqa: PLC0415 - where vLLM is

    if load_format == "auto":
        load_format = "mistral" if any(folder.glob("consolidated*.safetensors")) else "hf"
    for pattern in _PATTERNS[load_format]:
        found = sorted(str(path) for path in folder.glob(pattern))
        if not found:
            continue
        if pattern.endswith(".safetensors"):
            index = "consolidated" if load_format == "mistral" else "model"
            found = weight_utils.filter_duplicate_safetensors_files(
                found, str(folder), f"{index}.safetensors.index.json"
            )
        else:
            found = weight_utils.filter_files_not_needed_for_inference(found)
        return [Path(path) for path in found]
    return []


def sample_files(paths: Iterable[Path]) -> str:
    """Hashes some bytes of every tensor in files of weights."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            try:
                if path.suffix == ".safetensors":
                    _sample_safetensors(file, digest)
                elif zipfile.is_zipfile(file):
                    _sample_zip(file, digest)
                else:
                    _sample_evenly(file, digest)
            except _DAMAGED:
                digest.update(b"damaged")  # vLLM says so when it loads them
    return digest.hexdigest()[:16]


def _sample_safetensors(file: BinaryIO, digest: Any) -> None:
    size = os.fstat(file.fileno()).st_size
    (length,) = struct.unpack("<Q", file.read(8))
    header = file.read(min(length, size))
    digest.update(header)
    tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
    for start, end in tensors:
        _sample(file, 8 + length + start, end - start, digest)


def _sample_zip(file: BinaryIO, digest: Any) -> None:
    """Of a file by `torch.save`, which is a zip archive with one record for each tensor and the checksum of each."""
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            digest.update(f"{record.filename} {record.file_size} {record.CRC}".encode())
            _sample(file, record.header_offset, record.compress_size, digest)


def _sample_evenly(file: BinaryIO, digest: Any) -> None:
    size = os.fstat(file.fileno()).st_size
    digest.update(str(size).encode())
    part = max(_SAMPLE_BYTES, size // _NUM_SAMPLES)
    for start in range(0, size, part):
        _sample(file, start, part, digest)


def _sample(file: BinaryIO, start: int, length: int, digest: Any) -> None:
    """Adds some bytes from the middle of a part of a file."""
    file.seek(start + max(0, length - _SAMPLE_BYTES) // 2)
    digest.update(file.read(min(_SAMPLE_BYTES, length)))
