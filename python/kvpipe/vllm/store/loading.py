"""Loads of a worker: chunks are read into the blocks of their request, or into staging memory first, and verified."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from kvpipe.exceptions import CorruptDataError, KVPipeError
from kvpipe.vllm.store.chunk import HEADER_BYTES
from kvpipe.vllm.store.client import failure_reason
from kvpipe.vllm.store.metadata import StoreLoadOutcome
from kvpipe.vllm.store.staging import StagingPool
from kvpipe.vllm.store.threads import TaskThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpipe import _kvpipe
    from kvpipe.store.base import KVStore, Value
    from kvpipe.vllm.device import HostOrder
    from kvpipe.vllm.store.cache_bytes import CacheBytes
    from kvpipe.vllm.store.client import StoreClient
    from kvpipe.vllm.store.metadata import StoreLoad
    from kvpipe.vllm.store.values import ChunkValues

logger = init_logger("vllm.kvpipe.store")

_FAILED = "event.failed the device did not complete what uses the blocks: %s"
# A value under a name of ours that is not what the name says is deleted, so that a right one can be saved.
_WRONG = ("short", "foreign", "corrupt")


class _DeviceFailedError(Exception):
    """The device did not complete its work, or copied nothing."""


class ActiveLoad:
    """A load under way. Threads that read chunks share it with the hooks of vLLM.

    No thread copies into the blocks once `outcome` has returned the end: vLLM may then give them to others.

    Args:
        load: The load.
        deadline_s: Time at which it ends with the chunks that it has, by the clock of `outcome`.

    Attributes:
        load: The load.
        event: Work of a device that may use the blocks until it is done; `None` if there is none.
    """

    def __init__(self, load: StoreLoad, deadline_s: float) -> None:
        self.load = load
        self.event: _kvpipe.CudaEvent | None = None
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._is_copied = [False] * len(load.part_ids)
        # Chunks from here on are of no use, because this one cannot be loaded.
        self._end = len(load.part_ids)
        self._num_copying = 0
        self._is_closed = False
        self._reason = ""

    def wants(self, index: int) -> bool:
        """True if a chunk is still of use."""
        return not self._is_closed and index < self._end

    def copy(self, index: int, copy: Callable[[], bool]) -> bool:
        """Copies a chunk into the blocks, if it is still of use. `copy` returns true if it is there, and verified.

        Returns:
            True if nothing is left to be done for this chunk.
        """
        with self._lock:
            if not self.wants(index):
                return True
            self._num_copying += 1
        is_copied = False
        try:
            is_copied = copy()
        finally:
            with self._lock:
                self._num_copying -= 1
                self._is_copied[index] = is_copied
        return is_copied

    def fail(self, index: int, reason: str) -> None:
        """Notes that a chunk cannot be loaded."""
        with self._lock:
            if index < self._end:
                self._end, self._reason = index, reason

    def cancel(self, reason: str) -> None:
        """Ends the load with what it has."""
        with self._lock:
            self._close(reason)

    def _close(self, reason: str) -> None:
        if not self._is_closed:
            self._is_closed, self._reason = True, self._reason or reason

    def outcome(self, now_s: float) -> StoreLoadOutcome | None:
        """Returns the outcome of the load; `None` while it has none, or while a thread copies into its blocks."""
        with self._lock:
            if now_s >= self._deadline_s:
                self._close("timeout")
            if self._num_copying:
                return None
            num_loaded = self._num_loaded()
            if num_loaded < self._end and not self._is_closed:
                return None
            self._is_closed = True
            return StoreLoadOutcome(num_loaded, self._reason if num_loaded < len(self._is_copied) else "")

    def _num_loaded(self) -> int:
        return next((index for index, is_copied in enumerate(self._is_copied) if not is_copied), len(self._is_copied))


class Loader:
    """Opens the store, and loads chunks for one rank. Its methods are for the thread of vLLM's hooks; none waits.

    Args:
        client: The store.
        cache: The KV cache.
        values: Format of the chunks.
        order: Order of the device's work.
        chunk_blocks: Blocks of a chunk.
        num_threads: Threads that read.
    """

    def __init__(
        self,
        client: StoreClient,
        cache: CacheBytes,
        values: ChunkValues,
        order: HostOrder,
        *,
        chunk_blocks: int,
        num_threads: int,
    ) -> None:
        self._client = client
        self._order = order
        self._cache = cache
        self._values = values
        self._chunk_blocks = chunk_blocks
        self._slots = StagingPool(num_threads * values.slot_bytes, values.slot_bytes, has_pages=True)
        self._threads = TaskThreads("kvpipe-load", num_threads)
        # Loads do not queue behind the pages of all of the cache.
        self._page_thread = TaskThreads("kvpipe-pages", 1)
        self._active: dict[str, ActiveLoad] = {}
        self._threads.submit(client.open)
        for layer in range(cache.num_layers):
            self._page_thread.submit(functools.partial(cache.make_pages, layer))

    def begin(self, load: StoreLoad, namespace: bytes, now_s: float) -> None:
        """Begins a load. `namespace` is that of this rank."""
        active = self._active[load.request_id] = ActiveLoad(load, now_s + load.limit_s)
        try:
            active.event = self._order.record()
        except KVPipeError as error:
            logger.warning(_FAILED, error)
            active.cancel("device")
        for index, part_id in enumerate(load.part_ids):
            self._threads.submit(lambda index=index, key=namespace + part_id: self._read(active, index, key))  # type: ignore[misc]

    def cancel(self, request_id: str) -> None:
        """Ends an obsolete load."""
        if (active := self._active.get(request_id)) is not None:
            active.cancel("cancelled")

    def ended(self, now_s: float) -> list[tuple[StoreLoad, StoreLoadOutcome]]:
        """Returns loads that have ended, each once."""
        outcomes = [(active.load, active.outcome(now_s)) for active in self._active.values()]
        found = [(load, outcome) for load, outcome in outcomes if outcome is not None]
        for load, _ in found:
            del self._active[load.request_id]
        return found

    def missing_blocks(self, load: StoreLoad, outcome: StoreLoadOutcome) -> list[int]:
        """Returns the blocks that a load was to fill and did not."""
        return load.block_ids[max(0, outcome.num_loaded * self._chunk_blocks - load.first) :]

    def num_bytes(self, load: StoreLoad, outcome: StoreLoadOutcome) -> int:
        """Returns the number of bytes of KV that a load has brought."""
        num_blocks = min(load.first + len(load.block_ids), outcome.num_loaded * self._chunk_blocks)
        return num_blocks * int(self._cache.block_bytes)

    def __len__(self) -> int:
        return len(self._active)

    def _read(self, active: ActiveLoad, index: int, key: bytes) -> None:
        if not active.wants(index):
            return
        slot = self._slots.acquire()
        if slot is None:
            message = "more threads than slots"
            raise RuntimeError(message)
        try:
            reason = self._load(active, index, key, slot)
        except CorruptDataError:
            reason = "corrupt"
        except _DeviceFailedError as error:
            logger.warning(_FAILED, error)
            reason = "device"
        except Exception as error:  # noqa: BLE001 - a user's store may raise anything; the load ends with what it has
            reason = failure_reason(error)
        finally:
            self._slots.release(slot)
        if reason:
            active.fail(index, reason)

    def _load(self, active: ActiveLoad, index: int, key: bytes, slot: np.ndarray) -> str:
        """Loads a chunk, or an entry. Returns the reason of a failure; empty if it is loaded, or of no use any more."""
        if index == len(active.load.chunk_ids):
            reason = self._client.run(lambda store: self._consume_entry(store, active.load, key, slot))
            return reason or self._scatter(active, index, slot)
        reason = self._client.run(lambda store: self._load_chunk(store, active, index, key, slot))
        if reason in _WRONG:
            self._client.run(lambda store: store.delete([key]))
        return reason

    def _load_chunk(self, store: KVStore, active: ActiveLoad, index: int, key: bytes, slot: np.ndarray) -> str:
        value = store.select(key)
        if value is None:
            return "missing"
        with value:
            memory = self._values.buffer_for(value.num_bytes, slot, self._chunk_blocks)
            if memory is None:
                return "short"
            if self._is_read_into_blocks(active, index, key, value):
                return ""
            value.read_into(memory.data)
        reason = self._values.restore(memory, key, slot, self._chunk_blocks)
        return reason or self._scatter(active, index, slot)

    def _is_read_into_blocks(self, active: ActiveLoad, index: int, key: bytes, value: Value) -> bool:
        """Reads a chunk straight into its blocks, which saves a copy and a checksum. Returns true if that is done.

        Not if the value has to be decoded, if a part of it is not wanted, if the store cannot read so, or if a device
        has the blocks.
        """
        block_ids = self._block_ids(active.load, index)
        if self._order.is_async or not self._values.is_plain or len(block_ids) < self._chunk_blocks:
            return False
        header: np.ndarray = np.empty(HEADER_BYTES, np.uint8)
        parts = [part.data for part in (header, *self._cache.parts(block_ids))]

        def read() -> bool:
            checksum = value.read_parts(parts)
            return checksum is not None and self._values.is_whole(header, checksum, key)

        return active.copy(index, read)

    def _consume_entry(self, store: KVStore, load: StoreLoad, key: bytes, slot: np.ndarray) -> str:
        """Reads an entry, which is deleted then, whatever is in it."""
        lease = store.take(key)
        if lease is None:
            return "missing"
        num_blocks = load.first + len(load.block_ids) - len(load.chunk_ids) * self._chunk_blocks
        with lease:
            memory = self._values.buffer_for(lease.num_bytes, slot, num_blocks)
            if memory is not None and lease.record == load.record:
                lease.read_into(memory.data)
            lease.acknowledge()
        if memory is None:
            return "short"
        if lease.record != load.record:
            return "foreign"
        return self._values.restore(memory, key, slot, num_blocks)

    def _block_ids(self, load: StoreLoad, index: int) -> list[int]:
        """The blocks that a chunk goes to; the first chunk's may be fewer."""
        start = index * self._chunk_blocks - load.first
        return load.block_ids[max(0, start) : start + self._chunk_blocks]

    def _scatter(self, active: ActiveLoad, index: int, slot: np.ndarray) -> str:
        """Copies a verified chunk from staging memory into its blocks."""
        block_ids = self._block_ids(active.load, index)
        num_left_out = max(0, active.load.first - index * self._chunk_blocks)

        def copy() -> bool:
            try:
                if active.event is not None:
                    active.event.wait()
                if block_ids:
                    self._cache.scatter(slot[HEADER_BYTES:], block_ids, num_left_out)
            except KVPipeError as error:
                raise _DeviceFailedError(str(error)) from error
            return True

        active.copy(index, copy)
        return ""

    def close(self, timeout: float) -> bool:
        """Ends all loads. Returns true if their threads have ended in time."""
        for active in self._active.values():
            active.cancel("cancelled")
        return all([self._page_thread.close(timeout), self._threads.close(timeout)])
