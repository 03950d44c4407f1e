"""Opening the store of an engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvpipe.exceptions import ConnectError
from tests.vllm.store.engine import CHUNK, answered
from tests.vllm.store.stores import WAIT_S, SharedStore
from tests.vllm.store.test_engine import prompt, stored

pytestmark = pytest.mark.vllm


@pytest.fixture
def opened(store: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts how often the store of the test is opened."""
    times = threading.Semaphore(0)
    monkeypatch.setattr(SharedStore, "on_open", staticmethod(lambda name: name == store.name and times.release()))
    return times


def test_an_engine_opens_the_store_before_its_first_request(opened: threading.Semaphore, new_engine: Any) -> None:
    new_engine()
    for _ in ("scheduler", "worker"):
        assert opened.acquire(timeout=WAIT_S)


def test_a_store_that_opens_slowly_delays_no_engine_and_is_used_by_the_first_request_once_it_is_open(
    new_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(3 * CHUNK + 2)
    stored(new_engine(), tokens)
    may_open = threading.Event()

    def waits(_: str) -> None:
        assert may_open.wait(WAIT_S)

    monkeypatch.setattr(SharedStore, "on_open", staticmethod(waits))
    engine = new_engine(lookup_timeout_s=10)
    assert engine.answer(prompt(5)) == answered(prompt(5))
    may_open.set()
    engine.until(lambda: engine.role._client._store is not None)
    assert engine.answer(tokens) == answered(tokens)
    assert engine.count("loaded") == 3
    assert engine.count("decisions", "lookup_timeout") == 0


def test_an_engine_starts_without_its_store_and_uses_it_once_it_is_there(
    new_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(3 * CHUNK + 2)
    stored(new_engine(), tokens)
    refused = threading.Semaphore(0)

    def refuses(_: str) -> None:
        refused.release()
        raise ConnectError("no listener")

    with monkeypatch.context() as away:
        away.setattr(SharedStore, "on_open", staticmethod(refuses))
        engine = new_engine()
        for _ in ("scheduler", "worker"):
            assert refused.acquire(timeout=WAIT_S)
    assert engine.answer(tokens) == answered(tokens)
    assert engine.count("loaded") == 3
