"""Tensors on a GPU: their memory, and the pending work of their streams.

docs/gpu.md states what of it has run on a GPU.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpipe import _kvpipe
from kvpipe.exceptions import ConfigError, TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

# Dtypes that torch and numpy share, in numpy's notation; hosts of GPUs are little-endian.
_NUMPY = {
    "bool": "|b1",
    "int8": "|i1",
    "uint8": "|u1",
    **{f"{name}{8 * size}": f"<{kind}{size}" for name, kind in (("int", "i"), ("uint", "u")) for size in (2, 4, 8)},
    **{f"float{8 * size}": f"<f{size}" for size in (2, 4, 8)},
    "complex64": "<c8",
    "complex128": "<c16",
}
_TYPESTR = re.compile(r"[<>|][biufc]\d+")
_LEGACY_DEFAULT_STREAM = 1

_is_logged = False


class OnGpu(NamedTuple):
    """Bytes on a GPU.

    Attributes:
        memory: Their location; it keeps the tensor alive.
        ready: The work of the tensor's stream when it was described; `None` if there is nothing to wait for.
    """

    memory: _kvpipe.CudaMemory
    ready: _kvpipe.CudaEvent | None


def of_torch(torch: Any, tensor: Any) -> OnGpu:
    """Describes a contiguous torch tensor on a GPU, ready when the GPU's current stream is.

    Raises:
        TransportUnavailableError: The GPU is not an NVIDIA GPU, or there is no driver.
    """
    if torch.version.cuda is None:
        raise _unusable(tensor, str(tensor.device), "this torch is not built for CUDA")
    device = tensor.device.index
    return OnGpu(of_range(tensor, 0, tensor.nbytes), record_pending(device))


def of_range(tensor: Any, offset: int, num_bytes: int) -> _kvpipe.CudaMemory:
    """Describes bytes of a torch tensor on a GPU, from an offset to its first element. They keep the tensor alive."""
    memory = _kvpipe.CudaMemory(tensor.data_ptr() + offset, num_bytes, tensor.device.index, tensor)
    _warn_if_not_exportable(memory.address)
    return memory


def record(device: int) -> _kvpipe.CudaEvent:
    """Records the work of the current stream: torch's, or without torch the legacy default stream."""
    return _kvpipe.CudaEvent.record(device, _current_stream(device))


def record_pending(device: int) -> _kvpipe.CudaEvent | None:
    """Records the work of the current stream that is not done yet; `None` if there is none."""
    return _kvpipe.CudaEvent.record_pending(device, _current_stream(device))


def _current_stream(device: int) -> int:
    torch = sys.modules.get("torch")
    return _LEGACY_DEFAULT_STREAM if torch is None else torch.cuda.current_stream(device).cuda_stream


def of_array(tensor: Any, interface: Mapping[str, Any], *, must_be_in_place: bool) -> tuple[str, OnGpu | None]:
    """Returns numpy dtype and bytes of an object with `__cuda_array_interface__`; no bytes if it is empty.

    Raises:
        ConfigError: It is not contiguous, is masked, is a read-only destination, or its dtype is not a plain one.
        TransportUnavailableError: There is no driver, or the memory is not on one GPU.
    """
    (address, is_read_only), typestr, shape = interface["data"], interface["typestr"], interface["shape"]
    if not _TYPESTR.fullmatch(typestr) or interface.get("mask") is not None:
        message = f"{type(tensor).__name__} of typestr {typestr!r}: expected plain elements and no mask"
        raise ConfigError(message)
    itemsize = int(typestr[2:])
    if not _is_contiguous(shape, interface.get("strides"), itemsize):
        message = f"{type(tensor).__name__}: memory on a GPU must be contiguous; copy it first"
        raise ConfigError(message)
    if must_be_in_place and is_read_only:
        message = "the memory is read-only, but has to be written"
        raise ConfigError(message)
    num_bytes = math.prod(shape) * itemsize
    if num_bytes == 0:
        return repr(typestr), None
    try:
        device = _kvpipe.cuda_device_of(address)
    except TransportUnavailableError as error:
        raise _unusable(tensor, "cuda", str(error)) from error
    stream = interface.get("stream")
    ready = None if stream is None else _kvpipe.CudaEvent.record_pending(device, stream)
    _warn_if_not_exportable(address)
    return repr(typestr), OnGpu(_kvpipe.CudaMemory(address, num_bytes, device, tensor), ready)


def of_dlpack(tensor: Any, device: str) -> tuple[str, Any]:
    """Returns the numpy dtype of a DLPack object on a GPU, and a torch tensor over its memory.

    Torch makes its current stream wait for the object's stream, as the protocol requires.

    Raises:
        ConfigError: Numpy has no such dtype.
        TransportUnavailableError: Torch is not installed, or does not see the GPU.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise _unusable(tensor, device, "DLPack on GPUs needs torch, which is not installed") from error
    if not torch.cuda.is_available():
        raise _unusable(tensor, device, "torch sees no CUDA device")
    plain = torch.from_dlpack(tensor)
    name = str(plain.dtype).removeprefix("torch.")
    if name not in _NUMPY:
        message = f"{type(tensor).__name__}: numpy has no {name}; convert it with torch.from_dlpack"
        raise ConfigError(message)
    return repr(_NUMPY[name]), plain


def _is_contiguous(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> bool:
    if strides is None or 0 in shape:
        return True
    # The stride of a dimension with one element has no meaning.
    steps = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    if not steps:
        return True
    return steps[-1][1] == itemsize and all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(steps))


def _warn_if_not_exportable(address: int) -> None:
    """Warns once if transfers are slow because of the allocator."""
    global _is_logged  # noqa: PLW0603 - once in a process
    if _is_logged or _kvpipe.cuda_is_exportable(address):
        return
    _is_logged = True
    logger.warning(
        "cuda.not_shared memory of this allocator cannot be opened by every other process; unless UCX can, its bytes "
        "go through the host: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    )


def _unusable(tensor: Any, device: str, reason: str) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"a {type(tensor).__name__} on device {device} cannot be sent or received here: {reason}; "
        "copy it to the CPU first"
    )
