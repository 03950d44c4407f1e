"""Plans the processes of a spec: ports, environments and command lines. Starts nothing."""

import dataclasses
import importlib.metadata
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from kvpipe._address import join_host_port
from kvpipe.config import resolve_tokens
from kvpipe.launch.arguments import data_parallel_size
from kvpipe.launch.cores import BIND_VARIABLE, Cores, assign_cores
from kvpipe.launch.gpus import GpuShare, assign_gpus
from kvpipe.launch.ports import free_ports
from kvpipe.launch.process import ChildProcess
from kvpipe.launch.spec import LOOPBACK, OWN_STORE, DeploymentSpec
from kvpipe.launch.watchdog import Watchdog

Role = Literal["store", "prefill", "decode", "undivided", "proxy"]
Echo = Callable[[str], None]

_KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}

# The class is the synchronous or the asynchronous scheduler, as vLLM is configured.
DECODE_ARGS = ("--scheduler-cls", "kvpipe.connector.ContinuingScheduler")

# For vLLM's CPU build. By default, all instances bind to the same cores, and each takes a share of all memory for its
# KV. With these, they share the cores and have 1 GiB of KV each.
_CPU_ENV = {BIND_VARIABLE: "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclasses.dataclass(frozen=True)
class Instance:
    """One process of a deployment, with its addresses."""

    role: Role
    url: str
    control: str | None
    """`host:port` of the connector's control port; None without a connector."""
    cores: Cores
    """Cores of its worker's OMP threads; empty if they are not pinned."""
    child: ChildProcess
    gpu_share: GpuShare
    """Its GPUs and its share of their memory; empty if none are assigned."""

    @property
    def name(self) -> str:
        """Name of the process, such as `prefill-0`."""
        return self.child.name


@dataclasses.dataclass(frozen=True)
class DeploymentPlan:
    """The processes of a deployment, with their addresses, before their start."""

    held_ports: list[int]
    """Ports that this process holds until `release_ports`."""
    prefill: list[Instance]
    decode: list[Instance]
    undivided: list[Instance]
    proxy: Instance | None
    store: Instance | None


class Planner:
    """Turns a spec into a plan. Picks free ports; starts nothing."""

    def __init__(self, spec: DeploymentSpec, watchdog: Watchdog, echo: Echo | None) -> None:
        """Accepts the arguments of `Deployment`, and the watchdog for its processes."""
        num_engines = spec.num_prefill + spec.num_decode
        self._spec = spec
        self._echo = echo
        self._watchdog = watchdog
        self._env = _environment(spec)
        cores = assign_cores(num_engines + spec.num_undivided, spec.omp_threads, {**os.environ, **spec.env})
        self._cores = iter(cores)
        self._gpu_shares = iter(assign_gpus(num_engines + spec.num_undivided, spec.gpus, spec.vllm_args))
        # The control ports of an engine's data-parallel ranks follow each other.
        num_ranks = data_parallel_size(spec.vllm_args)
        ports = free_ports(2 * num_engines + spec.num_undivided + 3, num_ranks)
        self._ports = iter(ports)
        self._held_ports = [first + rank for first in ports for rank in range(num_ranks)]
        self._store_url = f"kvpipe://{LOOPBACK}:{next(self._ports)}" if spec.store == OWN_STORE else spec.store

    def plan(self) -> DeploymentPlan:
        """Returns the processes of the spec."""
        spec = self._spec
        store = self._store() if spec.store == OWN_STORE else None
        prefill = [self._instance("prefill", index) for index in range(spec.num_prefill)]
        decode = [self._instance("decode", index) for index in range(spec.num_decode)]
        undivided = [self._instance("undivided", index) for index in range(spec.num_undivided)]
        proxy = None
        if spec.proxy_command is not None:
            proxy = self._proxy(spec.proxy_command, [*prefill, *decode])
        return DeploymentPlan(self._held_ports, prefill, decode, undivided, proxy, store)

    def _store(self) -> Instance:
        """The store, whose state is known by its metrics."""
        metrics_port = next(self._ports)
        address = self._store_url.partition("://")[2]
        command = [*self._spec.store_command, "--listen", address, "--metrics-port", str(metrics_port)]
        return Instance(
            "store", f"http://{LOOPBACK}:{metrics_port}", address, (), self._child("store", command, ()), GpuShare()
        )

    def _instance(self, role: Role, index: int) -> Instance:
        spec, port = self._spec, str(next(self._ports))
        where = ["--model", spec.model, "--host", LOOPBACK, "--port", port]
        command = [*spec.server_command, *where]
        if spec.block_size is not None:
            command += ["--block-size", str(spec.block_size)]
        control = None
        if role in _KV_ROLE and self._store_url:
            command += ["--kv-transfer-config", json.dumps(_store_config(spec, role, self._store_url))]
        elif role in _KV_ROLE:
            control = f"{LOOPBACK}:{next(self._ports)}"
            command += ["--kv-transfer-config", json.dumps(_kv_transfer_config(spec, role, control))]
            if role == "decode":
                command += DECODE_ARGS
        cores, share = next(self._cores), next(self._gpu_shares)
        command += [*share.args, *spec.vllm_args]
        child = self._child(f"{role}-{index}", command, cores, share.gpus)
        return Instance(role, f"http://{LOOPBACK}:{port}", control, cores, child, share)

    def _proxy(self, command: Sequence[str], engines: Sequence[Instance]) -> Instance:
        spec, port = self._spec, self._spec.port or next(self._ports)
        where = ["--host", spec.host, "--port", str(port)]
        command = [*command, *where, "--dispatch", "store" if self._store_url else spec.dispatch]
        if spec.split_from is not None:
            command += ["--split-from", str(spec.split_from)]
        for name in ("ssl_certfile", "ssl_keyfile", "api_key_file"):
            if (path := getattr(spec, name)) is not None:
                command += [f"--{name.replace('_', '-')}", str(path)]
        for engine in engines:
            command += [f"--{engine.role}", f"{engine.url},{engine.control}" if engine.control else engine.url]
        scheme = "http" if spec.ssl_certfile is None else "https"
        url = f"{scheme}://{join_host_port(spec.host, port)}"
        return Instance("proxy", url, None, (), self._child("proxy", command, ()), GpuShare())

    def _child(self, name: str, command: Sequence[str], cores: Cores, gpus: Sequence[str] = ()) -> ChildProcess:
        log_dir = self._spec.log_dir
        log_path = None if log_dir is None else log_dir / f"{name}.log"
        bind = {BIND_VARIABLE: ",".join(map(str, cores))} if cores else {}
        bind |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        return ChildProcess(
            name,
            command,
            self._env | bind,
            watchdog=self._watchdog,
            log_path=log_path,
            echo=self._echo,
        )


def is_cpu_vllm() -> bool:
    """True if the vLLM installed here is its CPU build, by the rule that vLLM itself uses."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return distribution == "vllm-cpu" or "cpu" in version
    return False


def _environment(spec: DeploymentSpec) -> dict[str, str]:
    """This process's environment with defaults for missing variables; the user's own values stay."""
    env = {**os.environ, **spec.env}
    defaults = {"PYTHONUNBUFFERED": "1"}
    if is_cpu_vllm():
        defaults |= _CPU_ENV
    if Path(spec.model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    if spec.token:
        env["KVPIPE_TOKEN"] = spec.token
    elif not env.get("KVPIPE_TOKEN") and not env.get("KVPIPE_TOKEN_FILE"):
        env["KVPIPE_TOKEN"] = secrets.token_hex(16)
    # Finds a file that the processes cannot read before the models are loaded, not after.
    resolve_tokens(variables=env)
    return {**defaults, **env}


def _kv_transfer_config(spec: DeploymentSpec, role: Role, control: str) -> dict[str, Any]:
    return {
        "kv_connector": "KVPipeConnector",
        "kv_connector_module_path": spec.connector_module,
        "kv_role": _KV_ROLE[role],
        "kv_connector_extra_config": {"listen": control, **spec.connector_config},
    }


def _store_config(spec: DeploymentSpec, role: Role, url: str) -> dict[str, Any]:
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvpipe.store_connector",
        "kv_role": _KV_ROLE[role],
        "kv_connector_extra_config": {"store": url, **spec.connector_config},
    }
