"""`kvpipe bench handoff`: what it makes of a trace, who takes part, whose turn it is. Real vLLM is not started here."""

import argparse
import json
import math
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import timeline, trace
from bench.handoff import command, report, run, samples, subjects
from bench.handoff.client import CpuClock
from bench.instances import vllm
from bench.instances.servers import Server, ServerPool, resumed
from bench.report import as_json
from bench.results import Findings
from bench.trace import Event
from kvpipe import _kvpipe
from kvpipe.exceptions import ConfigError

GIB = 1 << 30


def life(**times_s: float) -> list[Event]:
    """Events of one handoff at these times; D's, but for `sampled`."""
    named = {name.replace("_", " "): time_s for name, time_s in times_s.items()}
    return [
        Event(name, "h", "prefill" if name == "sampled" else "decode", time_s, time_s)
        for name, time_s in sorted(named.items(), key=lambda item: item[1])
    ]


def sample(subject: str, first_ms: float, cpu_s: float, handoff: str = "", **more: Any) -> samples.Sample:
    fields = {"decode_share": None, "exposed": None} | more
    return samples.Sample(subject, 512, first_ms, 2 * first_ms, cpu_s, handoff=handoff, **fields)


# --- the trace


def test_a_handover_is_split_at_what_happened_after_the_first_token() -> None:
    events = life(sampled=10.0, queued=10.1, admitted=10.15, load=10.2, loaded=10.5, first_step=10.6)
    found = samples.exposed(events)
    assert found is not None
    assert found.phases_ms == pytest.approx((100, 100, 300, 100))
    assert found.total_ms == pytest.approx(600)
    assert found.last_block_ms is None


def test_what_was_over_before_the_first_token_counts_as_nothing() -> None:
    events = life(queued=9.0, admitted=9.1, load=9.2, sampled=10.0, arrived=10.002, loaded=10.005, first_step=10.009)
    found = samples.exposed(events)
    assert found is not None
    assert found.phases_ms == pytest.approx((0, 0, 5, 4))
    assert found.last_block_ms == pytest.approx(2)


def test_kv_is_there_when_its_last_block_and_the_token_are_and_not_when_the_worker_ends_the_load() -> None:
    times = {"queued": 9.0, "admitted": 9.1, "load": 9.2, "sampled": 10.0, "first_step": 10.005, "loaded": 10.006}
    late_state = samples.exposed(life(**times, verified=9.9, finished=10.001))
    late_block = samples.exposed(life(**times, verified=10.003, finished=10.001))
    assert late_state is not None
    assert late_block is not None
    assert late_state.phases_ms == pytest.approx((0, 0, 1, 4))
    assert late_block.phases_ms == pytest.approx((0, 0, 3, 2))


def test_the_request_of_prefill_is_not_mistaken_for_that_of_decode() -> None:
    events = [Event("queued", "h", "prefill", 11.0, 11.0), *life(sampled=10.0, queued=10.1, admitted=10.2)]
    events += life(load=10.3, loaded=10.4, first_step=10.5)
    found = samples.exposed(events)
    assert found is not None
    assert found.phases_ms == pytest.approx((100, 200, 100, 100))


@pytest.mark.parametrize("missing", ["sampled", "admitted", "load", "loaded", "first_step"])
def test_a_handoff_without_all_of_its_kv_has_no_handover(missing: str) -> None:
    times = {"sampled": 1.0, "queued": 1.1, "admitted": 1.2, "load": 1.3, "loaded": 1.4, "first_step": 1.5}
    del times[missing]
    assert samples.exposed(life(**times)) is None


def test_a_trace_that_is_being_written_is_read_to_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    handoff = secrets.token_bytes(16)
    lines = _kvpipe.Trace(str(path), "worker")
    began_s = time.monotonic()
    lines.instant("sampled", handoff, tokens=7)
    lines.span("computed", handoff, began_s, layer=2)
    del lines
    with path.open("a") as file:
        file.write('{"name":"half')
    sampled, computed = sorted(trace.read(path), key=lambda event: event.name, reverse=True)
    assert (sampled.name, sampled.handoff, sampled.process) == ("sampled", handoff.hex(), "worker")
    assert (sampled.facts, sampled.began_s) == ({"tokens": 7}, sampled.ended_s)
    assert (computed.name, computed.facts) == ("computed", {"layer": 2})
    assert began_s - 1e-3 <= computed.began_s <= computed.ended_s <= time.monotonic()


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ConfigError, match=r"trace\.json cannot be read"):
        trace.read(path)
    path.write_text("[\nnonsense\n")
    with pytest.raises(ConfigError, match=r"trace\.json cannot be read"):
        trace.read(path)


def test_a_timeline_is_drawn_layer_by_layer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    events = [
        Event(name, "h", "p", at_s, at_s + 0.01, {"layer": layer})
        for layer in range(3)
        for name, at_s in (("computed", layer), ("announced", layer + 0.1), ("arrived", layer + 0.2))
    ]
    path = tmp_path / "handoff.png"
    timeline.draw(path, [*events, *life(sampled=3.0, first_step=3.1)], "one handoff")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no layer"):
        timeline.draw(path, life(sampled=3.0), "one handoff")


# --- the figures

FACTS = {"cpu": "a CPU", "num_cpus": 2, "dtype": "float32"}


def test_cpu_is_counted_beyond_that_of_one_instance_for_each_gib() -> None:
    found = samples.rows_of(
        [sample("undivided", 800, 1.0), sample("kvpipe", 880, 1.5, "h"), sample("kvpipe", 880, 1.7, "i")],
        kv_bytes_per_token=GIB // 1024,
    )
    undivided, kvpipe = found
    assert kvpipe["ratio"] == pytest.approx(1.1)
    assert kvpipe["cpu_s_per_gib"] == pytest.approx(0.6 / 0.5)
    assert (kvpipe["num_full"], kvpipe["num_handoffs"]) == (0, 2)
    assert (undivided["ratio"], undivided["cpu_s_per_gib"], undivided["num_handoffs"]) == (1.0, None, 0)


def test_the_report_has_every_row_and_what_was_left_out() -> None:
    whole = samples.Exposed(12.5, (0.0, 0.0, 8.0, 4.5), 3.0)
    measured = [sample("undivided", 800, 1.0), sample("kvpipe just-in-time", 840, 1.2, "h", exposed=whole)]
    details = {
        "samples": measured,
        "prefill_s": {"undivided": [0.8], "kvpipe": [0.88, 0.82, 0.9]},
        "plain_s": {"kvpipe": [0.8, 0.81, 0.9]},
        "prefill_tokens": 512,
        "idle": {"undivided": 1.5},
    }
    found = Findings(FACTS, samples.rows_of(measured, 65536), {"nixl pull": "not there"}, details)
    text = report.text(found)
    for words in ("kvpipe just-in-time", "12.5 (12.5, 1.0x)", "1.05", "1 of 1", "skipped: nixl pull: not there"):
        assert words in text
    for words in ("880 (900)", "+10.0 %", "810 (900)", "+1.2 %"):
        assert words in text
    read = json.loads(as_json(found))
    assert read["samples"][1]["exposed"]["total_ms"] == whole.total_ms


def test_a_plot_has_a_row_for_each_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = samples.Exposed(12.5, (0.0, 0.0, 8.0, 4.5), 3.0)
    measured = [sample("undivided", 800, 1.0), sample("kvpipe", 840, 1.2, "h", exposed=whole)]
    report.draw(tmp_path / "f.png", Findings(FACTS, samples.rows_of(measured, 65536)))
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_the_share_of_a_cpu_is_that_between_two_times() -> None:
    clock = CpuClock(server=SimpleNamespace(), readings=[(0.0, 0.0), (1.0, 0.5), (2.0, 0.6), (3.0, 9.0)])
    assert clock.share(0.9, 2.5) == pytest.approx(10)
    assert clock.share(2.5, 3.5) is None


# --- arguments


def arguments(**changed: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([])
    vars(args).update(changed)
    return args


def test_lengths_without_rounds_of_their_own_take_the_last() -> None:
    assert command._lengths(arguments(tokens="512,2048,4096", rounds="20,10")) == [(512, 20), (2048, 10), (4096, 10)]


@pytest.mark.parametrize("changed", [{"tokens": "many"}, {"tokens": "0"}, {"tokens": "99999"}, {"rounds": "0"}])
def test_bad_lengths_are_refused_before_anything_is_started(changed: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        command.main(arguments(**changed))


def test_a_group_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="undivided, kvpipe, validate, nixl pull, nixl push"):
        command.main(arguments(only="mooncake"))


def test_without_memory_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.machine, "available_bytes", lambda: GIB)
    with pytest.raises(ConfigError, match="fewer groups with --only"):
        command.main(arguments())


def test_nixl_is_left_out_with_the_reason_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(command.machine, "available_bytes", lambda: 100 * GIB)
    names, skipped = command._names(arguments(only="undivided,nixl", nixl_path=tmp_path))
    assert names == ["undivided"]
    assert f"pip install --no-deps --target {tmp_path} nixl" in skipped["nixl pull"]
    (tmp_path / "nixl").mkdir()
    assert command._names(arguments(only="nixl", nixl_path=tmp_path)) == (["nixl pull", "nixl push"], {})


def test_the_other_benchmarks_need_neither_vllm_nor_the_proxy() -> None:
    absent = ("aiohttp", "orjson", "torch", "vllm", "transformers", "matplotlib")
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import bench.command"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- turns


class Noted:
    """A subject that notes who was asked."""

    name = "noted"

    def __init__(self, name: str, asked: list[tuple[str, int]]) -> None:
        self.name, self._asked = name, asked

    def ask(self, tokens: list[int]) -> subjects.Times:
        self._asked.append((self.name, len(tokens)))
        return subjects.Times(0.0, 1.0, 2.0)


class Idle:
    """A server that does nothing, and notes its signals."""

    name = "idle"

    def __init__(self) -> None:
        self.signals: list[int] = []

    def cpu_s(self) -> float:
        return 0.0

    def signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> run.Run:
    monkeypatch.setattr(run, "_SETTLE_S", 0.0)
    monkeypatch.setattr(run, "_QUIET_S", 0.0)
    asked: list[tuple[str, int]] = []
    groups = [subjects.Group(name, Idle(), None, [Noted(name, asked)], lambda _: 1.0) for name in "abc"]
    found = run.Run(groups)
    monkeypatch.setattr(run, "report", lambda _: None)
    found.asked = asked  # type: ignore[attr-defined]
    return found


def test_another_group_begins_in_each_round_and_the_first_round_does_not_count(running: run.Run) -> None:
    running.rounds(512, 3, math.inf, times_prefill=True)
    long = "".join(name for name, num_tokens in running.asked if num_tokens == 512)
    assert long == "abc" + "bca" + "cab" + "abc"
    assert len(running.measured) == 3 * 3
    assert running.prefill_s == {name: [1.0] * 3 for name in "abc"}


def test_prefill_with_and_without_a_handoff_take_turns_in_coming_first(running: run.Run) -> None:
    order: list[str] = []
    running.groups[1].prefill_once = lambda _: float(order.append("handoff") is None)
    running.groups[1].plain_once = lambda _: float(order.append("plain") is not None)
    running.rounds(512, 3, math.inf, times_prefill=True)
    assert order == ["plain", "handoff", "handoff", "plain"] * 2
    assert running.prefill_s["b"] == [1.0] * 3
    assert running.plain_s == {"b": [0.0] * 3}


def test_each_long_request_follows_a_short_one_of_the_same_subject(running: run.Run) -> None:
    running.rounds(512, 2, math.inf, times_prefill=False)
    pairs = list(zip(running.asked[::2], running.asked[1::2], strict=True))
    assert all(short[0] == long[0] and short[1] < long[1] == 512 for short, long in pairs)


def test_all_but_one_group_are_stopped_at_any_time(running: run.Run) -> None:
    running.rounds(512, 2, math.inf, times_prefill=False)
    for group in running.groups:
        assert group.prefill.signals == [signal.SIGCONT, signal.SIGSTOP] * 3


def test_when_time_is_over_three_rounds_are_made_all_the_same(running: run.Run) -> None:
    running.rounds(512, 20, 0.0, times_prefill=False)
    assert len(running.measured) == 3 * 3


def test_a_length_whose_prefill_takes_too_long_is_left_out(running: run.Run) -> None:
    running.groups[0].prefill_once = lambda tokens: float(len(tokens) == 4096) * 16
    command._measure(running, [(512, 1), (2048, 1), (4096, 1)], math.inf)
    assert len(running.measured) == 2 * 3


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_server_is_stopped_outside_its_turn_and_ended_at_the_end(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    with ServerPool() as pool:
        server: Server = pool.start("sleeper", "http://127.0.0.1:1", program, {}, tmp_path / "log")
        with resumed([server]):
            assert state(server.group) != "T"
        deadline = time.monotonic() + 10
        while state(server.group) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert subprocess.run(["kill", "-0", str(server.group)], stderr=subprocess.DEVNULL, check=False).returncode != 0
