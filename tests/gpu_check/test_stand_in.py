"""The whole of `gpu-check --vllm`, from an unpacked folder to its report, with a stand-in for each engine of vLLM.

One step cannot run with a stand-in and fails here: the probe. It is nothing but calls of NVIDIA's driver, of a UCX with
CUDA and of vLLM's kernels, and has to say of each that it is not there.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_vllm import packing, probe

STAND_IN = Path(__file__).parent / "stand_in"
OF_A_GPU = {"machine", "kvpipe", *probe.EXTENSIONS, "rms_norm", "silu_and_mul", "FlashAttention 3", "Triton"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The script as it ended, the folder that comes back, and the commit of the pack."""
    folder = tmp_path_factory.mktemp("there")
    site, pack, out = (folder / name for name in ("site", "pack", "out"))
    shutil.copytree(STAND_IN, site, ignore=shutil.ignore_patterns("__pycache__"))
    packing.benchmarks(site)
    pack.mkdir()
    packing.fill(pack, site, {"the stand-in": sorted(file for file in site.rglob("*") if file.is_file())})
    # The stand-in's torch for what reads the real one meanwhile; scripts find the unpacked one by themselves.
    env = os.environ | {"PYTHONPATH": str(site), "GPU_CHECK_START_S": "100"}
    command = [sys.executable, pack / "gpu-check", "--vllm", "--out", out, "--within", "375"]
    ran = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=395, check=False)
    return ran, out, json.loads((pack / packing.FACTS).read_text())["commit"]


@pytest.mark.slow
def test_the_whole_script_runs_to_its_end_with_a_stand_in_for_each_engine(ended):
    ran, out, commit = ended
    result = json.loads((out / "result.json").read_text())
    outcomes = {name: step["outcome"] for name, step in result["steps"].items()}
    assert outcomes.pop("probe") == "failed", ran.stdout
    assert outcomes.pop("shape-eager") == "left out: shape has measured"
    assert set(outcomes.values()) == {"passed"}, ran.stdout
    assert len(outcomes) == 12
    assert ran.returncode == 1  # because of the probe
    assert result["facts"]["commit"] == commit
    assert len(list(out.iterdir())) <= 8


@pytest.mark.slow
def test_the_probe_says_of_each_part_of_a_gpu_that_it_is_not_there(ended):
    wrong = json.loads((ended[1] / "result.json").read_text())["steps"]["probe"]["wrong"]
    assert {each.partition(":")[0] for each in wrong} == OF_A_GPU


@pytest.mark.slow
def test_the_report_has_answers_deaths_and_figures_of_the_stand_in(ended):
    steps = json.loads((ended[1] / "result.json").read_text())["steps"]
    for name in ("bfloat16-v1", "float32-v2", "default-graphs"):
        assert steps[name]["one at a time"]["equal"] == steps[name]["one at a time"]["asked"] == 15
        assert steps[name]["eight at once"]["transport"] == {"cuda_ipc": 8}
    assert steps["float32-v2"]["continuing seeded"]["computed_tokens"] == {"0": 7}
    assert steps["float32-v1"]["continuing seeded"]["computed_tokens"] == {"1": 7}
    assert steps["float32-v2"]["decode killed"]["no answer"] > 0
    assert steps["float32-v2"]["prefill killed"]["right"] == 8
    row = steps["shape"]["one at a time"]["2048 just-in-time"]
    assert row["handover_ms"]["num_samples"] == row["first_ms"]["num_samples"] == 8
    table = (ended[1] / "table.txt").read_text()
    assert ended[2] in table.splitlines()[0]
    assert "shape: hand-over of 2048 tokens" in table
    assert (ended[1] / "figures.png").read_bytes().startswith(b"\x89PNG")
