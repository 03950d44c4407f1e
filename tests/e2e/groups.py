"""The groups of servers that the tests share, one at a time. Their instances are forked from a zygote."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvpipe.launch.deployment import Deployment, DeploymentSpec, DeploymentThread, Instance
from kvpipe.launch.ports import free_ports
from kvpipe.store.server import StoreServer
from tests.e2e.client import LEASE_S, TOKEN, Servers, is_healthy, until
from tests.e2e.model_kinds import KINDS, make_model
from tests.zygote import Zygote

REPOSITORY = Path(__file__).parents[2]
LOGS = REPOSITORY / ".cache" / "test-logs" / "instances"
COMMON = (
    *("--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"),
)

# Long prompts take several steps of 256 tokens, so that blocks are announced while prefill computes. The instance that
# is called prefill fails requests whose KV does not come; that matters where it decodes.
ROOMY = ("--max-model-len", "4096", "--max-num-batched-tokens", "256")
WITH_ROOM = ("roomy", "stages", "data parallel", "multi", "store", "pipe and store", "oldest", "upgrade", *KINDS)

# Instances of the oldest vLLM that is supported. Beside others, one that is upgraded later than those.
OLDEST = "0.30.0"
OF_OLDEST = {"oldest": ("prefill", "decode", "undivided"), "upgrade": ("prefill",)}

# 39 blocks of 32 tokens, where requests of 1024 tokens are allowed: what runs at once grows until some is preempted.
# vLLM on CPU dies of a seeded request that is computed in several chunks: a step holds all that a test sends at once.
TIGHT = ("--max-model-len", "1024", "--num-gpu-blocks-override", "40", "--no-scheduler-reserve-full-isl")
TIGHT_BY_ROLE = {
    "prefill": (*TIGHT, "--max-num-batched-tokens", "512"),
    "decode": (
        *TIGHT,
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "1024", "--no-enable-prefix-caching"),
    ),
    "undivided": ("--max-model-len", "1024", "--max-num-batched-tokens", "1024"),
}

# Arguments of the undivided instance alone.
UNDIVIDED = {"data parallel": ("--data-parallel-size", "1")}

# Prompts that fit one instance do not fit another.
LENGTHS = {"prefill": 512, "decode": 2048, "undivided": 2048}
LENGTHS_BY_ROLE = {role: ("--max-model-len", str(length)) for role, length in LENGTHS.items()}

# Two blocks.
STORE_CHUNK = 64
# Decode may wait half of it for what prefill's threads save meanwhile, which takes long on a busy machine.
LOOKUP_TIMEOUT_S = 10
# Alone, instances share a user's own store, whose values a test can change by hand; beside a handoff kvpipe's own.
FILE_STORE = "tests.e2e.file_store:FileStore"

# Whole prompts in one step each, nothing cached.
BFLOAT16 = (
    *("--dtype", "bfloat16", "--no-enable-prefix-caching"),
    *("--max-model-len", "1024", "--max-num-batched-tokens", "1024"),
)
# Several threads that share a sum round it otherwise for one row than for many. They sleep while they wait.
# Both variables are read at import, so that this group has a zygote of its own.
THREADS = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "passive"}


# A stage's input has its memory from a run for the compiler. vLLM on CPUs does without it with --enforce-eager, and
# dies of the first request.
# Its rotary embedding in C++ takes the distance of heads for that of tokens (0.32), where a query has a dimension of
# heads, as in latent attention. Answers are wrong, and depend on the heads of a rank. The one in Python is right.
# It computes gated delta networks on CPUs in bfloat16 only.
KIND_ARGS = {
    "stages": ("--no-enforce-eager", "--compilation-config", '{"mode":2,"backend":"eager"}'),
    "deepseek-v2": ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
    "qwen3-next": ("--dtype", "bfloat16"),
    "gpt-oss": ("--no-enable-auto-tool-choice", "--tool-call-parser", "openai"),
}


class Groups:
    """Starts a group when it is first asked for, and ends the one before.

    Attributes:
        store_server: kvpipe's own store, of the group `pipe and store`.
    """

    store_server: StoreServer

    def __init__(self, zygote: Zygote, flip: Path, store: Path, models: Path) -> None:
        self._zygote = zygote
        self._flip = flip
        self._store = store
        self._models = models
        self._name = ""
        self._servers: Servers | None = None
        self._running = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def show(self, name: str) -> Servers:
        """The servers of a group.

        Args:
            name: `roomy`, `stages`, `data parallel`, `multi`, `tight`, `tight, validate`, `bfloat16`, `lengths`,
                `store`, `pipe and store`, `oldest`, `upgrade`, or a kind of model; and more arguments of vLLM. Those
                after ` | ` are for decode and the undivided instance.
        """
        if self._servers is None or name != self._name:
            self._running.close()
            self._name, self._servers = name, self._running.enter_context(self._started(name))
        return self._servers

    def end(self) -> None:
        """Ends the running group, for tests that start instances of their own."""
        self._running.close()
        self._servers = None

    @contextmanager
    def _started(self, name: str) -> Iterator[Servers]:
        started = ExitStack()
        group, shared, differing = _parts(name)
        threads = THREADS if group == "bfloat16" else {}
        zygote = started.enter_context(Zygote(env=threads, log=LOGS / "zygote.log")) if threads else self._zygote
        spec = self._spec(group, shared, zygote, threads, LOGS / "-".join(re.findall(r"[\w.]+", name)))
        running = DeploymentThread(spec, report=print)
        prefill, decode = running.deployment.prefill[0], running.deployment.decode[0]
        # Some tests have the two change places. An instance with several stages only prefills.
        for instance in (prefill, decode) if group != "stages" else (decode,):
            change_transfer(instance, lambda config: config | {"kv_role": "kv_both"})
        if group == "roomy":
            change_transfer(prefill, strict)
        elif group == "multi":
            change_transfer(prefill, lambda config: beside_another(config, "fail"))
            change_transfer(decode, lambda config: beside_another(config, "recompute"))
        elif group == "store":
            change_transfer(prefill, self._with_file_store)
            change_transfer(decode, self._with_file_store)
        elif group == "pipe and store":
            self.store_server = started.enter_context(StoreServer(token=TOKEN))
            change_transfer(prefill, lambda config: beside_store(config, self.store_server.url))
            change_transfer(decode, lambda config: beside_store(config, self.store_server.url))
        elif group == "bfloat16":
            add_arguments(running.deployment.instances, BFLOAT16)
        elif group not in WITH_ROOM:
            by_role = LENGTHS_BY_ROLE if group == "lengths" else TIGHT_BY_ROLE
            for instance in running.deployment.instances:
                instance.child.command += by_role[instance.role]
        elif group in OF_OLDEST:
            of_oldest = [each for each in running.deployment.instances if each.role in OF_OLDEST[group]]
            started.enter_context(forked_from(OLDEST, of_oldest))
        add_arguments((decode, running.deployment.undivided[0]), differing)
        add_arguments(running.deployment.undivided, UNDIVIDED.get(group, ()))
        with started, running, ExitStack() as proxies:
            yield Servers(
                running,
                lambda dispatch, is_reversed: proxies.enter_context(
                    proxy(running.deployment, dispatch, is_reversed=is_reversed)
                ),
            )

    def _spec(
        self, group: str, more: tuple[str, ...], zygote: Zygote, threads: Mapping[str, str], logs: Path
    ) -> DeploymentSpec:
        return DeploymentSpec(
            model=self._model(group),
            num_undivided=1,
            token=TOKEN,
            block_size=32,
            server_command=zygote.command(),
            connector_module="tests.e2e.faulty_connector",
            connector_config={"lease_s": LEASE_S} | ({"integrity": "validate"} if "validate" in group else {}),
            env={"KVPIPE_TEST_FLIP": str(self._flip), "PYTHONPATH": str(REPOSITORY), "VLLM_SERVER_DEV_MODE": "1"}
            | dict(threads),
            vllm_args=(*COMMON, *(ROOMY if group in WITH_ROOM else ()), *KIND_ARGS.get(group, ()), *more),
            log_dir=logs,
        )

    def _with_file_store(self, config: dict[str, Any]) -> dict[str, Any]:
        return store_alone(config, f"{FILE_STORE}:{self._store}", "tests.e2e.unchecked_store_connector")

    def _model(self, kind: str) -> str:
        plain = tiny_model()
        if kind not in KINDS:
            return plain
        folder = self._models / kind
        return str(folder if folder.exists() else make_model(kind, folder, Path(plain)))


def two_by_two(zygote: Zygote, logs: Path, *vllm_args: str, **more: Any) -> DeploymentSpec:
    """Two prefill, two decode and one undivided instance."""
    return DeploymentSpec(
        model=tiny_model(),
        num_prefill=2,
        num_decode=2,
        num_undivided=1,
        token=TOKEN,
        block_size=32,
        server_command=zygote.command(),
        vllm_args=(*COMMON, *vllm_args),
        log_dir=logs,
        **more,
    )


def _parts(name: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The group or kind of model, the arguments of all instances, and those of all but prefill."""
    group = name.partition(" --")[0]
    shared, _, differing = name.removeprefix(group).partition(" | ")
    return group, tuple(shared.split()), tuple(differing.split())


def add_arguments(instances: Iterable[Instance], arguments: tuple[str, ...]) -> None:
    """Adds arguments of vLLM to instances before they start. Of one that is given twice, the last counts."""
    for instance in instances:
        instance.child.command += arguments


@contextmanager
def forked_from(version: str, instances: Sequence[Instance]) -> Iterator[None]:
    """Has another vLLM run these instances, which `scripts/vllm-version` fetches once."""
    made = subprocess.run([REPOSITORY / "scripts" / "vllm-version", version], stdout=subprocess.PIPE, check=True)
    path = made.stdout.decode().strip()
    before = filter(None, [os.environ.get("PYTHONPATH")])
    with Zygote(env={"PYTHONPATH": os.pathsep.join([path, *before])}, log=LOGS / f"zygote-{version}.log") as zygote:
        for instance in instances:
            command = zygote.command()
            instance.child.command = (*command, *instance.child.command[len(command) :])
            # Of what vLLM starts as programs of their own.
            instance.child.env["PYTHONPATH"] = os.pathsep.join([path, instance.child.env["PYTHONPATH"]])
        yield


def change_transfer(instance: Instance, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes an instance's `--kv-transfer-config` before it starts."""
    command = list(instance.child.command)
    place = command.index("--kv-transfer-config") + 1
    command[place] = json.dumps(change(json.loads(command[place])))
    instance.child.command = tuple(command)


def strict(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of an instance that fails the requests whose KV does not come."""
    return config | {"kv_connector_extra_config": config["kv_connector_extra_config"] | {"on_load_failure": "fail"}}


def beside_another(config: dict[str, Any], policy: str) -> dict[str, Any]:
    """The configuration of an instance with a second connector, under MultiConnector."""
    if policy == "fail":
        config = strict(config)
    idle = {
        "kv_connector": "IdleConnector",
        "kv_connector_module_path": "tests.e2e.idle_connector",
        "kv_role": config["kv_role"],
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": config["kv_role"],
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [config, idle]},
    }


def store_alone(config: dict[str, Any], url: str, module: str = "kvpipe.store_connector") -> dict[str, Any]:
    """The configuration of an instance that shares nothing but a store with others."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": module,
        "kv_role": config["kv_role"],
        "kv_connector_extra_config": {
            "store": url,
            "chunk_size": STORE_CHUNK,
            "always_load": True,
            "lookup_timeout_s": LOOKUP_TIMEOUT_S,
        },
    }


def beside_store(config: dict[str, Any], url: str) -> dict[str, Any]:
    """The configuration of an instance with handoffs and a store, under MultiConnector."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": config["kv_role"],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [config, store_alone(config, url)]},
    }


@contextmanager
def proxy(deployment: Deployment, dispatch: str, *, is_reversed: bool = False) -> Iterator[str]:
    """One more proxy before the same instances; reversed, the decode instance prefills and the other decodes."""
    prefill, decode = deployment.prefill[0], deployment.decode[0]
    roles = {"--prefill": decode, "--decode": prefill} if is_reversed else {"--prefill": prefill, "--decode": decode}
    port = free_ports(1)[0]
    engines = [part for flag, who in roles.items() for part in (flag, f"{who.url},{who.control}")]
    command = [sys.executable, "-m", "kvpipe", "proxy", "--port", str(port), "--dispatch", dispatch, *engines]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=os.environ | {"KVPIPE_TOKEN": TOKEN}) as process:
        try:
            until(lambda: is_healthy(url))
            yield url
        finally:
            process.terminate()


def tiny_model() -> str:
    """The folder of the tiny model."""
    path = REPOSITORY / "examples" / "disagg_prefill" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.make_tiny_model())
