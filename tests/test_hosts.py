"""Two hosts: the tests of tests/hosts, each file in a process that has not used UCX on another network before."""

import importlib.util
import subprocess
import sys

import pytest

from tests.hosts.namespaces import why_no_hosts
from tests.peers import ROOT

LIMIT_S = 200
# Two processes import vLLM.
ENGINES_LIMIT_S = 380

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())]


def run(file, limit_s=LIMIT_S):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    print(done.stdout[-20_000:])  # also what was skipped, and why
    assert done.returncode == 0, done.stderr[-2000:]


def test_everything_works_between_two_hosts_that_share_nothing_but_a_network():
    run("tests/hosts/suite.py")


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: run make setup")
def test_an_engine_on_a_wildcard_is_reached_from_another_host_at_the_address_that_it_advertises():
    run("tests/hosts/engines.py", ENGINES_LIMIT_S)
