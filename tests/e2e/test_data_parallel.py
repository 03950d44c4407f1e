"""Prefill and decode of two data-parallel ranks each: every pair of ranks is used, with answers of one instance."""

import json
import re
from collections import Counter
from itertools import product
from typing import Any

import pytest

from kvpipe.control import ControlClient
from kvpipe.launch.deployment import Instance
from tests.e2e.client import CHAT, COMPLETIONS, TOKEN, Servers, chat, completion, get, prompt, until
from tests.e2e.groups import Groups

BLOCK = 32
SIZE = 2
# Requests for each pair of ranks.
REQUESTS_EACH = 2
LENGTHS = [BLOCK, BLOCK + 1, 5 * BLOCK + 7, 300, 700, 1500]
PAIR = re.compile(r"request\.end handoff=(\w+) .* prefill=\S+#dp(\d) decode=\S+#dp(\d)")
ANSWERED = re.compile(r'^vllm:request_success_total\{engine="(\d)",.*\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def ranks(groups: Groups) -> Servers:
    """Servers of two ranks, all of which the proxy knows; the undivided one has one."""
    servers = groups.show(f"data parallel --data-parallel-size {SIZE} --num-gpu-blocks-override 1024")
    names = [[f"{each.url}#dp{rank}" for rank in range(SIZE)] for each in (servers.prefill, servers.decode)]
    until(lambda: [[*states(servers)[role]] for role in ("prefill", "decode")] == names)
    return servers


def states(servers: Servers) -> dict[str, Any]:
    """The proxy's report on its instances."""
    return json.loads(get(servers.url, "/health"))


def num_answered(instance: Instance) -> Counter[str]:
    """The requests that each engine of a server has answered, by vLLM's own count."""
    found: Counter[str] = Counter()
    for rank, number in ANSWERED.findall(get(instance.url, "/metrics").decode()):
        found[rank] += int(float(number))
    return found


def control_of(instance: Instance, rank: int) -> str:
    """The control port of a rank."""
    host, _, port = instance.control.rpartition(":")
    return f"{host}:{int(port) + rank}"


def test_every_pair_of_ranks_hands_over_and_answers_are_those_of_one_instance(ranks: Servers) -> None:
    requests = [(COMPLETIONS, completion(prompt(length), stream=length % 2 == 0)) for length in LENGTHS]
    requests += [(CHAT, chat(f"What is a block table, {number}?", stream=number == 0)) for number in range(2)]
    before = [num_answered(instance) for instance in (ranks.prefill, ranks.decode)]
    handoffs = []
    for path, body in requests:
        text, handoff = ranks.answer(ranks.url, path, body)
        assert text == ranks.expected(path, body)
        handoffs.append(handoff)

    log = ranks.running.deployment.spec.log_dir / "proxy.log"
    named = until(
        lambda: (
            (found := {h: (int(p), int(d)) for h, p, d in PAIR.findall(log.read_text())}).keys() >= {*handoffs}
            and found
        )
    )
    pairs = [named[handoff] for handoff in handoffs]
    assert Counter(pairs) == dict.fromkeys(product(range(SIZE), repeat=2), REQUESTS_EACH)
    # vLLM counts the ranks that have answered.
    for instance, was, index in ((ranks.prefill, before[0], 0), (ranks.decode, before[1], 1)):
        wanted = Counter(str(pair[index]) for pair in pairs)
        assert until(lambda instance=instance, was=was: (now := num_answered(instance)) != was and now) - was == wanted
    # The control port of that rank of D, and of no other, knows the handoff.
    client = ControlClient(TOKEN)
    try:
        for handoff, (_, decode) in zip(handoffs, pairs, strict=True):
            result = until(lambda h=handoff, d=decode: client.result(control_of(ranks.decode, d), h).wait(5))
            assert (result["result"], result["computed_tokens"]) == ("full", 0)
            assert client.result(control_of(ranks.decode, 1 - decode), handoff).wait(5) is None
    finally:
        client.close()


def test_every_pair_of_ranks_can_connect(ranks: Servers) -> None:
    report = states(ranks)
    assert report["status"] == "ok"
    assert "pairs" not in report
