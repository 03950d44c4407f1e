"""`kvpipe bench serving`: what is offered, how it is counted, who is measured. A stand-in takes vLLM's place."""

import argparse
import asyncio
import io
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from kvpipe.bench.instances import vllm
from kvpipe.bench.instances.servers import Server, ServerPool
from kvpipe.bench.processes import SubjectError
from kvpipe.bench.progress import Progress
from kvpipe.bench.serving import benchmark, command, generator, metrics, plan, plots, report, results, run, subjects
from kvpipe.bench.serving.faults import Fault, Faults, FaultyRun
from kvpipe.bench.serving.generator import NixlPull, Outcome, RoundRobin
from kvpipe.bench.serving.measure import Measured, Measurement, Wanted
from kvpipe.bench.serving.metrics import Slo
from kvpipe.bench.serving.plan import Offer, Pace
from kvpipe.bench.serving.run import Cell, Timeline
from kvpipe.bench.serving.subjects import Group, Setting, Subject
from kvpipe.bench.serving.workload import MIXES, Mix, Request, Workload, parse_range
from kvpipe.exceptions import ConfigError

from .stand_in_completions import StandIn, listening

SMALL = Mix((4, 8), (3, 3))
GIB = 1 << 30


def ignore(_: Outcome) -> None:
    """Nobody wants to know."""


def outcome(
    *chunks_s: float, at_s: float = 0.0, number: int = 0, error: str = "", sent_s: float | None = None
) -> Outcome:
    """A request that got a token at each of these times, and wanted as many."""
    request = Request(number, at_s, 10, len(chunks_s))
    end_s = chunks_s[-1] if chunks_s else at_s + 1
    return Outcome(request, at_s if sent_s is None else sent_s, chunks_s, end_s, 0 if error else len(chunks_s), error)


# --- the workload


def test_the_same_seed_gives_the_same_arrivals_lengths_and_prompts() -> None:
    first, second = (Workload.draw(7, 2.0, 50, MIXES["mixed"]) for _ in range(2))
    assert first == second
    assert [first.prompt(request, "a") for request in first.requests] == [
        second.prompt(request, "a") for request in second.requests
    ]
    other = Workload.draw(8, 2.0, 50, MIXES["mixed"])
    assert [request.at_s for request in other.requests] != [request.at_s for request in first.requests]
    assert [request.num_prompt for request in other.requests] != [request.num_prompt for request in first.requests]


def test_another_rate_changes_the_scale_of_time_only() -> None:
    slow, fast = (Workload.draw(1, rate, 20, MIXES["mixed"]) for rate in (0.5, 2.0))
    for one, other in zip(slow.requests, fast.requests, strict=True):
        assert one.at_s == pytest.approx(4 * other.at_s)
        assert replace(one, at_s=0.0) == replace(other, at_s=0.0)


def test_arrivals_are_in_order_and_their_number_is_that_of_the_rate() -> None:
    workload = Workload.draw(1, 4.0, 400, MIXES["mixed"])
    arrivals = [request.at_s for request in workload.requests]
    assert arrivals == sorted(arrivals)
    assert workload.window_s == 100.0
    assert 0 <= arrivals[0] < arrivals[-1] < 100.0
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    # Of exponential gaps with a mean of 0.25 s, 63 % are shorter than that, and 13.5 % longer than twice that.
    assert 0.55 < sum(gap < 0.25 for gap in gaps) / len(gaps) < 0.71
    assert 0.09 < sum(gap > 0.5 for gap in gaps) / len(gaps) < 0.19


def test_lengths_are_those_of_the_mix() -> None:
    requests = Workload.draw(1, 1.0, 300, MIXES["mixed"]).requests
    for lengths, low, high in (
        ([it.num_prompt for it in requests], 128, 1024),
        ([it.num_output for it in requests], 32, 256),
    ):
        assert low <= min(lengths) < 1.2 * low
        assert 0.95 * high < max(lengths) <= high
    assert {(it.num_prompt, it.num_output) for it in Workload.draw(1, 1.0, 9, MIXES["parity"]).requests} == {(128, 8)}


def test_no_prompt_is_like_that_of_another_request_or_use() -> None:
    workload = Workload.draw(1, 1.0, 6, MIXES["parity"])
    prompts = [
        tuple(workload.prompt(request, use)) for request in workload.requests for use in ("kvpipe 1", "kvpipe 2")
    ]
    assert len({prompt[:8] for prompt in prompts}) == len(prompts) == 12


def test_a_burst_comes_all_at_once() -> None:
    assert {request.at_s for request in Workload.draw(1, float("inf"), 9, SMALL).requests} == {0.0}


def test_a_range_is_two_numbers_or_one() -> None:
    assert parse_range("--prompt-tokens", "128:1024") == (128, 1024)
    assert parse_range("--prompt-tokens", "7") == (7, 7)


@pytest.mark.parametrize("text", ["", "0:4", "8:4", "a:b", "1:2:3"])
def test_what_is_no_range_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--prompt-tokens {text}: expected LO:HI"):
        parse_range("--prompt-tokens", text)


# --- how many requests


def test_each_rate_gets_the_longest_window_that_fits_into_the_time() -> None:
    pace = Pace(saturation=1.0, answer_s=5.0)
    found = plan.offers([0.5, 1.0], 4, 3600.0, pace)
    assert found[1].num_requests // 2 == found[0].num_requests
    assert 3400 < plan.total_s(found, 4, pace) <= 3600
    assert found[0].num_requests < plan.offers([0.5, 1.0], 4, 7200.0, pace)[0].num_requests


def test_a_rate_has_requests_also_where_there_is_no_time() -> None:
    found = plan.offers([0.01], 4, 0.0, Pace(1.0, 5.0))
    assert [offer.num_requests for offer in found] == [plan.LEAST_REQUESTS]


def test_a_rate_above_saturation_takes_longer_than_its_window() -> None:
    pace = Pace(saturation=1.0, answer_s=0.0)
    assert pace.cell_s(0.1, 10) == pytest.approx(100 + plan.BEFORE_CELL_S)
    assert pace.cell_s(2.0, 200) > 300


# --- figures


def test_quantiles_are_those_of_all_values() -> None:
    found = metrics.quantiles("itl", [number / 1000 for number in range(101)])
    assert found == {
        "itl_p50_ms": pytest.approx(50),
        "itl_p90_ms": pytest.approx(90),
        "itl_p99_ms": pytest.approx(99),
        "itl_max_ms": pytest.approx(100),
    }
    assert metrics.quantiles("itl", []) == {}


def test_ttft_counts_from_when_a_request_was_due_and_not_from_when_it_was_sent() -> None:
    found = metrics.figures([outcome(3.0, 3.1, at_s=1.0, sent_s=2.5)], 1.0, None, {})
    assert found["ttft_p50_ms"] == pytest.approx(2000)
    assert found["lag_max_ms"] == pytest.approx(1500)


def test_gaps_are_counted_all_and_first_and_later_ones_apart() -> None:
    found = metrics.figures([outcome(1.0, 1.5, 1.6, 1.7), outcome(1.0, 1.9)], 1.0, None, {})
    assert found["second_max_ms"] == pytest.approx(900)
    assert found["second_p50_ms"] == pytest.approx(700)
    assert found["later_max_ms"] == pytest.approx(100)
    assert found["itl_max_ms"] == pytest.approx(900)
    assert found["tpot_max_ms"] == pytest.approx(900)


def test_goodput_is_the_rate_of_requests_that_meet_both_limits() -> None:
    slo = Slo(ttft_ms=1000, itl_ms=100)
    good = outcome(0.9, 0.95, 1.09)
    outcomes = [
        good,
        outcome(1.1, 1.15),  # begins too late
        outcome(0.5, 0.65),  # its tokens come too slowly
        replace(good, error="cut"),
    ]
    found = metrics.figures(outcomes, 8.0, slo, {})
    assert found["good_share"] == pytest.approx(1 / 4)
    assert found["goodput"] == pytest.approx(2.0)
    # The mean gap of the good one is within the limit, its longest one is not.
    assert found["good_share_each_gap"] == 0


def test_failures_are_lost_before_the_first_token_and_cut_after_it() -> None:
    outcomes = [
        outcome(1.0, 2.0),
        outcome(error="503"),
        outcome(1.0, error="the stream ended early"),
        outcome(error="x"),
    ]
    found = metrics.figures(outcomes, 1.0, Slo(1e6, 1e6), {})
    assert (found["num_requests"], found["num_lost"], found["num_cut"]) == (4, 2, 1)
    assert found["tokens_per_s"] == pytest.approx(2 / 2.0)
    assert found["goodput"] == pytest.approx(0.25)


def test_requests_that_came_one_after_the_other_took_the_sum_of_their_times() -> None:
    assert metrics.figures([outcome(1.0, 2.0), outcome(1.0, 4.0)], 0.0, None, {})["duration_s"] == 6.0


def test_a_round_in_which_all_requests_fail_has_figures() -> None:
    found = metrics.figures([outcome(error="503"), outcome(error="503")], 1.0, Slo(1, 1), {})
    assert (found["num_lost"], found["goodput"], found["tokens_per_s"]) == (2, 0, 0)
    assert "ttft_p50_ms" not in found


def test_the_median_of_rounds_is_that_of_each_figure() -> None:
    assert metrics.medians([{"a": 1.0, "b": 5.0}, {"a": 9.0}, {"a": 2.0, "b": 7.0}]) == {"a": 2.0, "b": 6.0}


def test_the_limits_are_multiples_of_idle_medians_unless_given() -> None:
    idle = [outcome(1.0, 1.1, 1.2), outcome(2.0, 2.1), outcome(9.0, 9.1)]
    assert results.slo_of(idle, None, None) == Slo(pytest.approx(8000), pytest.approx(200))
    assert results.slo_of(idle, 5.0, None) == Slo(5.0, pytest.approx(200))
    assert results.slo_of([], 5.0, 6.0) == Slo(5.0, 6.0)
    assert results.slo_of([], None, None) is None


# --- the generator


def within(scene: Callable[[StandIn], Awaitable[Any]], **instance: Any) -> Any:
    """Runs a scene with an instance."""

    async def main() -> Any:
        async with listening(StandIn(**instance)) as stand_in:
            return await scene(stand_in)

    return asyncio.run(main())


def offered(workload: Workload, *, limit_s: float = 60.0, **instance: Any) -> list[Outcome]:
    """Offers a workload to an instance."""
    return within(
        lambda stand_in: generator.offer(RoundRobin([stand_in.url]), workload, "test", limit_s, ignore), **instance
    )


def test_a_request_asks_for_exactly_its_tokens_and_is_answered() -> None:
    async def scene(stand_in: StandIn) -> list[dict[str, Any]]:
        outcomes = await generator.offer(RoundRobin([stand_in.url]), workload, "test", 60.0, ignore)
        assert [it.error for it in outcomes] == ["", ""]
        assert [(len(it.chunks_s), it.num_output) for it in outcomes] == [(3, 3), (3, 3)]
        return stand_in.bodies

    workload = Workload.draw(1, 100.0, 2, SMALL)
    bodies = sorted(within(scene), key=lambda body: len(body["prompt"]))
    wanted = sorted((workload.prompt(request, "test") for request in workload.requests), key=len)
    assert [body["prompt"] for body in bodies] == wanted
    for body in bodies:
        assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (3, 3, True, 0)


def test_a_slow_server_shows_in_the_ttft_of_all_requests_that_wait_for_it() -> None:
    """A closed loop would send the later requests later, and find each of them quick (coordinated omission)."""
    workload = Workload.draw(1, 100.0, 10, SMALL)
    outcomes = offered(workload, num_at_once=1, first_s=0.2)
    ttfts = [it.ttft_s for it in outcomes]
    # The last of ten requests within 0.1 s waits for nine turns of 0.2 s.
    assert max(ttfts) > 9 * 0.2 - workload.window_s
    assert sum(ttft > 0.4 for ttft in ttfts) >= 7
    # None was sent only after another had been answered.
    assert max(it.sent_s for it in outcomes) < min(it.end_s for it in outcomes) + 0.2 * 8


def test_gaps_are_those_of_the_server() -> None:
    (found,) = offered(Workload.draw(1, 10.0, 1, SMALL), first_s=0.1, gap_s=0.05)
    assert found.ttft_s >= 0.1
    assert all(gap >= 0.04 for gap in found.gaps_s)
    assert found.tpot_s == pytest.approx(sum(found.gaps_s) / 2)


def test_what_fails_is_told_with_its_reason() -> None:
    workload = Workload.draw(1, 20.0, 4, SMALL)
    found = offered(workload, fails={0: 503}, num_before_cut={1: 2}, error_after={2: 1})
    assert found[0].error == "503: out of order"
    assert not found[0].chunks_s
    assert found[1].error
    assert len(found[1].chunks_s) == 2
    assert "the engine is dead" in found[2].error
    assert found[3].error == ""


def test_a_request_is_given_up_after_its_limit() -> None:
    (found,) = offered(Workload.draw(1, 10.0, 1, SMALL), limit_s=0.2, first_s=60.0)
    assert "Timeout" in found.error


def test_a_server_that_is_not_there_loses_requests_and_stops_nothing() -> None:
    workload = Workload.draw(1, 100.0, 3, SMALL)
    found = asyncio.run(generator.offer(RoundRobin(["http://127.0.0.1:9"]), workload, "test", 5.0, ignore))
    assert all(it.error and not it.chunks_s for it in found)


def test_an_answer_with_fewer_tokens_than_asked_for_is_a_failure() -> None:
    stream = generator._Stream(0.0)
    for line in (b'data: {"choices": [{"text": "a"}]}', b'data: {"choices": [], "usage": {"completion_tokens": 1}}'):
        stream.read(line)
    assert stream.failure(2) == "the stream ended early"
    stream.read(b"data: [DONE]")
    assert stream.failure(2) == "1 tokens instead of 2"
    assert stream.failure(1) == ""


def test_requests_go_to_instances_in_turn() -> None:
    async def scene(first: StandIn) -> tuple[list[int], list[int]]:
        async with listening(StandIn()) as second:
            await generator.offer(RoundRobin([first.url, second.url]), workload, "test", 60.0, ignore)
            return tuple([len(body["prompt"]) for body in it.bodies] for it in (first, second))

    workload = Workload.draw(1, 200.0, 6, Mix((1, 999), (1, 1)))
    lengths = [request.num_prompt for request in workload.requests]
    first, second = within(scene)
    assert sorted(first) == sorted(lengths[::2])
    assert sorted(second) == sorted(lengths[1::2])


def test_nixl_is_asked_as_its_toy_proxy_does() -> None:
    async def scene(prefill: StandIn) -> tuple[Any, ...]:
        async with listening(StandIn()) as decode:
            found = await generator.ask(NixlPull(prefill.url, decode.url), [5, 6], 3, 60.0)
            return found, prefill.bodies[0], decode.bodies[0]

    found, first, second = within(scene)
    assert (found.error, len(found.chunks_s)) == ("", 3)
    assert (first["max_tokens"], first["min_tokens"], first["stream"]) == (1, 1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second["kv_transfer_params"] == {"remote_block_ids": [0]}
    assert second["max_tokens"] == 3


def test_a_prefill_of_nixl_that_fails_loses_its_request() -> None:
    found = within(lambda it: generator.ask(NixlPull(it.url, it.url), [5], 3, 60.0), fails={0: 500})
    assert "prefill answered 500" in found.error


# --- the subjects


class Started:
    """Takes the place of a pool: notes what is started."""

    def __init__(self) -> None:
        self.commands: dict[str, list[str]] = {}
        self.env: dict[str, dict[str, str]] = {}

    def start(self, name: str, url: str, command: list[str], env: dict[str, str], log: Path) -> Any:
        self.commands[name], self.env[name] = command, env
        return argparse.Namespace(name=name, url=url, until_healthy=lambda: None)

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
        self.prompts += [(target, *workload.prompt(request, use)) for request in workload.requests]
        return [outcome(1.0, 2.0, number=request.number) for request in workload.requests]

    async def _ask(
        self, target: Any, prompt: list[int], num: int, limit_s: float, number: int = 0, **_: Any
    ) -> Outcome:
        self.prompts.append((target, *prompt))
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


def test_no_prompt_comes_twice_to_a_subject(answers: Answers) -> None:
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


# --- under faults


def test_leased_blocks_are_read_from_the_metrics_and_a_dead_instance_has_none() -> None:
    async def scene(stand_in: StandIn) -> tuple[float | None, ...]:
        from kvpipe.bench.serving.faults import leased_blocks  # noqa: PLC0415

        async with generator._session(5.0) as http:
            return await leased_blocks(http, stand_in.url), await leased_blocks(http, "http://127.0.0.1:9")

    assert within(scene, leased=7.0) == (7.0, None)


def test_instances_are_killed_in_turn_and_come_back_while_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpipe.bench.serving.faults._SAMPLE_EVERY_S", 0.1)
    program = [sys.executable, str(Path(__file__).parent / "stand_in_completions.py")]
    with ServerPool() as pool:
        servers = [
            pool.start(
                name,
                f"http://127.0.0.1:{port}",
                [*program, "--host", "127.0.0.1", "--port", str(port)],
                {},
                tmp_path / name,
            )
            for name, port in zip(("prefill 0", "decode 0", "proxy"), vllm.free_ports(3), strict=True)
        ]
        for server in servers:
            server.until_healthy()
        target = RoundRobin([servers[2].url])
        instances = {"prefill": servers[:1], "decode": servers[1:2]}
        group = Group([Subject("kvpipe", target, target)], instances, {"kvpipe": servers[2]})
        before = [server.group for server in servers]
        workload = Workload.draw(1, 1.0, 10, SMALL)
        cells, faults = FaultyRun(pool, group, 0.5, 30.0, Progress(io.StringIO())).measure(workload)
        assert [cell.phase for cell in cells] == ["load", "faults"]
        assert [it.error for cell in cells for it in cell.outcomes] == [""] * 20
        assert [it.request for it in cells[0].outcomes] == [it.request for it in cells[1].outcomes]
        killed = [fault.instance for fault in faults.faults]
        assert killed[:3] == ["prefill 0", "decode 0", "prefill 0"]
        assert all(fault.back_s > fault.killed_s for fault in faults.faults[:-1])
        assert [server.group != pid for server, pid in zip(servers, before, strict=True)] == [True, True, False]
        assert faults.leased["prefill 0"]


# --- output


def findings(*, has_faults: bool = False) -> results.Findings:
    facts = {"cpu": "a CPU", "num_cpus": 2, "dtype": "float32", "commit": "c0ffee"}
    names = ("kvpipe", "undivided-2048")
    cells = [Cell("idle", name, 0.0, 1, [outcome(1.0, 1.1, 1.2)], {"generator": 0.1, "workers": 1.0}) for name in names]
    cells += [
        Cell(
            "load",
            name,
            rate,
            number,
            [outcome(0.5 + rate, 0.7 + rate, 0.8 + 2 * rate), outcome(error="503")],
            {"generator": 0.5},
        )
        for name in names
        for rate in (0.5, 1.0)
        for number in (1, 2, 3)
    ]
    cells.append(Cell("burst", "undivided-2048", float("inf"), 1, [outcome(1.0, 1.1)], {}))
    timelines = [Timeline(name, (-0.2, -0.1, 0.3, 0.4), 1.5) for name in names]
    faults = None
    if has_faults:
        cells.append(Cell("faults", "kvpipe", 1.0, 1, [outcome(1.0, 1.2), outcome(2.0, 2.5, error="cut")], {}))
        faults = Faults(
            [Fault("kvpipe prefill 0", 20.0, 70.0), Fault("kvpipe decode 0", 90.0, None)],
            {"kvpipe prefill 0": [(1.0, 3.0), (2.0, 0.0)]},
        )
    return results.Findings(facts, {"nixl": "not there"}, Slo(4000.0, 200.0), cells, timelines, faults)


def test_the_report_has_every_rate_with_its_quantiles_goodput_failures_and_cpu() -> None:
    text = report.text(findings())
    for words in ("SLO: TTFT 4000 ms, TPOT 200 ms", "skipped: nixl: not there", "all at once", "alone"):
        assert words in text
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| 0.5/s")]
    assert len(lines) == 2 * 3
    (latencies, throughput, cpu) = [[cell.strip() for cell in line] for line in lines[::2]]
    assert latencies[2:5] == ["kvpipe", "1000 / 1000 / 1000 / 1000", "200 / 200 / 200 / 200"]
    # Half of the requests failed; the others' mean gap is 400 ms.
    assert throughput[2:5] == ["kvpipe", "3", "2"]
    assert throughput[7:12] == ["0", "0 %", "0 %", "3", "0"]
    assert cpu[2:4] == ["kvpipe", "0.5"]
    assert "nixl: its workers spin" not in text


def test_the_tables_are_markdown() -> None:
    assert report.markdown(["a", "bb"], [["1", "2"], ["333", "4"]]).splitlines() == [
        "| a   | bb |",
        "| --- | -- |",
        "| 1   | 2  |",
        "| 333 | 4  |",
    ]


def test_the_json_has_facts_limits_rows_and_every_request() -> None:
    read = json.loads(report.as_json(findings(has_faults=True)))
    assert read["machine"]["commit"] == "c0ffee"
    assert read["slo"] == {"ttft_ms": 4000.0, "itl_ms": 200.0}
    row = next(row for row in read["rows"] if (row["phase"], row["rate"]) == ("load", 0.5))
    assert (len(row["rounds"]), row["figures"]["num_lost"]) == (3, 1)
    assert next(row for row in read["rows"] if row["phase"] == "burst")["rate"] is None
    request = next(it for it in read["requests"] if it["phase"] == "load")
    assert request["chunks_ms"] == [1000.0, 1200.0, 1800.0]
    assert request["num_prompt"] == 10
    assert read["faults"]["faults"][1] == {"instance": "kvpipe decode 0", "killed_s": 90.0, "back_s": None}
    assert read["timelines"][0]["first_s"] == 1.5


def test_faults_are_reported_with_leased_blocks_and_failures() -> None:
    text = report.text(findings(has_faults=True))
    for words in ("| kvpipe prefill 0 | 20 ", "not yet", "leased blocks"):
        assert words in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_written_as_their_file_is_called(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    found = findings(has_faults=True)
    for name, draw in (("load", plots.draw_load), ("timeline", plots.draw_timeline), ("faults", plots.draw_faults)):
        path = tmp_path / f"{name}{suffix}"
        draw(path, found)
        begins = path.read_bytes()[:5]
        assert begins.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


# --- arguments, and a whole run


def arguments(**changed: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([])
    vars(args).update(changed)
    return args


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"only": "mooncake"}, "--only mooncake: expected some of kvpipe, kvpipe-late"),
        ({"only": "nixl"}, "--only"),
        ({"loads": "half"}, "--loads half: expected numbers over 0"),
        ({"rates": "0"}, "--rates 0: expected numbers over 0"),
        ({"prompt_tokens": "9:1"}, "--prompt-tokens 9:1: expected LO:HI"),
        ({"rounds": 0}, "--rounds 0: expected more than 0"),
        ({"requests": 0}, "--requests 0: expected more than 0"),
        ({"kv_blocks": 4}, "--kv-blocks 4: a request may have"),
        ({"env": ["OMP"]}, "--env OMP: expected NAME=VALUE"),
        ({"json": Path("/nowhere/f.json")}, "file /nowhere/f.json: there is no such folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.main(arguments(**changed))


def test_without_memory_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.machine, "available_bytes", lambda: GIB)
    with pytest.raises(ConfigError, match="fewer subjects with --only, or fewer --kv-blocks"):
        command.main(arguments())


def test_a_run_under_faults_has_two_instances_of_each_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.machine, "available_bytes", lambda: GIB)
    with pytest.raises(ConfigError, match="for 4 instances"):
        command.main(arguments(faults=True))


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


def test_a_server_that_was_ended_starts_again_at_the_same_address(tmp_path: Path) -> None:
    (port,) = vllm.free_ports(1)
    program = [sys.executable, str(Path(__file__).parent / "stand_in_completions.py"), "--host", "127.0.0.1"]
    with ServerPool() as pool:
        server: Server = pool.start(
            "it", f"http://127.0.0.1:{port}", [*program, "--port", str(port)], {}, tmp_path / "log"
        )
        server.until_healthy()
        server.end()
        with pytest.raises(SubjectError, match="it has ended"):
            server.require_running()
        pool.restart(server)
        server.until_healthy()
        assert server.cpu_s_by_part()["API servers"] > 0
        assert server.is_healthy()
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 60
    assert not server.is_healthy()
