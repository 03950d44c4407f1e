"""Requests of the end-to-end tests to the servers: answers, handoff results, metrics."""

import http.client
import json
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvpipe import transfer_params
from kvpipe.control import ControlClient
from kvpipe.launch.deployment import DeploymentThread, Instance

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TIMEOUT_S = 120
TOKEN = "the token of the tests"
LEASE_S = 15


def kinds(names: Iterable[str], *smoke: str) -> list[Any]:
    """The parameters of a test. Those that `smoke` names are smoke tests."""
    params = {name: pytest.param(name) for name in names}
    params |= {name: pytest.param(*params[name].values, marks=pytest.mark.smoke) for name in smoke}
    return list(params.values())


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt; each seed is another one."""
    return random.Random(f"{seed} {length}").choices(range(10, 2000), k=length)


def completion(ids: list[int] | str, **more: Any) -> dict[str, Any]:
    """Body of a greedy completion."""
    return {"model": "tiny", "prompt": ids, "temperature": 0, "max_tokens": 12, **more}


def chat(text: str, **more: Any) -> dict[str, Any]:
    """Body of a greedy chat completion."""
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12, **more}


@contextmanager
def sent(url: str, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """Sends a request; leaving the block closes the connection, as a client that goes away does."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        yield connection
    finally:
        connection.close()


@contextmanager
def post(url: str, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """Sends a request and waits for the head of its answer."""
    with sent(url, path, body) as connection:
        yield connection.getresponse()


def get(url: str, path: str) -> bytes:
    """Body of a GET."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def is_healthy(url: str) -> bool:
    """True if a server answers there."""
    try:
        get(url, "/health")
    except OSError:
        return False
    return True


def text_of(answer: dict[str, Any]) -> str:
    """The text of a completion or chat answer."""
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed_text(body: bytes) -> str:
    """The text of a stream of either kind."""
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = get(url, "/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def until(condition: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    """Waits until a condition holds, and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come to hold in time"
        time.sleep(0.1)
    return value


def result_of(handoff: str, asked: Iterable[Instance]) -> dict[str, Any]:
    """Result of a handoff, from the control port of one of these instances."""
    client = ControlClient(TOKEN)
    try:
        return until(lambda: next(filter(None, (client.result(each.control, handoff).wait(5) for each in asked)), None))
    finally:
        client.close()


class Servers:
    """The deployment, and the questions that tests ask of it."""

    def __init__(self, running: DeploymentThread, start_proxy: Callable[[str, bool], str]) -> None:
        self.running = running
        self._start_proxy = start_proxy
        self._proxies: dict[tuple[str, bool], str] = {}
        deployment = running.deployment
        self.url = deployment.url
        self.prefill, self.decode = deployment.prefill[0], deployment.decode[0]
        self.undivided = deployment.undivided[0]

    def through(self, dispatch: str, *, is_reversed: bool = False) -> str:
        """A proxy with another dispatch; reversed, prefill and decode change places."""
        key = dispatch, is_reversed
        if key not in self._proxies:
            self._proxies[key] = self._start_proxy(*key)
        return self._proxies[key]

    def answer(self, url: str, path: str, body: dict[str, Any]) -> tuple[str, str | None]:
        """The text of an answer, and the id of its handoff."""
        with post(url, path, body) as response:
            payload = response.read()
            assert response.status == http.HTTPStatus.OK, payload
            handoff = response.headers["x-kvpipe-handoff"]
        text = streamed_text(payload) if body.get("stream") else text_of(json.loads(payload))
        return text, handoff

    def expected(self, path: str, body: dict[str, Any]) -> str:
        """Answer of the undivided instance."""
        return self.answer(self.undivided.url, path, body)[0]

    def result(self, handoff: str, instance: Instance | None = None) -> dict[str, Any]:
        """Result of a handoff, from its consumer's control port: that of decode, or prefill where they changed."""
        return result_of(handoff, [instance] if instance is not None else [self.decode, self.prefill])

    def metric(self, instance: Instance, name: str) -> float:
        """As the function of this name."""
        return metric(instance.url, name)

    def holds_no_block(self, instance: Instance) -> bool:
        """True if the block pool of an instance is as large as when it was new."""
        return self.metric(instance, "vllm:kv_cache_usage_perc") == 0

    def is_idle(self, instance: Instance) -> bool:
        """True if no request runs or waits there."""
        running = self.metric(instance, "vllm:num_requests_running")
        return running + self.metric(instance, "vllm:num_requests_waiting") == 0

    def come_to_rest(self) -> None:
        """Waits until both instances are idle and their block pools as large as when they were new."""
        for instance in (self.prefill, self.decode):
            until(lambda instance=instance: self.is_idle(instance) and self.holds_no_block(instance))

    def kill(self, instance: Instance) -> None:
        """Ends an instance with SIGKILL, all its processes."""
        self.running.call(instance.child.stop(0))

    def restart(self, instance: Instance) -> None:
        """Starts a killed instance again with its addresses."""
        self.running.call(self.running.deployment.restart(instance))


def new_handoff() -> str:
    """A handoff id as the proxy mints it."""
    return secrets.token_hex(16)


def consume(handoff: str, producer: str) -> dict[str, Any]:
    """The parameters that the proxy gives to decode."""
    return {"kv_transfer_params": transfer_params.consume(handoff, producer)}


def produce(handoff: str) -> dict[str, Any]:
    """The parameters that the proxy gives to prefill."""
    return {"max_tokens": 1, "kv_transfer_params": transfer_params.produce(handoff)}
