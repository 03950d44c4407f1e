"""The KV cache of a GPU in a store's chunks: right bytes or an error, and the next copy is right."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.fake_cuda

CALLS = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize", "cuEventSynchronize", "cuEventRecord"]
TIMEOUT_S = 60


def run(library, *calls):
    command = [sys.executable, "-m", "tests.fake_cuda.cache_layers", library, *calls]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return ended.stdout.splitlines()


def test_blocks_of_a_gpu_are_gathered_and_scattered_through_page_locked_memory(library):
    assert run(library) == ["right", "right", "", "right", "refused", "refused"]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_once_fails_one_copy_by_name(library, call):
    before, during, is_made, after, *_ = run(library, call)
    assert is_made == "True"
    assert during.startswith(f"error: {call.removesuffix('_v2')}: CUDA_ERROR_UNKNOWN")
    assert (before, after) == ("right", "right")
