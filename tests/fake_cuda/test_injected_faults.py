"""Faults that only a comparison of content finds: each is found, and no wrong block counts."""

import json
import random
import subprocess
import sys

import pytest

pytestmark = pytest.mark.fake_cuda

TIMEOUT_S = 500
KINDS = {"flip", "swap", "stale", "shift", "lost copy", "flipped copy"}
RIGHT = {"corrupt", "found, read again", "right"}


def run(place, count, seed, *kernels):
    """Of kernels that do not load."""
    print(f"seed {seed}")
    command = [sys.executable, "-m", "tests.fake_cuda.injected_faults", place, str(count), str(seed), *kernels]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return json.loads(ended.stdout)


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_injected_faults_in_blocks_of_a_gpu_are_all_found(library, count):
    all_found(run(library, count, random.randrange(1 << 32))["outcomes"], count)


def all_found(outcomes, count):
    assert {outcome.partition(": ")[0] for outcome in outcomes} == KINDS
    assert {outcome.partition(": ")[2] for outcome in outcomes} == RIGHT
    assert sum(outcomes.values()) == count


def test_an_announcement_is_digested_by_one_launch_and_a_batch_copied_and_digested_by_one(library):
    # Announced whole, then its slices; three loads; the load with the fault, and its second read.
    assert 2 + 3 + 1 <= run(library, 1, 1)["launches"] <= 2 + 3 + 2


def test_where_the_kernel_that_does_both_does_not_load_one_copies_and_one_digests(library):
    found = run(library, 300, 1, "kvpipe_copy_and_digest")
    all_found(found["outcomes"], 300)
    assert found["launches"] > 1.5 * run(library, 300, 1)["launches"]
