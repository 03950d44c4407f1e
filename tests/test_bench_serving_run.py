"""`kvpipe bench serving`: who is measured when, and what survives an error. A stand-in takes vLLM's place."""

import argparse
import asyncio
import io
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from bench.instances import vllm
from bench.processes import SubjectError
from bench.progress import Progress
from bench.serving import benchmark, command, generator, run, subjects
from bench.serving.generator import Outcome, RoundRobin
from bench.serving.measure import Measured, Measurement, Wanted
from bench.serving.metrics import Slo
from bench.serving.plan import Offer
from bench.serving.run import Cell, Timeline
from bench.serving.subjects import Group, Setting, Subject
from bench.serving.workload import Workload
from kvpipe.exceptions import ConfigError

from .stand_in_completions import StandIn
from .test_bench_serving import GIB, SMALL, arguments, outcome
from .test_bench_serving_generator import within

# --- the subjects


class Started:
    """Takes the place of a pool: notes what is started."""

    def __init__(self) -> None:
        self.commands: dict[str, list[str]] = {}
        self.env: dict[str, dict[str, str]] = {}

    def start(self, name: str, url: str, command: list[str], env: dict[str, str], log: Path) -> Any:
        self.commands[name], self.env[name] = command, env
        return argparse.Namespace(name=name, url=url, until_healthy=lambda: None, cpu_s=lambda: 1.0)

    def start_broker(self, folder: Path) -> Any:
        assert list(folder.iterdir()) == []
        return argparse.Namespace(url="amqp://guest:guest@127.0.0.1:1/", pid=os.getpid())

    def option(self, name: str, option: str) -> str:
        return self.commands[name][self.commands[name].index(option) + 1]


SETTING = Setting(Path("/w"), 4096, 48, 1024, 512, 1, Path("/nixl"), 4, {"OMP_WAIT_POLICY": "PASSIVE"})


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6})


def started(names: list[str], setting: Setting = SETTING) -> tuple[Started, Group]:
    pool = Started()
    return pool, subjects.start(pool, setting, names)


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.parametrize("names", [["kvpipe"], ["undivided-512"], ["nixl"]])
def test_every_subject_has_the_same_two_cores_one_for_each_worker_and_the_same_variables(names: list[str]) -> None:
    pool, group = started(names)
    workers = [env for name, env in pool.env.items() if not name.startswith("proxy")]
    assert sorted(env["VLLM_CPU_OMP_THREADS_BIND"] for env in workers) == ["3", "5"]
    assert {env["OMP_WAIT_POLICY"] for env in workers} == {"PASSIVE"}
    assert [subject.name for subject in group.subjects] == names
    instances = [name for name in pool.commands if not name.startswith("proxy")]
    assert {pool.option(name, "--num-gpu-blocks-override") for name in instances} == {"48"}


@pytest.mark.usefixtures("two_cpus")
def test_prefill_and_decode_have_chunks_of_their_own_and_an_undivided_pair_that_of_its_name() -> None:
    pool, _ = started(["kvpipe"])
    assert pool.option("kvpipe prefill 0", "--max-num-batched-tokens") == "1024"
    assert pool.option("kvpipe decode 0", "--max-num-batched-tokens") == "512"
    assert pool.env["kvpipe prefill 0"]["VLLM_CPU_OMP_THREADS_BIND"] == "3"
    pool, group = started(["undivided-128"])
    assert {pool.option(name, "--max-num-batched-tokens") for name in pool.commands} == {"128"}
    assert "--kv-transfer-config" not in pool.commands["undivided-128 0"]
    (subject,) = group.subjects
    assert len(subject.target.urls) == 2
    assert subject.one.urls == subject.target.urls[:1]


@pytest.mark.usefixtures("two_cpus")
def test_kvpipe_late_has_the_same_instances_and_a_proxy_without_early_tokens() -> None:
    pool, group = started(["kvpipe", "kvpipe-late"])
    assert len(group.instances["prefill"]) == len(group.instances["decode"]) == 1
    assert "--early-token" not in pool.commands["proxy kvpipe"]
    assert pool.option("proxy kvpipe-late", "--early-token") == "off"
    for name in ("proxy kvpipe", "proxy kvpipe-late"):
        assert pool.option(name, "--prefill").startswith(group.instances["prefill"][0].url)
    assert subjects.grouped(["kvpipe", "kvpipe-late", "undivided-512", "nixl"]) == [
        ["kvpipe", "kvpipe-late"],
        ["undivided-512"],
        ["nixl"],
    ]


@pytest.mark.usefixtures("two_cpus")
def test_kvpipe_queue_has_the_same_instances_and_a_worker_and_a_proxy_at_one_broker(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "of an earlier run").touch()
    pool, group = started(["kvpipe", "kvpipe-queue"], replace(SETTING, work=tmp_path))
    assert len(group.instances["prefill"]) == len(group.instances["decode"]) == 1
    assert pool.option("proxy kvpipe-queue", "--dispatch") == "amqp"
    assert "--decode" not in pool.commands["proxy kvpipe-queue"]
    assert pool.option("worker 0", "--decode") == pool.option("proxy kvpipe", "--decode")
    urls = {pool.env[name]["KVPIPE_AMQP"] for name in ("proxy kvpipe-queue", "worker 0")}
    assert urls == {"amqp://guest:guest@127.0.0.1:1/"}


@pytest.mark.usefixtures("two_cpus")
def test_what_a_broker_connects_is_not_stopped_while_others_are_measured(tmp_path: Path) -> None:
    _, group = started(["kvpipe", "kvpipe-queue"], replace(SETTING, work=tmp_path))
    stopped = [server.name for server in group.servers]
    assert stopped == ["kvpipe prefill 0", "kvpipe decode 0", "proxy kvpipe"]


def test_only_requests_through_the_broker_are_charged_for_broker_and_workers() -> None:
    part = argparse.Namespace(cpu_s=lambda: 1.0)
    queue = subjects.Queue(argparse.Namespace(pid=os.getpid()), [part, part])  # type: ignore[arg-type]
    group = Group([], {}, {"kvpipe": part, "kvpipe-queue": part}, queue)  # type: ignore[dict-item]
    assert group.cpu_s("kvpipe").keys() == {"generator", "proxy"}
    assert group.cpu_s("kvpipe-queue").keys() == {"generator", "proxy", "broker", "queue workers"}
    assert group.cpu_s("kvpipe-queue")["queue workers"] == 2.0


@pytest.mark.usefixtures("two_cpus")
def test_a_single_instance_has_both_cores() -> None:
    pool, group = started(["single-2048"])
    assert list(pool.commands) == ["single-2048 0"]
    assert pool.env["single-2048 0"]["VLLM_CPU_OMP_THREADS_BIND"] == "3,5"
    assert pool.option("single-2048 0", "--max-num-batched-tokens") == "2048"
    assert len(group.subjects[0].target.urls) == 1


def test_the_broker_and_the_single_instance_are_measured_only_if_named() -> None:
    assert not {"kvpipe-queue", "single-2048"} & set(benchmark._names(arguments())[0])
    names, skipped = benchmark._names(arguments(only="single-2048"))
    assert (names, skipped) == (["single-2048"], {})


def test_without_rabbitmq_the_broker_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects.broker_process, "missing", lambda: "rabbitmq-server not found")
    names, skipped = benchmark._names(arguments(only="kvpipe,kvpipe-queue"))
    assert (names, skipped) == (["kvpipe"], {"kvpipe-queue": "rabbitmq-server not found"})


@pytest.mark.usefixtures("two_cpus")
def test_two_by_two_instances_have_control_ports_of_their_own() -> None:
    pool, group = started(["kvpipe"], replace(SETTING, num_a_role=2))
    controls = [
        json.loads(pool.option(name, "--kv-transfer-config"))["kv_connector_extra_config"]["listen"]
        for name in pool.commands
        if not name.startswith("proxy")
    ]
    assert len(set(controls)) == 4
    assert [server.name for server in group.instances["decode"]] == ["kvpipe decode 0", "kvpipe decode 1"]
    assert pool.commands["proxy kvpipe"].count("--decode") == 2


def test_one_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    with pytest.raises(ConfigError, match="1 CPU may be used, each of two workers needs one"):
        subjects.cpus()


# --- the phases


class Idle:
    """A server that does nothing, and notes its signals."""

    name = "idle"

    def __init__(self) -> None:
        self.signals: list[int] = []

    def cpu_s_by_part(self) -> dict[str, float]:
        return {"API servers": 1.0, "workers": 2.0}

    def require_running(self) -> None:
        pass

    def signal(self, number: int) -> None:
        self.signals.append(number)


class Answers:
    """Takes the place of the generator: answers at once, and notes who was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offers: list[tuple[str, float]] = []
        self.prompts: list[tuple[Any, ...]] = []
        monkeypatch.setattr(run, "_SETTLE_S", 0.0)
        monkeypatch.setattr(run, "_QUIET_S", 0.0)
        monkeypatch.setattr(generator, "offer", self._offer)
        monkeypatch.setattr(generator, "ask", self._ask)
        self.groups = [self._group(name) for name in ("kvpipe", "undivided-2048", "undivided-512")]

    def _group(self, name: str) -> Group:
        return Group([Subject(name, name, name)], {"undivided": [Idle()]})

    async def _offer(self, target: Any, workload: Workload, use: str, limit_s: float, ended: Any) -> list[Outcome]:
        self.offers.append((target, workload.rate))
        self.prompts += [tuple(workload.prompt(request, use)) for request in workload.requests]
        return [outcome(1.0, 2.0, number=request.number) for request in workload.requests]

    async def _ask(
        self, target: Any, prompt: list[int], num: int, limit_s: float, number: int = 0, **_: Any
    ) -> Outcome:
        self.prompts.append(tuple(prompt))
        return outcome(1.0, 2.0)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(monkeypatch)


def running(answers: Answers) -> run.Run:
    return run.Run(answers.groups, SMALL, 1, 60.0, Progress(io.StringIO()))


def test_another_subject_begins_in_each_round_and_each_rate_meets_all(answers: Answers) -> None:
    found = running(answers)
    for number in (1, 2):
        for rate in (1.0, 2.0):
            found.load(Offer(rate, 2), number)
    order = [name for name, _ in answers.offers]
    assert order[:3] == ["undivided-2048", "undivided-512", "kvpipe"]
    assert order[6:9] == ["undivided-512", "kvpipe", "undivided-2048"]
    assert sorted(answers.offers) == sorted(
        (name, rate) for name in found.names for rate in (1.0, 2.0) for _ in range(2)
    )


def test_no_prompt_comes_twice_because_subjects_share_instances(answers: Answers) -> None:
    found = running(answers)
    found.idle(2)
    found.burst("undivided-2048")
    for number in (1, 2):
        for rate in (1.0, 2.0):
            found.load(Offer(rate, 2), number)
    assert len(set(answers.prompts)) == len(answers.prompts) > 80


def test_all_but_one_group_are_stopped_at_any_time(answers: Answers) -> None:
    found = running(answers)
    found.load(Offer(1.0, 2), 1)
    for group in answers.groups:
        (server,) = group.servers
        assert server.signals == [signal.SIGCONT, signal.SIGSTOP]


def test_cpu_is_that_of_the_requests_by_part(answers: Answers) -> None:
    found = running(answers)
    found.load(Offer(1.0, 2), 1)
    assert set(found.cells[0].cpu_s) == {"generator", "API servers", "workers"}
    assert found.cells[0].cpu_s["workers"] == 0.0


def test_the_pace_is_that_of_idle_requests_and_of_the_burst(answers: Answers) -> None:
    found = running(answers)
    found.idle(3)
    found.burst("kvpipe")
    assert found.answer_s("kvpipe") == 2.0
    assert found.saturation("kvpipe") == pytest.approx(run.BURST_REQUESTS / 2.0)


def test_a_subject_that_answers_nothing_ends_the_run_with_the_reason(answers: Answers) -> None:
    found = running(answers)
    found.cells.append(Cell("burst", "kvpipe", float("inf"), 1, [outcome(error="503: no")], {}))
    with pytest.raises(SubjectError, match="kvpipe answered no request, burst: 503: no"):
        found.saturation("kvpipe")


def test_a_timeline_has_the_gaps_before_and_after_the_long_prompt() -> None:
    async def scene(stand_in: StandIn) -> Timeline:
        target = RoundRobin([stand_in.url])
        return await run._timeline(Subject("undivided-512", target, target), 60.0)

    found = within(scene, first_s=0.05, gap_s=0.001)
    assert len(found.chunks_s) == run.STREAM_TOKENS
    assert sum(at_s < 0 for at_s in found.chunks_s) >= run._STREAM_BEFORE - 1
    assert found.chunks_s[-1] > 0
    assert found.first_s >= 0.05


def test_a_request_that_fails_before_a_measurement_is_sent_again_and_a_subject_that_always_fails_is_named() -> None:
    async def scene(stand_in: StandIn) -> str:
        target = RoundRobin([stand_in.url])
        group = Group([Subject("kvpipe", target, target)], {"undivided": [Idle()]})
        await asyncio.to_thread(run.warm_up, group, group.subjects[0], "test", 8, 60.0)
        stand_in.fails = dict.fromkeys(range(99), 503)
        try:
            await asyncio.to_thread(run.warm_up, group, group.subjects[0], "test", 8, 60.0)
        except SubjectError as error:
            return str(error)
        return ""

    assert within(scene, fails={0: 503}) == "kvpipe does not answer: 503: out of order"


# --- the order of the phases


WANTED = Wanted(
    names=("kvpipe", "undivided-2048", "nixl"),
    mix=SMALL,
    seed=1,
    rates=(),
    loads=(0.5, 1.0),
    num_requests=None,
    rounds=3,
    idle_requests=2,
    minutes=60.0,
    slo_ttft_ms=None,
    slo_itl_ms=None,
    limit_s=60.0,
    has_timeline=False,
    fault_interval_s=20.0,
)


class Together:
    """A measurement with subjects that answer at once; notes which ones were started together."""

    def __init__(self, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[list[str]] = []
        self.said: list[str] = []
        self.saved: list[Measured] = []
        self._answers = answers
        monkeypatch.setattr(run, "start", self._start)

    def _start(self, pool: Any, setting: Any, names: list[str], *_: Any) -> list[Group]:
        self.started.append(list(names))
        return [self._answers._group(name) for name in names]

    def measure(self, **changed: Any) -> Measured:
        wanted = replace(WANTED, **changed)
        return Measurement(wanted, SETTING, Progress(io.StringIO()), self.said.append, self.saved.append).measure()


@pytest.fixture
def together(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> Together:
    return Together(answers, monkeypatch)


def test_nixl_runs_alone_after_the_others_at_the_lowest_rate_with_32_requests_at_most(together: Together) -> None:
    found = together.measure()
    assert together.started == [["kvpipe", "undivided-2048"], ["nixl"]]
    load = [cell for cell in found.cells if (cell.phase, cell.subject) == ("load", "nixl")]
    assert [(cell.rate, len(cell.outcomes)) for cell in load] == [(0.5 * run.BURST_REQUESTS / 2.0, 32)]


def test_rates_are_shares_of_the_saturation_of_undivided_2048_and_the_same_for_all(together: Together) -> None:
    found = together.measure(names=("kvpipe", "undivided-2048"))
    assert [cell.subject for cell in found.cells if cell.phase == "burst"] == ["undivided-2048"]
    saturation = run.BURST_REQUESTS / 2.0
    for name in ("kvpipe", "undivided-2048"):
        rates = [cell.rate for cell in found.cells if (cell.phase, cell.subject) == ("load", name)]
        assert rates == [0.5 * saturation, saturation] * 3
    assert found.slo == Slo(pytest.approx(4000), pytest.approx(2000))
    assert any("is saturated at 12 requests/s" in line for line in together.said)
    assert any("minutes, until" in line for line in together.said)


def test_given_rates_need_no_burst_and_given_requests_are_kept(together: Together) -> None:
    found = together.measure(names=("kvpipe",), rates=(4.0,), num_requests=64, rounds=1)
    assert [(cell.phase, cell.rate, len(cell.outcomes)) for cell in found.cells] == [
        ("idle", 0.0, 2),
        ("load", 4.0, 64),
    ]


def test_when_the_time_is_over_no_other_round_begins(together: Together) -> None:
    found = together.measure(names=("kvpipe",), minutes=1e-6)
    assert {cell.number for cell in found.cells} == {1}
    assert "the time is over after 1 of 3 rounds" in together.said


def test_what_was_measured_is_saved_after_each_rate_and_survives_an_error_or_ctrl_c(
    together: Together, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, words in ((SubjectError("kvpipe has ended"), "kvpipe has ended"), (KeyboardInterrupt(), "interrupted")):
        together.saved.clear()
        answers.offers.clear()

        async def offer(*args: Any, error: BaseException = error) -> list[Outcome]:
            if len(answers.offers) == 4:
                raise error
            return await answers._offer(*args)

        monkeypatch.setattr(generator, "offer", offer)
        found = together.measure(names=("kvpipe", "undivided-2048"))
        assert found.error == words
        # The burst, and one rate and a half of the first round.
        assert [cell.phase for cell in found.cells] == ["idle", "idle", "burst", "load", "load", "load"]
        assert len(together.saved) == 1


def test_the_time_is_said_in_advance() -> None:
    def estimate(**changed: Any) -> str:
        wanted = replace(WANTED, **changed)
        return Measurement(wanted, SETTING, Progress(io.StringIO()), print, print).estimate()

    assert estimate() == "about 60 minutes"
    assert estimate(rates=(1.0,), num_requests=60, names=("kvpipe",), rounds=1, idle_requests=1) == "about 4 minutes"
    assert "when the rates are known" in estimate(num_requests=60)


# --- a whole run


@pytest.mark.slow
def test_a_whole_run_writes_tables_json_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    program = [sys.executable, str(Path(__file__).parent / "stand_in_completions.py")]
    monkeypatch.setattr(vllm, "VLLM_COMMAND", program)
    monkeypatch.setattr(run, "_QUIET_S", 0.0)
    monkeypatch.setattr(benchmark.machine, "available_bytes", lambda: 100 * GIB)
    files = {"json": tmp_path / "f.json", "markdown": tmp_path / "f.md", "plot": tmp_path / "f.svg"}
    changed = {"only": "undivided-2048,undivided-512", "loads": "0.01,0.02", "requests": 3, "rounds": 2, "layers": 1}
    args = arguments(**changed, **files, timeline=tmp_path / "t.svg", work=tmp_path, output_tokens="3:5")
    assert command.main(args) == 0
    shown = capsys.readouterr()
    assert (tmp_path / "f.md").read_text().strip() == shown.out.strip()
    for words in ("undivided-2048 is saturated at", "about", "until", "round 2"):
        assert words in shown.err
    read = json.loads((tmp_path / "f.json").read_text())
    assert {row["phase"] for row in read["rows"]} == {"idle", "burst", "load"}
    assert {row["figures"]["num_lost"] for row in read["rows"]} == {0}
    assert len(read["requests"]) == 2 * 6 + run.BURST_REQUESTS + 2 * 2 * 2 * 3
    for name in ("f.svg", "t.svg"):
        assert (tmp_path / name).stat().st_size
