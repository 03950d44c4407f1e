"""Each call of the CUDA driver fails once: a clear error or the right bytes, and what comes next works."""

import subprocess
import sys

import pytest

from tests.fake_cuda.driver import FAILURE

pytestmark = pytest.mark.fake_cuda

# Without these there is no GPU for the rest of the process.
AT_START = ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuStreamCreate"]
# Their failure is logged, and harms nothing.
HARMLESS = ["cuCtxPopCurrent_v2", "cuEventDestroy_v2"]
# They move the bytes of a read where no kernel can be launched.
OF_READS = ["cuStreamSynchronize", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]
LATER = ["cuStreamIsCapturing", "cuStreamQuery", "cuPointerGetAttribute", "cuEventCreate", "cuEventRecord"]
LATER += ["cuEventSynchronize", "cuDeviceGetAttribute", "cuFlushGPUDirectRDMAWrites"]
OF_STREAMS = ["cuMemHostAlloc", "cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize"]
TIMEOUT_S = 60


def run(library, operation, *calls):
    """Outcomes of the operation while the calls failed, and afterwards; and the log of the program."""
    command = [sys.executable, "-m", "tests.fake_cuda.scenario", library, operation, *calls]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    first, second, num_current, num_calls = ended.stdout.splitlines()
    if "cuCtxPopCurrent_v2" not in calls:
        assert num_current == "0", "a context is current when kvpipe's calls have returned"
    assert all(int(number) > 0 for number in num_calls.split()), "the call that is to fail was made"
    return first, second, ended.stderr


@pytest.mark.parametrize("operation", ["send", "read"])
def test_without_a_failure_bytes_are_right_although_the_streams_are_late(library, operation):
    assert run(library, operation)[:2] == ("right", "right")


@pytest.mark.parametrize("operation", ["to_host", "from_host", "large", "large_to_host", "large_from_host"])
def test_bytes_are_right_between_gpus_and_the_host_however_many_chunks_they_are(library, operation):
    assert run(library, operation)[:2] == ("right", "right")


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        *((operation, call) for operation in ("send", "read") for call in LATER),
        *(("large_to_host", call) for call in [*OF_STREAMS, "cuMemcpyDtoHAsync_v2"]),
        # A receive waits for its memory by cuEventSynchronize too, and may be called again where that fails.
        *(("large_from_host", call) for call in [*OF_STREAMS, "cuMemcpyHtoDAsync_v2"] if "Event" not in call),
    ],
)
def test_a_call_that_fails_once_fails_one_operation(library, operation, call):
    first, second, logged = run(library, operation, call)
    assert first.startswith("error: ")
    assert "Timeout" not in first
    assert f"{call.removesuffix('_v2')}: CUDA_ERROR_UNKNOWN ({FAILURE})" in first + logged
    assert second == "right"


@pytest.mark.parametrize("operation", ["send", "read"])
@pytest.mark.parametrize("call", OF_READS)
def test_a_read_that_fails_once_begins_again_as_a_stream(library, operation, call):
    first, second, logged = run(library, operation, "cuLaunchKernel", call)
    assert (first, second) == ("right", "right")
    assert f"{call.removesuffix('_v2')}: CUDA_ERROR_UNKNOWN ({FAILURE})" in logged
    assert "session.stream " in logged


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuCtxEnablePeerAccess"])
@pytest.mark.parametrize("operation", ["send", "read"])
def test_a_read_for_which_no_kernel_can_be_launched_goes_piece_by_piece(library, operation, call):
    first, second, logged = run(library, operation, call)
    assert (first, second) == ("right", "right")
    assert "session.stream " not in logged


@pytest.mark.parametrize("call", AT_START)
def test_a_call_that_fails_at_the_start_leaves_the_process_without_a_gpu_and_says_why(library, call):
    first, second, _ = run(library, "send", call)
    for outcome in (first, second):
        assert outcome.startswith("error: TransportUnavailableError")
        assert f"{call}: CUDA_ERROR_UNKNOWN ({FAILURE})" in outcome


@pytest.mark.parametrize("call", HARMLESS)
def test_a_failing_call_after_the_work_is_logged_and_harms_nothing(library, call):
    first, second, logged = run(library, "send", call)
    assert (first, second) == ("right", "right")
    assert call.removesuffix("_v2") in logged
