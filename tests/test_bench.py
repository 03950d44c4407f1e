"""`kvpipe bench`: that it measures what it says and tells it, never how fast anything is."""

import contextlib
import io
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench import benchmarks, bounds, command, machine, measure, perftest, plot, report, subjects
from bench.measure import Case
from bench.processes import Process, SubjectError
from bench.programs import blocks, checksum_tensors, lookup_inserts, lookup_wakes, request, side, tensors
from bench.progress import Progress
from bench.results import Row, Summary, summarize
from bench.run import Run
from bench.runner import Entry, Group, Program, Sample, Subject
from bench.transports import labels_of, rows_of
from kvpipe import ConfigError, TransportUnavailableError, _kvpipe

# Each runs programs for seconds.
pytestmark = pytest.mark.slow

SMALL = ("--rounds", "5", "--working-set", "8M", "--data-path", "default")


def bench(*arguments):
    return [sys.executable, "-m", "kvpipe", "bench", *map(str, arguments)]


def run_bench(*arguments, **env):
    return subprocess.run(
        bench(*arguments), capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **env}
    )


# --- figures ----------------------------------------------------------------------------------------------------


def test_a_benchmark_on_a_gpu_is_refused_with_the_remedy_where_there_is_none():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU")
    with pytest.raises(TransportUnavailableError, match="torch sees no CUDA device; run this where there is one"):
        command.main(["gpu", "--rounds", "5"])


def test_a_summary_is_the_median_between_its_percentiles():
    samples = [float(n) for n in range(101)][::-1]
    assert summarize(samples) == Summary(median=50, p10=10, p90=90, largest=100, num_samples=101)
    assert summarize([3, 1, 2, 4]).median == statistics.median([1, 2, 3, 4])
    assert summarize([7.0]) == Summary(7, 7, 7, 7, 1)
    with pytest.raises(ConfigError, match="no samples"):
        summarize([])


def test_sizes_and_blocks_have_units_and_come_in_ascending_order():
    assert measure.parse_sizes("1M, 8,64K,8") == (8, 65536, 1 << 20)
    assert measure.parse_blocks("64Kx512,4Kx8192") == ((4096, 8192), (65536, 512))


@pytest.mark.parametrize("text", ["", "0", "-8", "9", "8B", "K", "8,,16", "1.5K", "8KK"])
def test_a_bad_size_is_named(text):
    with pytest.raises(ConfigError, match="expected a multiple of 8 in bytes"):
        measure.parse_sizes(text)


@pytest.mark.parametrize("text", ["64K", "64Kx", "64Kx0", "x8", "64Kx1.5"])
def test_bad_blocks_are_named(text):
    with pytest.raises(ConfigError, match="expected"):
        measure.parse_blocks(text)


@pytest.mark.parametrize("kind", measure.UNITS)
@pytest.mark.parametrize("size", [8, 4096, 1 << 20, 1 << 26, 1 << 30])
def test_a_round_moves_neither_too_little_nor_too_much(kind, size):
    case = Case(kind, size)
    assert case.count >= 1
    assert case.payload_bytes(case.count) <= max(measure.ROUND_BYTES, 4 * size)


def test_a_slow_subject_moves_less_a_round_and_a_fast_one_no_more():
    case = Case("tensors", 1 << 20)
    assert case.fitting_count(0.0) == case.fitting_count(0.2) == case.count
    assert case.fitting_count(0.5) == case.count // 2
    assert case.fitting_count(1e9) == 4


def test_buffers_of_both_sides_together_are_larger_than_the_cache():
    assert 2 * measure.working_set_bytes(260 << 20, [Case("tensors", 8)]) > 2 * (260 << 20)
    assert measure.working_set_bytes(1 << 20, [Case("blocks", 1 << 20, 512)]) == 1 << 30


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds():
    case, program = Case("tensors", 8), Program("", ())
    named = {name: Subject(name, "default", program, frozenset({"tensors"})) for name in ("ours", "base")}
    ours, base = (Entry(case, named[name]) for name in ("ours", "base"))
    # the machine was slow for both in the second round
    ours.samples = [Sample(8, 1), Sample(1, 3), Sample(6, None)]
    base.samples = [Sample(4, 1), Sample(2, 1), Sample(4, 1)]
    rows = rows_of([ours, base], ["nobody", "base"])
    assert [(row["ratio"], row["baseline"]) for row in rows] == [(1.5, "base"), (1, "base")]
    assert rows[0]["cpu_s_per_gib"] == Summary(2, 1.2, 2.8, 3, 2)


def test_a_baseline_is_of_the_same_case_and_data_path_or_of_none():
    case, program = Case("tensors", 8), Program("", ())
    entries = [
        Entry(case, Subject(name, data_path, program, frozenset()), samples=[Sample(1, None)])
        for name, data_path in [("ours", "tcp"), ("base", "default"), ("memcpy", "")]
    ]
    found = [row["baseline"] for row in rows_of(entries, ["base", "memcpy"])]
    assert found == ["memcpy", "base", "memcpy"]


def test_the_serial_bound_is_of_hashing_and_then_moving_round_by_round():
    cases = [Case("tensors", 8), Case("tensors", 64)]
    figures = {
        ("kvpipe out=", "tcp"): [2, 6, 3],
        ("kvpipe out=, no checksum", "tcp"): [6, 3, 12],
        ("kvpipe fresh", "tcp"): [2, 6, 3],  # nobody to hold it against
        (subjects.HASH, ""): [3, 6, 4],
    }
    entries = [
        Entry(case, Subject(*name, Program("", ()), frozenset()), samples=[Sample(value, None) for value in values])
        for case in cases
        for name, values in figures.items()
    ]
    found = bounds.bounds_of(entries)
    assert [(bound["bytes"], bound["subject"], bound["data_path"]) for bound in found] == [
        (case.num_bytes, "kvpipe out=", "tcp") for case in cases
    ]
    assert [found[0][name].median for name in ("value", "copy", "hash")] == [3, 6, 4]
    assert (found[0]["serial"].median, found[0]["serial"].p90) == pytest.approx((2, 2.8))  # of 2, 2, 3
    assert found[0]["ratio"] == pytest.approx(1)  # of 1, 3, 1
    assert bounds.bounds_of(entries[:3]) == []


# --- what is moved ----------------------------------------------------------------------------------------------


def task(kind="tensors", num_bytes=64, num_blocks=1, layout="none", *, count=3, number=0, **options):
    words = {"kind": kind, "bytes": num_bytes, "blocks": num_blocks, "layout": layout, "count": count, "round": number}
    return request.Task.of(request.parse(request.compose("run", words | options))[1])


def test_the_walk_through_a_buffer_goes_on_where_the_round_before_ended():
    walked = [at for number in range(4) for at in task(count=4, number=number).offsets(1024)]
    assert walked == [i * 64 for i in range(16)]
    assert task(num_bytes=8).offsets(1024) == [0, 64, 128]


def test_scattered_blocks_are_all_of_them_in_another_order_on_each_side():
    scattered = task("blocks", 64, 8, "scattered")
    local, remote = (np.concatenate(scattered.transfers(64 * 64, side)) for side in (request.LOCAL, request.REMOTE))
    assert sorted(local) == sorted(remote) == list(range(64))
    assert list(local) != list(remote) != list(range(64))
    assert [list(ids) for ids in task("blocks", 64, 4).transfers(64 * 8, request.LOCAL)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_byte_that_did_not_arrive_is_found():
    buffer = tensors.ReceiveBuffer(1024)
    buffer.data[:] = request.pattern(1024)
    buffer.verify(task())
    buffer.data[130] ^= 1
    with pytest.raises(ValueError, match="tensors did not arrive"):
        buffer.verify(task())
    buffer.clear()
    buffer.fresh = request.pattern(1024)[128:192]
    buffer.verify(task())


def test_a_block_in_the_wrong_place_is_found():
    asked = task("blocks", 64, 4, "scattered", count=2)
    buffer = np.zeros(1024, np.uint8)
    pairs = zip(asked.transfers(1024, request.LOCAL), asked.transfers(1024, request.REMOTE), strict=True)
    for to, source in pairs:
        buffer.reshape(-1, 64)[to] = request.pattern(1024).reshape(-1, 64)[source]
    blocks.verify_blocks(buffer, asked)
    buffer[:64], buffer[64:128] = buffer[64:128].copy(), buffer[:64].copy()
    with pytest.raises(ValueError, match="blocks did not arrive"):
        blocks.verify_blocks(buffer, asked)


def test_the_checksum_that_is_measured_is_that_of_pipes_and_of_the_tensors_asked_for():
    assert _kvpipe.checksums(b"..123456789", [2], 9) == [0xAE8B14860A799888]  # the catalogue's, as in checksum.rs
    with pytest.raises(ConfigError, match="9 bytes at 3 are not in a buffer of 11"):
        _kvpipe.checksums(b"..123456789", [2, 3], 9)
    alone, asked = checksum_tensors.Alone(side.Setup(1024, "", {})), task()
    assert alone.run(asked)["seconds"] > 0
    assert len(set(alone._checksums)) == asked.count
    alone.verify(asked)
    alone._checksums[1] ^= 1
    with pytest.raises(ValueError, match="not those of the tensors"):
        alone.verify(asked)


def test_an_entry_that_is_lost_or_comes_twice_is_found():
    consumer = lookup_wakes.Consumer(side.Setup(0, "", {}))
    asked = task("wake", 8)
    for numbers in ([0, 2], [0, 1, 1], [0, 2, 1]):
        consumer.clear(asked)
        consumer._numbers += numbers
        with pytest.raises(ValueError, match="entries did not arrive"):
            consumer.verify(asked)
    consumer.clear(asked)
    consumer._numbers += [0, 1, 2]
    consumer.verify(asked)


@pytest.mark.parametrize("by", ["insert", "copy"])
def test_an_insert_and_a_copy_are_compared_with_their_source(by):
    alone, asked = lookup_inserts.Alone(side.Setup(1024, "", {})), task("insert", by=by)
    assert alone.run(asked)["seconds"] > 0
    alone.verify(asked)
    alone._last[5] ^= 1
    with pytest.raises(ValueError, match="entries did not arrive"):
        alone.verify(asked)


# --- what is told -----------------------------------------------------------------------------------------------


def test_the_cache_size_is_the_largest_and_none_if_unknown(tmp_path):
    assert machine.cache_bytes(tmp_path) is None
    for index, size in enumerate(["48K\n", "1024K\n", "32768K\n"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert machine.cache_bytes(tmp_path) == 32 << 20


@pytest.mark.parametrize(("size", "text"), [(8, "8 B"), (1 << 16, "64 KiB"), (1 << 26, "64 MiB"), (1032, "1032 B")])
def test_sizes_are_printed_in_the_largest_unit_that_fits(size, text):
    assert measure.size_text(size) == text


def test_a_cell_has_three_digits_that_say_something():
    assert report.cell(Summary(0.0001234, 12.345, 4567.8, 5000, 9)) == "0.000123 (12.3-4568)"
    assert report.cell(Summary(0, 0, 0, 0, 1)) == "0 (0-0)"


def test_columns_are_aligned_and_empty_facts_left_out():
    assert report.table(["a", "long"], [["1000", "2"]]) == "a     long\n----  ------\n1000  2"
    assert report.describe({"cpu": "x", "commit": "", "cache_bytes": 1 << 20}) == "cpu: x\ncache_bytes: 1 MiB"


def test_progress_is_lines_where_there_is_no_terminal_and_a_bar_where_there_is():
    plain, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for stream in (plain, terminal):
        progress = Progress(stream)
        progress.expect(2)
        progress.line("round 1 of 1")
        progress.step("8 B")
        progress.end()
    assert plain.getvalue() == "round 1 of 1\n"
    assert terminal.getvalue().startswith("\r[###############...............] 1/2 8 B")
    assert terminal.getvalue().endswith("\n")


# --- subjects ------------------------------------------------------------------------------------------------


def test_a_process_that_ends_is_reported_with_its_last_line():
    process = Process([sys.executable, "-c", "import sys; sys.exit('no such device')"], {})
    with contextlib.closing(process), pytest.raises(SubjectError, match="ended with status 1: no such device"):
        process.answer()


def test_the_cpu_time_of_a_process_is_its_own():
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint('hello', flush=True); time.sleep(60)"
    with contextlib.closing(Process([sys.executable, "-c", code], {})) as process:
        process.answer()
        assert process.cpu_s() >= 0.2


class Spoken:
    """A side that says hello, and remembers what it is asked."""

    def __init__(self, **hello):
        self.hello, self.asked = hello, []

    def ask(self, line):
        self.asked.append(line)

    def answer(self):
        return {} if self.asked else self.hello


def test_processes_meet_by_the_words_of_all_others():
    sides = [Spoken(), Spoken(a="1"), Spoken(b="2", version="x-1")]
    assert Group(sides).version == "x-1"
    assert [side.asked for side in sides] == [["meet a=1 b=2 version=x-1"], ["meet b=2 version=x-1"], ["meet a=1"]]


def test_figures_of_ucx_perftest_are_read_from_its_last_line():
    line = "        2000      6.149    20.733    20.733        0.37       0.37       48233       48233\n"
    assert perftest.figures(f"+---+\n| Test |\n{line}", "")[1] == 6.149
    with pytest.raises(SubjectError, match="gave no figures: it broke"):
        perftest.figures("", "it broke")


def test_every_subject_has_a_name_of_its_own_on_its_data_path():
    args = command.parse(["peers"])
    found = benchmarks.subjects_of(benchmarks.BENCHMARKS["peers"], subjects.DATA_PATHS, args)
    names = [(one.name, one.data_path, kind) for one in found for kind in one.kinds]
    assert len(names) == len(set(names))
    assert {"NIXL READ", "NIXL WRITE", "ucxx", "Mooncake READ", "gloo", "ZeroMQ tcp", "memcpy"} <= {
        n for n, *_ in names
    }


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_each_baseline_is_a_subject(name, monkeypatch):
    monkeypatch.setattr(subjects, "require_gpu", lambda _: None)
    benchmark = benchmarks.BENCHMARKS[name]
    found = benchmarks.subjects_of(benchmark, subjects.DATA_PATHS, command.parse([name]))
    assert set(benchmark.baselines) <= {one.name for one in found}


@pytest.mark.parametrize("kind", measure.UNITS)
def test_a_plot_and_the_page_have_each_kind_with_its_unit(kind):
    pytest.importorskip("matplotlib")
    axis = plot.matplotlib()[1].Figure().subplots()
    row = Row(labels_of(Case(kind, 64), "kvpipe", ""), {"value": Summary(1, 1, 1, 1, 1)})
    plot._draw(axis, kind, [row], {"kvpipe": ("black", "o")})
    assert axis.get_ylabel().rpartition(", ")[2] == measure.UNITS[kind]
    assert f"`{kind}`" in (Path(__file__).parents[1] / "bench/README.md").read_text()


@pytest.mark.ucx
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["pipe", "--sizes", "64K", "--only", "kvpipe,memcpy"], {"kvpipe out=", "kvpipe fresh", "memcpy"}),
        pytest.param(["blocks", "--blocks", "4Kx16,64Kx4", "--only", "kvpipe"], {"kvpipe"}, marks=pytest.mark.slow),
        pytest.param(
            ["latency", "--sizes", "8", "--only", "kvpipe,-E sleep"],
            {"kvpipe", "kvpipe polling"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["lookup", "--sizes", "64K"],
            {"kvpipe, producer serves", "kvpipe, server apart", "kvpipe insert", "numpy copy"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["store", "--sizes", "64K,256K", "--only", "kvpipe store"],
            {"kvpipe store", "kvpipe store, 4 threads"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_benchmark_runs_to_its_end_and_writes_text_json_and_plot(tmp_path, arguments, names):
    figures, drawing = tmp_path / "figures.json", tmp_path / "drawing.png"
    done = run_bench(*arguments, *SMALL, "--json", figures, "--plot", drawing)
    assert done.returncode == 0, done.stderr
    for fact in ("cpu: ", "ucx: ", "load_average: ", "working_set_bytes: 8 MiB"):
        assert fact in done.stdout
    assert "round 5 of 5" in done.stderr
    found = json.loads(figures.read_text())
    assert set(found) == {"machine", "skipped", "rows", "bounds", "differences"}
    assert {"system", "cpu", "num_cpus", "cache_bytes", "load_average", "kvpipe", "python", "ucx"} <= set(
        found["machine"]
    )
    assert names <= {row["subject"] for row in found["rows"]}
    for row in found["rows"]:
        assert row["value"]["num_samples"] == 5
        assert row["value"]["p10"] <= row["value"]["median"] <= row["value"]["p90"]
        assert (row["cpu_s_per_gib"] is None) == (row["unit"] == "us")
    fields = "kind bytes num_blocks layout subject data_path transport unit value cpu_s_per_gib ratio baseline"
    assert all(row.keys() == set(fields.split()) for row in found["rows"])
    assert drawing.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ucx
def test_a_pipe_with_checksums_is_compared_with_the_serial_bound_in_text_and_json(tmp_path):
    figures = tmp_path / "figures.json"
    done = run_bench("pipe", "--sizes", "64K,1M", *SMALL, "--only", "kvpipe", "--json", figures)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    bound = found["bounds"][0]
    assert [(one["subject"], one["bytes"]) for one in found["bounds"]] == [
        ("kvpipe out=", 65536),
        ("kvpipe fresh", 65536),
        ("kvpipe out=", 1 << 20),
        ("kvpipe fresh", 1 << 20),
    ]
    by_name = {row["subject"]: row["value"] for row in found["rows"] if row["bytes"] == 65536}
    names = ("kvpipe out=", "kvpipe out=, no checksum", "kvpipe checksum")
    assert [bound[key] for key in ("value", "copy", "hash")] == [by_name[name] for name in names]
    assert 0 < bound["serial"]["median"] < min(bound["copy"]["p90"], bound["hash"]["p90"])
    assert "serial bound" in done.stdout
    line = next(line for line in done.stdout.partition("serial bound")[2].splitlines() if "kvpipe out=" in line)
    assert line.split()[-1] == f"{bound['ratio']:.2f}"


@pytest.mark.slow
@pytest.mark.ucx
def test_a_peer_that_is_not_installed_is_named_and_an_older_run_compared(tmp_path):
    figures = tmp_path / "figures.json"
    only = ["peers", "--kinds", "blocks", "--blocks", "64Kx4", "--layout", "scattered", "--only", "kvpipe,nixl read"]
    env = {"KVPIPE_BENCH_PEERS_PYTHON": sys.executable}
    done = run_bench(*only, *SMALL, "--json", figures, **env)
    assert done.returncode == 0, done.stderr
    assert "skipped: NIXL READ default: ModuleNotFoundError: No module named 'nixl' (make bench-peers)" in done.stdout
    assert list(json.loads(figures.read_text())["skipped"]) == ["NIXL READ default"]
    old = json.loads(figures.read_text())
    old["machine"]["ucx"] = "1.13.0"
    for row in old["rows"]:
        row["value"]["median"] = 1e-6
    figures.write_text(json.dumps(old))
    again = run_bench(*only, *SMALL, "--compare", figures, **env)
    assert again.returncode == 0, again.stderr
    assert "ucx differs: '1.13.0' then" in again.stdout
    line = next(line for line in again.stdout.splitlines() if line.startswith("blocks 64 KiB x 4 scattered"))
    now, ratio = map(float, line.split()[-3:-1])
    assert ratio == pytest.approx(now / 1e-6, rel=0.01)


@pytest.mark.slow
@pytest.mark.ucx
def test_the_bare_loop_moves_the_same_bytes(tmp_path):
    program = subjects.bare("default")[0].program
    if not Path(program.command[0]).exists():
        pytest.skip("not built: cargo build --release --example bare_loop -p kvpipe-ucx")
    figures = tmp_path / "blocks.json"
    done = run_bench("blocks", "--blocks", "64Kx4", *SMALL, "--only", "bare", "--json", figures)
    assert done.returncode == 0, done.stderr
    assert json.loads(figures.read_text())["skipped"] == {}


# --- two hosts --------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    process = subprocess.Popen(
        bench("serve", "--listen", "127.0.0.1:0", "--token", "secret"), stdout=subprocess.PIPE, text=True
    )
    yield process, process.stdout.readline().removeprefix("listening on ").strip()
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.ucx
def test_it_measures_to_another_process_that_serves(server, tmp_path):
    process, address = server
    figures = tmp_path / "figures.json"
    for benchmark in (["pipe", "--sizes", "64K"], ["blocks", "--blocks", "64Kx4"], ["latency", "--sizes", "8"]):
        done = run_bench(*benchmark, *SMALL, "--peer", address, "--token", "secret", "--json", figures)
        assert done.returncode == 0, done.stderr
        found = json.loads(figures.read_text())
        assert {row["subject"].split(",")[0].split()[0] for row in found["rows"]} == {"kvpipe"}
        assert found["machine"]["peer"] == address
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130


@pytest.mark.ucx
def test_a_peer_with_another_token_is_refused_and_the_server_goes_on(server):
    process, address = server
    refused = run_bench("latency", "--sizes", "8", *SMALL, "--peer", address, "--token", "guess")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: ")
    assert "token" in refused.stderr.splitlines()[-1]
    assert process.poll() is None


@pytest.mark.ucx
def test_a_peer_that_cannot_be_reached_is_named():
    with socket.socket() as bound:  # nothing else gets the port
        bound.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*bound.getsockname())
        done = run_bench("pipe", "--sizes", "64K", *SMALL, "--peer", address)
    assert done.returncode == 1
    assert f"cannot reach {address}" in done.stderr.splitlines()[-1]


# --- what goes wrong --------------------------------------------------------------------------------------------


@pytest.fixture
def options():
    return ()


@pytest.fixture
def running(options):
    process = subprocess.Popen(
        bench("pipe", "--sizes", "1M", "--rounds", "1000", "--working-set", "8M", "--only", "kvpipe out=", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "round 1 of" not in process.stderr.readline():
        assert process.poll() is None
    yield process
    process.kill()
    process.communicate()


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.ucx
@pytest.mark.parametrize("options", [("--pin", "--data-path", "tcp")])
def test_pinned_processes_of_a_subject_have_a_cpu_of_their_own_each(running):
    places = [os.sched_getaffinity(child) for child in children_of(running.pid)]
    cpus = sorted(os.sched_getaffinity(0))
    assert places == [{cpus[0]}, {cpus[1 % len(cpus)]}]
    assert os.sched_getaffinity(running.pid) == set(cpus)


def test_each_round_has_an_order_of_its_own_and_each_run_the_same():
    case, program = Case("tensors", 8), Program("", ())
    measured = [Subject(str(n), "default", program, frozenset({"tensors"})) for n in range(6)]
    runs = [Run(measured, [case], Progress()) for _ in range(2)]
    orders = [[[entry.subject.name for entry in run._order(n)] for n in range(5)] for run in runs]
    assert orders[0] == orders[1]
    assert all(sorted(order) == list("012345") for order in orders[0])
    before = [set(itertools.pairwise(order)) for order in orders[0]]
    assert not set.intersection(*before)


@pytest.mark.ucx
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_one_of_its_processes_is_killed(running, how):
    os.kill(children_of(running.pid)[1], how)
    killed_at = time.monotonic()
    _, errors = running.communicate(timeout=60)
    assert time.monotonic() - killed_at < 30
    assert errors.splitlines()[-1].startswith("error: kvpipe out=")
    assert running.returncode == 1


@pytest.mark.ucx
def test_ctrl_c_ends_all_processes(running):
    children = children_of(running.pid)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=20)
    assert running.returncode == 130
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["pipe", "--rounds", "4"], "--rounds 4: a median"),
        (["pipe", "--sizes", "7"], "size '7'"),
        (["pipe", "--data-path", "rdma"], "--data-path rdma"),
        (["pipe", "--only", "nobody"], "--only nobody"),
        (["pipe", "--sizes", "64M", "--working-set", "1M"], "--working-set 1M: the largest case needs 128 MiB"),
        (["pipe", "--working-set", "8192G"], "GB for the buffers of"),
        (["pipe", "--json", "/nowhere/figures.json"], "/nowhere/figures.json: there is no such folder"),
        (["pipe", "--compare", "/nowhere.json"], "/nowhere.json cannot be read"),
        (["pipe", "--compare", __file__], "holds no figures"),
        (["pipe", "--peer", "5"], "address '5'"),
        (["pipe", "--peer", "localhost:5", "--pin"], "--pin with --peer"),
        (["pipe", "--peer", "nohost.invalid:5"], "there is no way to nohost.invalid"),
        (["blocks", "--blocks", "64K"], "blocks '64K'"),
        (["blocks", "--layout", "round"], "--layout round"),
        (["peers", "--kinds", "tensors,files"], "--kinds files"),
    ],
)
@pytest.mark.ucx
def test_a_bad_argument_is_named_before_anything_is_measured(arguments, reason):
    with pytest.raises(ConfigError) as caught:
        command.main(arguments)
    assert reason in str(caught.value)


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["pipe", "--nope"]])
def test_wrong_usage_shows_the_right_one(arguments):
    done = run_bench(*arguments)
    assert done.returncode == 2
    assert "usage: kvpipe bench" in done.stderr


@pytest.mark.parametrize("module", ["numpy", "matplotlib", "tabulate"])
def test_without_its_extra_it_names_what_to_install(module):
    code = f"import sys; sys.modules[{module!r}] = None; from kvpipe.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", code, "bench", "pipe", "--plot", "drawing.png"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: {module} is not installed; pip install 'kvpipe[bench]'\n")
