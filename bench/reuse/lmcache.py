"""LMCache beside kvpipe: its server, which vLLM instances reach by `LMCacheMPConnector`, alone and before Redis.

It is installed beside vLLM in an environment of its own, and runs with what its documentation recommends. On CPUs the
server has to be told to let engines move KV (`--supported-transfer-mode auto`); its memory is then shared with them.
Its older connector, LMCacheConnectorV1, refuses CPUs: "No supported cpu connector found".
"""

from __future__ import annotations

import functools
import json
import secrets
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.instances.servers import ServerPool
from bench.instances.vllm import start_instance
from bench.processes import SubjectError
from bench.reuse.subjects import CHUNK_TOKENS, REDIS, Subject, SubjectSpec, redis_url, request, wait
from bench.subjects import program_missing
from kvpipe.launch.ports import free_ports
from kvpipe.launch.spec import LOOPBACK

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from bench.reuse.subjects import Setting

_GIB = 1 << 30


_VERSIONS = "import lmcache, vllm; print(f'\\nlmcache={lmcache.__version__} vllm={vllm.__version__}')"


@functools.cache
def versions(python: Path) -> str:
    """Versions in an environment, such as `lmcache=0.5.6 vllm=0.32.0`.

    Raises:
        SubjectError: LMCache or vLLM cannot be imported there.
    """
    try:
        found = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)  # noqa: S603 - what the user has named
    except OSError as error:
        message = f"cannot start {python}: {error.strerror}"
        raise SubjectError(message) from error
    except subprocess.CalledProcessError as error:
        raise SubjectError(_last_line(error.stderr)) from error
    return _last_line(found.stdout)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _unavailable_reason(setting: Setting) -> str:
    if setting.lmcache is None:
        return "no environment with vLLM and LMCache; --lmcache PYTHON names one"
    try:
        versions(setting.lmcache)
    except SubjectError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class LmcacheContents:
    """What LMCache's server has in its own memory (L1), and in Redis (L2).

    Attributes:
        url: Its HTTP API.
        redis: redis-py's client of the database; `None` without one.
    """

    url: str
    redis: Any = None

    def clear(self) -> None:
        """Deletes all of it."""
        request(self.url, "POST", "/cache/clear")
        if self.redis is not None:
            self.redis.flushdb()

    def until_stored(self, num_chunks: int) -> None:
        """Waits until it has so many chunks; with Redis, there alone.

        Raises:
            SubjectError: It does not in time.
        """
        wait(lambda: self._has(num_chunks), lambda: f"LMCache has not stored {num_chunks} chunks")
        if num_chunks and self.redis is not None:
            request(self.url, "POST", "/cache/clear")

    def _has(self, num_chunks: int) -> bool:
        storage = json.loads(request(self.url, "GET", "/status"))["storage_manager"]
        manager, controller = storage["l1_managers"]["_default"], storage["store_controllers"]["_default"]
        is_idle = not (controller["pending_keys_count"] or controller["in_flight_task_count"])
        num_in_memory = manager["total_object_count"] - manager["write_locked_count"]
        is_in_redis = self.redis is None or self.redis.dbsize() >= num_chunks
        return is_idle and num_in_memory >= num_chunks and is_in_redis


def _own(stack: ExitStack, setting: Setting) -> Subject:
    """Starts LMCache's server and an instance."""
    return _start(stack, setting, "LMCache, own server")


def _redis(stack: ExitStack, setting: Setting) -> Subject:
    """Starts Redis, LMCache's server before it, and an instance."""
    from redis import Redis  # noqa: PLC0415 - of this subject

    client = stack.enter_context(Redis.from_url(redis_url(stack)))
    where = client.connection_pool.connection_kwargs
    adapter = {"type": "resp", "host": where["host"], "port": where["port"]}
    return _start(stack, setting, "LMCache, Redis", ("--l2-adapter", json.dumps(adapter)), client)


SUBJECTS = {
    "LMCache, own server": SubjectSpec(_own, _unavailable_reason),
    "LMCache, Redis": SubjectSpec(_redis, lambda setting: _unavailable_reason(setting) or program_missing(REDIS)),
}


def _start(stack: ExitStack, setting: Setting, name: str, more: tuple[str, ...] = (), client: Any = None) -> Subject:
    pool = stack.enter_context(ServerPool())
    url, transfer = _server(pool, setting, name, more)
    python = str(setting.lmcache)
    instance = start_instance(pool, setting.work, name, setting.args, transfer=transfer, env=setting.env, python=python)
    return Subject(name, instance, LmcacheContents(url, client), stack)


def _server(pool: ServerPool, setting: Setting, name: str, more: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Returns the URL of the server's HTTP API, and `--kv-transfer-config` of its instances."""
    if setting.lmcache is None:
        message = "no environment with LMCache"
        raise SubjectError(message)
    port, http_port, metrics_port = free_ports(3)
    command = [str(setting.lmcache.with_name("lmcache")), "server", "--host", LOOPBACK, "--port", str(port)]
    command += ["--http-host", LOOPBACK, "--http-port", str(http_port), "--prometheus-port", str(metrics_port)]
    command += ["--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "LRU"]
    command += ["--l1-size-gb", str(max(1.0, 4 * setting.kv_bytes / _GIB)), "--no-l1-use-lazy"]
    command += ["--supported-transfer-mode", "auto", "--shm-name", secrets.token_hex(4), *more]
    url = f"http://{LOOPBACK}:{http_port}"
    log = setting.work / f"{name.replace(' ', '-')}-server.log"
    pool.start(f"{name}: server", url, command, {}, log, health="/healthcheck").until_healthy()
    extra = {"lmcache.mp.host": f"tcp://{LOOPBACK}", "lmcache.mp.port": port}
    return url, {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
