"""`kvpipe bench serving`: what is offered, how it is counted, and what is shown of it."""

import argparse
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from bench.report import as_json, markdown
from bench.results import Findings
from bench.serving import benchmark, command, metrics, plan, plots, report, results
from bench.serving.faults import Fault, Faults
from bench.serving.generator import Outcome
from bench.serving.measure import Measured
from bench.serving.metrics import Slo
from bench.serving.plan import Pace
from bench.serving.run import Cell, Timeline
from bench.serving.workload import MIXES, Mix, Request, Workload, parse_range
from kvpipe.exceptions import ConfigError

SMALL = Mix((4, 8), (3, 3))
GIB = 1 << 30


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


def test_the_time_of_an_answer_counts_from_when_it_was_due_and_only_of_those_that_are_complete() -> None:
    found = metrics.figures([outcome(3.0, 4.5, at_s=1.0, sent_s=2.5), outcome(9.0, error="cut")], 1.0, None, {})
    assert found["e2e_p50_ms"] == found["e2e_max_ms"] == pytest.approx(3500)


def test_gaps_are_counted_all_and_first_and_later_ones_apart() -> None:
    found = metrics.figures([outcome(1.0, 1.5, 1.6, 1.7), outcome(1.0, 1.9)], 1.0, None, {})
    assert found["second_max_ms"] == pytest.approx(900)
    assert found["second_p50_ms"] == pytest.approx(700)
    assert found["later_max_ms"] == pytest.approx(100)
    assert found["itl_max_ms"] == pytest.approx(900)
    assert found["tpot_max_ms"] == pytest.approx(900)


def test_a_gap_is_beside_a_prompt_while_another_request_waits_for_its_first_text() -> None:
    stream = outcome(1.0, 1.1, 1.2, 1.5, 1.6, 1.8)
    other = outcome(1.55, 1.9, at_s=1.3, sent_s=1.3)
    assert metrics.gaps_beside_prompts([stream, other]) == pytest.approx([0.3, 0.1])
    assert metrics.gaps_beside_prompts([stream]) == []


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


# --- output


def findings(*, has_faults: bool = False) -> Findings:
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
    measured = Measured(Slo(4000.0, 200.0), cells, timelines, faults)
    return results.findings_of(facts, {"nixl": "not there"}, measured)


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
    assert markdown(["a", "bb"], [["1", "2"], ["333", "4"]]).splitlines() == [
        "| a   | bb   |",
        "|-----|------|",
        "| 1   | 2    |",
        "| 333 | 4    |",
    ]


def test_the_json_has_facts_limits_rows_and_every_request() -> None:
    read = json.loads(as_json(findings(has_faults=True)))
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
    cells = [Cell("faults", "kvpipe", 1.0, 1, [outcome(1.0, 1.2), outcome(2.0, 2.5, error="cut")], {})]
    pictures = {
        "load": plots.draw_load,
        "timeline": plots.draw_timeline,
        "faults": lambda path, found: plots.draw_faults(path, found, cells),
    }
    for name, draw in pictures.items():
        path = tmp_path / f"{name}{suffix}"
        draw(path, found)
        begins = path.read_bytes()[:5]
        assert begins.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


# --- arguments


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
