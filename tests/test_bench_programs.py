"""The programs of `bench/` that pages name: that each starts, and that each that is named exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.bench_read import STEPS, steps_us
from bench.trace import Event

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")]
PROGRAMS = sorted(path.stem for path in ROOT.glob("bench/bench_*.py"))


def test_each_program_that_a_page_names_is_there():
    named = {name for page in PAGES for name in re.findall(r"python -m bench\.(bench_\w+)", page.read_text())}
    assert named
    assert named <= set(PROGRAMS)


def test_the_steps_of_a_load_add_up_to_all_of_it_where_its_reads_overlap():
    spans = [("load", 0, 0), ("turn", 2, 3), ("posted", 3, 4), ("moved", 4, 9), ("compared", 9, 12)]
    spans += [("turn", 4, 6), ("posted", 6, 7), ("moved", 7, 20), ("compared", 21, 25), ("loaded", 30, 30)]
    life = [Event(name, "", "", began * 1e-6, ended * 1e-6) for name, began, ended in spans]
    found = {name: round(step_us) for name, step_us in steps_us(life).items()}
    # Of two reads at once: the second one's launch, and the first one's comparison.
    expected = {"announced": 3, "turn": 1, "posted": 2, "moved": 12, "reported": 0, "compared": 7, "granted": 5}
    assert found == expected
    assert steps_us(life[1:]) == {}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_how_it_is_used(name):
    command = [sys.executable, "-m", f"bench.{name}", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert said.stdout.startswith("usage: ")


@pytest.mark.slow
def test_each_step_of_a_read_is_measured(tmp_path):
    report = tmp_path / "reads.json"
    options = ["--blocks", "4Kx64", "--json", str(report)]
    subprocess.run([sys.executable, "-m", "bench.bench_read", *options], cwd=ROOT, timeout=100, check=True)
    reads = json.loads(report.read_text())["reads"]
    integrities = ["validate"] * 2 + ["checksum"] * 2
    assert [read["integrity"] for read in reads] == integrities
    for load in (load for read in reads for load in read["loads_us"]):
        assert list(load) == list(STEPS)
        assert load["moved"] > 0
        assert load["posted"] == 0


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
