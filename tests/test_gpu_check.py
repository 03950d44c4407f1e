"""scripts/gpu-check: what it makes of a machine without a GPU, of tests and of figures."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/gpu-check"


@pytest.fixture(scope="module")
def check():
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    module = module_from_spec(spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    return module


HANDOFFS = {"validate": 200.0, "checksum": 190.0}


def row(subject, ratio, **case):
    return {"bytes": 64 << 10, "num_blocks": 1024, "layout": "scattered", "subject": subject, "ratio": ratio, **case}


def test_each_line_of_the_reach_has_the_ratio_of_its_case_or_none(check):
    pipe = row("kvpipe out= on the GPU", 0.95, bytes=64 << 20, num_blocks=1, layout="")
    handoffs = [row(f"kvpipe handoff, {name}", 0.4, value={"median": of}) for name, of in HANDOFFS.items()]
    rows = [pipe, row("kvpipe", 0.7), row("torch gather", 1.0), *handoffs]
    lines = {(line["subject"], line["bytes"], line["layout"]): line for line in check.reached(rows)}
    assert {case: (line["ratio"], line["is_met"]) for case, line in lines.items()} == {
        ("kvpipe out= on the GPU", 64 << 20, ""): (0.95, True),
        ("kvpipe", 64 << 10, "contiguous"): (None, False),
        ("kvpipe", 64 << 10, "scattered"): (0.7, False),
        ("kvpipe", 4 << 10, "contiguous"): (None, False),
        ("kvpipe", 4 << 10, "scattered"): (None, False),
        ("kvpipe handoff, checksum", 64 << 10, "contiguous"): (None, False),
        ("kvpipe handoff, checksum", 64 << 10, "scattered"): (0.95, True),
    }


def test_a_test_is_what_pytest_reports_of_it(check):
    report = ET.fromstring(
        "<suite><testcase classname='a' name='b' time='1'/><testcase classname='a' name='c'><failure message='m'/>"
        "</testcase><testcase classname='a' name='d'><skipped message='no GPU'/></testcase>"
        "<testcase classname='a' name='e'><error message='n'/></testcase></suite>"
    )
    found = [check.outcome_of(case) for case in report.iter("testcase")]
    assert [(test.name, test.outcome, test.reason) for test in found] == [
        ("a::b", "passed", ""),
        ("a::c", "failed", "m"),
        ("a::d", "skipped", "no GPU"),
        ("a::e", "failed", "n"),
    ]


@pytest.mark.parametrize(
    ("outcomes", "status"), [(["passed"], 0), (["passed", "failed"], 1), (["skipped"], 1), ([], 1)]
)
def test_the_exit_status_is_0_if_tests_have_run_and_none_has_failed(check, outcomes, status, capsys):
    tests = [check.Test("a", outcome, 0.0, "") for outcome in outcomes]
    report = {"reach": [], "seconds": 1, "machine": {"device": ""}, "bench": {}}
    assert check.conclude(report, tests, has_gpu=False) == status
    assert "on no device" in capsys.readouterr().out


def test_a_benchmark_that_has_failed_is_named_and_fails_the_check(check, capsys):
    report = {"reach": [], "seconds": 1, "machine": {"device": "H200"}, "bench": {"error": "exit status 2"}}
    assert check.conclude(report, [check.Test("a", "passed", 0.0, "")], has_gpu=True) == 1
    assert "failed: kvpipe bench gpu: exit status 2" in capsys.readouterr().out


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_runs_to_its_end_with_the_stand_in(tmp_path):
    report = tmp_path / "report.json"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, SCRIPT, "--json", report]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=True)
    assert "gpu-check: no device: torch sees no CUDA device" in ended.stdout
    found = json.loads(report.read_text())
    assert found["machine"]["reason"]
    assert {test["outcome"] for test in found["tests"]} == {"passed"}
