"""The same answers as one undivided instance; that the tests would see others is proved in `test_proof.py`."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.client import (
    CHAT,
    COMPLETIONS,
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

BLOCK = 32
REQUESTS = {
    "shorter than a block": (COMPLETIONS, completion(prompt(11))),
    "one token": (COMPLETIONS, completion(prompt(1))),
    "several blocks": (COMPLETIONS, completion(prompt(5 * BLOCK + 7))),
    "exactly four blocks": (COMPLETIONS, completion(prompt(4 * BLOCK))),
    "four blocks and one token": (COMPLETIONS, completion(prompt(4 * BLOCK + 1))),
    "four blocks less one token": (COMPLETIONS, completion(prompt(4 * BLOCK - 1))),
    "several steps": (COMPLETIONS, completion(prompt(1500))),
    "streamed": (COMPLETIONS, completion(prompt(101), stream=True)),
    "text": (COMPLETIONS, completion("def main() -> None:")),
    "chat": (CHAT, chat("What is a block table?")),
    "chat, streamed": (CHAT, chat("What is a rendezvous?", stream=True)),
}


@pytest.mark.parametrize("kind", kinds(REQUESTS, "exactly four blocks", "several steps", "chat, streamed"))
def test_the_answer_is_that_of_one_instance_and_decode_computes_no_prompt_token(servers: Servers, kind: str) -> None:
    path, body = REQUESTS[kind]
    text, handoff = servers.answer(servers.url, path, body)
    assert text == servers.expected(path, body)
    result = servers.result(handoff)
    is_short = result["prompt_tokens"] == 1  # nothing to move
    assert (result["result"], result["computed_tokens"]) == (("missing", 1) if is_short else ("full", 0))


@pytest.mark.smoke
def test_decode_itself_counts_every_prompt_token_as_transferred(servers: Servers) -> None:
    def by_source(source: str) -> float:
        lines = get(servers.decode.url, "/metrics").decode().splitlines()
        counts = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in counts if f'source="{source}"' in line)

    sources = ("local_compute", "external_kv_transfer")
    before = [by_source(source) for source in sources]
    for seed in range(3):
        servers.answer(servers.url, COMPLETIONS, completion(prompt(200, seed + 100)))
    # vLLM books the last token, which it computes again for its logits, as transferred too.
    assert [by_source(source) - was for source, was in zip(sources, before, strict=True)] == [0, 600]


@pytest.mark.smoke
def test_what_decode_has_cached_is_not_moved(servers: Servers) -> None:
    shared = prompt(4 * BLOCK, seed=7)
    servers.answer(servers.url, COMPLETIONS, completion(shared + prompt(9, 1)))
    body = completion(shared + prompt(9, 2))
    text, handoff = servers.answer(servers.url, COMPLETIONS, body)
    assert text == servers.expected(COMPLETIONS, body)
    result = servers.result(handoff)
    assert result["local_tokens"] == 4 * BLOCK
    assert result["computed_tokens"] == 0


@pytest.mark.smoke
def test_concurrent_requests_do_not_mix(servers: Servers) -> None:
    bodies = [completion(prompt(60 + 13 * seed, seed)) for seed in range(8)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        texts = list(threads.map(lambda body: servers.answer(servers.url, COMPLETIONS, body)[0], bodies))
    assert texts == [servers.expected(COMPLETIONS, body) for body in bodies]


def test_decode_may_be_asked_before_prefill_has_begun(servers: Servers) -> None:
    handoff, body = new_handoff(), completion(prompt(1700, seed=31))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(
            servers.answer, servers.decode.url, COMPLETIONS, body | consume(handoff, str(servers.prefill.control))
        )
        until(lambda: not servers.is_idle(servers.decode))
        with post(servers.prefill.url, COMPLETIONS, body | produce(handoff)) as response:
            response.read()
        text, _ = answer.result()
    assert text == servers.expected(COMPLETIONS, body)
    result = servers.result(handoff)
    assert (result["result"], result["computed_tokens"]) == ("full", 0)


@pytest.mark.smoke
def test_just_in_time_dispatch_asks_decode_before_prefill_has_answered(servers: Servers) -> None:
    servers.answer(servers.url, COMPLETIONS, completion(prompt(1200, seed=32)))  # whose steps prefill measures
    body = completion(prompt(3500, seed=33))
    text, handoff = servers.answer(servers.url, COMPLETIONS, body)
    assert text == servers.expected(COMPLETIONS, body)
    dispatch = until(lambda: json.loads(get(servers.url, f"/status/{handoff}")).get("dispatch"))
    assert dispatch["trigger"] in ("due", "finished")  # the latter if prefill was faster than predicted
    assert dispatch.keys() >= {"lead_ms", "admission_ms", "prediction_error_ms"}


@pytest.mark.smoke
def test_both_block_pools_are_whole_after_the_answers(servers: Servers) -> None:
    servers.answer(servers.url, COMPLETIONS, completion(prompt(300, seed=9)))
    servers.come_to_rest()
