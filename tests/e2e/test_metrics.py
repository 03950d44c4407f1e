"""What the proxy counts of real requests."""

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.client import COMPLETIONS, Servers, completion, get, prompt, until


def counts(servers: Servers) -> dict[tuple[str, ...], float]:
    """The proxy's metrics by name and labels."""
    families = text_string_to_metric_families(get(servers.url, "/metrics").decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_handoffs_and_tokens_that_were_shown_early_are_counted(servers: Servers) -> None:
    before = counts(servers)
    bodies = [completion(prompt(1500, seed=140 + seed), stream=True) for seed in range(3)]
    results = [servers.result(servers.answer(servers.url, COMPLETIONS, body)[1]) for body in bodies]
    assert {result["result"] for result in results} == {"full"}

    def more(*key: str) -> float:
        return counts(servers).get(key, 0) - before.get(key, 0)

    until(lambda: more("kvpipe_handoffs_total", "full") == len(bodies))
    assert more("kvpipe_requests_total", "answered") == len(bodies)
    assert more("kvpipe_dispatch_lead_seconds_count") == len(bodies)
    assert more("kvpipe_handoff_received_bytes_total") == sum(result["bytes"] for result in results)
    assert more("kvpipe_handoff_recomputed_tokens_total") == 0
    # Not each: where the machine is busy, decode may have spoken by the time that its headers are looked at.
    assert more("kvpipe_first_tokens_shown_total") > 0
