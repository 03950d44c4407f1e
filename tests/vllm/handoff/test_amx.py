"""AMX tiles: a process may use them after it has asked, wherever the processor has them."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kvpipe.vllm.amx import permit_tiles

pytestmark = pytest.mark.vllm

HAS_TILES = platform.machine() == "x86_64" and " amx_tile " in Path("/proc/cpuinfo").read_text()
ASK = (
    "from kvpipe.vllm import amx\n"
    "print(amx._has_tiles(amx._GET_XCOMP_PERMITTED), amx.permit_tiles(), amx.permit_tiles())"
)


def test_tiles_are_permitted_where_the_processor_has_them():
    assert permit_tiles() == HAS_TILES


@pytest.mark.skipif(not HAS_TILES, reason="this processor has no AMX")
def test_a_process_has_no_tiles_before_it_asks():
    found = subprocess.check_output([sys.executable, "-c", ASK], text=True)
    assert found.split() == ["False", "True", "True"]
