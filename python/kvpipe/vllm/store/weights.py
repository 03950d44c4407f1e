"""Identity of the weights of a worker: vLLM can change them while it runs, and the KV of others is not theirs then."""

from __future__ import annotations

import gc
import hashlib
import secrets
from typing import TYPE_CHECKING

import torch

from kvpipe import _kvpipe
from kvpipe.vllm.model_files import NOT_COMPARED

if TYPE_CHECKING:
    from collections.abc import Collection

# The property of a rank that says which weights it has.
PROPERTY = "weights in memory"
AS_LOADED = "as loaded"
_NUM_PROBES = 2


class _UnreadableError(Exception):
    """Weights have a form from which they cannot be read."""


class Weights:
    """The weights of the models that some attention layers belong to.

    Args:
        layers: The attention layers of this worker.
        quantization: vLLM's name of the quantization; `None` without one.

    Attributes:
        unreadable_reason: Reason for which the weights cannot be read; empty if they can.
    """

    def __init__(self, layers: Collection[torch.nn.Module], quantization: str | None) -> None:
        self._models = _models_of(layers)
        self._quantization = quantization
        self._first = self._content()
        self.unreadable_reason = self._first if self._first.startswith(NOT_COMPARED) else ""

    def identify(self) -> str:
        """Returns `AS_LOADED` while the weights are those of the start, and another identifier after a change.

        It reads all weights. If they cannot be read, the answer begins with `NOT_COMPARED`, and differs each time,
        because the weights may have changed.
        """
        content = self._content()
        if content.startswith(NOT_COMPARED):
            return f"{content} [{secrets.token_hex(16)}]"
        return AS_LOADED if content == self._first else content

    def _content(self) -> str:
        if self._quantization is not None:
            return f"{NOT_COMPARED}: quantization={self._quantization} packs them"
        if not self._models:
            return f"{NOT_COMPARED}: the model was not found"
        try:
            return hashlib.sha256(b"".join(sorted(_digest(each) for each in self._models))).hexdigest()
        except _UnreadableError as error:
            return f"{NOT_COMPARED}: {error}"


def _models_of(layers: Collection[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns the models that have these layers. vLLM gives a connector no reference to them."""
    wanted = {id(layer) for layer in layers}
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    owners = [each for each in modules if any(id(part) in wanted for part in each.modules())]
    parts = {id(part) for owner in owners for part in owner.modules() if part is not owner}
    return [owner for owner in owners if id(owner) not in parts]


def _digest(model: torch.nn.Module) -> bytes:
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            fact = f"{path}.{name} {tuple(parameter.shape)} {parameter.dtype}"
            content = parameter.detach() if parameter.numel() else _effect(module, parameter.dtype, fact)
            memory = content.reshape(-1).contiguous().view(torch.uint8).cpu().numpy()
            [checksum] = _kvpipe.checksums(memory, [0], memory.nbytes)
            digest.update(fact.encode() + checksum.to_bytes(8, "little"))
    return digest.digest()


def _effect(module: torch.nn.Module, dtype: torch.dtype, fact: str) -> torch.Tensor:
    """Returns the output of a linear layer for fixed inputs.

    On CPUs vLLM packs its weight for oneDNN, and keeps the packed form alone (0.32, `dispatch_cpu_unquantized_gemm`).

    Raises:
        _UnreadableError: The layer has no such form, or refuses these inputs.
    """
    linear, size = getattr(module, "cpu_linear", None), getattr(module, "input_size_per_partition", 0)
    if linear is None or not size:
        message = f"{fact} is kept elsewhere"
        raise _UnreadableError(message)
    inputs = torch.randn(_NUM_PROBES, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        with torch.inference_mode():
            outputs: torch.Tensor = linear(inputs, module.weight, None)
    except RuntimeError as error:  # of torch's operators
        message = f"{fact} cannot be used alone: {error}"
        raise _UnreadableError(message) from error
    return outputs
