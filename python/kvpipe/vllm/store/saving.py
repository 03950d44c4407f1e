"""Saves of a worker: chunks are copied into staging memory, and put into the store by threads.

So is the KV of entries. An entry waits there until the token is known, and for the chunks before it: a consumer that
finds the entry finds them.

In host memory the hook copies, and vLLM may free the blocks when it returns. A GPU has not computed them then. So a
thread copies behind the GPU's work, one chunk after the other, and vLLM keeps the blocks until then (`HeldBlocks`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from kvpipe.exceptions import CapacityError, ConfigError, KVPipeError
from kvpipe.vllm.store.circuit_breaker import Breaker
from kvpipe.vllm.store.client import failure_reason
from kvpipe.vllm.store.staging import StagingPool
from kvpipe.vllm.store.threads import TaskThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np

    from kvpipe import _kvpipe
    from kvpipe.vllm.device import HostOrder
    from kvpipe.vllm.store.cache_bytes import CacheBytes
    from kvpipe.vllm.store.client import StoreClient
    from kvpipe.vllm.store.values import ChunkValues

logger = init_logger("vllm.kvpipe.store")

_DEVICE = "device"
# The store is not to blame for these, or not broken: the breaker does not count them.
_HARMLESS = ("saved", "present", "store_full", "not_finite", _DEVICE)
_FAILED = "event.failed the device did not complete what computes the blocks: %s"
# Seconds until the store deletes an unclaimed entry.
ENTRY_TTL_S = 60.0
# Seconds that an entry waits for the chunks before it. Without it a store that hangs would hold up all later saves.
_CHUNKS_S = 1.0


class Saved(NamedTuple):
    """Result of saving a chunk that was handed to a thread.

    Attributes:
        key: The chunk.
        result: `saved`, `present` (another engine was faster), `store_full`, `not_finite` (KV that the serde cannot
            write), `device` (it failed), or the kind of a failure.
        num_bytes: Its size.
        elapsed_s: Seconds that the store took.
    """

    key: bytes
    result: str
    num_bytes: int
    elapsed_s: float


@dataclass
class _Copied:
    """Blocks in staging memory, or on their way.

    Attributes:
        slot: The memory.
        num_blocks: Number of blocks.
        before: Chunks that were handed over before, and that may not be in the store yet.
        is_done: True if nothing is copied any more.
        failure: Reason for which the blocks are not there; empty once they are.
    """

    slot: np.ndarray
    num_blocks: int
    before: set[bytes] = field(default_factory=set)
    is_done: bool = False
    failure: str = "error"


class Saver:
    """Saves chunks and entries of one rank. Its methods are for the thread of vLLM's hooks; none waits.

    Args:
        client: The store.
        cache: The KV cache.
        values: Format of the chunks.
        order: Order of the device's work.
        staging_bytes: Memory for chunks on their way.
        num_threads: Threads that write.
    """

    def __init__(
        self,
        client: StoreClient,
        cache: CacheBytes,
        values: ChunkValues,
        order: HostOrder,
        *,
        staging_bytes: int,
        num_threads: int,
    ) -> None:
        self._client = client
        self._order = order
        # Whatever has to wait for a copy runs on this thread, too, behind it.
        self._copier = TaskThreads("kvpipe-copy", 1) if order.is_async else None
        self._event: _kvpipe.CudaEvent | None = None
        self._failure = ""
        self._holds: deque[int] = deque()
        self._cache = cache
        self._values = values
        self._pool = StagingPool(staging_bytes, values.slot_bytes)
        self._threads = TaskThreads("kvpipe-save", num_threads)
        self._in_flight: set[bytes] = set()
        self._copies: dict[str, _Copied] = {}
        # Keys of the chunks that threads save now or later.
        self._pending: set[bytes] = set()
        self._is_put = threading.Condition()
        self._ended: deque[Saved] = deque()
        self._breaker = Breaker()

    @property
    def breaker_state(self) -> str:
        """State of the circuit breaker for saves: `closed`, `open` or `half-open`."""
        return self._breaker.state

    def save(self, key: bytes, block_ids: list[int], now_s: float, hold: int = 0) -> str:
        """Copies a chunk, and has a thread put it into the store.

        Returns:
            Reason against saving it: `in_flight`, `staging_full` or `breaker`; empty if it will be saved.
        """
        slot, reason = self._slot_for(key, now_s)
        if slot is None:
            self.release([hold])
            return reason
        copied = _Copied(slot, len(block_ids))
        self._gather(block_ids, copied, hold)
        self._submit(key, copied, lambda: self._put(key, copied))
        return ""

    def _slot_for(self, key: bytes, now_s: float) -> tuple[np.ndarray | None, str]:
        """Returns staging memory for a chunk; or none, and the reason against saving it."""
        if key in self._in_flight:
            return None, "in_flight"
        slot = self._pool.acquire()
        if slot is None:
            return None, "staging_full"
        if not self._breaker.allows(now_s):
            self._pool.release(slot)
            return None, "breaker"
        return slot, ""

    def copy(self, request_id: str, block_ids: list[int], hold: int = 0) -> str:
        """Copies the KV of a request's entry, until `save_entry` or `drop`.

        Returns:
            Why the entry cannot be saved: `staging_full`; empty if it can.
        """
        slot = self._pool.acquire()
        if slot is None:
            self.release([hold])
            return "staging_full"
        # The prompt's chunks are among them.
        copied = self._copies[request_id] = _Copied(slot, len(block_ids), set(self._pending))
        self._gather(block_ids, copied, hold)
        return ""

    def mark(self) -> None:
        """Marks what the device was given until now, behind which the copies that follow are made."""
        if self._copier is None:
            return
        self._event, self._failure = None, ""
        try:
            self._event = self._order.record()
        except KVPipeError as error:
            self._failure = _DEVICE
            logger.warning(_FAILED, error)

    def _gather(self, block_ids: list[int], copied: _Copied, hold: int) -> None:
        """Copies blocks into staging memory: now, or behind the mark."""
        out, event = self._values.content(copied.slot, copied.num_blocks), self._event

        def gather() -> None:
            try:
                if event is not None:
                    event.wait()
                self._cache.gather(block_ids, out)
                copied.failure = ""
            except KVPipeError as error:
                copied.failure = _DEVICE
                logger.warning(_FAILED, error)
            finally:
                copied.is_done = True
                self.release([hold])

        if self._failure:
            copied.failure, copied.is_done = self._failure, True
            self.release([hold])
        elif self._copier is None:
            gather()
        else:
            self._copier.submit(gather)

    def release(self, holds: Iterable[int]) -> None:
        """Blocks of these holds are not read, or not any more."""
        self._holds.extend(hold for hold in holds if hold)

    def drain_copied(self) -> dict[int, int]:
        """Returns the holds of blocks that are not read any more, each once, with the number of this rank: 1."""
        found = {}
        while self._holds:
            found[self._holds.popleft()] = 1
        return found

    def save_entry(self, request_id: str, key: bytes, record: bytes, now_s: float) -> str:
        """Has a thread put an entry into the store, after what was handed over before.

        Returns:
            Why it is not saved, as `save`; empty if it will be, or if its KV could not be copied.
        """
        if (copied := self._copies.pop(request_id, None)) is None:
            return ""
        if key in self._in_flight or not self._breaker.allows(now_s):
            self._behind_copy(copied, lambda: self._pool.release(copied.slot))
            return "in_flight" if key in self._in_flight else "breaker"
        self._submit(key, copied, lambda: self._put_entry(key, copied, record))
        return ""

    def drop(self, request_id: str) -> None:
        """Forgets the copy for an entry that is not saved."""
        if (copied := self._copies.pop(request_id, None)) is not None:
            self._behind_copy(copied, lambda: self._pool.release(copied.slot))

    def _submit(self, key: bytes, copied: _Copied, task: Callable[[], None]) -> None:
        self._in_flight.add(key)
        with self._is_put:
            self._pending.add(key)
        self._behind_copy(copied, lambda: self._threads.submit(task))

    def _behind_copy(self, copied: _Copied, action: Callable[[], None]) -> None:
        """Runs an action once a copy has been made, or has failed."""
        if self._copier is None or copied.is_done:
            action()
        else:
            self._copier.submit(action)

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

    def _put_entry(self, key: bytes, copied: _Copied, record: bytes) -> None:
        # Tasks begin in their order: those before this one run on other threads, or have ended.
        with self._is_put:
            self._is_put.wait_for(lambda: copied.before.isdisjoint(self._pending), _CHUNKS_S)
        self._put(key, copied, record)

    def _put(self, key: bytes, copied: _Copied, record: bytes = b"") -> None:
        began_s, num_bytes = time.monotonic(), 0
        try:
            result, num_bytes = self._write(key, copied, record)
        except CapacityError:
            result = "store_full"
        except Exception as error:  # noqa: BLE001 - a user's store may raise anything; the chunk is not saved
            result = failure_reason(error)
        finally:
            self._pool.release(copied.slot)
            with self._is_put:
                self._pending.discard(key)
                self._is_put.notify_all()
        self._ended.append(Saved(key, result, num_bytes, time.monotonic() - began_s))

    def _write(self, key: bytes, copied: _Copied, record: bytes) -> tuple[str, int]:
        """Puts a chunk into the store, or an entry, which has a record. Returns the result, and the value's size."""
        if copied.failure:
            return copied.failure, 0
        try:
            value = self._values.value_of(copied.slot, key, copied.num_blocks)
        except ConfigError:
            return "not_finite", 0
        ttl_s = ENTRY_TTL_S if record else None
        is_new = self._client.run(lambda store: store.put(key, value.data, record, ttl_s=ttl_s))
        return "saved" if is_new else "present", value.nbytes

    def close(self, timeout: float) -> bool:
        """Drops chunks that no thread has begun to save. Returns true if the threads have ended in time."""
        are_copied = self._copier is None or self._copier.close(timeout)
        return self._threads.close(timeout) and are_copied
