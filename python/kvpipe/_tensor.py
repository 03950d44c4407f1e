"""Tensors as bytes with a description, and back. Imports torch and numpy only for tensors of theirs."""

from __future__ import annotations

import ast
import importlib
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpipe import _cuda
from kvpipe.exceptions import ConfigError, ProtocolError, TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpipe import _kvpipe

NOTHING, TORCH, NUMPY = 0, 1, 2

# Formats of the buffer protocol with native size and order, with numpy's kind; numpy handles other formats.
_KINDS = {
    "?": "b",
    "c": "S",
    **dict.fromkeys("bhilqn", "i"),
    **dict.fromkeys("BHILQN", "u"),
    **dict.fromkeys("efd", "f"),
}

_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_DLPACK_DEVICES = {
    2: "cuda",
    3: "cuda_host",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    10: "rocm",
    13: "cuda_managed",
    14: "oneapi",
}

# As in rust/core/src/tensor.rs: the receiver refuses more.
_DTYPE_CAP = 4096
_DIMENSIONS_CAP = 64
# Bytes of a character in UTF-8.
_MOST_OF_A_CHARACTER = 4

Meta = tuple[int, str, "Sequence[int]"]


class Described(NamedTuple):
    """A tensor with its description, to be sent or received into.

    Attributes:
        meta: `(family, dtype, shape)`.
        data: An object with a contiguous buffer of the tensor's bytes, or a `_kvpipe.CudaMemory`; it keeps them alive.
        ready: Condition for reading or writing the bytes; `None`, as always on the host, if there is none.
    """

    meta: Meta
    data: Any
    ready: _kvpipe.CudaEvent | None = None


def describe(tensor: object, *, must_be_in_place: bool = False) -> Described:
    """Describes a tensor without copying it, unless it is not contiguous.

    Args:
        tensor: A torch tensor, a numpy array, `None`, or another object with DLPack, the buffer protocol or
            `__cuda_array_interface__`, which is described as a numpy array. On a GPU, the condition is the current work
            of the tensor's stream.
        must_be_in_place: The bytes will be written, so a tensor that needs a copy is an error.

    Raises:
        ConfigError: It is not a tensor, or has no plain bytes.
        TransportUnavailableError: Its device cannot be reached.
    """
    if tensor is None:
        return Described((NOTHING, "", ()), b"")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _bounded(_describe_torch(torch, tensor, must_be_in_place=must_be_in_place))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, (numpy.ndarray, numpy.generic)):
        return _bounded(_describe_numpy(numpy, tensor, must_be_in_place=must_be_in_place))
    if (interface := getattr(tensor, "__cuda_array_interface__", None)) is not None:
        return _bounded(_describe_cuda_array(tensor, interface, must_be_in_place=must_be_in_place))
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _bounded(_describe_dlpack(tensor, must_be_in_place=must_be_in_place))
    try:
        view = memoryview(tensor)  # type: ignore[arg-type]
    except TypeError as error:
        message = (
            f"{type(tensor).__name__} is no tensor: expected a torch tensor, a numpy array, None, "
            "or an object with DLPack, the buffer protocol or __cuda_array_interface__"
        )
        raise ConfigError(message) from error
    return _bounded(_describe_buffer(view, must_be_in_place=must_be_in_place))


def _bounded(described: Described) -> Described:
    _, dtype, shape = described.meta
    if len(shape) > _DIMENSIONS_CAP:
        message = f"a tensor of {len(shape)} dimensions cannot be sent (limit {_DIMENSIONS_CAP})"
        raise ConfigError(message)
    if len(dtype) * _MOST_OF_A_CHARACTER > _DTYPE_CAP and (size := len(dtype.encode())) > _DTYPE_CAP:
        message = f"a dtype with a description of {size} bytes cannot be sent (limit {_DTYPE_CAP})"
        raise ConfigError(message)
    return described


def _describe_torch(torch: Any, tensor: Any, *, must_be_in_place: bool) -> Described:
    if tensor.device.type not in {"cpu", "cuda"}:
        message = f"a tensor on device {tensor.device} cannot be sent or received; use tensor.cpu()"
        raise TransportUnavailableError(message)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        message = f"a {kind} tensor has no plain bytes; use tensor.to_dense() or tensor.dequantize()"
        raise ConfigError(message)
    plain = tensor.detach()
    if must_be_in_place and (not plain.is_contiguous() or plain.is_conj() or plain.is_neg()):
        message = "memory that is written in place must be contiguous, and no conjugate or negative view"
        raise ConfigError(message)
    plain = plain.resolve_conj().resolve_neg().contiguous()
    meta = (TORCH, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if plain.numel() == 0:
        return Described(meta, b"" if not must_be_in_place else bytearray())
    if tensor.device.type == "cuda":
        return Described(meta, *_cuda.of_torch(torch, plain))
    return Described(meta, as_numpy(plain.reshape(-1).view(torch.uint8)))


def _describe_numpy(numpy: Any, array: Any, *, must_be_in_place: bool) -> Described:
    is_plain = type(array) is numpy.ndarray
    if not is_plain and _is_masked(array):
        message = "a masked array cannot be sent, its mask would be lost; send its data and mask apart"
        raise ConfigError(message)
    is_contiguous = array.flags.c_contiguous
    if must_be_in_place and not (is_contiguous and (is_plain or not isinstance(array, numpy.generic))):
        message = "memory that is written in place must be a contiguous array"
        raise ConfigError(message)
    meta = (NUMPY, _numpy_dtype_name(array.dtype), array.shape)
    if array.nbytes == 0:
        return Described(meta, b"" if not must_be_in_place else bytearray())
    if not (is_plain and is_contiguous and array.ndim):
        array = numpy.ascontiguousarray(array).reshape(-1)
    return Described(meta, array.view(numpy.uint8))


def _is_masked(array: Any) -> bool:
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(array, masked.MaskedArray)


def _describe_cuda_array(tensor: Any, interface: Any, *, must_be_in_place: bool) -> Described:
    dtype, on_gpu = _cuda.of_array(tensor, interface, must_be_in_place=must_be_in_place)
    meta = (NUMPY, dtype, tuple(interface["shape"]))
    if on_gpu is None:
        return Described(meta, b"" if not must_be_in_place else bytearray())
    return Described(meta, *on_gpu)


def _describe_dlpack(tensor: Any, *, must_be_in_place: bool) -> Described:
    kind, index = tensor.__dlpack_device__()
    if kind != _DLPACK_CPU:
        device = f"{_DLPACK_DEVICES.get(int(kind), f'DLPack type {int(kind)}')}:{index}"
        if kind == _DLPACK_CUDA:
            dtype, plain = _cuda.of_dlpack(tensor, device)
            described = _describe_torch(sys.modules["torch"], plain, must_be_in_place=must_be_in_place)
            return described._replace(meta=(NUMPY, dtype, described.meta[2]))
        message = (
            f"a {type(tensor).__name__} on device {device} cannot be sent or received in this version; "
            "copy it to the CPU first"
        )
        raise TransportUnavailableError(message)
    numpy = _imported_numpy()
    try:
        array = numpy.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        message = (
            f"{type(tensor).__name__}: numpy does not know this DLPack tensor ({error}); "
            "convert it, for example with torch.from_dlpack"
        )
        raise ConfigError(message) from error
    return _describe_numpy(numpy, array, must_be_in_place=must_be_in_place)


def _describe_buffer(view: memoryview, *, must_be_in_place: bool) -> Described:
    if must_be_in_place and not view.c_contiguous:
        message = "memory that is written in place must be contiguous"
        raise ConfigError(message)
    kind = _KINDS.get(view.format.removeprefix("@"))
    if kind is None or not view.shape:
        numpy = _imported_numpy()
        try:
            return _describe_numpy(numpy, numpy.asarray(view), must_be_in_place=must_be_in_place)
        except ValueError as error:
            message = f"a buffer of format {view.format!r} has no element type that numpy knows: {error}"
            raise ConfigError(message) from error
    order = "|" if view.itemsize == 1 else {"little": "<", "big": ">"}[sys.byteorder]
    meta = (NUMPY, repr(f"{order}{kind}{view.itemsize}"), tuple(view.shape))
    if view.nbytes == 0:
        return Described(meta, b"" if not must_be_in_place else bytearray())
    return Described(meta, view.cast("B") if view.c_contiguous else view.tobytes())


def as_numpy(tensor: Any) -> Any:
    """Returns the memory of a torch tensor on the CPU as an array.

    Raises:
        ConfigError: Numpy is not installed, without which torch has no such call.
    """
    try:
        return tensor.numpy()
    except RuntimeError:
        _imported_numpy()
        raise


def _imported_numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        message = "such memory is described by numpy, which is not installed: pip install numpy"
        raise ConfigError(message) from error


@lru_cache(maxsize=256)
def _numpy_dtype_name(dtype: Any) -> str:
    """Names a dtype (plain, structured, or of ml_dtypes) so that `_numpy_dtype` can rebuild it."""
    if dtype.hasobject:
        message = f"dtype={dtype}: Python objects cannot be sent"
        raise ConfigError(message)
    if dtype.type.__module__ == "ml_dtypes":
        return f"ml_dtypes.{dtype.name}"
    if dtype.type.__module__.partition(".")[0] != "numpy":
        message = f"dtype={dtype}: a type that {dtype.type.__module__} adds to numpy cannot be sent; send a view"
        raise ConfigError(message)
    try:
        return repr(sys.modules["numpy"].lib.format.dtype_to_descr(dtype))
    except ValueError as error:
        message = f"dtype={dtype}: fields that overlap or are out of order cannot be sent"
        raise ConfigError(message) from error


def _numpy_dtype(name: str) -> Any:
    # Each array gets its own structured dtype, because its names can be changed in place.
    return _parse_dtype(name) if name.startswith("[") else _plain_dtype(name)


@lru_cache(maxsize=256)
def _plain_dtype(name: str) -> Any:
    return _parse_dtype(name)


def _parse_dtype(name: str) -> Any:
    numpy: Any = _imported_numpy()
    try:
        if name.startswith("ml_dtypes."):
            return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name.removeprefix("ml_dtypes.")))
        return numpy.lib.format.descr_to_dtype(ast.literal_eval(name))
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        message = f"the received numpy dtype {name!r} is not known here: {error}"
        raise ProtocolError(message) from error


def rebuild(meta: Meta, data: Any) -> Any:
    """Rebuilds the described tensor over `data`, without a copy.

    Raises:
        ProtocolError: The description does not fit the bytes.
    """
    family, name, shape = meta
    if family == NOTHING:
        return None
    if family == TORCH:
        return _rebuild_torch(name, shape, data)
    if family == NUMPY:
        return _rebuild_numpy(name, shape, data)
    message = f"a tensor of the unknown family {family} was received"
    raise ProtocolError(message)


def _rebuild_torch(name: str, shape: Sequence[int], data: Any) -> Any:
    import torch  # noqa: PLC0415 - the sender used torch, so the receiver means to

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        message = f"the received torch dtype {name!r} is not known to torch {torch.__version__}"
        raise ProtocolError(message)
    if len(data) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    try:
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(tuple(shape))
    except RuntimeError as error:
        message = f"{len(data)} bytes are no torch.{name} tensor of shape {tuple(shape)}: {error}"
        raise ProtocolError(message) from error


def _rebuild_numpy(name: str, shape: Sequence[int], data: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - the sender used numpy, so the receiver means to

    dtype = _numpy_dtype(name)
    if len(data) == 0:
        return np.empty(tuple(shape), dtype=dtype)
    try:
        return np.frombuffer(data, dtype=np.uint8).view(dtype).reshape(tuple(shape))
    except ValueError as error:
        message = f"{len(data)} bytes are no numpy {name} array of shape {tuple(shape)}: {error}"
        raise ProtocolError(message) from error
