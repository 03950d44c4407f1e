"""Blocks that change behind their owner's back on a card, after they were announced: each fault is found."""

import json
import random
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

TIMEOUT_S = 120
KINDS = {"flip", "swap", "stale", "shift"}


# gpu-check also runs the short one under NVIDIA's compute-sanitizer.
@pytest.mark.parametrize("count", [100, 10_000])
def test_injected_faults_in_blocks_of_this_gpu_are_all_found(count: int) -> None:
    seed = str(random.randrange(1 << 32))
    print(f"seed {seed}")
    command = [sys.executable, "-m", "tests.fake_cuda.injected_faults", "cuda:0", str(count), seed]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    outcomes = json.loads(ended.stdout)["outcomes"]
    assert {outcome.partition(": ")[0] for outcome in outcomes} == KINDS
    assert {outcome.partition(": ")[2] for outcome in outcomes} == {"corrupt", "right"}
    assert sum(outcomes.values()) == count
