"""Two hosts: the tests of tests/hosts/suite.py, in a process that has not used UCX on another network before."""

import subprocess
import sys

import pytest

from tests.hosts.namespaces import why_no_hosts
from tests.peers import ROOT

LIMIT_S = 200

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())]


def test_everything_works_between_two_hosts_that_share_nothing_but_a_network():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/hosts/suite.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    print(done.stdout[-20_000:])  # also what was skipped, and why
    assert done.returncode == 0, done.stderr[-2000:]
