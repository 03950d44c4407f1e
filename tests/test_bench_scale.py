"""`kvpipe bench scale`: that it measures what it says beside what it says, never how much that is."""

import json
import subprocess
import sys
import time
from contextlib import closing

import pytest

from bench import command
from bench.processes import SubjectError
from bench.scale import command as scale
from bench.scale import point as of_point
from bench.scale.agents import Loads, Node
from bench.scale.control import ControlPlane
from bench.scale.point import Point, ReactorThread, wait
from bench.scale.results import HELD, OPERATIONS, RATES, UNITS, rows_of
from kvpipe import ConfigError, TransferTimeoutError


def test_growth_is_the_median_of_the_ratios_to_the_first_point_of_each_round():
    one, many = Point(1, 10), Point(16, 100)
    # The machine was slow for both in the second round.
    samples = {
        one: [dict.fromkeys(UNITS, value) for value in (1.0, 10.0, 2.0)],
        many: [dict.fromkeys(UNITS, value) for value in (2.0, 15.0, 3.0)],
    }
    rows = {(row["peers"], row["loads"], row["cost"]): row for row in rows_of(samples)}
    assert len(rows) == 2 * len(UNITS)
    assert rows[16, 100, "load"]["growth"] == 1.5
    assert rows[1, 10, "load"]["growth"] == 1
    assert rows[16, 100, "load"]["value"].median == 3
    assert rows[16, 100, "p99"]["growth"] is None, "latencies have no cost to grow from"


def test_the_cpu_of_an_operation_is_the_reactors_and_not_the_callers():
    nodes = []
    thread = ReactorThread.made_by(lambda: nodes.append(Node.start(1)))
    (node,) = nodes
    handoff = bytes(16)

    def busy():
        until_s = time.thread_time() + 0.2
        while time.thread_time() < until_s:
            pass
        node.agent.commit(handoff)

    cost_us = thread.cost_us(busy)
    node.agent.close()
    assert 0 < cost_us < 100_000


def test_what_never_happens_is_given_up(monkeypatch):
    monkeypatch.setattr(of_point, "_WITHIN_S", 0.05)
    with pytest.raises(TransferTimeoutError, match="nothing happened within"):
        wait(lambda: False)


def _ended(under_way: Loads, number: int) -> bool:
    return under_way._has_ended(number.to_bytes(16), "load_failed")


def test_the_loads_of_a_point_are_under_way_before_and_after_what_is_measured():
    with closing(Loads(Point(2, 3))) as under_way:
        assert len(under_way._agent.peers()) == 2
        costs = under_way.costs()
        assert len(under_way._agent.peers()) == 2, "the others were closed again"
        for number in range(3):
            assert not _ended(under_way, number)
            under_way._agent.cancel(number.to_bytes(16), "over", is_withdrawn=False)
        for number in range(3):
            wait(lambda number=number: _ended(under_way, number))
    assert set(costs) | {"producer", "consumer"} | set(RATES) == set(UNITS)
    assert all(costs[name] > 0 for name in OPERATIONS if name in costs)
    assert costs["threads"] == 1
    assert all(costs[name] >= 0 for name in HELD)


def test_the_control_plane_is_measured_beside_handoffs_that_stay_open():
    with closing(ControlPlane(Point(3, 4))) as ports:
        found = ports.at_rate(200)
        for number in range(4):
            ports._producer.withdraw(number.to_bytes(16), "over")
        assert found["p50"] <= found["p90"] <= found["p99"]
        assert 0 < found["achieved"] <= 220
        assert found["producer"] > 0 < found["consumer"]


@pytest.mark.slow
def test_a_run_measures_each_point_in_each_round_and_writes_text_json_and_plot(tmp_path):
    figures, drawing = tmp_path / "figures.json", tmp_path / "drawing.png"
    arguments = ["--peers", "1,2", "--loads", "3", "--rate", "500", "--json", figures, "--plot", drawing]
    done = subprocess.run(
        [sys.executable, "-m", "kvpipe", "bench", "scale", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "round 5 of 5" in done.stderr
    assert "2 x 3" in done.stdout
    found = json.loads(figures.read_text())
    assert found["machine"]["handoffs_per_s"] == 500
    assert {(row["cost"], row["peers"], row["loads"]) for row in found["rows"]} == {
        (cost, num_peers, 3) for cost in UNITS for num_peers in (1, 2)
    }
    assert all(list(row) == ["cost", "unit", "peers", "loads", "value", "growth"] for row in found["rows"])
    assert all(row["value"]["num_samples"] == 5 for row in found["rows"])
    assert drawing.read_bytes().startswith(b"\x89PNG")


def test_a_sample_that_fails_names_its_point():
    with pytest.raises(SubjectError, match="0 x 1: its process ended with status 1"):
        scale._sample(Point(0, 1), 10)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rounds", "4"], "--rounds 4: expected at least 5"),
        (["--rate", "0"], "--rate 0: expected at least 1"),
        (["--peers", "1,x"], "--peers 1,x: expected numbers"),
        (["--loads", "0"], "--loads 0: expected numbers"),
        (["--json", "/nowhere/figures.json"], "/nowhere/figures.json: there is no such folder"),
    ],
)
def test_a_bad_argument_is_named_before_anything_is_measured(arguments, reason):
    with pytest.raises(ConfigError) as caught:
        command.main(["scale", *arguments])
    assert reason in str(caught.value)
