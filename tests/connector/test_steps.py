"""`steps_ms` of a result: how long a decode's steps kept a request until its load had begun."""

import time
from typing import Any

import pytest

from kvpipe import _kvpipe
from kvpipe.connector.metadata import WorkerOutcomes
from tests.connector.engine import Engine, outcome
from tests.connector.test_scheduler import consuming, loading, opened, prompt, reported, scheduled, until

pytestmark = pytest.mark.vllm


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
