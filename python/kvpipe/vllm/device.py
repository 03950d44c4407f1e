"""The device of the KV caches: whether kvpipe can move its memory, and what its stream has still to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpipe import _cuda, info
from kvpipe.exceptions import ConfigError, TransportUnavailableError

if TYPE_CHECKING:
    from kvpipe import _kvpipe


class HostOrder:
    """Of caches in host memory, vLLM calls a hook when the bytes that it is about are written.

    Attributes:
        is_async: True if hooks are called before the device has done their work.
    """

    is_async = False

    def record(self) -> _kvpipe.CudaEvent | None:
        """Returns an event behind all that was launched so far; `None`: it is done."""
        return None

    def is_capturing(self) -> bool:
        """True if what is launched now is recorded into a graph, and runs later."""
        return False


class CudaOrder(HostOrder):
    """Of caches on a GPU, vLLM calls a hook when the kernels that it is about are launched, on torch's current stream.

    Args:
        device: Ordinal of the GPU.
    """

    is_async = True

    def __init__(self, device: int) -> None:
        self._device = device

    def record(self) -> _kvpipe.CudaEvent:
        """Returns an event behind all that was launched so far.

        Raises:
            TransportUnavailableError: The CUDA driver refuses.
        """
        return _cuda.record(self._device)

    def is_capturing(self) -> bool:
        """True if what is launched now is recorded into a CUDA graph, and runs later."""
        return bool(torch.cuda.is_current_stream_capturing())


def order_of(device: torch.device) -> HostOrder:
    """Returns the order of a device's work."""
    return CudaOrder(device.index) if device.type == "cuda" else HostOrder()


def check_device(device: str) -> None:
    """Refuses devices whose memory kvpipe cannot move.

    Args:
        device: vLLM's type of the device.

    Raises:
        ConfigError: It is neither a CPU nor an NVIDIA GPU.
    """
    if device != "cpu" and (device != "cuda" or torch.version.cuda is None):
        name = "an AMD GPU" if torch.version.hip else f"device {device}"
        message = f"KV cache on {name}: kvpipe moves caches in host memory and on NVIDIA GPUs"
        raise ConfigError(message)


def check_ucx(device: str) -> None:
    """Checks that UCX reaches the memory of a device, as handoffs need.

    Raises:
        TransportUnavailableError: UCX has no CUDA here.
    """
    if device == "cpu":
        return
    ucx = info()
    if not ucx["ucx_has_cuda"]:
        found = f"UCX {ucx['ucx']} at {ucx['ucx_path']}" if ucx["ucx"] else "an environment without UCX"
        message = (
            f"KV cache on a GPU, and {found} has no CUDA: pip install 'kvpipe[ucx-cu12]' or 'kvpipe[ucx-cu13]'; "
            "UCX_TLS, if it is set, must name cuda"
        )
        raise TransportUnavailableError(message)


def one_device(caches: dict[str, torch.Tensor]) -> torch.device:
    """Returns the device of all caches.

    Raises:
        ConfigError: They are on several.
    """
    devices = {cache.device for cache in caches.values()} or {torch.device("cpu")}
    if len(devices) > 1:
        message = f"KV caches on {', '.join(sorted(map(str, devices)))}: those of one worker must be on one device"
        raise ConfigError(message)
    return devices.pop()
