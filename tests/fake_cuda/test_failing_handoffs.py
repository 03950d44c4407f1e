"""Each call of the CUDA driver fails once in a handoff: no block of it counts, or all are right, and the next works."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.fake_cuda

CALLS = ["cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuEventDestroy_v2"]
CALLS += ["cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDeviceGetAttribute", "cuFlushGPUDirectRDMAWrites"]
# They copy and compute digests.
CALLS += ["cuLaunchKernel", "cuStreamAddCallback"]
# They move the bytes of a read where no kernel can be launched.
OF_READS = ["cuStreamSynchronize", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]
TIMEOUT_S = 60


def run(library, integrity, last, *calls):
    """Outcomes of the handoffs before, during and after the failure, and the proof that the calls were made."""
    command = [sys.executable, "-m", "tests.fake_cuda.handoff", library, integrity, last, *calls]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return ended.stdout.splitlines()


@pytest.fixture(params=["validate", "checksum"])
def integrity(request):
    return request.param


@pytest.mark.parametrize("last", ["source", "target"])
def test_a_handoff_between_gpus_that_are_late_on_both_sides_is_right(library, integrity, last):
    assert run(library, integrity, last)[:3] == ["right", "right", "right"]


def test_digests_that_were_computed_before_the_stream_has_written_the_blocks_are_seen_to_differ(library):
    for outcome in run(library, "checksum", "too-early")[:3]:
        assert "differs from its checksum" in outcome


@pytest.mark.parametrize("without_gpu", ["host-source", "host-target"])
def test_a_handoff_between_a_gpu_and_the_host_is_right(library, integrity, without_gpu):
    assert run(library, integrity, without_gpu)[:3] == ["right", "right", "right"]


@pytest.mark.parametrize(
    ("without_gpu", "call"),
    [
        *(("host-source", call) for call in ("cuMemHostAlloc", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize")),
        *(("host-target", call) for call in ("cuMemHostAlloc", "cuMemcpyDtoHAsync_v2", "cuEventSynchronize")),
    ],
)
def test_a_call_that_fails_once_between_a_gpu_and_the_host_gives_no_wrong_kv(library, integrity, without_gpu, call):
    before, during, after, _ = run(library, integrity, without_gpu, call)
    assert during == "right" or (during.startswith("error: ") and "Timeout" not in during)
    assert (before, after) == ("right", "right")


@pytest.mark.parametrize("last", ["source", "target"])
@pytest.mark.parametrize(
    ("integrity", "calls"),
    [
        *((integrity, [call]) for integrity in ("validate", "checksum") for call in CALLS),
        *(("validate", ["cuLaunchKernel", call]) for call in OF_READS),
    ],
)
def test_a_call_that_fails_once_costs_one_handoff_at_most_and_gives_no_wrong_kv(library, integrity, calls, last):
    before, during, after, is_made = run(library, integrity, last, *calls)
    assert set(is_made.split()) == {"True"}
    assert during == "right" or (during.startswith("error: ") and "Timeout" not in during)
    assert (before, after) == ("right", "right")
