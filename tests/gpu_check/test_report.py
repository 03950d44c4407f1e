"""The report of `gpu-check --vllm`: the table and the picture, and what is objected to."""

import math

import pytest
from gpu_vllm import answers, instances, report

FACTS = {"commit": "0123456789ab", "device": "NVIDIA H200", "torch": "2.11.0+cu130"}


def spread(median):
    return {"median": median, "p10": median / 2, "p90": median * 2, "num_samples": 8}


def shape(**more):
    ways = ("undivided", "just-in-time", "sequential")
    rows = {
        f"{tokens} {way}": {
            "first_ms": spread(20.0),
            "between_ms": spread(2.0),
            **({} if way == "undivided" else {"handover_ms": spread(8.0), "megabytes": spread(67.1)}),
        }
        for tokens in (512, 2048)
        for way in ways
    }
    return {"outcome": "passed", "seconds": 80.0, "one at a time": rows, **more}


def result(**steps):
    return {"date": "2026-11-27", "facts": FACTS, "steps": steps}


def test_the_table_begins_with_card_and_commit_and_has_a_row_for_each_figure():
    lines = report.table(result(shape=shape(), probe={"outcome": "passed", "seconds": 19.2}))
    assert lines[0] == "2026-11-27: kvpipe at 0123456789ab, device NVIDIA H200, torch 2.11.0+cu130"
    assert "shape, one at a time, 2048 undivided: first_ms 20.00 (40.00), between_ms 2.00 (4.00)" in lines
    assert lines[-1] == "shape: hand-over of 2048 tokens 8.00 (16.00) ms of 15: reached"


def test_a_commit_that_is_not_known_is_said_to_be_so():
    assert report.title({"device": "H200"}) == "kvpipe at an unknown commit, device H200"


def test_a_hand_over_over_the_reach_is_told():
    slow = shape()
    slow["one at a time"]["2048 just-in-time"]["handover_ms"] = spread(15.1)
    assert report.table(result(shape=slow))[-1].endswith("15.10 (30.20) ms of 15: NOT reached")


def test_objections_and_the_reason_of_a_failure_are_in_the_table():
    step = {"outcome": "failed", "seconds": 3.0, "wrong": ["result {'missing': 1}, not only full"], "error": "a\nlast"}
    lines = report.table(result(**{"float32-v2": step}))
    assert lines[2:] == ["    result {'missing': 1}, not only full", "    a", "    last"]


def test_the_picture_is_drawn_and_names_the_commit(tmp_path):
    pytest.importorskip("matplotlib")
    found = result(shape=shape())
    lines = report.write(found, tmp_path)
    assert not [line for line in lines if line.startswith("no picture")]
    assert (tmp_path / report.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / report.TABLE).read_text().splitlines() == lines
    assert "0123456789ab" in report.picture(found).get_suptitle()


def test_a_picture_without_figures_is_drawn_too(tmp_path):
    pytest.importorskip("matplotlib")
    assert not [line for line in report.write(result(), tmp_path) if line.startswith("no picture")]


def test_a_colour_means_the_same_in_each_panel():
    pytest.importorskip("matplotlib")
    colours = [
        {drawn.get_label(): drawn[0].get_color() for drawn in axis.containers}
        for axis in report.picture(result(shape=shape())).axes
    ]
    assert [len(each) for each in colours] == [3, 3, 2]
    assert colours[0] == colours[1] == colours[0] | colours[2]


def death(**more):
    return {"under way": 8, "result": {"missing": 1}, "right": 8, "decode_holds_no_block": True, **more}


@pytest.mark.parametrize(
    ("found", "objection"),
    [
        (death(), None),
        (death(**{"under way": 0}), "too late, no request was under way"),
        (death(result={"full": 8}), "too late, all KV had come"),
        (death(wrong=1), "1 wrong answers"),
        (death(decode_holds_no_block=False), "not decode_holds_no_block"),
        (death(**{"no answer": 1, "errors": ["502"]}), "1 requests without an answer"),
    ],
)
def test_a_death_counts_when_it_came_while_requests_were_under_way(found, objection):
    wrong = answers.wrong_after_deaths("prefill killed", found)
    assert len(wrong) == (objection is not None)
    assert objection is None or objection in wrong[0]


def test_the_table_says_what_was_under_way_at_a_death():
    row = report.table(result(**{"float32-v2": {"outcome": "passed", "seconds": 1.0, "prefill killed": death()}}))[1]
    assert row.endswith("prefill killed: 8 under way, 8 right, 0 wrong, 0 no answer, missing 1")


def compared(**more):
    found = {"asked": 2, "parted": {}, "result": {"full": 2}, "transport": {"cuda_ipc": 2}, "first_token": {"exact": 2}}
    return found | {"computed_tokens": {"0": 2}} | more


@pytest.mark.parametrize(
    ("found", "objections"),
    [
        (compared(), []),
        (compared(transport={"cma": 2}), ["transport {'cma': 2}, not only cuda_ipc"]),
        (compared(result={"full": 1, "part": 1}), ["result {'full': 1, 'part': 1}, not only full"]),
        (compared(result={}), ["result {}, not only full"]),
        (compared(parted={"greedy 11": {"margin": 0.5}}), ["1 of 2 answers differ: greedy 11"]),
        (compared(parted={"greedy 11": {"margin": 1e-6}}), []),
        (compared(parted={"greedy 11": {"margin": None}}), ["1 of 2 answers differ: greedy 11"]),
        (compared(computed_tokens={"1": 2}), ["computed_tokens {'1': 2}, not only 0"]),
    ],
)
def test_answers_and_handoffs_are_objected_to_unless_equal_full_exact_and_by_cuda_ipc(found, objections):
    assert answers.objections(found, is_exact=True, transport="cuda_ipc", computed="0") == objections


@pytest.mark.parametrize(("margin", "is_right"), [(0.0625, True), (None, True), (0.5, False), (math.inf, False)])
def test_answers_in_other_batches_may_part_by_rounding_only(margin, is_right):
    found = compared(parted={"at once 3": {"margin": margin}})
    assert answers.objections(found, is_exact=False, transport="cuda_ipc", computed="0") == (
        [] if is_right else ["1 of 2 answers differ: at once 3"]
    )


def answered(*tokens, likely):
    alternatives = [{f"token_id:{token}": value for token, value in each.items()} for each in likely]
    return {"choices": [{"token_ids": list(tokens), "logprobs": {"top_logprobs": alternatives}}]}


@pytest.mark.parametrize(
    ("found", "margin"),
    [((5, 7), None), ((5, 8), 0.5), ((5, 9), math.inf), ((5,), math.inf), ((5, 6), 2.0)],
)
def test_a_margin_is_how_far_the_tokens_are_apart_and_infinite_where_one_is_not_among_the_likely(found, margin):
    expected = answered(5, 7, likely=[{5: -0.1}, {7: -3.0, 8: -2.5, 6: -1.0}])
    assert instances.margin(expected, answered(*found, likely=[])) == margin
