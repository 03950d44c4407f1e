"""What the proxy counts of real requests."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.client import CHAT, COMPLETIONS, Servers, chat, completion, get, kinds, prompt, until

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
