"""Fixtures of the tests: which data path the bytes take, and other processes that are really there."""

import contextlib
import functools
import gc
import importlib.util
import signal
from pathlib import Path

import pytest

from kvpipe import Agent, PeerLostError, Pipe, _log, info
from kvpipe.testing import memory_transport
from tests.peers import Child

# In the background of a script, SIGINT is ignored, and the programs that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

DATA_PATHS = {"default": None, "tcp": "tcp"}
IN_MEMORY = {"memory": "remote_read", "stream in memory": "stream"}


def pytest_collection_modifyitems(items):
    missing = {"ucx": _why_no_ucx(), "vllm": _why_no_vllm()}
    if any(item.get_closest_marker("gpu") for item in items):
        missing["gpu"] = _why_no_gpu()
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Leaves what was imported out of every later collection of garbage: with vLLM, each takes half a second."""
    gc.freeze()


def pytest_sessionfinish():
    """Gives it back to the collector, without which extensions report their objects as leaked."""
    gc.unfreeze()


@functools.cache
def _why_no_ucx():
    return None if info()["ucx"] else "there is no usable UCX"


def _why_no_gpu():
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch  # noqa: PLC0415 - the tests that ask have imported it

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None if info()["ucx_has_cuda"] else "this UCX has no CUDA: pip install 'kvpipe[ucx-cu12]'"


def _why_no_vllm():
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed: run make setup"


@pytest.fixture(autouse=True, scope="session")
def no_settings_of_the_user():
    """The user's own settings do not change the outcome of tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "KVPIPE_TOKEN",
            "KVPIPE_TOKEN_FILE",
            "KVPIPE_TOKEN_NEXT",
            "KVPIPE_TOKEN_NEXT_FILE",
            "UCX_TLS",
            "KVPIPE_DATA_PATH",
            "KVPIPE_ENCRYPTION",
            "KVPIPE_STREAMS",
        ):
            patch.delenv(name, raising=False)
        yield


def is_tcp(data_path):
    """True if bytes go over TCP."""
    return data_path == "tcp"


@pytest.fixture(params=DATA_PATHS, scope="module")
def data_path(request):
    """`default` reads the other process on one machine (CMA, where the kernel allows it); `tcp` allows nothing else."""
    with _over(DATA_PATHS[request.param]):
        yield request.param


@contextlib.contextmanager
def _over(data_path):
    with pytest.MonkeyPatch.context() as patch:
        if data_path:
            patch.setenv("KVPIPE_DATA_PATH", data_path)
        yield


@pytest.fixture(params=[*DATA_PATHS, *IN_MEMORY])
def transport(request):
    """For tests in one process: the data paths of processes, and those of UCX's twin in memory."""
    way = (
        _over(DATA_PATHS[request.param]) if request.param in DATA_PATHS else memory_transport(IN_MEMORY[request.param])
    )
    with way:
        yield request.param


@pytest.fixture(scope="module")
def start_for_module():
    """Starts a program of `tests.peers` in another process; all are killed after the module."""
    children = []

    def begin(program, *arguments):
        children.append(Child(program, *arguments, limit_s=600))
        return children[-1]

    yield begin
    for child in children:
        child.end()


@pytest.fixture
def start():
    """Starts a program of `tests.peers` in another process; all are killed after the test."""
    children = []

    def begin(program, *arguments):
        children.append(Child(program, *arguments))
        return children[-1]

    yield begin
    for child in children:
        child.end()


@pytest.fixture
def pair(transport):
    """Both ends of a pipe, in this process."""
    receiver = Pipe.listen()
    sender = Pipe.connect(receiver.address)
    yield sender, receiver
    receiver.close()
    with contextlib.suppress(PeerLostError):  # when the test left something that was not received
        sender.close()


@pytest.fixture
def agent(transport):
    with Agent() as agent:
        yield agent


@pytest.fixture
def other(transport):
    """A second agent of this process."""
    with Agent() as other:
        yield other


@pytest.fixture
def over_ucx(data_path):
    """An agent that reaches other processes."""
    with Agent() as agent:
        yield agent


@pytest.fixture
def new_threads():
    """Lists the threads that have begun since it was called, also those that Python does not know.

    A number of threads would not do: those of earlier tests may end at any time.
    """
    _log.begin()  # whose thread stays

    def of_this_process():
        return {thread.name for thread in Path("/proc/self/task").iterdir()}

    def begin():
        before = of_this_process()
        return lambda: of_this_process() - before

    return begin
