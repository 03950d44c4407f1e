"""Handoffs through kvpipe's own server and through Redis that are aborted at every step: nothing of them stays there.

`KVPIPE_ABORTS` is how many.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kvpipe.store import KVStore, StoreServer, open_store
from kvpipe.store.base import RESERVATION_S
from kvpipe.transfer_params import load, save
from kvpipe.vllm.store import saving
from tests.store import valkey_servers
from tests.vllm.handoff.engine import BLOCK
from tests.vllm.store.engine import CHUNK, Engine
from tests.vllm.store.test_engine import prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.ucx, pytest.mark.usefixtures("processor")]

NUM_HANDOFFS = int(os.environ.get("KVPIPE_ABORTS", "10000"))
# Shorter than a chunk: what is stored are entries alone.
PROMPTS = [prompt(length) for length in (5, BLOCK, CHUNK - 1)]
# After this a store ends an unclaimed entry; the test would wait in the end for a longer time.
ENDS_S = 10.0
# Beyond that.
SPARE_S = 30.0


@pytest.fixture
def own() -> Iterator[tuple[str, Callable[[KVStore], Any]]]:
    """kvpipe's own server, and what it still holds."""
    with StoreServer(token="t", reservation_s=ENDS_S) as server:
        yield server.url, lambda _: [server.stats().num_values, server.stats().num_reserved, server.stats().num_bytes]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[tuple[str, Callable[[KVStore], Any]]]:
    """A Redis server, and what it still holds."""
    with valkey_servers.running(valkey_servers.PROGRAMS["redis"], tmp_path) as server, server.client() as client:
        yield server.url(), lambda store: [len(list(store.list())), client.dbsize()]


NEEDS_REDIS = pytest.mark.skipif("redis" not in valkey_servers.PROGRAMS, reason="no redis-server: scripts/servers")


@pytest.mark.parametrize("kind", ["own", pytest.param("redis", marks=NEEDS_REDIS)])
def test_nothing_is_left_of_aborted_handoffs(
    new_engine: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("KVPIPE_TOKEN", "t")
    monkeypatch.setattr(saving, "ENTRY_TTL_S", ENDS_S)
    url, held = request.getfixturevalue(kind)
    choice, ended = random.Random(7), Counter()
    with open_store(url, "t") as store:
        producer, consumer = (new_engine(url=url, lookup_timeout_s=0.1, staging_bytes=1 << 20) for _ in range(2))
        for _ in range(NUM_HANDOFFS):
            ended[_aborted(choice, producer, consumer, store)] += 1
        producer.until(producer.is_at_rest)
        consumer.until(consumer.is_at_rest)
        producer.saved()
        assert all(ended[step] > NUM_HANDOFFS / 10 for step in STEPS), ended
        assert producer.count("saved") > NUM_HANDOFFS / 4, "entries were committed"
        deadline = time.monotonic() + max(ENDS_S, RESERVATION_S) + SPARE_S
        while any(held(store)):
            assert time.monotonic() < deadline, held(store)
            time.sleep(0.5)


STEPS = ("before the prefill", "not asked for", "while it is looked for", "while it is loaded", "reserved")


def _aborted(choice: random.Random, producer: Engine, consumer: Engine, store: KVStore) -> str:
    """Aborts one handoff at a step, and returns which."""
    tokens, handoff, step = choice.choice(PROMPTS), secrets.token_hex(16), choice.choice(STEPS)
    if step == "reserved":
        # A producer that was killed while it wrote.
        reservation = store.reserve(bytes.fromhex(handoff), 1000)
        assert reservation is not None
        reservation.write(bytes(choice.randrange(1000)))
        return step
    saving = producer.add(tokens, 1, save(handoff))
    if step == "before the prefill":
        loading = consumer.add(tokens, 3, load(handoff))
        consumer.step()
        producer.abort(saving)
        consumer.abort(loading)
        producer.step()
        return step
    producer.until(saving.is_finished)
    producer.step()  # the worker receives the end with the next step
    if step == "not asked for":
        return step
    if step == "while it is loaded":
        producer.saved()
    loading = consumer.add(tokens, 3, load(handoff))
    if step == "while it is loaded":
        prompt_of = consumer.role._prompts[loading.request_id]
        consumer.until(lambda: prompt_of.phase not in ("new", "asked", "answered"))
        step += "" if prompt_of.phase == "loading" else ", which it is not"
    else:
        consumer.step()
    consumer.abort(loading)
    consumer.step()
    return step
