"""Requests through a real RabbitMQ broker: 2 P + 2 D of real vLLM answer as one instance.

One deployment serves all tests of a kind: KV goes by handoffs, or through a store. The test that kills a D comes last.
"""

import http.client
import itertools
import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from bench.instances.broker_process import BrokerProcess
from kvpipe.launch.deployment import DeploymentThread, Instance
from kvpipe.launch.process import ChildProcess
from kvpipe.launch.watchdog import kill_members
from tests.amqp.broker import started
from tests.e2e.behind_broker import Queued, instances
from tests.e2e.client import (
    CHAT,
    COMPLETIONS,
    Servers,
    chat,
    completion,
    get,
    post,
    prompt,
    streamed_text,
    text_of,
    until,
)
from tests.e2e.groups import STORE_CHUNK, Groups
from tests.zygote import Zygote

Request = tuple[str, dict[str, Any]]

# Two prompts of each are computed in one step: vLLM on CPU dies of seeded requests that are not.
LENGTHS = [5, 31, 32, STORE_CHUNK, STORE_CHUNK + 1, 4 * STORE_CHUNK, 5 * STORE_CHUNK + 7, 1000]
FINISHED = re.compile(r'^vllm:request_success_total\{.*finished_reason="length".*\} (\S+)$', re.MULTILINE)
# Answers that are long enough to be killed in the middle, and how many pieces of each the clients have by then.
NUM_STREAMS, NUM_TOKENS, NUM_BEFORE = 4, 400, 20


def kill(child: ChildProcess) -> None:
    """Ends all processes of an instance at once."""
    while kill_members(child.pid):
        pass


# SIGTERM has vLLM abort all requests, as if they had ended.
ENDS = {"handoff": kill, "store": lambda child: child.send_signal(signal.SIGTERM)}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker for the tests of this module, whose queues have different names."""
    with started(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@dataclass(frozen=True)
class Behind:
    """A deployment behind the broker, and how its instances share KV."""

    kind: str
    running: DeploymentThread
    queued: Queued

    @property
    def prefill(self) -> list[Instance]:
        return self.running.deployment.prefill

    @property
    def decode(self) -> list[Instance]:
        return self.running.deployment.decode

    def expected(self, requests: list[Request]) -> list[str]:
        """Answers of the undivided instance."""
        return [text for text, _ in at_once(self.running.deployment.undivided[0].url, requests)]


@pytest.fixture(scope="module", params=["handoff", "store"])
def behind(groups: Groups, zygote: Zygote, broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[Behind]:
    """Two prefill and two decode instances behind the broker."""
    groups.end()
    with instances(request.param, zygote) as running:
        deployment = running.deployment
        with Queued(broker.url, request.param, deployment.prefill, deployment.decode) as queued:
            yield Behind(request.param, running, queued)


def answer(url: str, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The text of an answer, and the id of its handoff."""
    with post(url, path, body) as response:
        payload = response.read()
        assert response.status == http.HTTPStatus.OK, payload
        handoff = response.headers["x-kvpipe-handoff"]
    return (streamed_text(payload) if body.get("stream") else text_of(json.loads(payload))), handoff


def at_once(url: str, requests: list[Request]) -> list[tuple[str, str]]:
    """Texts and handoffs of requests that are sent at the same time."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: answer(url, *request), requests))


def mixed(number: int, **more: Any) -> list[Request]:
    """Completions and chats, streamed and whole."""
    requests = [
        (COMPLETIONS, completion(prompt(length, seed=2 * number + stream), stream=stream, **more))
        for length in LENGTHS
        for stream in (False, True)
    ]
    return requests + [
        (CHAT, chat(f"What is a block table, {number} {each}?", stream=each % 2 == 0, **more)) for each in range(4)
    ]


def num_finished(instance: Instance) -> float:
    """Answers that an instance has completed; those of prefill have one token."""
    return sum(map(float, FINISHED.findall(get(instance.url, "/metrics").decode())))


def total(instance: Instance, name: str, label: str = "") -> float:
    """The sum of a counter of an instance."""
    lines = get(instance.url, "/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{") and label in line)


def come_to_rest(behind: Behind, decode: list[Instance]) -> None:
    """Waits until nothing is left of all requests: in the queues, and in the block pools of the instances."""
    for each in (*behind.prefill, *decode):
        until(lambda each=each: total(each, "vllm:kv_cache_usage_perc") == 0)
    until(lambda: {queue["messages"] for queue in behind.queued.state()["queues"].values()} == {0})


# --- one pair; the other tests have two


@pytest.mark.smoke
def test_answers_through_a_broker_are_those_of_one_instance(servers: Servers, broker: BrokerProcess) -> None:
    requests = mixed(500)[::3]
    with Queued(broker.url, "smoke", [servers.prefill], [servers.decode]) as queued:
        found = at_once(queued.url, requests)
        assert [text for text, _ in found] == [servers.expected(*request) for request in requests]
        results = {servers.result(handoff, servers.decode)["result"] for _, handoff in found}
        assert results == {"full"}
    servers.come_to_rest()


# --- two pairs


def test_answers_to_requests_at_once_are_those_of_one_instance_and_all_instances_take_part(behind: Behind) -> None:
    requests = mixed(510)
    before = {each.name: num_finished(each) for each in (*behind.prefill, *behind.decode)}
    first_tokens = sum(map(num_first_tokens, behind.decode))
    found = at_once(behind.queued.url, requests)
    assert [text for text, _ in found] == behind.expected(requests)
    for each in (*behind.prefill, *behind.decode):
        assert num_finished(each) > before[each.name], each.name
    if behind.kind == "handoff":
        results = [json.loads(get(behind.queued.url, f"/status/{handoff}")) for _, handoff in found]
        assert {(result["result"], result["computed_tokens"]) for result in results} == {("full", 0)}
    else:
        until(lambda: sum(map(num_first_tokens, behind.decode)) - first_tokens == len(requests))
    come_to_rest(behind, behind.decode)


def num_first_tokens(decode: Instance) -> float:
    """Requests that D has continued from the token that P has left in the store."""
    return total(decode, "vllm:kvpipe_store_first_tokens_total", 'reason="none"')


@pytest.mark.parametrize("more", [{"temperature": 1.0}, {"temperature": 1.2, "top_p": 0.9}])
def test_sampled_answers_are_those_of_one_instance(behind: Behind, more: dict[str, Any]) -> None:
    requests = mixed(520 + len(more), seed=7, **more)
    assert [text for text, _ in at_once(behind.queued.url, requests)] == behind.expected(requests)


def test_the_front_end_of_a_prefill_node_answers_its_clients_from_all_decode_nodes(behind: Behind) -> None:
    url = behind.queued.front(behind.prefill[1])
    requests = mixed(530)
    before = {each.name: num_finished(each) for each in (*behind.prefill, *behind.decode)}
    assert [text for text, _ in at_once(url, requests)] == behind.expected(requests)
    after = {each.name: num_finished(each) - before[each.name] for each in (*behind.prefill, *behind.decode)}
    assert (after["prefill-0"], after["prefill-1"]) == (0, len(requests))
    assert after["decode-0"] + after["decode-1"] == len(requests)
    assert min(after["decode-0"], after["decode-1"]) > 0


def test_clients_have_the_token_of_prefill_before_decodes_stream(behind: Behind) -> None:
    def num_early() -> float:
        lines = get(behind.queued.url, "/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvpipe_early_tokens_total"))

    def is_early(number: int) -> bool:
        before, requests = num_early(), [(COMPLETIONS, completion(prompt(STORE_CHUNK + number, seed=560), stream=True))]
        assert [text for text, _ in at_once(behind.queued.url, requests)] == behind.expected(requests)
        return num_early() > before

    # Front ends learn within seconds that decode instances force tokens.
    numbers = itertools.count()
    until(lambda: is_early(next(numbers)))


def test_the_page_of_queues_names_the_broker_and_all_decode_instances(behind: Behind) -> None:
    connection = http.client.HTTPConnection(behind.queued.url.partition("//")[2], timeout=10)
    with ExitStack() as stack:
        stack.callback(connection.close)
        connection.request("GET", "/queue", headers={"accept": "text/html"})
        page = connection.getresponse().read().decode()
    for shown in ("amqp://127.0.0.1", *(each.url for each in behind.decode)):
        assert shown in page


def ended_in_the_middle(behind: Behind, seed: int, end: Callable[[int], None]) -> int:
    """Ends a D or its worker while clients read long sampled answers: the other D completes all. Returns which one."""
    requests = [
        (
            COMPLETIONS,
            completion(
                prompt(2 * STORE_CHUNK + number, seed=seed),
                temperature=1.0,
                seed=seed + number,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                stream=True,
            ),
        )
        for number in range(NUM_STREAMS)
    ]
    texts = behind.expected(requests)
    before = [num_finished(each) for each in behind.decode]
    with ExitStack() as stack:
        responses = [stack.enter_context(post(behind.queued.url, *request)) for request in requests]
        begun = [b"".join(response.readline() for _ in range(2 * NUM_BEFORE)) for response in responses]
        ended = max(range(2), key=lambda index: total(behind.decode[index], "vllm:num_requests_running"))
        num_running = total(behind.decode[ended], "vllm:num_requests_running")
        end(ended)
        found = [streamed_text(head + response.read()) for head, response in zip(begun, responses, strict=True)]
    assert found == texts
    assert num_running > 0
    other = 1 - ended
    assert num_finished(behind.decode[other]) - before[other] >= num_running
    return ended


def test_clients_of_a_killed_worker_get_the_sampled_answer_of_one_instance(behind: Behind) -> None:
    killed = ended_in_the_middle(behind, 540, lambda index: behind.queued.workers[index].end())
    behind.queued.replace(behind.queued.workers[killed])
    come_to_rest(behind, behind.decode)


def test_clients_of_a_decode_instance_that_ends_get_the_sampled_answer_of_one_instance(behind: Behind) -> None:
    ended = ended_in_the_middle(behind, 550, lambda index: ENDS[behind.kind](behind.decode[index].child))
    come_to_rest(behind, [behind.decode[1 - ended]])
