"""The subjects, each on the same two cores: kvpipe, undivided instances with several chunk sizes, NixlConnector."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpipe.bench.instances.vllm import (
    kvpipe_transfer,
    nixl_env,
    nixl_transfer,
    nixl_unavailable_reason,
    start_instance,
    start_proxy,
)
from kvpipe.bench.serving.generator import NixlPull, RoundRobin
from kvpipe.exceptions import ConfigError
from kvpipe.launch.plan import free_ports
from kvpipe.launch.spec import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpipe.bench.instances.servers import Server, ServerPool
    from kvpipe.bench.serving.generator import Target

BASELINE = "undivided-2048"
NAMES = ("kvpipe", "kvpipe-late", BASELINE, "undivided-512", "undivided-128", "nixl")
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
        place: int,
        chunk: int,
        *,
        transfer: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Server:
        """Starts an instance whose worker has one thread, on the CPU of its place."""
        args = ["--max-num-batched-tokens", str(chunk), "--max-model-len", str(self.max_model_len)]
        args += ["--num-gpu-blocks-override", str(self.num_blocks)]
        # A list of CPUs is taken as it is: vLLM reserves some for a connector only where it chooses them (`auto`).
        pinned = {"VLLM_CPU_OMP_THREADS_BIND": str(cpus()[place])}
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


@dataclass
class Group:
    """Servers that run together while all others are stopped.

    Attributes:
        subjects: What they are measured as.
        instances: vLLM instances by role.
        proxies: Proxies by the name of their subject.
    """

    subjects: list[Subject]
    instances: dict[str, list[Server]]
    proxies: dict[str, Server] = field(default_factory=dict)

    @property
    def servers(self) -> list[Server]:
        """All of them."""
        return [*(server for servers in self.instances.values() for server in servers), *self.proxies.values()]

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
    return nixl_unavailable_reason(nixl_path) if name == "nixl" else ""


def _undivided(pool: ServerPool, setting: Setting, name: str) -> Group:
    chunk = int(name.rpartition("-")[2])
    servers = [setting.start(pool, f"{name} {place}", place, chunk) for place in range(_NUM_CPUS)]
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
                    pool, f"kvpipe {role} {number}", place, chunks[role], transfer=kvpipe_transfer(kv_role, control)
                ),
                control,
            )
            for number, control in zip(range(setting.num_a_role), controls, strict=False)
        ]
        for place, (role, kv_role) in enumerate(_ROLES.items())
    }
    instances = {role: [server for server, _ in found] for role, found in pairs.items()}
    for servers in instances.values():
        for server in servers:
            server.until_healthy()
    proxies = {}
    for name in names:
        options = ["--early-token", "off"] if name == "kvpipe-late" else []
        proxies[name] = start_proxy(pool, setting.work, f"proxy {name}", pairs, options)
    targets = {name: RoundRobin([proxy.url]) for name, proxy in proxies.items()}
    return Group([Subject(name, target, target) for name, target in targets.items()], instances, proxies)


def _nixl(pool: ServerPool, setting: Setting) -> Group:
    chunks = (setting.prefill_chunk, setting.decode_chunk)
    ports = free_ports(_NUM_CPUS)
    servers = []
    for place, ((role, kv_role), chunk) in enumerate(zip(_ROLES.items(), chunks, strict=True)):
        transfer = nixl_transfer("NixlConnector", kv_role, setting.nixl_threads)
        env = nixl_env(setting.nixl_path, ports[place])
        servers.append(setting.start(pool, f"nixl {role}", place, chunk, transfer=transfer, env=env))
    for server in servers:
        server.until_healthy()
    target = NixlPull(*(server.url for server in servers))
    return Group([Subject("nixl", target, target)], dict(zip(_ROLES, ([it] for it in servers), strict=True)))
