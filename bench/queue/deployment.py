"""What is measured: a broker, front ends and workers, and a proxy with direct dispatch, before stand-ins for vLLM."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from bench.instances.servers import ServerPool
from bench.processes import Process, SubjectError, clock_s, requests_to, until
from kvpipe.launch.ports import free_ports
from kvpipe.queue.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bench.instances.servers import Server

_HOST = "127.0.0.1"
_TIMEOUT_S, _LOOK_EVERY_S = 60.0, 0.1
_ENDS_WITHIN_S = 90.0
_REQUESTS = Topology().requests, Topology().urgent_requests


class _Answer(NamedTuple):
    url: str
    status: int
    body: bytes


class Deployment:
    """All processes of a run; a context manager that ends them.

    Args:
        folder: Folder of logs and of the broker's data.
        num_prefill: Number of P's.
        num_decode: Number of D's, each with a worker.
        num_fronts: Number of proxies that dispatch through the broker.
        has_direct: Whether there is a proxy with direct dispatch too.
        max_message_bytes: Largest message of the broker, by default its own. The first front end is told.

    Attributes:
        broker: The broker.
        fronts: The proxies that dispatch through the broker.
        workers: The workers.
        direct: The proxy that dispatches directly, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        num_prefill: int,
        num_decode: int,
        *,
        num_fronts: int = 1,
        has_direct: bool,
        max_message_bytes: int = 0,
    ) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._of_broker = f"-rabbit max_message_size {max_message_bytes}" if max_message_bytes else ""
        self._of_first_front = ("--max-message-bytes", str(max_message_bytes)) if max_message_bytes else ()
        self._num_instances = num_prefill, num_decode
        self._num_fronts = num_fronts
        self._has_direct = has_direct
        self.fronts: list[Server] = []
        self.workers: list[Server] = []
        self.direct: Server | None = None

    def __enter__(self) -> Self:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self._pool = self._stack.enter_context(ServerPool())
        data = self._folder / "broker"
        data.mkdir()
        self.broker = self._pool.start_broker(data, self._of_broker)
        self._env = {"KVPIPE_AMQP": self.broker.url}
        command = [sys.executable, "-m", "bench.queue.instances", *map(str, self._num_instances)]
        instances = self._stack.enter_context(contextlib.closing(Process(command, {})))
        words = instances.answer()
        self.instances = instances
        self._prefill, self._decode = words["prefill"].split(";"), words["decode"].split(";")
        self.fronts = [
            self._proxy(f"front {number}", "--dispatch", "amqp", *(self._of_first_front if number == 1 else ()))
            for number in range(1, self._num_fronts + 1)
        ]
        self.workers = [self._worker(number, address) for number, address in enumerate(self._decode, 1)]
        if self._has_direct:
            self.direct = self._proxy("direct", "--dispatch", "sequential", *_each("--decode", self._decode))
            self.direct.until_healthy()
        self.until_served()

    def _proxy(self, name: str, *more: str) -> Server:
        [port] = free_ports(1)
        options = [*_each("--prefill", self._prefill), "--port", str(port), *more]
        return self._start_server(name, f"http://{_HOST}:{port}", "proxy", *options)

    def _worker(self, number: int, decode: str) -> Server:
        return self._start_server(f"worker {number}", decode.partition(",")[0], "worker", "--decode", decode)

    def _start_server(self, name: str, url: str, *arguments: str) -> Server:
        command = [sys.executable, "-m", "kvpipe", *arguments]
        return self._pool.start(name, url, command, self._env, self._folder / f"{name}.log")

    def replace_broker(self) -> None:
        """Ends the broker at once, and starts it again."""
        self.broker.kill()
        self.broker.start()

    @staticmethod
    def replace(server: Server) -> None:
        """Ends a worker or a front end at once, and starts it again."""
        server.end()
        server.start()

    def until_served(self) -> None:
        """Waits until all front ends are healthy and know all workers.

        Raises:
            SubjectError: It takes too long.
        """
        for front in self.fronts:
            front.until_healthy()
        if not until(self._has_all_workers, _TIMEOUT_S, _LOOK_EVERY_S):
            message = f"not all workers take requests; logs are in {self._folder}"
            raise SubjectError(message)

    def _has_all_workers(self) -> bool:
        return all(self._num_ready(front) >= len(self.workers) for front in self.fronts)

    def _num_ready(self, front: Server) -> int:
        state = self._queue_of(front)
        return 0 if state is None else sum(not worker["reason"] for worker in state["workers"])

    def _queue_of(self, front: Server) -> Any:
        """What a front end knows of queues and workers; `None` while it has no broker."""
        answer = self._ask(front.url, "/queue")
        return None if answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE else self._content(answer)

    def has_requests(self) -> bool:
        """True if requests wait in the queues, or workers have some, as far as is known."""
        state = self._queue_of(self.fronts[0])
        if state is None:
            return True
        waiting = sum(state["queues"][name]["messages"] for name in _REQUESTS)
        return bool(waiting or sum(worker["running"] for worker in state["workers"]))

    def stop(self) -> None:
        """Ends workers and front ends in order, and leaves the broker.

        Raises:
            SubjectError: One does not end.
        """
        for server in (*self.workers, *self.fronts):
            server.stop(_ENDS_WITHIN_S)

    def counts(self) -> dict[str, int]:
        """Over all instances: requests that P's and D's have answered, and handoffs that P's still have."""
        prefill = [self._get(address.partition(",")[0], "/counts") for address in self._prefill]
        decode = [self._get(address.partition(",")[0], "/counts") for address in self._decode]
        return {
            "prefilled": sum(each["answered"] for each in prefill),
            "decoded": sum(each["answered"] for each in decode),
            "handoffs": sum(each["handoffs"] for each in prefill),
        }

    def _get(self, url: str, path: str) -> Any:
        return self._content(self._ask(url, path))

    @staticmethod
    def _ask(url: str, path: str) -> _Answer:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
        with contextlib.closing(connection), requests_to(url):
            connection.request("GET", path)
            answer = connection.getresponse()
            return _Answer(url + path, answer.status, answer.read())

    @staticmethod
    def _content(answer: _Answer) -> Any:
        if answer.status != http.HTTPStatus.OK:
            message = f"{answer.url} answers {answer.status}: {answer.body.decode(errors='replace')}"
            raise SubjectError(message)
        return json.loads(answer.body)

    def cpu_s(self) -> Mapping[str, float]:
        """Seconds of CPU that each kind of process has used."""
        direct = {} if self.direct is None else {"direct proxy": clock_s(self.direct.group)}
        return {
            **direct,
            "front": sum(clock_s(front.group) for front in self.fronts),
            "workers": sum(clock_s(worker.group) for worker in self.workers),
            "broker": clock_s(self.broker.pid),
            "instances": self.instances.cpu_s(),
        }


def _each(option: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
