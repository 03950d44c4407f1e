"""UCX is loaded beside a CUDA driver, and opens no port: a client of one could read and write all memory."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.fake_cuda

CODE = """
import sys
from pathlib import Path
from tests.fake_cuda.driver import FakeDriver
FakeDriver(sys.argv[1])
from kvpipe import Agent
from tests.peers import listening_ports
with Agent("127.0.0.1:0") as agent, Agent("127.0.0.1:0") as other:
    agent.connect(other.address)
    assert "libucp" in Path("/proc/self/maps").read_text()
    assert sorted(listening_ports()) == sorted(int(each.address.rpartition(":")[2]) for each in (agent, other))
"""


def test_an_agent_listens_on_one_port_where_there_is_a_cuda_driver_too(library):
    command = [sys.executable, "-c", CODE, library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
