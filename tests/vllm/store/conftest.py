"""Engines with the store connector: vLLM's scheduler for real, its model runner played by the tests."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from tests.vllm.handoff.conftest import HAS_VLLM, log, tiny_model

if HAS_VLLM:
    import tests.vllm.store.engine
else:
    collect_ignore_glob = ["test_*.py"]

__all__ = ["log", "tiny_model"]


@pytest.fixture(scope="session")
def config(tiny_model: str) -> Any:
    """A real configuration of vLLM."""
    return tests.vllm.store.engine.store_config(tiny_model, "unused")


@pytest.fixture
def store() -> Iterator[Any]:
    """The store of a test."""
    from tests.vllm.store.stores import SharedStore  # noqa: PLC0415

    name = uuid.uuid4().hex
    store = SharedStore.open(name)
    store.name = name
    yield store
    store.is_open.set()
    del SharedStore.of[name]


@pytest.fixture
def new_engine(tiny_model: str, store: Any) -> Iterator[Callable[..., Any]]:
    """Makes engines on one store; arguments are settings of the connector, or of vLLM. `url` is another store."""
    engine, engines = tests.vllm.store.engine, []

    def make(**extra: Any) -> Any:
        engines.append(engine.Engine(tiny_model, extra.pop("url", store.name), **extra))
        return engines[-1]

    yield make
    store.is_open.set()
    for each in engines:
        each.close()


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has loaded the logits processor, which the engine's simulated sampler stands in for."""
    monkeypatch.setattr(PENDING_FIRST_TOKENS, "has_processor", True)
    monkeypatch.setattr(PENDING_FIRST_TOKENS, "_by_engine", {})
    monkeypatch.setattr(PENDING_FIRST_TOKENS, "_by_connector", {})


@pytest.fixture
def engine(new_engine: Callable[..., Any]) -> Any:
    """An engine with the connector's default settings."""
    return new_engine()
