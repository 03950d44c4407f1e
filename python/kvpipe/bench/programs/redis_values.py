"""A Redis or Valkey server, and redis-py, with which most programs speak to it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

from .request import pattern
from .side import Idle, Setup, Words, expect, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task

_START_S = 10.0


class Server(Idle):
    """Runs the server of this machine in a process of its own, which ends with this one."""

    def __init__(self, setup: Setup) -> None:
        server = shutil.which("valkey-server") or shutil.which("redis-server")
        if server is None:
            message = "neither valkey-server nor redis-server is installed; scripts/servers fetches one"
            raise FileNotFoundError(message)
        with socket.socket() as holder:
            holder.bind((setup.host, 0))
            self._address = holder.getsockname()
        host, port = self._address
        settings = ("--bind", host, "--port", str(port), "--save", "", "--appendonly", "no", "--daemonize", "no")
        self._process = subprocess.Popen(  # noqa: S603 - what the user has installed
            [shutil.which("setpriv") or "setpriv", "--pdeathsig", "KILL", server, *settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        ends_at = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(self._address, timeout=1).close()
            except OSError:
                if time.monotonic() > ends_at or self._process.poll() is not None:
                    raise
                time.sleep(0.05)
            else:
                return

    def hello(self) -> Words:
        """Returns the URL of the store."""
        host, port = self._address
        return {"url": f"redis://{host}:{port}"}


class RedisPy(Idle):
    """Sets and gets values as redis-py does, one after the other."""

    def __init__(self, setup: Setup) -> None:
        self._source = pattern(setup.total)
        self._last: dict[int, Any] = {}

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects to the server."""
        import redis  # noqa: PLC0415 - of this role

        self._client = redis.Redis.from_url(words["url"])
        return {}

    def clear(self, task: Task) -> None:
        """Puts the values that are read."""
        self._client.flushdb()
        if task.kind == "get":
            for at in range(0, len(self._source) // task.num_bytes * task.num_bytes, task.num_bytes):
                self._set(task, at)

    def run(self, task: Task) -> Words:
        """Sets or gets."""
        offsets = task.offsets(len(self._source))
        once = self._set if task.kind == "put" else self._get

        def all_of_them() -> None:
            for at in offsets:
                once(task, at)

        return seconds(all_of_them)

    def _set(self, task: Task, at: int) -> None:
        self._client.set(f"value/{at}", memoryview(self._source[at : at + task.num_bytes]))

    def _get(self, task: Task, at: int) -> None:
        value = self._client.get(f"value/{at}")
        if task.is_checked:
            self._last[at] = value

    def verify(self, task: Task) -> None:
        """Raises unless the values are those that were set."""
        for at in task.offsets(len(self._source)):
            self._get(task, at)
            expect(bytearray(self._last.pop(at)), self._source[at : at + task.num_bytes], "values")


ROLES = {"client": RedisPy, "server": Server}
