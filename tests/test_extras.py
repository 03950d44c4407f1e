"""What each extra brings, and the one sentence of a command that lacks a package of it."""

import ast
import importlib.metadata
import itertools
import re
import subprocess
import sys

import pytest

from kvpipe import _kvpipe
from kvpipe.exceptions import TransportUnavailableError
from tests.extras import COMMANDS, EXTRAS, distributions
from tests.peers import ROOT

# A None among the modules makes an import fail as that of a package that is not installed.
WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from kvpipe.cli import main; sys.exit(main(sys.argv[1:]))"

MODULES = {"aio-pika": "aio_pika", "prometheus-client": "prometheus_client", "python-dotenv": "dotenv"}
BENCH = [("bench", "pipe", "--plot", "drawing.png")]
COMPLETION = [("completion", "bash")]
NEEDS = [
    (extra, command, distribution)
    for extra, commands in {**COMMANDS, "bench": BENCH, "completion": COMPLETION}.items()
    for command, distribution in itertools.product(commands, distributions(extra))
]

# The caller brings these; huggingface_hub, tokenizers, transformers and yaml come with vLLM.
OF_THE_CALLER = {"huggingface_hub", "numpy", "tokenizers", "torch", "transformers", "vllm", "yaml"}


@pytest.mark.parametrize(
    ("extra", "command", "distribution"), NEEDS, ids=[f"{command[0]} without {name}" for _, command, name in NEEDS]
)
def test_a_command_without_a_package_names_it_and_the_command_that_brings_it(extra, command, distribution):
    module = MODULES.get(distribution, distribution)
    assert refusal(module, *command) == f"error: {module} is not installed; pip install 'kvpipe[{extra}]'\n"


def test_what_a_queue_needs_of_the_proxy_comes_with_its_extra():
    [front, *_] = COMMANDS["amqp"]
    assert "kvpipe[proxy]" in EXTRAS["amqp"]
    assert refusal("aiohttp", *front) == "error: aiohttp is not installed; pip install 'kvpipe[amqp]'\n"


def test_a_store_with_metrics_names_the_extra_that_they_need():
    arguments = ("store", "serve", "--listen", "127.0.0.1:0", "--capacity", "1048576", "--metrics-port", "0")
    assert refusal("prometheus_client", *arguments) == (
        "error: prometheus_client is not installed; pip install 'kvpipe[proxy]', or leave out --metrics-port\n"
    )


def test_ucx_that_is_missing_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPIPE_UCX_LIB", str(tmp_path))
    with pytest.raises(
        TransportUnavailableError, match=r"no UCX library could be loaded .*; pip install 'kvpipe\[ucx-cu12\]'"
    ):
        _kvpipe.ucx_info()


def test_a_tensor_of_torch_without_numpy_names_it():
    pytest.importorskip("torch")
    code = (
        "import sys, warnings; sys.modules['numpy'] = None; warnings.simplefilter('ignore'); import torch\n"
        "from kvpipe._tensor import describe; describe(torch.zeros(3))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "ConfigError: such memory is described by numpy, which is not installed: pip install numpy"
    )


def test_each_package_that_kvpipe_imports_is_in_an_extra_or_the_callers():
    of_extras = {_normalized(name) for extra in EXTRAS if extra != "test" for name in distributions(extra)}
    distributions_of = importlib.metadata.packages_distributions()
    imported = {module for path in (ROOT / "python").rglob("*.py") for module in _imports(path)}
    others = imported - set(sys.stdlib_module_names) - {"kvpipe"} - OF_THE_CALLER
    assert {"aiohttp", "aio_pika", "redis"} <= others
    brought = {module for module in others if {*map(_normalized, distributions_of.get(module, ()))} & of_extras}
    assert others - brought == set()


def refusal(module, *arguments):
    """Returns what a command writes to stderr where a module is missing."""
    command = [sys.executable, "-c", WITHOUT, module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def _imports(path):
    """Returns the packages of the modules that a file imports when it runs."""
    nodes = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        nodes += node.orelse if is_for_types else ast.iter_child_nodes(node)


def _normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()
