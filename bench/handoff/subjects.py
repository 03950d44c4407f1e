"""The subjects: an undivided instance, kvpipe with each dispatch, NixlConnector with pull and push."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from bench.handoff import client
from bench.instances.vllm import (
    BLOCK_SIZE,
    NIXL_PRODUCE,
    TOKEN,
    kvpipe_transfer,
    nixl_env,
    nixl_transfer,
    nixl_unavailable_reason,
    start_instance,
    start_proxy,
)
from kvpipe.control import ControlClient
from kvpipe.launch.ports import free_ports
from kvpipe.launch.spec import LOOPBACK
from kvpipe.transfer_params import produce

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bench.instances.servers import Server, ServerPool

# For blocks that prefill keeps for a consumer that never comes, and for the short requests before each measurement.
_SPARE_TOKENS = 1024
_DISPATCH = ("just-in-time", "sequential")


@dataclass(frozen=True)
class Times:
    """Times of one request at the client: the request, the first and the second token; and its handoff."""

    asked_s: float
    first_s: float
    second_s: float
    handoff: str = ""


class Subject(Protocol):
    """Answers requests."""

    @property
    def name(self) -> str:
        """Name, such as `kvpipe sequential`."""

    def ask(self, tokens: list[int]) -> Times:
        """Asks for a few tokens."""


@dataclass
class Group:
    """Instances that run together while all others are stopped.

    Attributes:
        name: Name, such as `nixl pull`.
        prefill: The instance that computes prompts.
        decode: The instance that decodes; `None` for an undivided instance.
        subjects: Subjects on these instances.
        prefill_once: Computes a prompt on `prefill` alone, and releases its blocks; returns seconds.
        others: Other processes of the group.
        plain_once: The same without a handoff, which shows the cost of a handoff within one process: two processes
            differ by more.
    """

    name: str
    prefill: Server
    decode: Server | None
    subjects: Sequence[Subject]
    prefill_once: Callable[[list[int]], float]
    others: Sequence[Server] = field(default_factory=list)
    plain_once: Callable[[list[int]], float] | None = None

    @property
    def servers(self) -> list[Server]:
        """All processes."""
        return [self.prefill, *([self.decode] if self.decode else []), *self.others]

    def cpu_s(self) -> float:
        """Seconds of CPU that its vLLM instances have used."""
        return self.prefill.cpu_s() + (self.decode.cpu_s() if self.decode else 0.0)


@dataclass(frozen=True)
class Setting:
    """Settings of all instances.

    Attributes:
        work: Folder of model, logs and trace.
        omp_threads: Of each worker.
        step_tokens: Most tokens of one step.
        nixl_threads: `num_threads` of NixlConnector.
        nixl_path: Where NIXL is, if it is not installed beside vLLM.
        max_tokens: Longest prompt; the KV cache of each instance has room for it and a little more.
    """

    work: Path
    omp_threads: int
    step_tokens: int
    nixl_threads: int
    nixl_path: Path
    max_tokens: int

    @property
    def trace(self) -> Path:
        """Trace file of the connectors."""
        return self.work / "trace.json"

    def start(self, pool: ServerPool, name: str, transfer: dict[str, Any] | None = None, **env: str) -> Server:
        """Starts an instance."""
        # All instances are in memory at once, and each allocates its KV cache at the start.
        num_blocks = -(-(self.max_tokens + _SPARE_TOKENS) // BLOCK_SIZE)
        args = ["--max-num-batched-tokens", str(self.step_tokens), "--max-model-len", str(self.max_tokens + 64)]
        args += ["--num-gpu-blocks-override", str(num_blocks)]
        common = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.omp_threads),
            "KVPIPE_TRACE": str(self.trace),
        }
        return start_instance(pool, self.work, name, args, transfer=transfer, env=common | env)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


# --- one instance -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Direct:
    """An instance or proxy that gets requests directly."""

    name: str
    url: str

    def ask(self, tokens: list[int]) -> Times:
        """Asks for a few tokens."""
        found = client.stream(self.url, tokens)
        first_s, second_s = found.texts_s[:2]
        return Times(found.asked_s, first_s, second_s, found.headers.get("x-kvpipe-handoff", ""))


def undivided(pool: ServerPool, setting: Setting) -> Group:
    """One instance without a connector."""
    server = setting.start(pool, "undivided")
    server.until_healthy()
    return Group("undivided", server, None, [Direct("undivided", server.url)], _plain(server))


def _plain(server: Server) -> Callable[[list[int]], float]:
    return lambda tokens: _timed(lambda: client.prefill(server.url, tokens))


# --- kvpipe -----------------------------------------------------------------------------------------------------


def kvpipe(name: str, **more: str) -> Callable[[ServerPool, Setting], Group]:
    """A prefill and a decode instance, with `more` settings of the connector, and a proxy for each dispatch."""

    def group(pool: ServerPool, setting: Setting) -> Group:
        ports = free_ports(2)
        controls = [f"{LOOPBACK}:{port}" for port in ports]
        servers = [
            setting.start(
                pool,
                f"{name} {part}",
                kvpipe_transfer(role, control, **more),
            )
            for part, role, control in zip(("prefill", "decode"), ("kv_producer", "kv_consumer"), controls, strict=True)
        ]
        for server in servers:
            server.until_healthy()
        proxies = [_proxy(pool, setting, f"{name} {dispatch}", servers, controls) for dispatch in _DISPATCH]
        found = [Direct(f"{name} {dispatch}", proxy.url) for dispatch, proxy in zip(_DISPATCH, proxies, strict=True)]
        control = ControlClient(TOKEN)

        def once(tokens: list[int]) -> float:
            handoff = secrets.token_hex(16)
            params = produce(handoff)
            took_s = _timed(lambda: client.prefill(servers[0].url, tokens, kv_transfer_params=params))
            control.release(controls[0], handoff).wait()
            return took_s

        plain = _plain(servers[0])
        return Group(name, servers[0], servers[1], found, once, proxies, plain_once=plain)

    return group


def _proxy(
    pool: ServerPool, setting: Setting, subject: str, servers: Sequence[Server], controls: Sequence[str]
) -> Server:
    instances = {
        role: [pair] for role, pair in zip(("prefill", "decode"), zip(servers, controls, strict=True), strict=True)
    }
    options = ["--dispatch", subject.rsplit(maxsplit=1)[-1]]
    return start_proxy(pool, setting.work, f"proxy {subject}", instances, options)


# --- NixlConnector ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nixl:
    """Asks prefill, then decode with prefill's parameters, as vLLM's toy proxies do, but without a proxy."""

    name: str
    prefill_url: str
    decode_url: str
    is_push: bool

    def ask(self, tokens: list[int]) -> Times:
        """Asks for a few tokens; decode samples all of them, and computes the last prompt token again."""
        handoff = secrets.token_hex(16)
        asked_s = time.monotonic()
        found = self._decode(tokens, handoff, self._prefill(tokens, handoff))
        first_s, second_s = found.texts_s[:2]
        return Times(asked_s, first_s, second_s, handoff)

    def prefill_s(self, tokens: list[int]) -> float:
        """Measures the seconds of a prefill. Decode then reads the blocks, because prefill keeps them until then."""
        handoff = secrets.token_hex(16)
        held: list[dict[str, Any]] = []
        took_s = _timed(lambda: held.append(self._prefill(tokens, handoff)))
        self._decode(tokens, handoff, held[0])
        return took_s

    def _prefill(self, tokens: list[int], handoff: str) -> dict[str, Any]:
        """Lets prefill compute a prompt and keep its blocks; returns their location."""
        done = client.prefill(self.prefill_url, tokens, {"X-Request-Id": handoff}, kv_transfer_params=NIXL_PRODUCE)
        held: dict[str, Any] = done["kv_transfer_params"]
        return held

    def _decode(self, tokens: list[int], handoff: str, held: dict[str, Any]) -> client.Streamed:
        if self.is_push:
            # decode sends its block ids to prefill, which writes there
            held = {key: value for key, value in held.items() if key != "remote_block_ids"}
        return client.stream(self.decode_url, tokens, {"X-Request-Id": handoff}, kv_transfer_params=held)


def nixl(mode: str) -> Callable[[ServerPool, Setting], Group]:
    """A prefill and a decode instance with NixlConnector; `mode` is `Pull` or `Push`."""

    def group(pool: ServerPool, setting: Setting) -> Group:
        name = f"nixl {mode.lower()}"
        ports = free_ports(2)
        servers = [
            setting.start(
                pool,
                f"{name} {part}",
                nixl_transfer(f"Nixl{mode}Connector", role, setting.nixl_threads)
                | {"kv_connector_module_path": "bench.handoff.nixl_connector"},
                **nixl_env(setting.nixl_path, port),
            )
            for part, role, port in zip(("prefill", "decode"), ("kv_producer", "kv_consumer"), ports, strict=True)
        ]
        for server in servers:
            server.until_healthy()
        subject = Nixl(name, servers[0].url, servers[1].url, mode == "Push")
        plain = _plain(servers[0])
        return Group(name, servers[0], servers[1], [subject], subject.prefill_s, plain_once=plain)

    return group


GROUPS: dict[str, Callable[[ServerPool, Setting], Group]] = {
    "undivided": undivided,
    "kvpipe": kvpipe("kvpipe"),
    "validate": kvpipe("validate", integrity="validate"),
    "nixl pull": nixl("Pull"),
    "nixl push": nixl("Push"),
}


# Without `validate`, which is kvpipe with another setting, they fit into 24 GB.
DEFAULT_GROUPS = ("undivided", "kvpipe", "nixl pull", "nixl push")


def unavailable_reason(name: str, nixl_path: Path) -> str:
    """Why a group cannot run here; empty if it can."""
    return nixl_unavailable_reason(nixl_path) if name.startswith("nixl") else ""
