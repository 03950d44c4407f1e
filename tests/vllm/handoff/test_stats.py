"""The connector's metrics in vLLM's `/metrics`: what the roles count, and how vLLM carries and shows it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.request import Request

from kvpipe import _kvpipe
from kvpipe.transfer_params import consume, resume
from kvpipe.vllm.handoff.connector import KVPipeConnector
from kvpipe.vllm.handoff.consumer.state_machine import Watch
from kvpipe.vllm.handoff.stats import KVPipeStats
from kvpipe.vllm.plugin import register
from tests.peers import ROOT
from tests.vllm.handoff.engine import BLOCK, Engine, new_id, outcome
from tests.vllm.handoff.test_scheduler import consuming, loading, opened, produced, prompt, scheduled, until
from tests.vllm.handoff.test_worker import Pair, received

pytestmark = pytest.mark.vllm

LABELS = {"model_name": "tiny", "engine": "0"}
LENGTH = 100


@pytest.fixture
def prom(config: VllmConfig) -> Iterator[KVConnectorProm]:
    """vLLM's side in an API server. It registers with the process's registry, as vLLM does."""
    yield KVConnectorProm(config, list(LABELS), {0: list(LABELS.values())})
    unregister_vllm_metrics()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.producer.close()
    pair.consumer.close()


def carried(stats: Any) -> Any:
    """Stats as an API server gets them from the process of the engine."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats))


def show(prom: KVConnectorProm, engine: Engine) -> None:
    for stats in engine.connector_stats:
        prom.observe(carried(stats), 0)
    engine.connector_stats.clear()


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:kvpipe_{name}", LABELS | labels)


def handoffs(engine: Engine) -> list[dict[str, Any]]:
    return [handoff for stats in engine.connector_stats for handoff in stats.get("handoffs", ())]


def loaded(engine: Engine, request: Request, **facts: Any) -> None:
    """Runs the load of an opened request to its end."""
    load = loading(engine, request)
    worker = {"finished_recving": {request.request_id}, "kv_connector_worker_meta": outcome(request, **facts)}
    if not facts.get("is_loaded", True):
        worker["invalid_block_ids"] = set(load.block_ids[-facts["num_missing"] :])
    engine.step(**worker)
    scheduled(engine, request)


def test_a_full_handoff_is_counted_with_its_tokens_and_bytes(
    engine: Engine, producer: _kvpipe.Control, prom: KVConnectorProm
) -> None:
    request, handoff = consuming(engine, producer, prompt(LENGTH))
    opened(producer, request, handoff)
    loaded(engine, request, num_received=4, num_bytes=4096)
    show(prom, engine)
    assert value("handoffs_total", result="full", reason="none") == 1
    assert value("handoff_received_tokens_total") == LENGTH
    assert value("handoff_missing_tokens_total") == value("handoff_recomputed_tokens_total") == 0
    assert value("handoff_received_bytes_total") == 4096
    assert value("handover_seconds_count") == 1
    assert 0 < value("handover_seconds_sum") < 60


def test_a_load_with_missing_blocks_counts_what_is_missing_and_what_is_computed_again(
    engine: Engine, producer: _kvpipe.Control, prom: KVConnectorProm
) -> None:
    request, handoff = consuming(engine, producer, prompt(LENGTH))
    opened(producer, request, handoff)
    loaded(engine, request, is_loaded=False, num_received=3, num_missing=1, cause="corrupt")
    show(prom, engine)
    assert value("handoffs_total", result="partial", reason="corrupt") == 1
    assert value("handoff_missing_tokens_total") == BLOCK
    assert value("handoff_received_tokens_total") == LENGTH - BLOCK
    # The first three blocks of 32 tokens count; the last one of 4 tokens is computed.
    assert value("handoff_recomputed_tokens_total") == LENGTH - 3 * BLOCK - 1


def unreachable(engine: Engine, producer: _kvpipe.Control) -> Request:
    return engine.add(prompt(LENGTH), params=consume(new_id(), "127.0.0.1:1"))


def refused(engine: Engine, producer: _kvpipe.Control) -> Request:
    engine.foreign = _kvpipe.Control("127.0.0.1:0", b"another token", "foreign")
    return engine.add(prompt(LENGTH), params=consume(new_id(), engine.foreign.address))


def withdrawn(engine: Engine, producer: _kvpipe.Control) -> Request:
    request, handoff = consuming(engine, producer, prompt(LENGTH))
    producer.withdraw(handoff, "what a peer says")
    return request


def of_another_prompt(engine: Engine, producer: _kvpipe.Control) -> Request:
    request, handoff = consuming(engine, producer, prompt(LENGTH))
    producer.open(handoff, bytes(32), LENGTH, [("127.0.0.1:1", bytes(16))])
    return request


def without_producer(engine: Engine, producer: _kvpipe.Control) -> Request:
    return engine.add(prompt(LENGTH), params=resume(new_id(), [7]))


def lost(engine: Engine, producer: _kvpipe.Control) -> Request:
    request, _ = consuming(engine, producer, prompt(LENGTH))
    until(lambda: engine.step() and [event for event in producer.drain() if event["event"] == "log"])
    producer.close()
    return request


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (unreachable, "unreachable"),
        (refused, "refused"),
        (withdrawn, "ended"),
        (of_another_prompt, "other_prompt"),
        (without_producer, "no_producer"),
        (lost, "lost"),
    ],
)
def test_a_handoff_that_brought_nothing_is_counted_with_its_reason_and_no_text_of_a_peer(
    engine: Engine,
    producer: _kvpipe.Control,
    prom: KVConnectorProm,
    begin: Callable[[Engine, _kvpipe.Control], Request],
    reason: str,
) -> None:
    scheduled(engine, begin(engine, producer))
    show(prom, engine)
    assert value("handoffs_total", result="missing", reason=reason) == 1
    assert value("handoff_missing_tokens_total") == value("handoff_recomputed_tokens_total") == LENGTH - 1
    assert value("handoff_received_tokens_total") == 0


def test_a_request_that_fails_is_counted_with_the_reason_for_which_its_kv_cannot_arrive(
    new_engine: Callable[..., Engine], producer: _kvpipe.Control
) -> None:
    engine = new_engine(on_load_failure="fail")
    request = withdrawn(engine, producer)
    load = loading(engine, request)
    word = outcome(request, is_loaded=False, num_missing=4, reason=load.refusal, cause="")
    engine.step(
        finished_recving={request.request_id},
        invalid_block_ids=set(load.block_ids),
        kv_connector_worker_meta=word,
    )
    engine.step()
    assert [(handoff["result"], handoff["reason"]) for handoff in handoffs(engine)] == [("failed", "ended")]


def test_a_handoff_that_ends_after_its_request_was_aborted_is_counted_as_aborted(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(LENGTH))
    opened(producer, request, handoff)
    load = loading(engine, request)
    consumed = engine.role._consuming._consumed.of(handoff)
    engine.abort(request)
    assert consumed.load.watch is Watch.OPEN
    producer.withdraw(handoff, "preempted")
    until(lambda: engine.step() and consumed.load.watch is Watch.OVER)
    engine.step(
        finished_recving={request.request_id},
        invalid_block_ids=set(load.block_ids),
        kv_connector_worker_meta=outcome(request, is_loaded=False, num_missing=4, cause="cancelled"),
    )
    engine.step()
    assert [(handoff["result"], handoff["reason"]) for handoff in handoffs(engine)] == [("aborted", "aborted")]


def test_a_handoff_that_is_late_is_counted_as_timed_out(
    new_engine: Callable[..., Engine], producer: _kvpipe.Control
) -> None:
    engine = new_engine(handoff_timeout_s=0.2)
    request, _ = consuming(engine, producer, prompt(LENGTH))
    scheduled(engine, request)
    assert [handoff["reason"] for handoff in handoffs(engine)] == ["timeout"]


def test_the_kind_of_a_cancelled_load_is_that_of_its_cancellation(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(LENGTH))
    opened(producer, request, handoff)
    load = loading(engine, request)
    producer.withdraw(handoff, "preempted")
    until(lambda: engine.step()[1].cancels)
    engine.step(
        finished_recving={request.request_id},
        invalid_block_ids=set(load.block_ids),
        kv_connector_worker_meta=outcome(request, is_loaded=False, num_missing=4, cause="cancelled"),
    )
    scheduled(engine, request)
    assert [handoff["reason"] for handoff in handoffs(engine)] == ["ended"]


def test_an_aborted_request_misses_no_token_and_has_no_hand_over(engine: Engine, producer: _kvpipe.Control) -> None:
    request, _ = consuming(engine, producer, prompt(LENGTH))
    engine.step()
    engine.abort(request)
    engine.step()
    [handoff] = handoffs(engine)
    assert (handoff["result"], handoff["reason"]) == ("aborted", "aborted")
    assert (handoff["missing_tokens"], handoff["handover_s"]) == (0, None)


def test_steps_in_which_nothing_ends_report_nothing(engine: Engine, producer: _kvpipe.Control) -> None:
    plain = engine.add(prompt(LENGTH))
    consuming(engine, producer, prompt(LENGTH, seed=2))
    until(lambda: engine.step() and plain.is_finished())
    assert engine.connector_stats == []
    assert engine.scheduler.connector.get_kv_connector_stats() is None


def test_leased_blocks_are_shown_until_they_are_free(engine: Engine, prom: KVConnectorProm) -> None:
    requests = [produced(engine, prompt(LENGTH, seed=seed))[0] for seed in (1, 2)]
    until(lambda: engine.step() and all(request.is_finished() for request in requests))
    show(prom, engine)
    assert value("leased_blocks") == 8
    engine.step(finished_sending={requests[0].request_id})
    show(prom, engine)
    assert value("leased_blocks") == 4
    engine.step(finished_sending={requests[1].request_id})
    show(prom, engine)
    assert value("leased_blocks") == 0


def test_sessions_are_shown_by_data_path_when_they_come_and_go(pair: Pair, prom: KVConnectorProm) -> None:
    def changed() -> dict[str, int] | None:
        num_sessions = pair.consumer.drain_num_sessions()
        if num_sessions is None:
            return None
        stats = KVPipeStats.of_sessions(0, *num_sessions)
        prom.observe(carried(stats.to_dict()))
        return stats.data["sessions"]["0"]

    assert changed() == {"remote_read": 0, "stream": 0}
    assert changed() is None
    pair.load([5])
    pair.announce([2])
    received(pair.consumer)
    assert sum(until(changed).values()) == 1
    shown = [value("sessions", data_path=path, rank="0") for path in ("remote_read", "stream")]
    assert sorted(shown) == [0, 1]
    assert changed() is None
    pair.producer.close()
    assert until(changed) == {"remote_read": 0, "stream": 0}


def stats_of(rank: int) -> KVPipeStats:
    stats = KVPipeStats()
    stats.set_sessions(rank, num_remote_read=rank, num_stream=1)
    return stats


def ended(result: str) -> KVPipeStats:
    stats = KVPipeStats()
    counts = {"received_tokens": 1, "missing_tokens": 2, "recomputed_tokens": 3, "received_bytes": 1 << 20}
    stats.add_handoff(result, "none", handover_s=0.5, **counts)
    return stats


def test_ranks_and_steps_add_up_and_of_a_state_the_latest_counts() -> None:
    total = stats_of(0).aggregate(stats_of(1)).aggregate(ended("full"))
    for num_blocks in (5, 3):
        later = ended("local")
        later.set_leased_blocks(num_blocks)
        total = total.aggregate(later)
    assert total.data["sessions"] == {
        "0": {"remote_read": 0, "stream": 1},
        "1": {"remote_read": 1, "stream": 1},
    }
    assert total.data["leased_blocks"] == 3
    assert [handoff["result"] for handoff in total.data["handoffs"]] == ["full", "local", "local"]


def test_the_log_line_of_an_interval_is_short_and_another_loggers_data_stays_as_it_is(config: VllmConfig) -> None:
    logging, lines = KVConnectorLogging(config.kv_transfer_config), []
    data = [ended("full").to_dict(), ended("partial").to_dict(), stats_of(1).to_dict()]
    before = carried(data)
    for each in data:
        logging.observe(each)
    logging.log(lambda _, line: lines.append(line))
    logging.log(lambda _, line: lines.append(line))
    assert data == before
    figures = ["Handoffs=2", "Full handoffs=1", "Recomputed tokens=6", "MiB received=2.0", "Avg hand-over (ms)=500.0"]
    assert lines == [", ".join([*figures, "Sessions (remote_read)=1", "Sessions (stream)=1"])]


def test_the_metrics_work_under_multi_connector(config: VllmConfig) -> None:
    register()
    single = config.kv_transfer_config
    child = {"kv_connector": "KVPipeConnector", "kv_role": "kv_both", "kv_connector_module_path": "kvpipe.connector"}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [child]}
    )
    try:
        prom = KVConnectorProm(config, list(LABELS), {0: list(LABELS.values())})
        logging = KVConnectorLogging(config.kv_transfer_config)
        stats = MultiConnector.build_kv_connector_stats({KVPipeConnector.__name__: ended("full")})
        data = carried(stats.to_dict())
        prom.observe(data)
        logging.observe(data)
        logging.observe(data)
        lines = []
        logging.log(lambda _, line: lines.append(line))
        assert value("handoffs_total", result="full", reason="none") == 1
        assert "'Handoffs': 2" in lines[0]
    finally:
        config.kv_transfer_config = single
        unregister_vllm_metrics()


@pytest.mark.slow
def test_of_several_api_servers_any_shows_all_handoffs_and_the_latest_number_of_leased_blocks(tmp_path: Path) -> None:
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    command = [sys.executable, "-m", "tests.vllm.handoff.api_servers"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = {
        (sample.name, sample.labels["engine"]): sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
    }
    assert [shown["vllm:kvpipe_handoffs_total", engine] for engine in "01"] == [2, 1]
    assert [shown["vllm:kvpipe_handoff_received_tokens_total", engine] for engine in "01"] == [64, 32]
    assert [shown["vllm:kvpipe_handover_seconds_count", engine] for engine in "01"] == [2, 1]
    assert [shown["vllm:kvpipe_leased_blocks", engine] for engine in "01"] == [3, 7]
