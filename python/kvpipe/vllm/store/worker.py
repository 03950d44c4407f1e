"""The worker role: loads and saves of one rank, and exactly-once reports to vLLM.

It runs on the worker's main thread. No hook waits for the store.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvpipe.exceptions import ConfigError
from kvpipe.store.serde import Serde
from kvpipe.vllm.amx import permit_tiles
from kvpipe.vllm.device import check_device, one_device, order_of
from kvpipe.vllm.fingerprint import attention_properties, instruction_set
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from kvpipe.vllm.kept_blocks import KeptBlocks
from kvpipe.vllm.store.cache_bytes import CacheBytes
from kvpipe.vllm.store.client import StoreClient
from kvpipe.vllm.store.keys import rank_namespace
from kvpipe.vllm.store.loading import Loader
from kvpipe.vllm.store.metadata import StoreStepMetadata, WorkerReport
from kvpipe.vllm.store.saving import Saver
from kvpipe.vllm.store.stats import KVStoreStats
from kvpipe.vllm.store.values import ChunkValues, layout_of
from kvpipe.vllm.store.weights import AS_LOADED, PROPERTY, Weights

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from kvpipe.vllm.store.config import StoreConnectorConfig
    from kvpipe.vllm.store.metadata import StoreLoadOutcome

logger = init_logger("vllm.kvpipe.store")

# Seconds for the threads of loads, and for those of saves, to end: before the store is closed, and after that.
_DRAIN_S = 2.0
_CLOSE_S = 5.0


class StoreWorkerRole:
    """Loads chunks into the KV cache of one rank, and saves chunks from it."""

    def __init__(self, vllm_config: VllmConfig, config: StoreConnectorConfig, num_blocks: int) -> None:
        self._vllm_config = vllm_config
        self._num_blocks = num_blocks
        self._config = config
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.world_size
        self._is_saving = vllm_config.kv_transfer_config.kv_role != "kv_consumer"
        self._client = StoreClient(config.store, config.load_timeout_s)
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._kept = KeptBlocks()
        self._step = StoreStepMetadata()
        self._namespace = b""
        self._weights: Weights | None = None
        self._layout = ""
        self._properties: list[tuple[str, str]] = []
        self._is_introduced = False
        self._identification = 0
        self._invalid_block_ids: set[int] = set()
        self._outcomes: dict[str, StoreLoadOutcome] = {}
        self._stats = KVStoreStats()
        self._breaker_state = "closed"

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Starts the threads that move chunks.

        Raises:
            ConfigError: kvpipe cannot move the caches, a layer's blocks are not contiguous, or `staging_bytes` is less
                than a chunk; or the serde cannot write this KV.
        """
        device = one_device(kv_caches)
        check_device(device.type)
        permit_tiles()
        config, cache, order = self._config, CacheBytes(kv_caches, self._num_blocks), order_of(device)
        chunk_blocks = config.chunk_size // self._vllm_config.cache_config.block_size
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase)
        self._weights = Weights(list(layers.values()), self._vllm_config.model_config.quantization)
        if self._weights.unreadable_reason:
            logger.warning(
                "store.weights after a reset this instance shares no KV until it is restarted: its weights are %s",
                self._weights.unreadable_reason,
            )
        self._layout = cache.digest.hex()
        self._properties = self._identified(AS_LOADED)
        values = self._chunk_values(kv_caches, chunk_blocks, cache)
        num_threads, parts = config.num_io_threads, (self._client, cache, values, order)
        self._loader = Loader(*parts, chunk_blocks=chunk_blocks, num_threads=num_threads)
        if self._is_saving:
            num_threads = max(1, num_threads // 2)
            self._saver = Saver(*parts, staging_bytes=config.staging_bytes, num_threads=num_threads)
        self._kept = KeptBlocks([cache.blocks])

    def _identified(self, weights: str) -> list[tuple[str, str]]:
        """Returns this rank's additions to the fingerprint."""
        return [*attention_properties(self._vllm_config), ("layout", self._layout), (PROPERTY, weights)]

    def _chunk_values(self, kv_caches: dict[str, torch.Tensor], chunk_blocks: int, cache: CacheBytes) -> ChunkValues:
        serde, layout = Serde.parse(self._config.serde), None
        if not serde.is_lossless and one_device(kv_caches).type != "cpu":
            message = f"serde={self._config.serde}: it knows the layout of vLLM's CPU build alone; write naive on a GPU"
            raise ConfigError(message)
        if not serde.is_lossless:
            layout = layout_of(kv_caches.values(), chunk_blocks, instruction_set(self._vllm_config))
        return ChunkValues(serde, layout, cache.digest, chunk_blocks, cache.block_bytes)

    def begin_step(self, step: StoreStepMetadata) -> None:
        """Begins and cancels loads, and saves entries whose KV is here, before the forward pass."""
        # vLLM does not end every forward pass that it begins.
        self._drop_saves()
        self._step = step
        self._kept.keep((0, block_id) for block_id in step.restores)
        PENDING_FIRST_TOKENS.set(self._engine_id, "KVStoreConnector", step.first_tokens)
        if self._loader is None:
            return
        if step.identification and self._weights is not None:
            self._identification, self._is_introduced = step.identification, False
            self._properties = self._identified(self._weights.identify())
        self._namespace = rank_namespace(step.namespace, self._rank) if step.namespace else b""
        now_s = time.monotonic()
        for load in step.loads:
            self._loader.begin(load, self._namespace, now_s)
        for request_id in step.cancels:
            self._loader.cancel(request_id)
        if self._saver is not None:
            self._save_entries(self._saver, step, now_s)

    def _save_entries(self, saver: Saver, step: StoreStepMetadata, now_s: float) -> None:
        for entry in step.entries:
            if not entry.entry_id:
                saver.drop(entry.request_id)
                continue
            key = self._namespace + entry.entry_id
            if reason := saver.save_entry(entry.request_id, key, entry.record, now_s):
                self._stats.add("skipped", reason)

    def _drop_saves(self) -> None:
        """Saves nothing of the step, whose blocks vLLM may give to others."""
        step, self._step = self._step, StoreStepMetadata()
        if self._saver is not None:
            self._saver.release([*(save.hold for save in step.saves), *(copy.hold for copy in step.copies)])

    def end_forward(self, *, has_failed: bool = False) -> None:
        """Restores blocks, and copies what is complete with the forward pass, after it.

        Args:
            has_failed: True if the forward pass raised: its blocks have the KV of others yet, and nothing is saved.
        """
        self._kept.put_back()
        if has_failed or not self._namespace:
            self._drop_saves()
        step, self._step = self._step, StoreStepMetadata()
        if self._saver is None:
            return
        now_s = time.monotonic()
        self._count_saved(self._saver, now_s)
        if step.saves or step.copies:
            self._saver.mark()
        for save in step.saves:
            if reason := self._saver.save(self._namespace + save.chunk_id, save.block_ids, now_s, save.hold):
                self._stats.add("skipped", reason)
        for copy in step.copies:
            if reason := self._saver.copy(copy.request_id, copy.block_ids, copy.hold):
                self._stats.add("skipped", reason)

    def _count_saved(self, saver: Saver, now_s: float) -> None:
        for saved in saver.ended(now_s):
            if saved.result == "saved":
                self._stats.add("saved", "none")
                self._stats.add("bytes", "save", saved.num_bytes)
            else:
                self._stats.add("skipped", saved.result)
            self._stats.add("operations", "save")
            self._stats.add("seconds", "save", saved.elapsed_s)
        if saver.breaker_state != self._breaker_state:
            self._breaker_state = saver.breaker_state
            self._stats.set_breaker(f"save {self._rank}", self._breaker_state)

    def finished(self) -> set[str]:
        """Returns requests whose load has ended, each exactly once."""
        if self._loader is None:
            return set()
        received = set()
        for load, outcome in self._loader.ended(time.monotonic()):
            received.add(load.request_id)
            self._outcomes[load.request_id] = outcome
            self._invalid_block_ids.update(self._loader.missing_blocks(load, outcome))
            self._stats.add("bytes", "load", self._loader.num_bytes(load, outcome))
        return received

    def drain_invalid_block_ids(self) -> set[int]:
        """Returns missing blocks of the loads that `finished` has just reported."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def drain_report(self) -> WorkerReport | None:
        """Returns the report of this step for the scheduler role; `None` if there is nothing to report."""
        is_first = not self._is_introduced and self._loader is not None
        properties = {self._rank: self._properties} if is_first else {}
        unforced = [self._rank] if is_first and not PENDING_FIRST_TOKENS.has_processor else []
        outcomes, self._outcomes = self._outcomes, {}
        copied = {} if self._saver is None else self._saver.drain_copied()
        if not (properties or outcomes or copied):
            return None
        self._is_introduced = True
        return WorkerReport(properties, outcomes, unforced, self._identification, copied)

    def drain_stats(self) -> KVStoreStats | None:
        """Returns the counts since the last call; `None` if there are none."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KVStoreStats()
        return stats

    def close(self) -> None:
        """Ends the threads and the store. Chunks that no thread has begun to save are lost."""
        parts = [part for part in (self._loader, self._saver) if part is not None]
        are_ended = [part.close(_DRAIN_S) for part in parts]
        # This ends calls that wait for the store, and with them the threads.
        self._client.close()
        if not all(are_ended) and not all(tuple(part.close(_CLOSE_S) for part in parts)):
            logger.warning("store.threads_left a call of the store has not ended within %s s", _CLOSE_S)
