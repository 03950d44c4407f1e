"""Two prefill and two decode instances of real vLLM, and the front ends and workers that a broker connects."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

from bench.instances.servers import Server, ServerPool
from kvpipe.launch.deployment import DeploymentThread, Instance
from kvpipe.launch.ports import free_ports
from kvpipe.launch.spec import OWN_STORE
from tests.e2e.client import TOKEN, get, until
from tests.e2e.groups import LOGS, LOOKUP_TIMEOUT_S, STORE_CHUNK, two_by_two
from tests.e2e.two_by_two import SMALL
from tests.zygote import Zygote

# Whole prompts in one step: vLLM on CPU dies of a seeded request that is computed in several chunks.
ONE_STEP = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096")
SPECS: dict[str, dict[str, Any]] = {
    "handoff": {},
    "store": {
        "store": OWN_STORE,
        "connector_config": {"chunk_size": STORE_CHUNK, "always_load": True, "lookup_timeout_s": LOOKUP_TIMEOUT_S},
    },
}


class Queued:
    """The front ends and workers of a deployment on one broker; a context manager that ends them.

    Args:
        broker: URL of the broker.
        name: prefix of the names of its queues.
        prefill: instances that the proxy asks.
        decode: instances with a worker each.

    Attributes:
        proxy: The proxy.
        workers: The workers, in the order of the decode instances.
    """

    def __init__(self, broker: str, name: str, prefill: Sequence[Instance], decode: Sequence[Instance]) -> None:
        self._env = {"KVPIPE_AMQP": broker, "KVPIPE_TOKEN": TOKEN}
        self._name = name
        self._logs = LOGS / f"queue-{name}"
        self._prefill, self._decode = prefill, decode
        self._pool = ServerPool()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._pool)
            self._logs.mkdir(parents=True, exist_ok=True)
            prefill = [part for each in self._prefill for part in ("--prefill", address(each))]
            self.proxy = self._front("proxy", "proxy", "--dispatch", "amqp", *prefill)
            self.workers = [
                self._start(f"worker-{number}", each.url, "worker", "--decode", address(each))
                for number, each in enumerate(self._decode)
            ]
            self.until_taken()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The proxy's address."""
        return self.proxy.url

    def front(self, prefill: Instance) -> str:
        """The address of a front end beside a prefill instance."""
        url = self._front(f"front-{prefill.name}", "front", "--prefill", address(prefill)).url
        self.until_taken(url)
        return url

    def replace(self, server: Server) -> None:
        """Starts the proxy or a worker that has been killed again."""
        server.start()
        until(lambda: server.require_running() or is_listening(self.url))
        self.until_taken()

    def state(self, url: str = "") -> dict[str, Any]:
        """Queues and workers as a front end sees them."""
        return json.loads(get(url or self.url, "/queue"))

    def until_taken(self, url: str = "") -> None:
        """Waits until as many workers take requests as there are."""
        # A front end that has no broker knows no workers.
        until(lambda: [each["reason"] for each in self.state(url).get("workers", ())] == [""] * len(self._decode))

    def _front(self, name: str, *arguments: str) -> Server:
        port = str(free_ports(1)[0])
        server = self._start(name, f"http://127.0.0.1:{port}", *arguments, "--port", port)
        # Not its health, which needs workers.
        until(lambda: server.require_running() or is_listening(server.url))
        return server

    def _start(self, name: str, url: str, *arguments: str) -> Server:
        command = [sys.executable, "-m", "kvpipe", *arguments, "--queue", self._name]
        return self._pool.start(name, url, command, self._env, self._logs / f"{name}.log")


def address(instance: Instance) -> str:
    """An instance as the commands' arguments name it."""
    return f"{instance.url},{instance.control}" if instance.control else instance.url


def is_listening(url: str) -> bool:
    """True if a front end answers."""
    try:
        return bool(get(url, "/queue"))
    except OSError:
        return False


@contextlib.contextmanager
def instances(kind: str, zygote: Zygote) -> Iterator[DeploymentThread]:
    """Two prefill, two decode and one undivided instance, that share KV by handoffs or through a store."""
    logs = LOGS / f"queue-{kind}"
    spec = two_by_two(zygote, logs, *ONE_STEP, *SMALL, proxy_command=None, **SPECS[kind])
    with DeploymentThread(spec, report=print) as running:
        yield running
