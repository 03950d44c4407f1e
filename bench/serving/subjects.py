"""The subjects, each on the same two cores: kvpipe, also behind a broker, undivided instances, NixlConnector."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.instances import broker_process
from bench.instances.vllm import (
    kvpipe_transfer,
    nixl_env,
    nixl_transfer,
    nixl_unavailable_reason,
    start_instance,
    start_proxy,
    start_worker,
)
from bench.processes import clock_s
from bench.serving.generator import NixlPull, RoundRobin
from kvpipe.exceptions import ConfigError
from kvpipe.launch.ports import free_ports
from kvpipe.launch.spec import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.instances.broker_process import BrokerProcess
    from bench.instances.servers import Server, ServerPool
    from bench.serving.generator import Target

BASELINE = "undivided-2048"
QUEUED, SINGLE = "kvpipe-queue", "single-2048"
NAMES = ("kvpipe", "kvpipe-late", QUEUED, BASELINE, "undivided-512", "undivided-128", SINGLE, "nixl")
# Measured only where they are asked for by name.
ON_REQUEST = (QUEUED, SINGLE)
_NUM_CPUS = 2
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True)
class Setting:
    """Settings of all instances.

    Attributes:
        work: Folder of model and logs.
        max_model_len: Most tokens of a request.
        num_blocks: KV blocks of each instance.
        prefill_chunk: `--max-num-batched-tokens` of prefill instances.
        decode_chunk: The same of decode instances.
        num_a_role: Prefill instances of kvpipe, and decode instances.
        nixl_path: Where NIXL is, if it is not installed beside vLLM.
        nixl_threads: `num_threads` of NixlConnector.
        env: Variables of every instance.
    """

    work: Path
    max_model_len: int
    num_blocks: int
    prefill_chunk: int
    decode_chunk: int
    num_a_role: int
    nixl_path: Path = Path()
    nixl_threads: int = 4
    env: Mapping[str, str] = field(default_factory=dict)

    def start(
        self,
        pool: ServerPool,
        name: str,
        bound: Sequence[int],
        chunk: int,
        *,
        transfer: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Server:
        """Starts an instance whose worker has a thread on each of the CPUs."""
        args = ["--max-num-batched-tokens", str(chunk), "--max-model-len", str(self.max_model_len)]
        args += ["--num-gpu-blocks-override", str(self.num_blocks)]
        # A list of CPUs is taken as it is: vLLM reserves some for a connector only where it chooses them (`auto`).
        pinned = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, bound))}
        return start_instance(pool, self.work, name, args, transfer=transfer, env={**pinned, **self.env, **(env or {})})


def cpus() -> list[int]:
    """The CPUs of the two workers.

    Raises:
        ConfigError: There are fewer.
    """
    found = sorted(os.sched_getaffinity(0))[:_NUM_CPUS]
    if len(found) < _NUM_CPUS:
        message = f"{len(found)} CPU may be used, each of two workers needs one"
        raise ConfigError(message)
    return found


@dataclass(frozen=True)
class Subject:
    """What answers requests.

    Attributes:
        name: Its name.
        target: Where requests are sent to.
        one: The same for requests that meet at one instance; prefill and decode are one in this sense.
    """

    name: str
    target: Target
    one: Target


@dataclass(frozen=True)
class Queue:
    """A broker, and the workers beside the decode instances."""

    broker: BrokerProcess
    workers: Sequence[Server]


@dataclass
class Group:
    """Servers that run together while all others are stopped.

    Attributes:
        subjects: What they are measured as.
        instances: vLLM instances by role.
        proxies: Proxies by the name of their subject.
        queue: What one of the proxies dispatches through.
    """

    subjects: list[Subject]
    instances: dict[str, list[Server]]
    proxies: dict[str, Server] = field(default_factory=dict)
    queue: Queue | None = None

    @property
    def servers(self) -> list[Server]:
        """All that are stopped while others are measured: a broker would end connections to stopped processes."""
        proxies = [proxy for name, proxy in self.proxies.items() if name != QUEUED]
        return [*(server for servers in self.instances.values() for server in servers), *proxies]

    def cpu_s(self, subject: str) -> dict[str, float]:
        """Seconds of CPU by part, the generator (this process) included."""
        found = {"generator": time.process_time()}
        for role, servers in self.instances.items():
            for server in servers:
                for part, seconds in server.cpu_s_by_part().items():
                    key = part if part != "workers" or role == "undivided" else f"{role} {part}"
                    found[key] = found.get(key, 0.0) + seconds
        if subject in self.proxies:
            found["proxy"] = self.proxies[subject].cpu_s()
        if self.queue is not None and subject == QUEUED:
            found["broker"] = clock_s(self.queue.broker.pid)
            found["queue workers"] = sum(worker.cpu_s() for worker in self.queue.workers)
        return found


def start(pool: ServerPool, setting: Setting, names: Sequence[str]) -> Group:
    """Starts the servers of a group by the names of its subjects; waits until they are healthy."""
    if names[0].startswith("kvpipe"):
        return _kvpipe(pool, setting, names)
    (name,) = names
    return _nixl(pool, setting) if name == "nixl" else _undivided(pool, setting, name)


def grouped(names: Sequence[str]) -> list[list[str]]:
    """The names by group: kvpipe's subjects share their instances."""
    ours = [name for name in names if name.startswith("kvpipe")]
    return [*([ours] if ours else []), *([name] for name in names if name not in ours)]


def unavailable_reason(name: str, nixl_path: Path) -> str:
    """Why a subject cannot run here; empty if it can."""
    if name == QUEUED:
        return broker_process.missing() or ("" if importlib.util.find_spec("aio_pika") else "aio_pika is not installed")
    return nixl_unavailable_reason(nixl_path) if name == "nixl" else ""


def _undivided(pool: ServerPool, setting: Setting, name: str) -> Group:
    chunk = int(name.rpartition("-")[2])
    bounds = [cpus()] if name == SINGLE else [[cpu] for cpu in cpus()]
    servers = [setting.start(pool, f"{name} {place}", bound, chunk) for place, bound in enumerate(bounds)]
    for server in servers:
        server.until_healthy()
    target = RoundRobin([server.url for server in servers])
    return Group([Subject(name, target, RoundRobin(target.urls[:1]))], {"undivided": servers})


def _kvpipe(pool: ServerPool, setting: Setting, names: Sequence[str]) -> Group:
    chunks = {"prefill": setting.prefill_chunk, "decode": setting.decode_chunk}
    controls = iter([f"{LOOPBACK}:{port}" for port in free_ports(2 * setting.num_a_role)])
    pairs = {
        role: [
            (
                setting.start(
                    pool, f"kvpipe {role} {number}", [cpu], chunks[role], transfer=kvpipe_transfer(kv_role, control)
                ),
                control,
            )
            for number, control in zip(range(setting.num_a_role), controls, strict=False)
        ]
        for cpu, (role, kv_role) in zip(cpus(), _ROLES.items(), strict=True)
    }
    instances = {role: [server for server, _ in found] for role, found in pairs.items()}
    for servers in instances.values():
        for server in servers:
            server.until_healthy()
    proxies, queue = {}, None
    for name in names:
        if name == QUEUED:
            queue = _queue(pool, setting, pairs["decode"])
            options, env = ["--dispatch", "amqp"], {"KVPIPE_AMQP": queue.broker.url}
            prefill = {"prefill": pairs["prefill"]}
            proxies[name] = start_proxy(pool, setting.work, f"proxy {name}", prefill, options, env=env)
        else:
            options = ["--early-token", "off"] if name == "kvpipe-late" else []
            proxies[name] = start_proxy(pool, setting.work, f"proxy {name}", pairs, options)
    targets = {name: RoundRobin([proxy.url]) for name, proxy in proxies.items()}
    return Group([Subject(name, target, target) for name, target in targets.items()], instances, proxies, queue)


def _queue(pool: ServerPool, setting: Setting, decode: Sequence[tuple[Server, str]]) -> Queue:
    folder = setting.work / "broker"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    broker = pool.start_broker(folder)
    workers = [
        start_worker(pool, setting.work, f"worker {number}", each, broker.url) for number, each in enumerate(decode)
    ]
    return Queue(broker, workers)


def _nixl(pool: ServerPool, setting: Setting) -> Group:
    chunks = (setting.prefill_chunk, setting.decode_chunk)
    ports = free_ports(_NUM_CPUS)
    servers = []
    for cpu, port, (role, kv_role), chunk in zip(cpus(), ports, _ROLES.items(), chunks, strict=True):
        transfer = nixl_transfer("NixlConnector", kv_role, setting.nixl_threads)
        env = nixl_env(setting.nixl_path, port)
        servers.append(setting.start(pool, f"nixl {role}", [cpu], chunk, transfer=transfer, env=env))
    for server in servers:
        server.until_healthy()
    target = NixlPull(*(server.url for server in servers))
    return Group([Subject("nixl", target, target)], dict(zip(_ROLES, ([it] for it in servers), strict=True)))
