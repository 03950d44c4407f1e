"""Saves of a worker: chunks are copied into staging memory by a hook, and put into the store by threads."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from kvpipe.exceptions import CapacityError, ConfigError
from kvpipe.store_connector.breaker import Breaker
from kvpipe.store_connector.chunk import HEADER_BYTES
from kvpipe.store_connector.client import failure_reason
from kvpipe.store_connector.staging import StagingPool
from kvpipe.store_connector.threads import TaskThreads

if TYPE_CHECKING:
    import numpy as np

    from kvpipe.store_connector.client import StoreClient
    from kvpipe.store_connector.layout import CacheBytes
    from kvpipe.store_connector.values import ChunkValues

logger = init_logger("vllm.kvpipe.store")

# The store is not to blame for these, or not broken: the breaker does not count them.
_HARMLESS = ("saved", "present", "store_full", "not_finite")


class Saved(NamedTuple):
    """How a chunk that was handed to a thread has ended.

    Attributes:
        key: The chunk.
        result: `saved`, `present` (another engine was faster), `store_full`, `not_finite` (KV that the serde cannot
            write), or the kind of a failure.
        num_bytes: Its size.
        elapsed_s: Seconds that the store took.
    """

    key: bytes
    result: str
    num_bytes: int
    elapsed_s: float


class Saver:
    """Saves chunks of one rank. Its methods are for the thread of vLLM's hooks; none waits.

    Args:
        client: The store.
        cache: The KV cache.
        values: How chunks are written.
        staging_bytes: Memory for chunks on their way.
        num_threads: Threads that write.
    """

    def __init__(
        self, client: StoreClient, cache: CacheBytes, values: ChunkValues, staging_bytes: int, num_threads: int
    ) -> None:
        self._client = client
        self._cache = cache
        self._values = values
        self._pool = StagingPool(staging_bytes, values.slot_bytes)
        self._threads = TaskThreads("kvpipe-save", num_threads)
        self._in_flight: set[bytes] = set()
        self._ended: deque[Saved] = deque()
        self._breaker = Breaker()

    @property
    def breaker_state(self) -> str:
        """Whether the store is used for saves."""
        return self._breaker.state

    def save(self, key: bytes, block_ids: list[int], now_s: float) -> str:
        """Copies a chunk, and has a thread put it into the store.

        Returns:
            Why it is not saved: `in_flight`, `staging_full` or `breaker`; empty if it will be.
        """
        if key in self._in_flight:
            return "in_flight"
        slot = self._pool.take()
        if slot is None:
            return "staging_full"
        if not self._breaker.allows(now_s):
            self._pool.give_back(slot)
            return "breaker"
        self._cache.gather(block_ids, slot[HEADER_BYTES:])
        self._in_flight.add(key)
        self._threads.submit(lambda: self._put(key, slot))
        return ""

    def ended(self, now_s: float) -> list[Saved]:
        """Returns the chunks that threads are done with, each once."""
        found = []
        while self._ended:
            saved = self._ended.popleft()
            found.append(saved)
            self._in_flight.discard(saved.key)
            was_closed = self._breaker.state == "closed"
            if saved.result in _HARMLESS:
                self._breaker.succeeded()
            else:
                self._breaker.failed(now_s)
            if was_closed and self._breaker.state == "open":
                logger.warning("store.breaker saves stop for a while, the last one failed: %s", saved.result)
        return found

    def _put(self, key: bytes, slot: np.ndarray) -> None:
        began_s, num_bytes = time.monotonic(), slot.nbytes
        try:
            result, num_bytes = self._write(key, slot)
        except CapacityError:
            result = "store_full"
        except Exception as error:  # noqa: BLE001 - a user's store may raise anything; the chunk is not saved
            result = failure_reason(error)
        finally:
            self._pool.give_back(slot)
        self._ended.append(Saved(key, result, num_bytes, time.monotonic() - began_s))

    def _write(self, key: bytes, slot: np.ndarray) -> tuple[str, int]:
        """Puts a chunk into the store. Returns the result, and the size of the value."""
        try:
            value = self._values.value_of(slot, key)
        except ConfigError:
            return "not_finite", slot.nbytes
        is_new = self._client.run(lambda store: store.put(key, value.data))
        return "saved" if is_new else "present", value.nbytes

    def close(self, timeout: float) -> bool:
        """Drops chunks that no thread has begun to save, and returns whether the threads have ended in time."""
        return self._threads.close(timeout)
