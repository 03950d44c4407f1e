"""The steps of `gpu-check --vllm`: their order, what is left out, their bounds, and what comes back.

The programs of the steps are small ones of these tests.
"""

import json
import os
import textwrap

import pytest
from gpu_vllm import groups, there
from gpu_vllm.there import Check, Step

from kvpipe.launch.gpus import assign_gpus, start_turns

PROGRAMS = {
    "passes": "finish({'start_s': 1.0}, 0)",
    "measures": "finish({'start_s': 1.0, 'eight at once': {'a': {}}}, 0)",
    "starts_and_fails": "finish({'start_s': 1.0, 'wrong': ['it differs']}, 1)",
    "fails": "sys.exit(1)",
    "hangs": "print('pid', os.getpid(), flush=True); time.sleep(600)",
}
FILES = {"console.log", "probe.log", "instances.log", "result.json", "table.txt", "figures.png", "trace.json"}


@pytest.fixture
def run(tmp_path):
    """Runs steps to their end; returns the check."""
    checks = []
    package = tmp_path / "programs/gpu_vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, line in PROGRAMS.items():
        program = f"""
            import json, os, pathlib, sys, time
            def finish(found, status):
                pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(found))
                sys.exit(status)
            {line}
        """
        (package / f"{name}.py").write_text(textwrap.dedent(program))

    def run(*steps, within_s=30.0):
        check = Check(tmp_path / "out", within_s, [], site=None, on_cpu=False)
        checks.append(check)
        check.steps = list(steps)
        check._all_steps(os.environ | {"PYTHONPATH": str(tmp_path / "programs")})
        return check

    yield run
    for check in checks:
        for each in check.runs.values():
            check._end(each, "stopped")
        check.close()


def outcomes(check):
    return {name: each.outcome for name, each in check.runs.items()}


def console(check):
    lines = (check.out / "console.log").read_text().splitlines()
    return [line.split(maxsplit=1)[1].partition(" after")[0] for line in lines]


def test_a_step_begins_when_what_it_needs_has_ended_and_one_that_measures_is_alone_at_the_end(run):
    measures = Step("measures", "passes", 20, ("first",), is_alone=True)
    check = run(measures, Step("second", "passes", 20, ("first",)), Step("first", "passes", 20))
    told = ["first: begun", "first: passed", "second: begun", "second: passed", "measures: begun", "measures: passed"]
    assert console(check) == told


def test_a_step_is_left_out_when_none_of_its_needs_has_started_and_what_needs_that_one_too(run):
    check = run(Step("a", "fails", 20), Step("b", "passes", 20, ("a",)), Step("c", "passes", 20, ("b",)))
    assert outcomes(check) == {
        "a": "failed",
        "b": "left out: none of a has started",
        "c": "left out: none of b has started",
    }


def test_a_step_runs_when_one_of_its_needs_has_started_its_engines_although_answers_were_wrong(run):
    steps = [Step("a", "fails", 20), Step("b", "starts_and_fails", 20), Step("c", "passes", 20, ("a", "b"))]
    check = run(*steps)
    assert outcomes(check) == {"a": "failed", "b": "failed", "c": "passed"}
    assert check.result()["steps"]["b"]["wrong"] == ["it differs"]


def test_a_step_that_runs_in_place_of_another_is_left_out_when_that_one_has_measured(run):
    shape = Step("shape", "measures", 20, is_alone=True)
    check = run(shape, Step("shape-eager", "passes", 20, is_alone=True, instead_of="shape"))
    assert outcomes(check) == {"shape": "passed", "shape-eager": "left out: shape has measured"}


def test_the_bound_of_a_step_ends_it_and_the_others_go_on(run):
    check = run(Step("a", "hangs", 1), Step("b", "passes", 20))
    assert outcomes(check) == {"a": "failed: over its 1 s", "b": "passed"}
    assert check.runs["a"].process.returncode is not None


def test_when_the_time_of_the_whole_has_passed_nothing_begins_any_more(run):
    check = run(Step("a", "hangs", 60), Step("b", "passes", 60, ("a",)), within_s=1.0)
    assert "b" not in check.runs
    assert console(check)[-1] == "1 s have passed: 1 steps ended, 1 left out"


def test_what_comes_back_is_eight_files_at_most_with_the_commit_beside_the_findings(run):
    check = run(*(Step(f"step {number}", "passes", 20, weight=1) for number in range(12)))
    check.facts["commit"] = "0123456789ab"
    trace = check.logs / "shape" / there.TRACE
    trace.parent.mkdir()
    trace.write_text("[")
    check._gather()
    assert check._report() == 0
    assert {file.name for file in check.out.iterdir()} == FILES
    assert len(FILES) <= 8
    assert json.loads((check.out / "result.json").read_text())["facts"]["commit"] == "0123456789ab"


def test_a_run_in_which_nothing_has_run_is_no_success(run):
    assert run()._report() == 1


def test_the_steps_are_those_of_the_reference_in_their_order():
    steps = there.steps()
    names = [step.name for step in steps]
    assert names[0] == "probe"
    engines = {name for name in names if name.startswith("engine ")}
    assert {name.removeprefix("engine ") for name in engines} <= groups.GROUPS.keys()
    assert set(names) - engines - {"probe"} == groups.GROUPS.keys() | groups.SHAPES.keys()
    for at, step in enumerate(steps):
        assert set(step.needs) <= set(names[:at]), step.name
    assert [step.name for step in steps if step.is_alone] == names[-2:] == ["shape", "shape-eager"]


@pytest.mark.parametrize("group", [*groups.GROUPS.values(), *groups.SHAPES.values()])
def test_the_instances_of_a_group_start_at_once_although_they_share_a_gpu(group):
    assert set(start_turns(assign_gpus(3, ("0",), group.args), group.args)) == {0}


def test_every_step_has_a_bound_within_eight_minutes():
    assert all(step.bound_s <= 300 for step in there.steps())
    assert there.steps()[0].bound_s <= 120
