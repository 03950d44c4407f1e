"""Prefill and decode instances and their proxy, on one machine.

`Deployment` starts, watches and ends the processes. It does not react when one dies, so that tests can kill and restart
processes.
"""

import asyncio
import http
import signal
import socket
import threading
import time
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp

from kvpipe.exceptions import ConfigError, KVPipeError
from kvpipe.launch.gpus import start_turns
from kvpipe.launch.plan import Echo, Instance, Planner
from kvpipe.launch.ports import release_ports
from kvpipe.launch.process import ChildProcess
from kvpipe.launch.spec import DeploymentSpec
from kvpipe.launch.states import States
from kvpipe.launch.watchdog import Watchdog
from kvpipe.proxy.api_keys import ApiKeys
from kvpipe.proxy.tls import server_context

__all__ = ["Deployment", "DeploymentSpec", "DeploymentThread", "Instance"]

T = TypeVar("T")

_HEALTH_INTERVAL_S = 0.2
_HEALTH_TIMEOUT_S = 5.0
_PROGRESS_INTERVAL_S = 15.0


class Deployment:
    """The processes of a `DeploymentSpec`.

    An asynchronous context manager: the processes are healthy inside its block, and ended after it.
    """

    def __init__(self, spec: DeploymentSpec, *, echo: Echo | None = None, report: Echo | None = None) -> None:
        """Plans ports and command lines; starts nothing.

        Args:
            spec: The processes to start.
            echo: Called with each log line of each process, prefixed with its name.
            report: Called with a line for each process whose state changes, and with a progress line every few seconds
                during the start.
        """
        self.spec = spec
        self._report = report or (lambda _: None)
        self._watchdog = Watchdog()
        plan = Planner(spec, self._watchdog, echo).plan()
        self.prefill, self.decode = plan.prefill, plan.decode
        self.undivided, self.proxy, self.store = plan.undivided, plan.proxy, plan.store
        self._held_ports = plan.held_ports
        self._states = States(self.processes, self._report)

    @property
    def instances(self) -> list[Instance]:
        """All vLLM instances."""
        return [*self.prefill, *self.decode, *self.undivided]

    @property
    def processes(self) -> list[Instance]:
        """All processes."""
        return [process for process in (self.store, *self.instances, self.proxy) if process is not None]

    @property
    def url(self) -> str:
        """The proxy's address."""
        if self.proxy is None:
            raise ConfigError("this deployment has no proxy: its spec has proxy_command=None")
        return self.proxy.url

    async def __aenter__(self) -> Self:
        """Starts all processes; ends them again if that fails."""
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends all processes."""
        await self.stop()

    async def start(self) -> None:
        """Starts the store, the instances, then the proxy, and returns when all answer `/health` with 200.

        Instances that share a GPU start one after the other, because each measures its free memory.

        Raises:
            KVPipeError: A process ended, or the timeout has passed. The others keep running until `stop`.
        """
        if self.proxy is not None:
            _check_address_is_free(self.spec.host, self.proxy.url)
            _check_files(self.spec)
        if self.store is not None:
            await self._start(self.store)
            await self.until_healthy([self.store])
        turns = start_turns([instance.gpu_share for instance in self.instances], self.spec.vllm_args)
        for turn in range(max(turns, default=-1) + 1):
            starting = [instance for instance, its in zip(self.instances, turns, strict=True) if its == turn]
            for instance in starting:
                await self._start(instance)
            await self.until_healthy(starting)
        if self.proxy is not None:
            await self._start(self.proxy)
            await self.until_healthy([self.proxy])

    async def restart(self, instance: Instance) -> None:
        """Kills one process, and starts it again with the same addresses."""
        await self._stop(instance, 0)
        await self._start(instance)
        await self.until_healthy([instance])

    async def stop(self) -> None:
        """Ends all processes and their children, the proxy first, the store last."""
        if self.proxy is not None:
            await self._stop(self.proxy, self.spec.grace_s)
        await asyncio.gather(*(self._stop(instance, self.spec.instance_grace_s) for instance in self.instances))
        if self.store is not None:
            await self._stop(self.store, self.spec.grace_s)
        await self._watchdog.close()
        release_ports(self._held_ports)
        self._held_ports = []

    def kill(self) -> None:
        """Kills the processes that a pending `stop` waits for."""
        for process in self.processes:
            process.child.send_signal(signal.SIGKILL)

    async def until_a_role_has_ended(self) -> Instance:
        """Waits until no process of some role is left, and returns the last one of that role.

        Without its store, a deployment goes on: its instances compute every prompt.
        """
        running = {asyncio.create_task(process.child.wait()): process for process in self.processes}
        try:
            while True:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for ended in [running.pop(task) for task in done]:
                    self._note_end(ended)
                    if ended.role != "store" and all(process.role != ended.role for process in running.values()):
                        return ended
        finally:
            for task in running:
                task.cancel()

    async def until_healthy(self, processes: Iterable[Instance]) -> None:
        """Waits until each of `processes` answers `/health` with 200.

        Raises:
            KVPipeError: A process ended (the message has its last lines), or the timeout has passed.
        """
        began = reported = time.monotonic()
        pending = list(processes)
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while pending := await self._not_yet_healthy(session, pending, began):
                names = ", ".join(process.name for process in pending)
                now = time.monotonic()
                if now - began > self.spec.startup_timeout_s:
                    raise KVPipeError(f"{names}: not healthy after {self.spec.startup_timeout_s:.0f} s")
                if now - reported >= _PROGRESS_INTERVAL_S:
                    reported = now
                    self._report(f"{now - began:.0f} s, still starting: {names}")
                await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def _not_yet_healthy(
        self, session: aiohttp.ClientSession, processes: list[Instance], began: float
    ) -> list[Instance]:
        for process in processes:
            if not process.child.is_running:
                await self._stop(process, 0)  # afterwards all of its output has been read
                raise KVPipeError(_early_exit(process.child))
        answers = await asyncio.gather(*(_is_healthy(session, process.url) for process in processes))
        for process, is_healthy in zip(processes, answers, strict=True):
            if is_healthy:
                self._states.change(process, f"healthy after {time.monotonic() - began:.0f} s")
        return [process for process, is_healthy in zip(processes, answers, strict=True) if not is_healthy]

    async def _start(self, process: Instance) -> None:
        await process.child.start()
        self._states.change(process, "starting")

    async def _stop(self, process: Instance, grace_s: float) -> None:
        await process.child.stop(grace_s)
        self._note_end(process)

    def _note_end(self, process: Instance) -> None:
        if process.child.pid is not None:
            self._states.change(process, f"ended with {exit_text(process.child.returncode)}")


class DeploymentThread:
    """A `Deployment` for callers without an event loop: a context manager with a loop in a thread.

    `deployment` is the deployment; `call` runs a coroutine of it, or of one of its children, to the end.
    """

    def __init__(self, spec: DeploymentSpec, *, echo: Echo | None = None, report: Echo | None = None) -> None:
        """Accepts the arguments of `Deployment`; starts nothing."""
        self.deployment = Deployment(spec, echo=echo, report=report)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpipe-up", daemon=True)

    def __enter__(self) -> Self:
        """Starts all processes; ends them again if that fails."""
        self._thread.start()
        try:
            self.call(self.deployment.start())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends all processes and the thread."""
        try:
            self.call(self.deployment.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the deployment's loop, and returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _check_address_is_free(host: str, url: str) -> None:
    """Finds a port in use before the models are loaded, not after."""
    parts = urlsplit(url)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, parts.port), family=family):
            pass
    except OSError as error:
        raise ConfigError(f"cannot listen on {parts.netloc}: {error.strerror}; use another --port") from error


def _check_files(spec: DeploymentSpec) -> None:
    """Finds files that the proxy cannot use before the models are loaded, not after."""
    server_context(spec.ssl_certfile, spec.ssl_keyfile)
    if spec.api_key_file is not None:
        ApiKeys(spec.api_key_file)


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        # The certificate names the host for clients, which may not be the address here; only a status is read.
        async with session.get(f"{url}/health", ssl=False) as response:
            return response.status == http.HTTPStatus.OK
    except (aiohttp.ClientError, TimeoutError):
        return False


def _early_exit(child: ChildProcess) -> str:
    lines = "\n".join(f"  [{child.name}] {line}" for line in child.tail)
    how = exit_text(child.returncode)
    return f"{child.name} ended with {how} before it was healthy; its last lines:\n{lines}"


def exit_text(returncode: int | None) -> str:
    """Describes how a process ended: `exit code 1`, `signal SIGKILL`."""
    if returncode is not None and returncode < 0:
        return f"signal {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
