"""Counts of real requests, by the proxy, and by the connector in vLLM's own metrics."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpipe.control import ControlClient
from kvpipe.launch.deployment import Instance
from tests.e2e.client import (
    CHAT,
    COMPLETIONS,
    TOKEN,
    Servers,
    chat,
    completion,
    consume,
    get,
    kinds,
    new_handoff,
    post,
    produce,
    prompt,
    until,
)

TEXTS = [f"What is a {name}? " * 20 for name in ("queue", "lease", "socket", "cache line", "semaphore")]
STREAMS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "completions": (COMPLETIONS, [completion(prompt(1500, seed=140 + seed), stream=True) for seed in range(5)]),
    "chats": (CHAT, [chat(text, stream=True) for text in TEXTS]),
}


def counts(servers: Servers) -> dict[tuple[str, ...], float]:
    """The proxy's metrics by name and labels."""
    families = text_string_to_metric_families(get(servers.url, "/metrics").decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


@pytest.mark.parametrize("kind", kinds(STREAMS, "completions"))
def test_streams_are_counted_and_some_of_them_begin_before_decode_has_spoken(servers: Servers, kind: str) -> None:
    path, bodies = STREAMS[kind]
    before = counts(servers)
    answers = [servers.answer(servers.url, path, body) for body in bodies]
    assert [text for text, _ in answers] == [servers.expected(path, body) for body in bodies]
    results = [servers.result(handoff) for _, handoff in answers]
    assert {result["result"] for result in results} == {"full"}

    def more(*key: str) -> float:
        return counts(servers).get(key, 0) - before.get(key, 0)

    until(lambda: more("kvpipe_handoffs_total", "full") == len(bodies))
    assert more("kvpipe_requests_total", "answered") == len(bodies)
    assert more("kvpipe_dispatch_lead_seconds_count") == len(bodies)
    assert more("kvpipe_handoff_received_bytes_total") == sum(result["bytes"] for result in results)
    assert more("kvpipe_handoff_recomputed_tokens_total") == 0
    # Not of each: a text may end within a character, and on a busy machine decode may have spoken meanwhile.
    assert more("kvpipe_early_tokens_total") > 0


class EngineMetrics:
    """The connector's metrics in an instance's `/metrics`, compared with their values at the start."""

    def __init__(self, instance: Instance) -> None:
        self._url = instance.url
        self._before = self.now()

    def now(self) -> dict[tuple[str, ...], float]:
        """Values by name, and by labels beyond the model's name and the engine, sorted."""
        families = text_string_to_metric_families(get(self._url, "/metrics").decode())
        values = {}
        for sample in (sample for family in families for sample in family.samples if "kvpipe" in sample.name):
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            own = sorted(f"{name}={value}" for name, value in labels.items())
            values[sample.name.removeprefix("vllm:kvpipe_"), *own] = sample.value
        return values

    def more(self, *key: str) -> float:
        """Growth of a counter."""
        return self.now().get(key, 0) - self._before.get(key, 0)


@pytest.mark.smoke
def test_vllms_metrics_of_decode_have_a_full_handoff_with_its_tokens_and_bytes(servers: Servers) -> None:
    metrics = EngineMetrics(servers.decode)
    _, handoff = servers.answer(servers.url, COMPLETIONS, completion(prompt(500, seed=150)))
    result = servers.result(handoff)
    assert result["result"] == "full"
    until(lambda: metrics.more("handoffs_total", "reason=none", "result=full") == 1)
    assert metrics.more("handoff_received_tokens_total") == 500
    assert metrics.more("handoff_received_bytes_total") == result["bytes"]
    assert metrics.more("handoff_missing_tokens_total") == metrics.more("handoff_recomputed_tokens_total") == 0
    assert metrics.more("handover_seconds_count") == 1
    assert metrics.more("handover_seconds_sum") == pytest.approx(result["handover_ms"] / 1000)
    now = metrics.now()
    # If prefill has been a consumer too, there is a session of its own for that.
    assert sum(now["sessions", f"data_path={path}", "rank=0"] for path in ("remote_read", "stream")) in (1, 2)


def test_vllms_metrics_of_decode_have_a_lost_handoff_with_its_reason(servers: Servers) -> None:
    metrics = EngineMetrics(servers.decode)
    body = completion(prompt(300, seed=151)) | consume(new_handoff(), "127.0.0.1:1")
    with post(servers.decode.url, COMPLETIONS, body) as response:
        response.read()
    until(lambda: metrics.more("handoffs_total", "reason=unreachable", "result=missing") == 1)
    assert metrics.more("handoff_missing_tokens_total") == metrics.more("handoff_recomputed_tokens_total") == 299
    assert metrics.more("handoff_received_tokens_total") == 0


def test_vllms_metrics_of_prefill_have_the_blocks_that_it_leases_until_they_are_released(servers: Servers) -> None:
    servers.come_to_rest()
    metrics, handoff = EngineMetrics(servers.prefill), new_handoff()
    assert metrics.now()["leased_blocks",] == 0
    with post(servers.prefill.url, COMPLETIONS, completion(prompt(300, seed=152)) | produce(handoff)) as response:
        response.read()
    # 300 tokens in blocks of 32.
    until(lambda: metrics.now()["leased_blocks",] == 10)
    client = ControlClient(TOKEN)
    assert client.release(servers.prefill.control, handoff).wait(5) is True
    client.close()
    until(lambda: metrics.now()["leased_blocks",] == 0)
