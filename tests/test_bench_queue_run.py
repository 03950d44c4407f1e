"""`kvpipe bench queue` from its start to its end. It has no other tests beside it, see `tests/__main__.py`."""

import json

import pytest

from bench.queue.results import UNITS
from tests.test_bench_queue import NEEDS_BROKER, bench


@NEEDS_BROKER
@pytest.mark.slow
def test_a_run_measures_both_in_each_round_and_writes_text_and_json(tmp_path):
    figures = tmp_path / "figures.json"
    done = bench("--requests", 20, "--json", figures)
    assert done.returncode == 0, done.stderr
    assert "round 5 of 5" in done.stderr
    assert "direct" in done.stdout
    found = json.loads(figures.read_text())
    assert [row["name"] for row in found["rows"]] == list(UNITS)
    assert all(row[side]["num_samples"] == 5 for row in found["rows"] for side in ("direct", "broker", "difference"))
    assert all(row[side]["median"] > 0 for row in found["rows"] for side in ("direct", "broker"))
    assert list(found["cpu_us"]) == ["direct proxy", "front", "workers", "broker"]
