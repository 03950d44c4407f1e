"""Starts the instances of a group as `kvpipe up` does, and asks them."""

import http.client
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.instances.model import random_prompt
from bench.instances.vllm import MODEL
from gpu_vllm.groups import ENV, LEASE_S, TOKEN, Group
from kvpipe.control import ControlClient
from kvpipe.exceptions import KVPipeError
from kvpipe.launch.deployment import DeploymentSpec, DeploymentThread, Instance
from kvpipe.launch.spec import VLLM_COMMAND

Body = dict[str, Any]
COMPLETIONS = "/v1/completions"
# Ids instead of texts as the names of tokens: two pieces of characters have the same text.
ALTERNATIVES: Body = {"return_tokens_as_token_ids": True, "logprobs": 2}
_TIMEOUT_S = 60
_BEGAN = time.monotonic()
# Of vLLM's logs: what it has chosen, and what kvpipe says once.
_CHOSEN = re.compile(
    r"attention backend|model runner|Asynchronous scheduling|FlashAttention version|cudagraph_mode|cuda\.|"
    r"Graph capturing|compile|connector\.|first_token|fingerprint|transport",
    re.IGNORECASE,
)
_NUM_CHOSEN = 25


def say(text: str) -> None:
    """Prints a line of progress with the seconds since the start."""
    print(f"{time.monotonic() - _BEGAN:6.1f} {text}", flush=True)


def spec(
    group: Group, model: Path, logs: Path, *, on_cpu: bool, server_command: Sequence[str] = VLLM_COMMAND, **env: str
) -> DeploymentSpec:
    """The deployment of a group: P, D, an undivided instance and the proxy."""
    chosen = group.on_cpu() if on_cpu else group
    return DeploymentSpec(
        model=str(model),
        num_undivided=1,
        token=TOKEN,
        gpus=() if on_cpu else ("0",),
        server_command=server_command,
        connector_config={"lease_s": LEASE_S},
        env={**ENV, **chosen.env, **env},
        vllm_args=("--served-model-name", MODEL, *chosen.args),
        log_dir=logs,
        startup_timeout_s=float(os.environ.get("GPU_CHECK_START_S", "170")),
        grace_s=3.0,
    )


def completion(tokens: Sequence[int], *, with_alternatives: bool = True, **more: Any) -> Body:
    """Body of a completion whose answer names token ids, and their alternatives."""
    named = {"return_token_ids": True, **(ALTERNATIVES if with_alternatives else {})}
    return {"model": MODEL, "prompt": list(tokens), "temperature": 0, "max_tokens": 24, **named, **more}


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of a prompt; each seed is another one."""
    return random_prompt(length, f"{seed} {length}")


def get(url: str, path: str) -> str:
    """Body of a GET."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def ask(url: str, body: Body) -> tuple[dict[str, Any], str]:
    """An answer and the id of its handoff, which is empty without one.

    Raises:
        RuntimeError: The answer is an error, or broke off.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        payload = response.read()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{url} answered {response.status}: {payload[:300]!r}")
        return json.loads(payload), response.headers["x-kvpipe-handoff"] or ""
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(f"{url}: {error!r}") from error
    finally:
        connection.close()


def token_ids(answer: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def margin(expected: dict[str, Any], found: dict[str, Any]) -> float | None:
    """How far apart in log-probability two tokens are where the answers part. None where they do not."""
    alternatives = (expected["choices"][0].get("logprobs") or {}).get("top_logprobs") or []
    mine, theirs = token_ids(expected), token_ids(found)
    for at, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            if at >= len(alternatives):
                return float("inf")
            likely = [alternatives[at].get(f"token_id:{each}", float("-inf")) for each in (one, other)]
            return abs(float(likely[0] - likely[1])) if min(likely) > float("-inf") else float("inf")
    return None if len(mine) == len(theirs) else float("inf")


def until(condition: Callable[[], Any], within_s: float) -> Any:
    """Waits until a condition holds; returns what it gave, or its last value when the time has passed."""
    deadline = time.monotonic() + within_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def metric(instance: Instance, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = [line for line in get(instance.url, "/metrics").splitlines() if line.startswith(name + "{")]
    if not lines:
        raise RuntimeError(f"{instance.url} has no metric {name}")
    return sum(float(line.rpartition(" ")[2]) for line in lines)


class Asker:
    """Asks the proxy and the undivided instance, and D's control port about each handoff."""

    def __init__(self, running: DeploymentThread) -> None:
        deployment = running.deployment
        self.running = running
        self.url = deployment.url
        self.prefill, self.decode = deployment.prefill[0], deployment.decode[0]
        self.undivided = deployment.undivided[0]
        self._control = ControlClient(TOKEN)

    def close(self) -> None:
        """Closes the connections to control ports."""
        self._control.close()

    def result(self, handoff: str) -> dict[str, Any]:
        """How a handoff ended, as D's control port says."""
        reason = ""

        def asked() -> dict[str, Any] | None:
            nonlocal reason
            try:
                return self._control.result(self.decode.control or "", handoff).wait(5)
            except KVPipeError as error:  # such as a session's end after 10 s without CPU time
                reason = str(error)
                return None

        return until(asked, 10) or {"result": "unknown", "reason": reason}

    def both(self, body: Body) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The undivided instance's answer, that through P and D, and how the handoff ended."""
        with ThreadPoolExecutor(2) as threads:
            alone = threads.submit(ask, self.undivided.url, body)
            found, handoff = ask(self.url, body)
            return alone.result()[0], found, self.result(handoff) if handoff else {"result": "no handoff"}


def chosen_lines(logs: Iterable[Path]) -> dict[str, list[str]]:
    """What vLLM and kvpipe say that they have chosen, by log."""
    found = {}
    for log in logs:
        lines = [line[:300] for line in log.read_text(errors="replace").splitlines() if _CHOSEN.search(line)]
        found[log.stem] = list(dict.fromkeys(lines))[:_NUM_CHOSEN]
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes findings so that a reader never sees a half of them."""
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(found, indent=1) + "\n")
    scratch.replace(path)


def fail(path: Path, found: dict[str, Any], error: BaseException) -> int:
    """Adds an error to the findings, prints it, and returns the exit status."""
    write(path, found | {"error": f"{type(error).__name__}: {error}"[-4000:]})
    say(f"failed: {type(error).__name__}: {error}")
    sys.stdout.flush()
    return 1
