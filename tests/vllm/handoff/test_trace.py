"""`KVPIPE_TRACE`: the life of each handoff, as schedulers and workers write it."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from bench.trace import Event, read
from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.handoff.config import ConnectorConfig
from kvpipe.vllm.handoff.metadata import StepMetadata
from tests.vllm.handoff import test_worker
from tests.vllm.handoff.engine import Engine, new_id, outcome
from tests.vllm.handoff.test_scheduler import loading, prompt, scheduled, until

# Of a read by calls to the kernel
STEPS = ["turn", "moved", "reported", "compared"]

pytestmark = pytest.mark.vllm


def order(events: list[Event], *names: str) -> list[str]:
    """Those of `names` that happened, in their order."""
    return [event.name for event in events if event.name in names]


def threads() -> list[str]:
    """Names of this process's threads."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append(path.read_text().strip())
    return names


def test_schedulers_trace_the_life_of_a_handoff(new_engine: Callable[..., Engine], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    prefill, decode = (new_engine(trace=str(trace)) for _ in range(2))
    handoff = new_id()
    prefill.add(prompt(300), max_tokens=1, params=produce(handoff))
    request = decode.add(prompt(300), params=consume(handoff, prefill.role.address))
    for _ in range(2):
        prefill.step()
    loading(decode, request)
    until(lambda: order(read(trace), "finished"))
    decode.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    assert scheduled(decode, request) == 1
    there = Counter(queued=2, watched=1, opened=2, sampled=1, finished=1, admitted=1, received=1, scheduled=1)
    # Each process has a thread of its own that writes, some time later.
    until(lambda: Counter(event.name for event in read(trace)) >= there)
    events = read(trace)
    assert {event.handoff for event in events} == {handoff}
    assert order(events, "admitted", "received", "scheduled") == ["admitted", "received", "scheduled"]
    assert order(events, "opened", "sampled", "finished")[0] == "opened"


def test_workers_trace_layers_blocks_and_the_first_step(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    pair = test_worker.Pair(str(trace))
    pair.load([5, 4], has_state=False)
    pair.begin_step([2, 3])
    for layer in range(test_worker.LAYERS):
        pair.producer.save_layer(f"layer.{layer}")
    pair.producer.end_forward()
    until(lambda: pair.arrived([2, 3], [5, 4]))
    pair.consumer.begin_step(StepMetadata(states=[pair.handoff]))
    assert test_worker.received(pair.consumer) == {"consuming"}
    pair.consumer.begin_step(StepMetadata(first_steps=[pair.handoff]))
    pair.consumer.end_forward()
    once = "load", "verified", "committed", "loaded", "acknowledged", "first step"
    until(lambda: set(once) == set(order(read(trace), *once)))
    pair.producer.close()
    pair.consumer.close()
    events = read(trace)
    counted = Counter(event.name for event in events)
    assert counted["computed"] == test_worker.LAYERS
    assert [counted[name] for name in once] == [1] * 6
    arrived = [event for event in events if event.name == "arrived"]
    assert sum(event.facts["blocks"] for event in arrived) == 2 * test_worker.LAYERS
    assert {event.facts["layer"] for event in arrived} == set(range(test_worker.LAYERS))
    assert all(event.began_s <= event.ended_s for event in events)
    for read_s in arrived:
        steps = [event for event in events if event.name in STEPS and event.facts["layer"] == read_s.facts["layer"]]
        steps.sort(key=lambda event: (event.began_s, event.ended_s))
        assert [event.name for event in steps] == STEPS
        assert all(step.ended_s == pytest.approx(after.began_s, abs=1e-5) for step, after in pairwise(steps))
        assert (steps[1].began_s, steps[-1].ended_s) == pytest.approx((read_s.began_s, read_s.ended_s), abs=1e-5)
    ends = [event.name for event in events]
    assert ends.index("computed") < ends.index("arrived") < ends.index("loaded") < ends.index("first step")
    announced = sum(event.facts["blocks"] * event.facts["layers"] for event in events if event.name == "announced")
    assert announced == 2 * test_worker.LAYERS


def test_a_trace_is_a_list_that_lacks_its_end(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    pair = test_worker.Pair(str(trace))
    pair.producer.close()
    pair.consumer.close()
    lines = until(lambda: (text := trace.read_text()).count("\n") >= 7 and text)
    assert {line["ph"] for line in json.loads(lines.rstrip().rstrip(",") + "]")} == {"M"}


def test_without_a_file_nothing_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = threads().count("kvpipe-trace")
    pair = test_worker.Pair()
    pair.load([5, 4])
    pair.announce([2, 3])
    assert test_worker.received(pair.consumer) == {"consuming"}
    assert threads().count("kvpipe-trace") <= before
    pair.producer.close()
    pair.consumer.close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_trace_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPIPE_TRACE", "/tmp/trace.json")
    assert ConnectorConfig.parse({}).trace == "/tmp/trace.json"
    assert ConnectorConfig.parse({"trace": "other"}).trace == "other"
