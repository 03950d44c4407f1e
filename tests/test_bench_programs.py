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


@pytest.mark.vllm
@pytest.mark.slow
def test_slices_are_measured_beside_whole_blocks():
    options = ["--rounds", "1", "--blocks", "8", "--tokens", "4096"]
    command = [sys.executable, "-m", "bench.bench_slices", *options]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    rows = [[cell.strip() for cell in line.split("|")] for line in said.stdout.splitlines()]
    first_cells = [" ".join(row[1:4]) for row in rows if len(row) > 4]
    assert {f"default scattered {ranks}" for ranks in ("1 to 1", "4 to 4", "1 to 4", "4 to 1")} <= set(first_cells)
    assert {"tcp contiguous 1 to 4"} <= set(first_cells)
    assert any(cells.startswith("consumers 8 slices") for cells in first_cells)
    assert any(cells.startswith("D, the load begins") for cells in first_cells)
