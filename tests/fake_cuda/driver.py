"""The stand-in for the CUDA driver of this process, and memory on its GPUs."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("libcuda.c")
SONAME = "libcuda.so.1"
# Result of an injected failure: no code of CUDA's own.
FAILURE = 719


def build(folder: Path) -> Path:
    """Compiles the stand-in into a folder."""
    library = folder / SONAME
    compiler = shutil.which("cc")
    assert compiler is not None
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{SONAME}", "-o", library]
    subprocess.run([compiler, *options, SOURCE, "-lpthread"], check=True)
    return library


class FakeDriver:
    """The stand-in, loaded. kvpipe finds it by its name afterwards, so it must be loaded before any use of CUDA.

    Attributes:
        devices: Its GPUs.
    """

    devices = 0, 1

    def __init__(self, library: str | os.PathLike[str]) -> None:
        self._calls = ctypes.CDLL(os.fspath(library), mode=ctypes.RTLD_GLOBAL)
        self._calls.fake_cuda_alloc.restype = ctypes.c_void_p
        self._calls.fake_cuda_alloc.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self._calls.fake_cuda_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        self._calls.fake_cuda_hold.argtypes = [ctypes.c_void_p]
        self._calls.fake_cuda_hold.restype = ctypes.c_long
        self._calls.fake_cuda_release.argtypes = [ctypes.c_long]
        self._calls.fake_cuda_last_hold.restype = ctypes.c_long
        self._calls.fake_cuda_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        self._calls.fake_cuda_num_calls.argtypes = [ctypes.c_char_p]

    def memory(self, num_bytes: int, device: int = 0, stream: int = 1) -> "FakeMemory":
        address = self._calls.fake_cuda_alloc(num_bytes, device)
        assert address
        return FakeMemory(address, num_bytes, stream)

    def stream(self) -> int:
        """A stream of its own; 1 is the default one, whatever the GPU."""
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        codes = [self._calls.cuInit(0), self._calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)]
        codes.append(self._calls.cuCtxPushCurrent_v2(context))
        codes.append(self._calls.cuStreamCreate(ctypes.byref(stream), 1))
        codes.append(self._calls.cuCtxPopCurrent_v2(ctypes.byref(context)))
        assert not any(codes)
        assert stream.value
        return stream.value

    def write(self, to: "FakeMemory", content: bytes, at: int = 0) -> None:
        """Has the memory's stream write these bytes, after its work so far."""
        self._calls.fake_cuda_write(to.stream, to.address + at, content, len(content))

    def hold(self, stream: int = 1) -> int:
        """Has a stream wait for `release` with the number that this returns, or a later one."""
        return int(self._calls.fake_cuda_hold(stream))

    def release(self, number: int) -> None:
        self._calls.fake_cuda_release(number)

    def hold_kernels(self, *, is_held: bool) -> None:
        """Has kernels that kvpipe launches from now on begin only after `release` of their number, or at once again."""
        self._calls.fake_cuda_hold_kernels(is_held)

    def last_hold(self) -> int:
        """Number of what was held last."""
        return int(self._calls.fake_cuda_last_hold())

    def fail(self, call: str, times: int = 1) -> None:
        """Has the next calls of a function fail."""
        self._calls.fake_cuda_fail(call.encode(), FAILURE, times)

    def lose_copies(self, times: int) -> None:
        """Has the next copies do nothing, and succeed."""
        self._calls.fake_cuda_lose_copies(times)

    def flip_copies(self, times: int) -> None:
        """Has the next copies flip a bit, and succeed."""
        self._calls.fake_cuda_flip_copies(times)

    def num_calls(self, call: str) -> int:
        return int(self._calls.fake_cuda_num_calls(call.encode()))

    def num_current(self) -> int:
        """Contexts that this thread has left current."""
        return int(self._calls.fake_cuda_num_current())


class FakeMemory:
    """Bytes on a GPU of the stand-in, as `__cuda_array_interface__` describes them."""

    def __init__(self, address: int, num_bytes: int, stream: int) -> None:
        self.address, self.stream = address, stream
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": stream,
        }

    def put(self, content: bytes, at: int = 0) -> None:
        """Has other bytes at once, whatever its stream does."""
        ctypes.memmove(self.address + at, content, len(content))

    def content(self) -> bytes:
        return ctypes.string_at(self.address, self.__cuda_array_interface__["shape"][0])
