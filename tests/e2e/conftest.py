"""One prefill, one decode and one undivided instance of real vLLM behind a proxy, shared by all tests here."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.deployment import DeploymentSpec, DeploymentThread
from tests.e2e.client import LEASE_S, TOKEN, Servers

REPOSITORY = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs vLLM."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: run make setup"))


@pytest.fixture(scope="session")
def flip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file whose existence orders faulty_connector to spoil what arrives."""
    return tmp_path_factory.mktemp("flip") / "order"


@pytest.fixture(scope="session")
def servers(flip: Path) -> Iterator[Servers]:
    """Running servers; the tests that kill some start them again."""
    spec = importlib.util.spec_from_file_location(
        "tiny_model", REPOSITORY / "examples" / "disagg_prefill" / "tiny_model.py"
    )
    tiny_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_model)
    logs = REPOSITORY / ".cache" / "test-logs"
    shutil.rmtree(logs, ignore_errors=True)
    deployment = DeploymentSpec(
        model=str(tiny_model.make_tiny_model()),
        num_undivided=1,
        token=TOKEN,
        block_size=32,
        connector_module="tests.e2e.faulty_connector",
        connector_config={"lease_s": LEASE_S},
        env={"KVPIPE_TEST_FLIP": str(flip), "PYTHONPATH": str(REPOSITORY), "VLLM_SERVER_DEV_MODE": "1"},
        # 256 tokens a step: prompts of several steps, so that blocks are announced while prefill computes.
        vllm_args=(
            *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--max-num-batched-tokens", "256"),
            *("--served-model-name", "tiny"),
        ),
        log_dir=logs,
    )
    with DeploymentThread(deployment, report=print) as running:
        yield Servers(running)
