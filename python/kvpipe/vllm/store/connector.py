"""The connector class that vLLM loads: a facade over the scheduler role or the worker role of its process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpipe.vllm.engine_checks import check_cache, check_cascade, check_parent, check_pipeline
from kvpipe.vllm.facade import Facade
from kvpipe.vllm.store.config import StoreConnectorConfig
from kvpipe.vllm.store.metadata import StoreStepMetadata
from kvpipe.vllm.store.stats import KVStorePromMetrics, KVStoreStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.vllm.store.scheduler import StoreSchedulerRole
    from kvpipe.vllm.store.worker import StoreWorkerRole


class KVStoreConnector(Facade["StoreSchedulerRole", "StoreWorkerRole"]):
    """Saves the KV of a prompt's full chunks in a store, and loads the longest prefix that is stored."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_cache(kv_cache_config)
        # The other stages would never copy the blocks that are held for them.
        check_pipeline(vllm_config, is_consumer=False)
        if vllm_config.device_config.device_type != "cpu":
            check_cascade(vllm_config.model_config)
        transfer, block_size = self._kv_transfer_config, int(vllm_config.cache_config.block_size)
        config = StoreConnectorConfig.parse(transfer.kv_connector_extra_config, block_size)
        self._set_load_failure_policy(config.on_load_failure)
        if role == KVConnectorRole.SCHEDULER:
            from kvpipe.vllm.store.scheduler import StoreSchedulerRole  # noqa: PLC0415 - only where the role is

            self._scheduler = StoreSchedulerRole(vllm_config, config)
        else:
            from kvpipe.vllm.store.worker import StoreWorkerRole  # noqa: PLC0415 - only where the role is

            check_parent(transfer.kv_load_failure_policy, "KVStoreConnector")
            self._worker = StoreWorkerRole(vllm_config, config, kv_cache_config.num_blocks)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Does nothing. MultiConnector passes on the metadata of another connector, also that of several stages."""

    @property
    def requires_kv_delivery(self) -> bool:
        """True if a request may end only when its KV has been sent: no, chunks are saved from copies."""
        return False

    # --- worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Starts the threads that move chunks of the caches."""
        self._of_worker().register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begins the step's loads, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StoreStepMetadata):
            self._of_worker().begin_step(connector_metadata)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Does nothing: a chunk is saved with all of its layers, after the forward pass."""

    def wait_for_save(self) -> None:
        """Copies the chunks that this step has completed, after the forward pass. Threads save the copies.

        The V1 model runner calls it also when the forward pass has raised.
        """
        self._of_worker().end_forward(has_failed=sys.exc_info()[0] is not None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns requests whose load has ended, each exactly once. No request waits for its saves."""
        return None, self._of_worker().finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns missing blocks of the requests that `get_finished` has just returned."""
        return self._of_worker().drain_invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns the outcomes of loads, and once this rank's additions to the fingerprint."""
        return self._of_worker().drain_report()

    # --- scheduler role

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Stores the manager, which knows the blocks of each request."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._of_scheduler().bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """Asks the store for the chunks of a new prompt."""
        self._of_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of tokens in the store; `None` before it has answered."""
        return self._match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begins a load."""
        self._of_scheduler().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the scheduler role's metadata for the worker role."""
        self._loaded_first.scheduled(scheduler_output)
        return self._of_scheduler().build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Processes the worker role's reports."""
        self._of_scheduler().update(connector_output)
        self._loaded_first.loaded(connector_output.finished_recving)

    def has_pending_push_work(self) -> bool:
        """True if the engine has to go on without requests: blocks are held until the workers report their copies."""
        return self._of_scheduler().holds_blocks

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns that the request's blocks may be freed, as saves are of copies, and parameters for the response."""
        self._loaded_first.finished(request)
        return False, self._of_scheduler().finished(request)

    def reset_cache(self) -> bool:
        """Has the workers identify their weights: vLLM's change, it sleeps, or an operator resets it."""
        self._of_scheduler().reset()
        return True

    # --- both

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """Returns the counts for metrics since the last call; `None` after most steps."""
        role = self._scheduler or self._worker
        return role.drain_stats() if role is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        """Returns the stats of data that another process has sent; without data, empty stats."""
        return KVStoreStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        """Registers the connector's Prometheus metrics. vLLM calls this in each API server."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
