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


def run(place, count, seed):
    print(f"seed {seed}")
    command = [sys.executable, "-m", "tests.fake_cuda.injected_faults", place, str(count), str(seed)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return json.loads(ended.stdout)


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_injected_faults_in_blocks_of_a_gpu_are_all_found(library, count):
    outcomes = run(library, count, random.randrange(1 << 32))["outcomes"]
    assert {outcome.partition(": ")[0] for outcome in outcomes} == KINDS
    assert {outcome.partition(": ")[2] for outcome in outcomes} == RIGHT
    assert sum(outcomes.values()) == count


def test_digests_of_all_blocks_of_an_announcement_and_of_a_batch_are_one_launch_each(library):
    # Announced whole, then its slices; three loads; the load with the fault, and its second read.
    assert 2 + 3 + 1 <= run(library, 1, 1)["launches"] <= 2 + 3 + 2
