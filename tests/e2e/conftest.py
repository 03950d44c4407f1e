"""One prefill, one decode and one undivided instance of real vLLM behind a proxy, shared by all tests here."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Servers
from tests.e2e.groups import LOGS, Groups
from tests.zygote import Zygote


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs vLLM, and is slow unless it is a smoke test."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("smoke") is None:
                item.add_marker(pytest.mark.slow)
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: run make setup"))


@pytest.fixture(scope="session")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that faulty_connector looks for."""
    return tmp_path_factory.mktemp("flip") / "order"


@pytest.fixture
def flip(order: Path) -> Iterator[Path]:
    """The file whose existence orders faulty_connector to spoil a block; gone after the test."""
    yield order
    order.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the store that instances share."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process from which instances are forked.

    Each worker has one OpenMP thread: for a tiny model more of them spin for each other most of the time.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with Zygote(log=LOGS / "zygote.log") as zygote:
            yield zygote


@pytest.fixture(scope="session")
def groups(zygote: Zygote, order: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """Starts the servers; only one group runs at a time."""
    with Groups(zygote, order, folder, tmp_path_factory.mktemp("models")) as groups:
        yield groups


@pytest.fixture
def servers(groups: Groups) -> Servers:
    """Instances with room; the tests that kill some start them again."""
    return groups.show("roomy")


@pytest.fixture
def lengths(groups: Groups) -> Servers:
    """Instances whose models have contexts of several lengths; decode's is longer than prefill's."""
    return groups.show("lengths")


@pytest.fixture
def multi(groups: Groups) -> Servers:
    """Instances with a second connector: what is called decode recomputes, what is called prefill fails requests."""
    return groups.show("multi")


@pytest.fixture
def sharing(groups: Groups) -> Servers:
    """Instances that share a store, and know nothing else of each other."""
    return groups.show("store")


@pytest.fixture
def pipe_and_store(groups: Groups) -> Servers:
    """Instances with handoffs and a store."""
    return groups.show("pipe and store")


@pytest.fixture(scope="module", params=["tight", "tight, validate"])
def tight(groups: Groups, request: pytest.FixtureRequest) -> Servers:
    """Instances that preempt, with checksums and with `integrity=validate`."""
    return groups.show(request.param)


@pytest.fixture
def bfloat16(groups: Groups) -> Servers:
    """Instances that compute in bfloat16."""
    return groups.show("bfloat16")


@pytest.fixture
def is_validated(request: pytest.FixtureRequest) -> bool:
    """True if `tight` validates."""
    return "validate" in request.node.callspec.params["tight"]
