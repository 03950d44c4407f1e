"""Metadata of a step, which vLLM pickles between its processes."""

import pickle
from dataclasses import fields

import pytest

from kvpipe.vllm.handoff.metadata import StepMetadata, WorkerOutcomes

CONTENTS = {"control": "127.0.0.1:1", "first_tokens": {b"handoff": 7}}


@pytest.mark.parametrize("name", [field.name for field in fields(StepMetadata)])
def test_a_step_with_any_content_is_not_empty_and_survives_pickling(name):
    step = StepMetadata(**{name: CONTENTS.get(name, [b"content"])})
    assert not step.is_empty()
    assert pickle.loads(pickle.dumps(step)) == step


def test_an_empty_step_is_small_and_survives_pickling():
    pickled = pickle.dumps(StepMetadata())
    assert len(pickled) < 100
    step = pickle.loads(pickled)
    assert step.is_empty()
    step.loads.append(b"content")
    assert StepMetadata().is_empty()


def test_commits_that_one_of_two_reports_acknowledges_are_acknowledged():
    # vLLM 0.33 adds the report of a failed worker to the next ones.
    before, now = WorkerOutcomes(acknowledged=[b"1", b"2"]), WorkerOutcomes(acknowledged=[b"2", b"3"])
    assert before.aggregate(now).acknowledged == [b"1", b"2", b"3"]
