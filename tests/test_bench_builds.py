"""`kvpipe bench --against`: two builds in the same rounds, and what is said of their difference."""

import subprocess
import sys

import pytest

from bench import builds
from bench.measure import Case
from bench.runner import Entry, Program, Sample, Subject

# Of the harness, which no user waits for.
pytestmark = pytest.mark.slow


def test_the_interval_of_a_median_leaves_out_as_many_samples_as_the_binomial_distribution_allows():
    samples = [float(n) for n in range(15)][::-1]
    assert builds.interval(samples) == builds.Interval(3, 7, 11)  # 96.5 %; 4 to 10 would be 88 %
    assert builds.interval([3, 1, 2]) == builds.Interval(1, 2, 3)
    assert builds.interval([5.0]) == builds.Interval(5, 5, 5)


def test_a_build_is_faster_when_its_throughput_is_higher_or_its_time_is_shorter():
    program = Program("", ())
    found = {}
    for kind in ("tensors", "latency"):
        case = Case(kind, 8)
        ours, other = (
            Entry(case, Subject(name, "tcp", program, frozenset({kind})), samples=[Sample(value, cpu)] * 6)
            for name, value, cpu in (("kvpipe", 4.0, 1.0), (f"kvpipe{builds.OTHER}", 2.0, 4.0))
        )
        found[kind] = builds.differences_of([ours, other])
    assert [one["speed"].median for one in found["tensors"]] == [2.0]
    assert [one["speed"].median for one in found["latency"]] == [0.5]
    assert [one["cpu"].low for one in found["tensors"]] == [0.25]


@pytest.mark.ucx
def test_a_build_is_measured_beside_another_in_the_same_rounds(tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    small = (
        "--rounds",
        "5",
        "--working-set",
        "8M",
        "--data-path",
        "default",
        "--sizes",
        "64K",
        "--only",
        "kvpipe out=",
    )
    ran = subprocess.run(
        [sys.executable, "-m", "kvpipe", "bench", "pipe", *small, "--against", wrapper],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "kvpipe out= (other build)" in ran.stdout
    assert "this build / other" in ran.stdout
    starts = [line for line in ran.stderr.splitlines() if line.startswith("starting")]
    assert len(starts) == 2 * 2, "each build, at the beginning and after three of the five rounds"
