"""Digests that come late, in any order of events: no wrong block counts, and each load ends."""

import json
import random
import subprocess
import sys

import pytest

pytestmark = pytest.mark.fake_cuda

TIMEOUT_S = 400


# Digests are computed by the kernel that copies, or by one of their own after it.
@pytest.mark.parametrize("kernels", [[], ["kvpipe_copy_and_digest"]], ids=["one", "two"])
@pytest.mark.parametrize("count", [30, pytest.param(250, marks=pytest.mark.slow)])
def test_in_any_order_of_late_digests_ends_and_cancels_no_wrong_block_counts_and_each_load_ends(
    library, count, kernels
):
    seed = str(random.randrange(1 << 32))
    print(f"seed {seed}")
    command = [sys.executable, "-m", "tests.fake_cuda.late_digests", library, str(count), seed, *kernels]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = json.loads(ended.stdout)
    assert found["ends"].keys() == {"load_completed", "load_failed"}
    assert min(found["ends"].values()) > count
    assert found["contexts"] == 0
