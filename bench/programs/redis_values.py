"""A Redis or Valkey server, redis-py, with which most programs speak to it, and the server's own benchmark."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .request import pattern
from .server_program import ServerProgram
from .side import Idle, Setup, Words, expect, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .request import Task

_START_S = 10.0


def server_command(program: str, host: str, port: int) -> list[str]:
    """Command line of a server without persistence."""
    where = ["--bind", host, "--port", str(port)]
    return [program, *where, "--save", "", "--appendonly", "no", "--daemonize", "no"]


class Server(ServerProgram):
    """A Redis or Valkey server."""

    def __init__(self, setup: Setup) -> None:
        program = _program(setup.options["server"])
        super().__init__(setup.host, lambda host, port: server_command(program, host, port), _START_S)

    def hello(self) -> Words:
        """Returns the URL of the store."""
        host, port = self._address
        return {"url": f"redis://{host}:{port}"}


class RedisBenchmark(Idle):
    """Sets and gets values by `redis-benchmark`, over four connections at once. It does not look at what it gets."""

    _NUM_CONNECTIONS = 4
    _RATE = re.compile(r"([\d.]+) requests per second")

    def __init__(self, setup: Setup) -> None:
        self._program = _program("redis-benchmark")
        self._total = setup.total

    def meet(self, words: Mapping[str, str]) -> Words:
        """Connects to the server."""
        import redis  # noqa: PLC0415 - of this role

        self._port = str(urlsplit(words["url"]).port)
        self._client = redis.Redis.from_url(words["url"])
        return {}

    def clear(self, task: Task) -> None:
        """Sets each key that the program may draw, because a GET of a key without a value moves nothing."""
        self._client.flushdb()
        for number in range(self._num_values(task)):
            self._client.set(f"key:{number:012}", bytes(task.num_bytes))

    def run(self, task: Task) -> Words:
        """Sets or gets; the start of the program is not counted."""
        before = self._num_misses()
        rate = self._requests_per_s(task, "set" if task.kind == "put" else "get", task.count)
        if missed := self._num_misses() - before:
            message = f"{missed} of {task.count} keys had no value"
            raise ValueError(message)
        return {"seconds": task.count / rate}

    def _num_misses(self) -> int:
        return int(self._client.info("stats")["keyspace_misses"])

    def _num_values(self, task: Task) -> int:
        return self._total // task.num_bytes

    def _requests_per_s(self, task: Task, test: str, count: int) -> float:
        options = {"-p": self._port, "-t": test, "-n": count, "-d": task.num_bytes, "-c": self._NUM_CONNECTIONS}
        # As many keys as the other subjects have: one key alone would stay in the cache.
        options["-r"] = self._num_values(task)
        words = [str(word) for option in options.items() for word in option]
        ended = subprocess.run([self._program, "-q", *words], capture_output=True, text=True, check=True)  # noqa: S603 - what the user has installed
        return float(self._RATE.findall(ended.stdout)[-1])


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


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        message = f"{name} is not installed; scripts/servers fetches it"
        raise FileNotFoundError(message)
    return found


ROLES = {"client": RedisPy, "benchmark": RedisBenchmark, "server": Server}
