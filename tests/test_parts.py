"""Tests of `tests/__main__.py`, which runs the parts of `make test`."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tests.__main__ as parts
from tests.__main__ import VLLM_VERSIONS, Part, parts_of, parts_of_versions, run
from tests.peers import ROOT


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LOGS", tmp_path)
    monkeypatch.setattr(parts, "LOG_S", 0.2)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def bash(name, script):
    return Part(name, ("bash", "-c", script))


def test_two_parts_run_side_by_side_and_the_next_one_begins_when_one_has_ended(logs, capsys):
    waits = bash("waits", f"until [ -e {logs}/second ]; do sleep 0.05; done; echo '== 3 passed in 1.00s =='")
    first = bash("first", f"test ! -e {logs}/second; echo 'test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured'")
    second = bash("second", f"touch {logs}/second; echo 'the last line'")
    assert run([waits, first, second]) == 0
    told = capsys.readouterr().out
    assert re.search(r"first: 5 passed, 0 failed, 1 ignored \(\d+ s, \d+ s of CPU time\)", told)
    assert "second: the last line (" in told
    assert "waits: 3 passed in 1.00s (" in told
    assert re.search(r"test: all passed, \d+ s in all\n$", told)


def test_a_part_that_is_alone_has_no_other_beside_it(logs):
    before, alone, after = (bash(name, f"cd {logs}; echo begins >> all; sleep 0.5; echo ends >> all") for name in "abc")
    alone.is_alone = True
    assert run([before, alone, after]) == 0
    assert (logs / "all").read_text().split() == ["begins", "ends"] * 3


def test_a_part_that_fails_is_told_with_what_failed_and_the_others_go_on(capsys):
    fails = bash("fails", "echo before; echo '=== FAILURES ==='; echo 'it is wrong'; exit 1")
    after = bash("after", "echo done")
    assert run([fails, after], num_lanes=1) == 1
    told = capsys.readouterr().out
    assert re.search(r"test: fails FAILED after \d+ s", told)
    assert "=== FAILURES ===\nit is wrong\n" in told
    assert "before" not in told
    assert "test: after: done (" in told
    assert re.search(r"test: failed: fails, \d+ s in all\n$", told)


def test_the_last_lines_count_what_was_left_out_by_its_reason(capsys):
    first = bash("first", "echo 'SKIPPED [2] a.py:1: no GPU'; echo 'SKIPPED [1] b.py: no AMX: an older CPU'; echo done")
    second = bash("second", "echo 'SKIPPED [3] tests/c.py:12: no GPU'; echo done")
    assert run([first, second]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-3:-1] == ["test: 5 skipped: no GPU", "test: 1 skipped: no AMX: an older CPU"]


def files_of(part):
    """The files of tests that a part runs."""
    arguments = [argument for argument in part.command if argument.startswith("tests/")]
    left_out = [argument.removeprefix("--ignore=") for argument in part.command if argument.startswith("--ignore=")]
    roots = arguments or ["tests/e2e" if "e2e" in part.command else "tests"]
    files = {file for root in roots for file in (sorted((ROOT / root).rglob("test_*.py")) or [ROOT / root])}
    assert all((ROOT / path).exists() for path in (*roots, *left_out))
    return [file for file in files if not any(file.is_relative_to(ROOT / path) for path in left_out)]


@pytest.mark.parametrize("is_slow", [False, True])
def test_each_file_of_tests_is_in_one_part(is_slow):
    pytests = [part for part in parts_of(is_slow=is_slow) if "rust" not in part.command]
    assert all(("slow" if is_slow else "not slow") in part.command for part in pytests)
    files = [file for part in pytests for file in files_of(part)]
    assert sorted(files) == sorted((ROOT / "tests").rglob("test_*.py"))


def test_the_tests_of_rust_are_those_that_are_ignored_where_they_are_slow():
    for is_slow in (False, True):
        [rust] = [part for part in parts_of(is_slow=is_slow) if "rust" in part.command]
        assert ("--ignored" in rust.command) == is_slow


@pytest.mark.parametrize(
    ("output", "progress"),
    [
        ("", "starting"),
        ("   Compiling kvpipe-core v0.1.0", "compiling"),
        ("test a::b ... ok\ntest a::c ... FAILED", "2 tests"),
        ("collected 2619 items / 2595 deselected / 24 selected", "0/24"),
        ("tests/a.py::test_a PASSED [  1/24]\ntests/a.py::test_b PASSED [  2/24]\ntests/a.py::test_c", "2/24"),
    ],
)
def test_it_says_how_far_a_part_is(logs, output, progress):
    (logs / "part.log").write_text(output)
    assert Part("part", ()).progress() == progress


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_parts_and_what_they_started(logs, number):
    code = (
        "import pathlib, sys, tests.__main__ as parts\n"
        f"parts.LOGS = pathlib.Path('{logs}')\n"
        "parts.run([parts.Part('sleeps', ('bash', '-c', 'sleep 1000 & echo $!; wait'))])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    log = logs / "sleeps.log"
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    until(lambda: not is_running(int(log.read_text())))


def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_running(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_each_version_of_vllm_runs_all_tests_of_the_connectors_or_quick_ones_that_exist():
    every, quick = parts_of_versions(is_quick=False), parts_of_versions(is_quick=True)
    assert [part.command[2] for part in quick] == [part.command[2] for part in every[:-1]] == list(VLLM_VERSIONS)
    assert all(part.command[-1] == "tests/vllm" for part in every[:-1])
    assert list(every[-1].command[-2:]) == ["-k", "test_vllm_versions"]
    assert (ROOT / "tests/e2e/test_vllm_versions.py").exists()
    chosen = [path for path in quick[0].command if path.endswith(".py")]
    for pattern in parts.QUICK:
        assert [path for path in chosen if Path(path).match(pattern)], pattern
