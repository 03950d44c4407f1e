"""Programs that fork from one process which has imported what they need: a vLLM instance in 6 s instead of 45.

`server.py` is that process, the zygote. `client.py` stands for a forked program where a command line starts it: as
`python -m MODULE ARGUMENT...`, with its output, its environment, its process group, its signals and its status.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

REPOSITORY = Path(__file__).parents[2]
CLIENT = Path(__file__).parent / "client.py"
API_SERVER = "vllm.entrypoints.launchers.api_server.entry"
# Of an instance: API server, EngineCore and worker.
VLLM = (
    API_SERVER,
    "vllm.model_executor.models.llama",
    "vllm.tool_parsers.hermes_tool_parser",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "kvpipe.connector",
    "kvpipe.vllm.first_token.logits_processor",
    "kvpipe.vllm.plugin",
    "kvpipe.store_connector",
)
ENVIRONMENT = {
    # A process with one thread may fork; this library has one for each core otherwise, from its import on.
    "OPENBLAS_NUM_THREADS": "1",
    # A program that dies by a fault shows the stacks of its threads.
    "PYTHONFAULTHANDLER": "1",
}


class Zygote:
    """A process that has imported modules and forks programs. A context manager that ends it; programs go on.

    Args:
        modules: Modules that it imports.
        env: More variables of its environment; those that are read at import hold for all its programs.
        log: Its own output; none where it is None.
    """

    def __init__(
        self, modules: Sequence[str] = VLLM, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self._modules = tuple(modules)
        self._env = {**os.environ, **ENVIRONMENT, **(env or {})}
        # Each process of a group of instances would compile all of vLLM.
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)
        self._log = log

    def __enter__(self) -> Self:
        """Returns when it listens, which is before it has imported: what it forks waits for that."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zygote-"))
            self._path = f"{folder}/socket"
            output = subprocess.DEVNULL if self._log is None else stack.enter_context(self._log.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote.server", self._path, *self._modules],
                cwd=REPOSITORY,
                env=self._env,
                stdin=subprocess.PIPE,  # its end is the end of the zygote, also where this process is killed
                stdout=subprocess.PIPE,
                stderr=output,
                process_group=0,
            )
            stack.callback(self._end)
            assert self._process.stdout.readline() == b"listening\n", f"the zygote did not start: {self._log}"
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _end(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def command(self, module: str = API_SERVER) -> tuple[str, ...]:
        """Command that runs as `python -m module`, with arguments to follow, in the process group of its start."""
        return (sys.executable, "-I", "-S", str(CLIENT), self._path, module)
