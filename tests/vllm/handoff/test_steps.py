"""A step of the scheduler role: what it costs beside many requests, and how long steps kept a request (`steps_ms`)."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from kvpipe import _kvpipe
from kvpipe.vllm.handoff.metadata import StepMetadata, WorkerOutcomes
from tests.vllm.handoff.engine import Engine, outcome
from tests.vllm.handoff.test_scheduler import consuming, loading, opened, produced, prompt, reported, scheduled, until

pytestmark = pytest.mark.vllm


class Unlooped(dict[str, int]):
    """Tokens by request, which can be looked up and not looped over."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError

    keys = values = items = __iter__


def test_a_step_is_not_searched_for_requests_of_its_own(engine: Engine, producer: _kvpipe.Control) -> None:
    """It may have a thousand others."""
    build = engine.role.build_metadata

    def build_unlooped(output: SchedulerOutput) -> StepMetadata:
        counts = Unlooped(output.num_scheduled_tokens)
        return build(dataclasses.replace(output, num_scheduled_tokens=counts, scheduled_cached_reqs=None))

    engine.role.build_metadata = build_unlooped
    engine.add(prompt(50, seed=9), max_tokens=50)
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loading(engine, request)
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    producing, _ = produced(engine, prompt(600, seed=2))
    until(lambda: engine.step() and request.is_finished() and producing.is_finished())
    assert reported(engine, handoff.hex())["computed_tokens"] == 1
    assert engine.role._producing._produced.get(producing.request_id).next_positions == [19]


def test_the_result_has_the_time_until_the_end_of_the_step_with_which_its_load_began(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)

    def beginning() -> Any:
        output = engine.scheduler.schedule()
        if not output.kv_connector_metadata.loads:
            engine.end(output)
            return None
        return output

    output = until(beginning)
    time.sleep(0.1)
    engine.end(output, kv_connector_worker_meta=WorkerOutcomes())
    time.sleep(0.1)
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    scheduled(engine, request)
    result = reported(engine, handoff.hex())
    assert 100 <= result["steps_ms"] <= result["handover_ms"] - 100


def test_waiting_for_the_producer_is_not_counted_as_steps(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    for _ in range(10):
        engine.step()
        time.sleep(0.05)
    opened(producer, request, handoff)
    loading(engine, request)
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))
    scheduled(engine, request)
    result = reported(engine, handoff.hex())
    # The last two of ten steps that came before may count, of 50 ms each.
    assert 0 < result["steps_ms"] <= result["handover_ms"] - 400
