"""Instances of the oldest vLLM that is supported, alone and beside the newest that has a build for CPUs.

`upgrade` has the oldest as prefill; reversed, it decodes.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvpipe.control import ControlClient
from tests.e2e.client import CHAT, COMPLETIONS, TOKEN, Servers, chat, completion, get, prompt
from tests.e2e.groups import OLDEST, Groups

BLOCK = 32
GREEDY = {
    "shorter than a block": (COMPLETIONS, completion(prompt(11))),
    "exactly four blocks": (COMPLETIONS, completion(prompt(4 * BLOCK))),
    "four blocks and one token": (COMPLETIONS, completion(prompt(4 * BLOCK + 1))),
    "several steps": (COMPLETIONS, completion(prompt(1500))),
    "streamed": (COMPLETIONS, completion(prompt(101), stream=True)),
    "many tokens": (COMPLETIONS, completion(prompt(203), max_tokens=48)),
    "chat": (CHAT, chat("What is a block table?")),
}
# Samplers of two versions draw other numbers from one seed.
REQUESTS = GREEDY | {"sampled": (COMPLETIONS, completion(prompt(150), temperature=1.2, seed=5))}


@pytest.fixture
def oldest(groups: Groups) -> Servers:
    """Instances that are all of the oldest vLLM."""
    return groups.show("oldest")


@pytest.fixture
def upgrade(groups: Groups) -> Servers:
    """The same, of which decode and the undivided one have been upgraded."""
    return groups.show("upgrade")


def check(servers: Servers, url: str, kind: str, **more: Any) -> None:
    path, body = REQUESTS[kind]
    text, handoff = servers.answer(url, path, body | more)
    result = servers.result(handoff)
    assert (result["result"], result["first_token"]) == ("full", "exact")
    assert text == servers.expected(path, body | more)


def versions(servers: Servers) -> list[str]:
    """What runs as prefill, decode and undivided instance."""
    instances = servers.prefill, servers.decode, servers.undivided
    return [json.loads(get(each.url, "/version"))["version"] for each in instances]


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_oldest_vllm_answers_as_one_instance_of_it(oldest: Servers, kind: str) -> None:
    assert versions(oldest) == [OLDEST] * 3
    check(oldest, oldest.url, kind)


@pytest.mark.parametrize("is_reversed", [False, True], ids=["old to new", "new to old"])
@pytest.mark.parametrize("kind", GREEDY)
def test_instances_of_different_vllms_answer_as_one_instance(upgrade: Servers, kind: str, *, is_reversed: bool) -> None:
    old, *new = versions(upgrade)
    assert old == OLDEST
    assert OLDEST not in new
    check(upgrade, upgrade.through("just-in-time", is_reversed=is_reversed), kind, cache_salt=str(is_reversed))


@pytest.mark.parametrize("is_reversed", [False, True], ids=["old to new", "new to old"])
def test_concurrent_requests_of_different_vllms_do_not_mix(upgrade: Servers, *, is_reversed: bool) -> None:
    url = upgrade.through("just-in-time", is_reversed=is_reversed)
    bodies = [completion(prompt(60 + 13 * seed, seed)) for seed in range(8)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: upgrade.answer(url, COMPLETIONS, body), bodies))
    assert [text for text, _ in answers] == [upgrade.expected(COMPLETIONS, body) for body in bodies]
    assert {upgrade.result(handoff)["result"] for _, handoff in answers} == {"full"}


def test_control_ports_of_different_vllms_find_no_difference(upgrade: Servers) -> None:
    client = ControlClient(TOKEN)
    try:
        for one, other in ((upgrade.prefill, upgrade.decode), (upgrade.decode, upgrade.prefill)):
            assert client.check(str(one.control), str(other.control)).wait(10) == ""
    finally:
        client.close()
