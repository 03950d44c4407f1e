"""The subjects: an instance without a store, and one on each store."""

from __future__ import annotations

import http.client
import json
import os
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from bench.instances.servers import ServerPool
from bench.instances.vllm import BLOCK_SIZE, TOKEN, start_instance
from bench.processes import SubjectError, requests_to, until
from bench.programs import redis_values
from bench.programs.side import Setup
from bench.subjects import program_missing
from kvpipe.launch.spec import LOOPBACK
from kvpipe.store.server import StoreServer
from kvpipe.store.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from bench.instances.servers import Server
    from kvpipe.store.base import KVStore

NO_STORE = "no store"
REDIS = "redis-server"
CHUNK_TOKENS = 256
# Besides the measured prompt: a short one before it.
_SPARE_TOKENS = 1024
_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Setting:
    """Settings of all instances.

    Attributes:
        work: Folder of model and logs.
        max_tokens: Longest prompt.
        kv_bytes: Its KV.
        lmcache: Python of an environment with vLLM and LMCache; `None`: without it.
    """

    work: Path
    max_tokens: int
    kv_bytes: int
    lmcache: Path | None

    @property
    def args(self) -> list[str]:
        """Arguments of every instance."""
        num_blocks = -(-(self.max_tokens + _SPARE_TOKENS) // BLOCK_SIZE)
        return ["--max-model-len", str(self.max_tokens + 64), "--num-gpu-blocks-override", str(num_blocks)]

    @property
    def env(self) -> dict[str, str]:
        """Variables of every instance."""
        return {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(os.cpu_count()),
            # For /reset_prefix_cache.
            "VLLM_SERVER_DEV_MODE": "1",
        }

    def start(self, stack: ExitStack, name: str, store: str = "") -> Server:
        """Starts an instance, with a store if there is one."""
        pool, transfer = stack.enter_context(ServerPool()), _transfer(store) if store else None
        return start_instance(pool, self.work, name, self.args, transfer=transfer, env=self.env)


def _transfer(store: str) -> dict[str, Any]:
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvpipe.store_connector",
        "kv_role": "kv_both",
        # The weights are drawn, so that there are no files to compare.
        "kv_connector_extra_config": {"store": store, "namespace": "benchmark", "chunk_size": CHUNK_TOKENS},
    }


class Contents(Protocol):
    """What a store has."""

    def clear(self) -> None:
        """Deletes all of it."""

    def until_stored(self, num_chunks: int) -> None:
        """Waits until it has so many chunks."""


class NoContents:
    """Where there is no store."""

    def clear(self) -> None:
        """Does nothing."""

    def until_stored(self, num_chunks: int) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class StoreContents:
    """Contents of one of kvpipe's stores."""

    store: KVStore

    def clear(self) -> None:
        """Deletes all values."""
        self.store.delete([value.key for value in self.store.list()])

    def until_stored(self, num_chunks: int) -> None:
        """Waits until it has so many values.

        Raises:
            SubjectError: It does not in time.
        """
        wait(
            lambda: self._num_stored() >= num_chunks, lambda: f"{self._num_stored()} of {num_chunks} chunks are stored"
        )

    def _num_stored(self) -> int:
        return sum(1 for _ in self.store.list())


@dataclass(frozen=True)
class Subject:
    """An instance, and the store that it uses.

    Attributes:
        name: Name, such as `own store`.
        instance: The instance.
        contents: What its store has.
        stack: Ends the instance and its store when it is closed.
    """

    name: str
    instance: Server
    contents: Contents
    stack: ExitStack

    @property
    def has_store(self) -> bool:
        """True if its KV can come from a store."""
        return not isinstance(self.contents, NoContents)

    def forget(self) -> None:
        """Has the instance forget its own prefix cache, so that KV comes from the store or is computed.

        Raises:
            SubjectError: It does not in time. vLLM refuses while blocks are held, such as those that are being saved.
        """
        wait(self._forgets, lambda: f"{self.name}: vLLM holds blocks, and keeps its prefix cache")

    def _forgets(self) -> bool:
        """Asks once; vLLM answers with status 200 also where it refuses."""
        return bool(json.loads(request(self.instance.url, "POST", "/reset_prefix_cache"))["success"])

    def num_loaded(self) -> float:
        """Tokens whose KV the instance has had from outside so far, as vLLM counts them."""
        lines = request(self.instance.url, "GET", "/metrics").decode().splitlines()
        found = [line for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")]
        return sum(float(line.rpartition(" ")[2]) for line in found)


def wait(is_done: Callable[[], bool], late: Callable[[], str]) -> None:
    """Waits until a condition holds.

    Raises:
        SubjectError: It does not in time; `late` says what is.
    """
    if not until(is_done, _WITHIN_S, _LOOK_EVERY_S):
        message = f"{late()} after {_WITHIN_S:.0f} s"
        raise SubjectError(message)


def request(url: str, method: str, path: str) -> bytes:
    """Sends a request without a body, and returns that of the answer.

    Raises:
        SubjectError: There is no answer, or its status is another one than 200.
    """
    with requests_to(url), closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
    if response.status != http.HTTPStatus.OK:
        message = f"{url}{path} answered {response.status}: {body[:300]!r}"
        raise SubjectError(message)
    return body


# --- starting them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SubjectSpec:
    """A subject that may take part.

    Attributes:
        start: Starts its store and its instance, which a stack ends.
        unavailable_reason: Why it cannot take part here; empty if it can.
    """

    start: Callable[[ExitStack, Setting], Subject]
    unavailable_reason: Callable[[Setting], str] = lambda _: ""


def _without_store(name: str) -> SubjectSpec:
    return SubjectSpec(lambda stack, setting: Subject(name, setting.start(stack, name), NoContents(), stack))


def _own(stack: ExitStack, setting: Setting) -> Subject:
    server = stack.enter_context(StoreServer(f"{LOOPBACK}:0", capacity_bytes=2 * setting.kv_bytes, token=TOKEN))
    return _on_store(stack, setting, "kvpipe, own store", server.url)


def _redis(stack: ExitStack, setting: Setting) -> Subject:
    return _on_store(stack, setting, "kvpipe, Redis", redis_url(stack))


def _on_store(stack: ExitStack, setting: Setting, name: str, url: str) -> Subject:
    store = stack.enter_context(open_store(url, TOKEN))
    return Subject(name, setting.start(stack, name, url), StoreContents(store), stack)


def redis_url(stack: ExitStack) -> str:
    """Starts a Redis server, which the stack ends."""
    server = redis_values.Server(Setup(0, LOOPBACK, {"server": REDIS}))
    stack.callback(server.close)
    return str(server.hello()["url"])


OURS: dict[str, SubjectSpec] = {
    NO_STORE: _without_store(NO_STORE),
    "no store, another process": _without_store("no store, another process"),
    "kvpipe, own store": SubjectSpec(_own),
    "kvpipe, Redis": SubjectSpec(_redis, lambda _: program_missing(REDIS)),
}
