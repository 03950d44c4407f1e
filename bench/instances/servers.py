"""The servers of a benchmark: starts them, stops them while others are measured, counts their CPU time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from bench.checkout import python_path
from bench.instances.broker_process import BrokerProcess
from bench.processes import SubjectError, clock_s
from kvpipe.launch.process import ProcessGroup
from kvpipe.launch.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

_START_WITHIN_S = 600.0
_TAIL_LINES = 12
_PARTS = {"Worker": "workers", "EngineCor": "EngineCores"}


class Server:
    """One HTTP server and its descendants.

    Attributes:
        name: Name, such as `nixl pull decode`.
        url: Its base URL.
    """

    def __init__(
        self,
        name: str,
        url: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        watchdog: Watchdog,
        health: str = "/health",
    ) -> None:
        self.name = name
        self.url = url
        self._health = health
        self._watchdog = watchdog
        self._log = log
        self._command = list(command)
        self._env = {**os.environ, "PYTHONPATH": python_path(), **env}
        log.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        """Starts its process, again if it has ended; the log of the process before stays."""
        with self._log.open("ab") as output:
            self._process = ProcessGroup(self._command, watchdog=self._watchdog, stdout=output, env=self._env)
        self._members: list[int] = []

    @property
    def group(self) -> int:
        """The id of its process group."""
        return self._process.pid

    def until_healthy(self) -> None:
        """Waits until its health is answered with 200.

        Raises:
            SubjectError: The server has ended, or takes too long.
        """
        give_up_at = time.monotonic() + _START_WITHIN_S
        while not self.is_healthy():
            if not self.is_running or time.monotonic() > give_up_at:
                raise SubjectError(self._last_lines("did not start"))
            time.sleep(0.5)
        self._members = self._process.members()

    @property
    def is_running(self) -> bool:
        """True if its first process has not ended."""
        return self._process.poll() is None

    def require_running(self) -> None:
        """Checks that its first process has not ended.

        Raises:
            SubjectError: It has.
        """
        if not self.is_running:
            raise SubjectError(self._last_lines("has ended"))

    def _last_lines(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([f"{self.name} {what}; {self._log} ends with", *lines[-_TAIL_LINES:]])

    def is_healthy(self) -> bool:
        """True if its health is answered with 200."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=5)
        try:
            connection.request("GET", self._health)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def cpu_s(self) -> float:
        """Seconds of CPU that all threads of its processes have used."""
        return sum(map(clock_s, self._members))

    def worker_cpu_s(self) -> float:
        """The same for its worker alone."""
        return max(clock_s(pid) for pid in self._members if _part(pid) == "workers")

    def cpu_s_by_part(self) -> dict[str, float]:
        """The same for each part of a vLLM instance: `API servers`, `EngineCores`, `workers`."""
        found: dict[str, float] = {}
        for pid in self._members:
            found[_part(pid)] = found.get(_part(pid), 0.0) + clock_s(pid)
        return found

    def signal(self, number: int) -> None:
        """Sends a signal to all its processes."""
        self._process.signal_all(number)

    def stop(self, within_s: float) -> None:
        """Has its first process end in order, and waits for it.

        Raises:
            SubjectError: It takes too long.
        """
        self._process.terminate()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise SubjectError(self._last_lines(f"did not end within {within_s:.0f} s")) from None

    def end(self) -> None:
        """Ends all its processes."""
        self._process.kill_all()


def _part(pid: int) -> str:
    """The part of vLLM that a process is; Linux cuts its name after 15 characters."""
    with open(f"/proc/{pid}/comm") as file:  # noqa: PTH123 - a path of procfs
        name = file.read()
    return next((part for word, part in _PARTS.items() if word in name), "API servers")


class ServerPool:
    """All servers: a context manager that ends them.

    Attributes:
        watchdog: Ends them if this process dies.
    """

    def __init__(self) -> None:
        self.watchdog = Watchdog()
        self._servers: list[Server] = []
        self._brokers: list[BrokerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.end()
        for broker in self._brokers:
            broker.kill()
        asyncio.run(self.watchdog.close())

    def start(
        self, name: str, url: str, command: Sequence[str], env: Mapping[str, str], log: Path, *, health: str = "/health"
    ) -> Server:
        """Starts a server; the caller waits until it is healthy."""
        server = Server(name, url, command, env, log, watchdog=self.watchdog, health=health)
        self.add(server)
        return server

    def add(self, *servers: Server) -> None:
        """Adds servers that were started with its watchdog."""
        self._servers += servers

    def start_broker(self, folder: Path, erlang_arguments: str = "") -> BrokerProcess:
        """Starts a RabbitMQ broker with its data in an empty folder, and waits for it.

        Raises:
            SubjectError: It does not start.
        """
        broker = BrokerProcess(folder, erlang_arguments, watchdog=self.watchdog)
        broker.start()
        self._brokers.append(broker)
        return broker


@contextlib.contextmanager
def resumed(servers: Iterable[Server]) -> Iterator[None]:
    """Lets stopped servers run inside the block."""
    servers = list(servers)
    for server in servers:
        server.signal(signal.SIGCONT)
    try:
        yield
    finally:
        for server in servers:
            server.signal(signal.SIGSTOP)
