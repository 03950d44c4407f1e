"""Routers written for vLLM's NixlConnector drive the same instances: none of them knows kvpipe.

Every run asks the relay of examples/, vLLM's router (scripts/servers), and llm_d_sidecar.py, a stand-in for llm-d's
sidecar. vLLM's own example of a P/D proxy is in no package: KVPIPE_TEST_EXAMPLE_PROXY is the path of its
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py.
"""

import contextlib
import http
import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvpipe.launch.ports import free_ports
from tests.e2e.client import CHAT, COMPLETIONS, Servers, chat, completion, kinds, post, prompt, sent, until
from tests.e2e.groups import LOGS, REPOSITORY
from tests.e2e.test_identity import TOOL, called, hot_chat

BLOCK = 32
EOS = "2"
REQUESTS = {
    "several steps": (COMPLETIONS, completion(prompt(1500, seed=61))),
    "exactly four blocks": (COMPLETIONS, completion(prompt(4 * BLOCK, seed=62))),
    "streamed": (COMPLETIONS, completion(prompt(101, seed=63), stream=True)),
    "streamed, with usage": (
        COMPLETIONS,
        completion(prompt(103, seed=67), stream=True, stream_options={"include_usage": True}),
    ),
    "hot": (COMPLETIONS, completion(prompt(200, seed=64), temperature=1.2, seed=7)),
    "over with the first token": (COMPLETIONS, completion(prompt(90, seed=65), logit_bias={EOS: 100})),
    "chat": (CHAT, chat("What is a relay?")),
    "chat, streamed": (CHAT, chat("What is a lease?", stream=True, max_completion_tokens=9)),
}
EXAMPLE_PROXY = os.environ.get("KVPIPE_TEST_EXAMPLE_PROXY", "")
NAMES = ["relay", "vllm-router", "llm-d's sidecar", *(["example proxy"] if EXAMPLE_PROXY else [])]


class Router:
    """A router before the shared instances."""

    def __init__(self, servers: Servers, name: str) -> None:
        self.servers, self.name = servers, name
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.command = [*_command(servers, name), "--port", str(port)]
        self._log = LOGS / "roomy" / f"{servers.decode.child.name}.log"

    def results(self) -> list[dict[str, str]]:
        """Decode's log of the handoffs that have ended."""
        lines = self._log.read_text(errors="replace").splitlines()
        ended = [line.partition("handoff.end ")[2] for line in lines if "handoff.end " in line]
        return [dict(field.split("=", 1) for field in line.split(" ") if "=" in field) for line in ended]

    def result_of(self, body: dict[str, Any], path: str) -> dict[str, str]:
        """Sends a request, compares its answer with the undivided instance's, and returns its handoff's result."""
        num_ended = len(self.results())
        assert self.servers.answer(self.url, path, body)[0] == self.servers.expected(path, body)
        return until(lambda: self.results()[num_ended:])[0]


def _command(servers: Servers, name: str) -> list[str]:
    prefill, decode = servers.prefill.url, servers.decode.url
    if name == "vllm-router":
        if shutil.which(name) is None:
            pytest.skip("vllm-router was not found: scripts/servers")
        options = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--host", "127.0.0.1"]
        return [name, *options, "--prefill", prefill, "--decode", decode, "--prometheus-port", str(free_ports(1)[0])]
    if name == "llm-d's sidecar":
        picked = ["--picked", urlsplit(prefill).netloc, "--decode", decode]
        return [sys.executable, str(REPOSITORY / "tests" / "e2e" / "llm_d_sidecar.py"), *picked]
    if name == "example proxy":
        ports = [str(urlsplit(url).port) for url in (prefill, decode)]
        hosts = ["--prefiller-host", "127.0.0.1", "--decoder-host", "127.0.0.1"]
        return [sys.executable, EXAMPLE_PROXY, *hosts, "--prefiller-port", ports[0], "--decoder-port", ports[1]]
    return [sys.executable, str(REPOSITORY / "examples" / "relay.py"), "--prefill", prefill, "--decode", decode]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Name of the router."""
    return request.param


@pytest.fixture
def router(servers: Servers, name: str) -> Iterator[Router]:
    """The router, which ends after each test; the instances go on."""
    router = Router(servers, name)
    num_ended = len(router.results())
    with subprocess.Popen(router.command) as process:
        try:
            until(lambda: _answers(router))
            until(lambda: len(router.results()) > num_ended)
            yield router
        finally:
            process.terminate()


def _answers(router: Router) -> bool:
    try:
        with post(router.url, COMPLETIONS, completion(prompt(5), max_tokens=1)) as response:
            response.read()
            return response.status == http.HTTPStatus.OK
    except OSError:
        return False


@pytest.mark.parametrize("kind", kinds(REQUESTS, "several steps", "chat, streamed"))
def test_the_answer_is_that_of_one_instance_and_all_kv_came_from_prefill(router: Router, kind: str) -> None:
    path, body = REQUESTS[kind]
    result = router.result_of(body, path)
    # Decode continues after prefill's token, but for a seed and a token that ends the request.
    num_computed = "1" if body.keys() & {"seed", "logit_bias"} else "0"
    assert (result["result"], result["computed_tokens"], result["first_token"]) == ("full", num_computed, "exact"), (
        result
    )


def test_a_stop_token_that_a_client_does_not_want_yet_is_not_taken_from_prefill(router: Router) -> None:
    """Routers drop a client's `min_tokens` on the way to prefill, which then samples the stop token."""
    body = completion(prompt(150, seed=66), logit_bias={EOS: 100}, min_tokens=5)
    result = router.result_of(body, COMPLETIONS)
    assert (result["result"], result["first_token"]) == ("full", "sampled"), result


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_call_is_that_of_one_instance(router: Router, *, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "remember"}}
    body = hot_chat("Who was it?", 65, max_tokens=48, tools=[TOOL], tool_choice=choice, stream=stream)
    num_ended = len(router.results())
    assert called(router.url, body)[0] == called(router.servers.undivided.url, body)[0]
    result = until(lambda: router.results()[num_ended:])[0]
    assert (result["result"], result["first_token"]) == ("full", "exact"), result


def test_what_is_no_single_handoff_is_answered_as_by_one_instance_and_nothing_stays_leased(router: Router) -> None:
    """The router passes on the parameters of one handoff for all of them."""
    prompts = [prompt(70 + 40 * seed, seed + 90) for seed in range(4)]
    for body in (completion(prompts), completion(prompts, n=2, temperature=1.2, seed=9)):
        texts = []
        for url in (router.url, router.servers.undivided.url):
            with post(url, COMPLETIONS, body) as response:
                choices = json.loads(response.read())["choices"]
                texts.append([choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])])
        assert texts[0] == texts[1]
        assert len(texts[0]) == len(prompts) * body.get("n", 1)
    router.servers.come_to_rest()


def test_requests_at_once_do_not_mix(router: Router) -> None:
    bodies = [completion(prompt(60 + 13 * seed, seed + 70)) for seed in range(8)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        texts = list(threads.map(lambda body: router.servers.answer(router.url, COMPLETIONS, body)[0], bodies))
    assert texts == [router.servers.expected(COMPLETIONS, body) for body in bodies]
    router.servers.come_to_rest()


@pytest.mark.smoke
def test_a_request_that_decode_refuses_leaves_nothing_leased(servers: Servers) -> None:
    """As any router passes on prefill's answer: decode's API server refuses before its engine knows the request."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    body = completion(prompt(200, seed=81))
    with post(servers.prefill.url, COMPLETIONS, body | {"max_tokens": 1, "kv_transfer_params": params}) as response:
        passed_on = json.loads(response.read())["kv_transfer_params"]
    assert not servers.holds_no_block(servers.prefill)
    refused = body | {"max_tokens": 100_000, "kv_transfer_params": passed_on}
    with post(servers.decode.url, COMPLETIONS, refused) as response:
        assert response.status == http.HTTPStatus.BAD_REQUEST
        response.read()
    until(lambda: servers.holds_no_block(servers.prefill), timeout_s=5)
    servers.come_to_rest()


def test_a_request_that_decode_refuses_leaves_nothing_leased_behind_a_router(router: Router) -> None:
    body = completion(prompt(200, seed=85), max_tokens=100_000)
    if router.name == "example proxy":  # it answers 200, and breaks off
        with contextlib.suppress(http.client.HTTPException), post(router.url, COMPLETIONS, body) as response:
            response.read()
    else:
        with post(router.url, COMPLETIONS, body) as response:
            assert response.status == http.HTTPStatus.BAD_REQUEST
            response.read()
    until(lambda: router.servers.holds_no_block(router.servers.prefill), timeout_s=5)
    router.servers.come_to_rest()


@pytest.mark.smoke
def test_a_client_that_leaves_leaves_nothing_leased(router: Router) -> None:
    streamed = completion(prompt(300, seed=82), stream=True, max_tokens=2000, ignore_eos=True)
    with post(router.url, COMPLETIONS, streamed) as response:
        assert response.read1(64)
    with sent(router.url, COMPLETIONS, completion(prompt(3900, seed=83))):
        until(lambda: not router.servers.is_idle(router.servers.prefill))
    router.servers.come_to_rest()


def test_several_choices_straight_to_the_instances_are_those_of_one_and_nothing_stays_leased(servers: Servers) -> None:
    """vLLM makes a request of each choice, and all of them have the same parameters."""
    body = completion(prompt(200, seed=84), n=2, temperature=1.2, seed=9)
    expected = choices(servers.undivided.url, body)[0]
    mints = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    _, passed_on = choices(servers.prefill.url, body | {"max_tokens": 1} | mints)
    found, _ = choices(servers.decode.url, body | {"kv_transfer_params": passed_on})
    assert found == expected
    result = servers.result(passed_on["remote_request_id"])
    assert (result["result"], result["computed_tokens"], result["first_token"]) == ("full", 1, "sampled")
    servers.come_to_rest()


def choices(url: str, body: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The texts of an answer in the order of its choices, and the parameters that it passes on."""
    with post(url, COMPLETIONS, body) as response:
        answer = json.loads(response.read())
    found = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [choice["text"] for choice in found], answer["kv_transfer_params"] or {}
