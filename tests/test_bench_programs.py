"""The programs of `bench/` that pages name: that each starts, and that each that is named exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")]
PROGRAMS = sorted(path.stem for path in ROOT.glob("bench/bench_*.py"))


def test_each_program_that_a_page_names_is_there():
    named = {name for page in PAGES for name in re.findall(r"python -m bench\.(bench_\w+)", page.read_text())}
    assert named
    assert named <= set(PROGRAMS)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_how_it_is_used(name):
    command = [sys.executable, "-m", f"bench.{name}", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert said.stdout.startswith("usage: ")
