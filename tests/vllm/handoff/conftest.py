"""Engines for the connector's tests: vLLM's scheduler for real, its model runner played by the tests."""

import atexit
import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpipe import _kvpipe

REPOSITORY = Path(__file__).parents[3]
HAS_VLLM = importlib.util.find_spec("vllm") is not None
if HAS_VLLM:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # huggingface_hub reads it when it is imported. Tests put models there as if they had been downloaded.
    hub = tempfile.TemporaryDirectory(prefix="kvpipe-hub-")
    atexit.register(hub.cleanup)
    os.environ["HF_HUB_CACHE"] = hub.name
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with warnings.catch_warnings():
        # Its imports warn of much that is not ours.
        warnings.simplefilter("ignore")
        import tests.vllm.handoff.engine
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny_model() -> str:
    """The folder of the tiny model."""
    path = REPOSITORY / "examples" / "disagg_prefill" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.make_tiny_model())


@pytest.fixture(scope="session")
def config(tiny_model: str) -> Any:
    """A real configuration of vLLM."""
    return tests.vllm.handoff.engine.engine_config(tiny_model)


@pytest.fixture
def new_engine(tiny_model: str) -> Iterator[Callable[..., Any]]:
    """Makes engines; arguments are settings of the connector."""
    engine, engines = tests.vllm.handoff.engine, []

    def make(**extra: Any) -> Any:
        engines.append(engine.Engine(engine.engine_config(tiny_model, **extra)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def log(config: Any, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The connector's log. vLLM sets up its loggers with the first configuration, and passes on nothing."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def engine(new_engine: Callable[..., Any]) -> Any:
    """An engine with the connector's default settings."""
    return new_engine()


@pytest.fixture
def producer() -> Iterator[_kvpipe.Control]:
    """The control plane of a producer, without an engine behind it."""
    control = _kvpipe.Control("127.0.0.1:0", b"", "producer", lease=60.0)
    yield control
    control.close()
