"""A run fails when a process of it dies by a fault, unless its test says that it expects that."""

import signal
import subprocess
import sys

import pytest

from tests import deaths
from tests.deaths import Death, unexpected
from tests.peers import ROOT

needs_events = pytest.mark.skipif(not deaths.has_events(), reason="the kernel reports processes to root only")


def watched(script):
    command = [sys.executable, "-m", "tests.deaths", "bash", "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@needs_events
@pytest.mark.parametrize("name", ["SEGV", "ABRT", "BUS"])
def test_a_grandchild_that_dies_by_a_fault_fails_a_run_that_has_succeeded(name):
    done = watched(f"sh -c '(kill -{name} $$); true; exit 0'; exit 0")
    assert done.returncode == 1
    assert f"died by SIG{name}, and no test says that it expects that" in done.stdout


@needs_events
def test_a_process_that_outlives_its_parent_is_watched_too():
    done = watched("(sh -c 'sleep 0.1; kill -SEGV $$' &) ; sleep 0.5")
    assert done.returncode == 1


@needs_events
def test_a_death_that_a_test_expects_is_none():
    done = watched(f"sh -c 'echo SIGSEGV $$ >>${deaths.EXPECTED_VARIABLE}; kill -SEGV $$'; exit 0")
    assert (done.returncode, "FAILED" in done.stdout) == (0, False)


@pytest.mark.parametrize("name", ["KILL", "TERM"])
def test_signals_that_tests_send_are_no_faults(name):
    assert watched(f"sh -c 'kill -{name} $$'; exit 0").returncode == 0


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_is_that_of_the_command(status):
    assert watched(f"exit {status}").returncode == status


SEGV = Death("process 7 died by SIGSEGV", signal.SIGSEGV, 7)
LOGGED = Death("kvpipe[8]: segfault at 8 ip 0")
OF_MEMORY = Death("Out of memory: Killed process 9 (python)")


@pytest.mark.parametrize(
    ("found", "said", "left"),
    [
        ([SEGV], "", [SEGV]),
        ([SEGV], "SIGSEGV 7\n", []),
        ([SEGV, SEGV], "SIGSEGV 7\n", [SEGV]),
        ([SEGV], "SIGABRT 7\n", [SEGV]),
        ([SEGV], "SIGSEGV 6\n", [SEGV]),
        ([LOGGED], "", [LOGGED]),
        ([LOGGED], "SIGSEGV 7\n", []),  # a line of the log has the id of a thread
        ([OF_MEMORY], "SIGSEGV 9\n", [OF_MEMORY]),
    ],
)
def test_each_death_is_expected_once_by_its_signal_and_process(found, said, left):
    assert unexpected(found, said) == left


@needs_events
def test_a_death_counts_once_where_one_run_is_inside_another():
    """So it does where this test is in a run of all tests."""
    done = watched("python3 -m tests.deaths sh -c 'sh -c \"kill -SEGV \\$\\$\"; exit 0'; echo inner $?; exit 0")
    assert "inner 1" in done.stdout
    assert done.returncode == 0


@needs_events
def test_a_run_that_has_ended_inside_another_does_not_end_the_reports_of_that_one():
    done = watched("python3 -m tests.deaths true; sh -c 'kill -SEGV $$'; exit 0")
    assert done.returncode == 1
