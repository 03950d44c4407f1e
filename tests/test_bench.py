"""`kvpipe bench pipe`: its figures and its table; and that it runs, never how fast."""

import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpipe import ConfigError
from kvpipe.bench import measure, report
from kvpipe.bench.measure import Summary


def bench(*arguments):
    return [sys.executable, "-m", "kvpipe", "bench", "pipe", *arguments]


def test_a_summary_is_the_median_between_its_percentiles():
    samples = [float(n) for n in range(101)][::-1]
    assert measure.summarize(samples) == Summary(median=50, p10=10, p90=90, num_samples=101)
    assert measure.summarize([3, 1, 2, 4]).median == statistics.median([1, 2, 3, 4])
    assert measure.summarize([7.0]) == Summary(7, 7, 7, 1)
    with pytest.raises(ConfigError, match="no samples"):
        measure.summarize([])


def test_sizes_are_bytes_with_units_in_ascending_order():
    assert measure.parse_sizes("1M, 8,64K,8") == (8, 65536, 1 << 20)


@pytest.mark.parametrize("text", ["", "0", "-8", "9", "8B", "K", "8,,16", "1.5K", "8KK"])
def test_a_bad_size_is_named(text):
    with pytest.raises(ConfigError, match="expected a multiple of 8 in bytes"):
        measure.parse_sizes(text)


@pytest.mark.parametrize("size", [8, 4096, 1 << 20, 1 << 26, 1 << 30])
def test_a_round_moves_neither_too_little_nor_too_much(size):
    assert 4 <= measure.pings_per_round(size) <= measure.tensors_per_round(size) <= 1000


def test_buffers_are_larger_than_the_cache_and_are_walked_through():
    total = measure.working_set_bytes(32 << 20, [8, 1 << 20])
    assert total == 128 << 20
    assert measure.working_set_bytes(1 << 20, [1 << 30]) == 2 << 30
    walked = list(measure.offsets(1 << 20, 200, total))
    assert len(walked) == 200
    assert len(set(walked)) == 128
    assert max(walked) + (1 << 20) == total
    assert list(measure.offsets(8, 3, total)) == [0, 64, 128]


def test_the_cache_size_is_the_largest_and_none_where_nothing_tells(tmp_path):
    assert report.cache_bytes(tmp_path) is None
    for index, size in enumerate(["48K\n", "1024K\n", "32768K\n"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert report.cache_bytes(tmp_path) == 32 << 20


@pytest.mark.parametrize(("size", "text"), [(8, "8 B"), (1 << 16, "64 KiB"), (1 << 26, "64 MiB"), (1032, "1032 B")])
def test_sizes_are_told_in_the_largest_unit_that_fits(size, text):
    assert report.size_text(size) == text


def test_a_cell_has_three_digits_that_say_something():
    assert report.cell(Summary(0.0001234, 12.345, 4567.8, 9)) == "0.000123 (12.3-4568)"
    assert report.cell(Summary(0, 0, 0, 1)) == "0 (0-0)"


def test_columns_are_aligned():
    assert report.table(["a", "long"], [["1000", "2"]]) == "   a  long\n----  ----\n1000     2"


def test_empty_facts_are_left_out():
    assert report.describe({"cpu": "x", "UCX_TLS": "", "cache_bytes": 1 << 20}) == "cpu: x\ncache_bytes: 1 MiB"


def test_progress_is_lines_where_there_is_no_terminal_and_a_bar_where_there_is():
    plain, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for stream in (plain, terminal):
        progress = report.Progress(2, stream)
        progress.line("round 1 of 1")
        progress.step("8 B")
        progress.end()
    assert plain.getvalue() == "round 1 of 1\n"
    assert terminal.getvalue().startswith("\r[###############...............] 1/2 8 B")
    assert terminal.getvalue().endswith("\n")


@pytest.mark.ucx
def test_the_command_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "figures.json"
    done = subprocess.run(
        bench("--sizes", "8,64K", "--rounds", "5", "--json", str(file)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for fact in ("cpu: ", "ucx: ", "transport: ", "load_average", "working_set_bytes: "):
        assert fact in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines()[-2:]] == [["8", "B"], ["64", "KiB"]]
    assert "round 5 of 5" in done.stderr
    figures = json.loads(file.read_text())
    assert [row["bytes"] for row in figures["results"]] == [8, 65536]
    assert figures["results"][0]["pipe_out"]["num_samples"] == 5
    assert figures["machine"]["rounds"] == 5


@pytest.mark.ucx
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_second_process_is_killed(how):
    process = subprocess.Popen(
        bench("--sizes", "64M", "--rounds", "1000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert "round 1 of" in process.stderr.readline()
        (child,) = children_of(process.pid)
        os.kill(child, how)
        killed_at = time.monotonic()
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - killed_at < 10
        assert errors.splitlines()[-1].startswith("error: lost peer")
        assert process.returncode == 1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.ucx
def test_ctrl_c_ends_both_processes():
    process = subprocess.Popen(
        bench("--sizes", "64M", "--rounds", "1000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert "round 1 of" in process.stderr.readline()
        (child,) = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130
        assert not Path(f"/proc/{child}").exists()
    finally:
        process.kill()
        process.communicate()


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("arguments", "reason"), [(["--rounds", "4"], "at least 5"), (["--sizes", "7"], "size '7'"), (["--nope"], "--nope")]
)
def test_wrong_arguments_are_named(arguments, reason):
    done = subprocess.run(bench(*arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_without_numpy_it_says_what_to_install():
    code = "import sys; sys.modules['numpy'] = None; from kvpipe.cli import main; sys.exit(main(['bench', 'pipe']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "error: numpy is not installed; pip install 'kvpipe[bench]'\n")
