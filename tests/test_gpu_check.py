"""scripts/gpu-check: what it makes of a machine without a GPU, of tests and of figures."""

import contextlib
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.peers import ROOT

SCRIPT = ROOT / "scripts/gpu-check"


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
    report = {"reach": [], "seconds": 1, "machine": {"device": ""}, "bench": {}, "reads": {}}
    assert check.conclude(report, tests, has_gpu=False) == status
    assert "on no device" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["bench", "reads"])
def test_a_benchmark_that_has_failed_is_named_and_fails_the_check(check, part, capsys):
    report = {"reach": [], "seconds": 1, "machine": {"device": "H200"}, "bench": {}, "reads": {}}
    report[part] = {"error": "exit status 2"}
    assert check.conclude(report, [check.Test("a", "passed", 0.0, "")], has_gpu=True) == 1
    assert "failed: exit status 2" in capsys.readouterr().out


LAUNCHES = """\
========= Launch #1
=========   Kernel: kvpipe_copy_chunks
=========   Grid:   (1,1,1)
========= Launch #2
=========   Kernel: kvpipe_digest_blocks
========= Launch #3
=========   Kernel: kvpipe_copy_and_digest
"""
INVALID = "========= Invalid __global__ read of size 4 bytes\n"
NO_ERRORS = LAUNCHES + "========= ERROR SUMMARY: 0 errors\n"
NOT_BEGUN = "========= Error: Target application terminated before first instrumented API call\n"
UNTRACKED = "========= Internal Sanitizer Error: [...] didn't track the launch. Errors might go undetected.\n"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a program that stands in for compute-sanitizer: it reports this, runs nothing, and ends as told."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "")

    def stand_in(reported, end="exit 0", path="compute-sanitizer"):
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        log = "\n".join(f"echo '{line}'" for line in reported.replace("'", "").splitlines())
        program.write_text(f"""\
#!/bin/sh
echo 'a stand-in for compute-sanitizer: no test runs'
while [ "$1" != --log-file ]; do shift; done
{{ echo '========= COMPUTE-SANITIZER'; {log or ":"}
}} > "$2"
{end}
""")
        program.chmod(0o755)

    return stand_in


@pytest.fixture
def sanitize(check, tmp_path):
    """Runs all tools after a test that has passed."""

    def sanitize(bound_s=20.0, outcome="passed", **variables):
        return check.sanitize(os.environ | variables, [check.Test("a", outcome, 0.0, "")], tmp_path, bound_s)

    return sanitize


def conclusion(check, tests):
    report = {"reach": [], "seconds": 1, "machine": {"device": "H200"}, "bench": {}, "reads": {}}
    return check.conclude(report, [check.Test("a", "passed", 0.0, ""), *tests], has_gpu=True)


def test_tools_of_the_sanitizer_that_find_nothing_have_passed(check, stand_in, sanitize, capsys):
    stand_in(NO_ERRORS)
    tools = sanitize()
    names = ["compute-sanitizer memcheck", "compute-sanitizer synccheck", "compute-sanitizer racecheck"]
    assert [(tool.name, tool.outcome, tool.reason) for tool in tools] == [(name, "passed", "") for name in names]
    assert conclusion(check, tools) == 0
    assert "4 passed, 0 failed, 0 skipped" in capsys.readouterr().out


@pytest.mark.parametrize("more", ["", NOT_BEGUN, UNTRACKED])
def test_errors_that_the_sanitizer_finds_fail_the_check_with_its_last_lines(check, stand_in, sanitize, capsys, more):
    stand_in(more + LAUNCHES + INVALID, "exit 99")
    tools = sanitize()
    assert {tool.outcome for tool in tools} == {"failed"}
    assert INVALID.strip() in tools[0].reason
    assert "Launch #" not in tools[0].reason
    assert conclusion(check, tools) == 1
    assert "failed: compute-sanitizer memcheck: exit status 99" in capsys.readouterr().out


def test_a_test_that_fails_under_the_sanitizer_fails_the_check_with_its_last_lines(stand_in, sanitize):
    stand_in(LAUNCHES, "echo '1 failed in 3 s'; exit 1")
    assert sanitize()[0].outcome == "failed"
    assert sanitize()[0].reason.endswith("1 failed in 3 s")


def test_a_sanitizer_that_is_missing_is_named_with_the_remedy_and_is_skipped(
    check, stand_in, sanitize, tmp_path, capsys
):
    del stand_in
    tools = sanitize(PATH=str(tmp_path))
    assert [tool.outcome for tool in tools] == ["skipped"]
    assert conclusion(check, tools) == 0
    printed = capsys.readouterr().out
    assert "there is no compute-sanitizer: pip install nvidia-cuda-sanitizer-api\n" in printed
    assert "1 passed, 0 failed, 1 skipped" in printed


@pytest.mark.parametrize(
    ("reported", "end", "reason"),
    [
        (LAUNCHES.replace("kvpipe_copy_chunks", "other"), "exit 0", "not look at all launches of kvpipe_copy_chunks:"),
        (NOT_BEGUN, "exit 255", "not begun"),
        (NO_ERRORS + UNTRACKED, "exit 0", "launches of kvpipe_copy_chunks, kvpipe_digest_blocks, kvpipe_copy_"),
        (LAUNCHES, "rm $2; echo unrecognised option; exit 1", "unrecognised option"),
    ],
)
def test_a_sanitizer_that_did_not_look_at_all_launches_is_skipped_with_the_reason(
    stand_in, sanitize, reported, end, reason
):
    stand_in(reported, end)
    memcheck = sanitize()[0]
    assert memcheck.outcome == "skipped"
    assert reason in memcheck.reason


def is_running(argument):
    """True if a process has this argument for a second."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        found = False
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found = found or argument.encode() in line.read_bytes().split(b"\0")
        if not found:
            return False
    return True


@pytest.mark.parametrize(("reported", "outcome"), [(LAUNCHES, "skipped"), (LAUNCHES + INVALID, "failed")])
def test_a_sanitizer_that_takes_too_long_is_ended_and_has_not_passed(stand_in, sanitize, reported, outcome):
    duration = f"61.{os.getpid()}"
    stand_in(reported, f"sleep {duration} & sleep {duration}")
    tools = sanitize(bound_s=1.5)
    assert [tool.outcome for tool in tools] == [outcome, "skipped", "skipped"]
    assert [tool.reason.partition(":")[0] for tool in tools] == ["it took too long", *["no time was left for it"] * 2]
    assert not is_running(duration)


def test_the_sanitizer_of_the_wheel_is_taken_before_that_of_the_path(stand_in, sanitize, tmp_path):
    stand_in(NO_ERRORS)
    stand_in(LAUNCHES + INVALID, "exit 99", path="site/nvidia/cu13/bin/compute-sanitizer")
    assert sanitize(PYTHONPATH=str(tmp_path / "site"))[0].outcome == "failed"


def test_after_tests_that_have_failed_no_sanitizer_runs(stand_in, sanitize):
    stand_in(NO_ERRORS)
    assert [(tool.outcome, tool.reason) for tool in sanitize(outcome="failed")] == [
        ("skipped", "tests have failed without it")
    ]


def test_the_report_has_the_tools_of_the_sanitizer(check, stand_in, tmp_path, monkeypatch):
    stand_in(LAUNCHES + INVALID, "exit 99")
    monkeypatch.setattr(check, "describe", lambda _: {"device": "H200", "reason": ""})
    monkeypatch.setattr(check, "run_tests", lambda *_: [check.Test("a", "passed", 0.0, "")])
    monkeypatch.setattr(check, "run_bench", lambda *_: {"rows": []})
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--json", str(tmp_path / "report.json")])
    assert check.main() == 1
    tools = json.loads((tmp_path / "report.json").read_text())["sanitizer"]
    assert [(tool["name"].split()[1], tool["outcome"]) for tool in tools] == [(name, "failed") for name in check.TOOLS]


def test_the_tests_that_run_under_the_sanitizer_exist_and_its_kernels_are_ours(check):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    listed = subprocess.check_output([*command, *check.SANITIZED.values()], cwd=ROOT, text=True).splitlines()
    assert {line.partition("[")[0] for line in listed if "::" in line} == {
        test.partition("[")[0] for test in check.SANITIZED.values()
    }
    programs = "".join(path.read_text() for path in (ROOT / "rust/ucx/src/cuda").glob("*.ptx"))
    assert [kernel for kernel in check.SANITIZED if f".entry {kernel}(" not in programs] == []


def test_wheels_lose_what_no_check_uses_and_keep_permissions(check, tmp_path):
    wheel = tmp_path / "a.whl"
    kept, left_out = "nvidia/cu13/compute-sanitizer/compute-sanitizer", "nvidia/cu13/compute-sanitizer/x86/a.so"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (kept, left_out, "libucx/lib/libucp.a", "nvidia/cu13/compute-sanitizer/docs/index.html"):
            file = zipfile.ZipInfo(name)
            file.external_attr = 0o100755 << 16
            archive.writestr(file, name)
    check.slim(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert [(file.filename, file.external_attr >> 16) for file in archive.infolist()] == [(kept, 0o100755)]
        assert archive.read(kept).decode() == kept


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_runs_to_its_end_with_the_stand_in(tmp_path):
    report = tmp_path / "report.json"
    # The others of its tests run in `make test`, too.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": "-k test_failing_calls"}
    command = [sys.executable, SCRIPT, "--json", report]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=True)
    assert "gpu-check: no device: torch sees no CUDA device" in ended.stdout
    found = json.loads(report.read_text())
    assert found["machine"]["reason"]
    assert {test["outcome"] for test in found["tests"]} == {"passed"}
