"""The connector class that vLLM loads: a facade over the scheduler role or the worker role of its process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvpipe.vllm.engine_checks import check_parent, check_pipeline
from kvpipe.vllm.facade import Facade
from kvpipe.vllm.fingerprint import attention_properties
from kvpipe.vllm.handoff.cache_groups import CacheGroups
from kvpipe.vllm.handoff.config import ConnectorConfig
from kvpipe.vllm.handoff.integrity import objection_to_validate
from kvpipe.vllm.handoff.metadata import HandshakeMetadata, StepMetadata, WorkerOutcomes
from kvpipe.vllm.handoff.stats import KVPipePromMetrics, KVPipeStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.vllm.handoff.scheduler import SchedulerRole
    from kvpipe.vllm.handoff.worker import WorkerRole


KVConnectorMetadata.register(StepMetadata)
KVConnectorHandshakeMetadata.register(HandshakeMetadata)
KVConnectorWorkerMetadata.register(WorkerOutcomes)


class KVPipeConnector(Facade["SchedulerRole", "WorkerRole"], SupportsHMA):
    """Moves the KV cache of a request from a prefill instance to a decode instance; see docs/concepts/handoff.md."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        groups = CacheGroups.of(kv_cache_config, parallel.decode_context_parallel_size)
        self._set_load_failure_policy(config.on_load_failure)
        check_pipeline(vllm_config, is_consumer=transfer.is_kv_consumer)
        if role == KVConnectorRole.SCHEDULER:
            from kvpipe.vllm.handoff.scheduler import SchedulerRole  # noqa: PLC0415 - only where the role is

            self._scheduler = SchedulerRole(vllm_config, config, groups)
        else:
            from kvpipe.vllm.handoff.worker import WorkerEngine, WorkerRole  # noqa: PLC0415 - only where the role is

            check_parent(transfer.kv_load_failure_policy, is_consumer=transfer.is_kv_consumer)
            objection = objection_to_validate(vllm_config, kv_cache_config)
            engine = WorkerEngine(
                rank=parallel.rank % parallel.world_size,
                engine_id=str(transfer.engine_id),
                kv_role=str(transfer.kv_role),
                num_blocks=kv_cache_config.num_blocks,
                groups=groups.layers(),
                num_ranks=parallel.tensor_parallel_size,
                num_stages=parallel.pipeline_parallel_size,
                num_heads=groups.num_heads(vllm_config),
                num_hooked_layers=groups.num_attention_layers,
                has_parts=groups.has_parts,
                device=vllm_config.device_config.device_type,
                is_by_layer=calls_each_layer_once(vllm_config),
                objection_to_validate=objection,
            )
            self._worker = WorkerRole(engine, config)

    # --- worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the cache of each layer."""
        self._of_worker().register(kv_caches, attention_properties(self._vllm_config))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns the address of this rank's agent."""
        return self._of_worker().handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Ends handoffs, and copies blocks that are to be restored, before this step writes into any."""
        # Under MultiConnector the metadata may be another connector's.
        if isinstance(kv_connector_metadata, StepMetadata):
            self._of_worker().prepare_step(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begins the step's loads, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._of_worker().begin_step(connector_metadata)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Marks this step's blocks as ready in a layer whose attention is done."""
        self._of_worker().save_layer(layer_name)

    def finish_forward(self) -> None:
        """Marks this step's blocks as ready in the remaining layers, where vLLM calls it: its V2 model runner.

        That one calls `wait_for_save` after sampling, and after drafting, which then computes more layers.
        """
        self._of_worker().finish_layers()

    def wait_for_save(self) -> None:
        """Marks this step's blocks as ready in the remaining layers, after the forward pass.

        The V1 model runner calls it also when the forward pass has raised.
        """
        self._of_worker().end_forward(has_failed=sys.exc_info()[0] is not None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns requests whose sending or receiving has ended, each exactly once."""
        return self._of_worker().finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the same, and those of the received requests that vLLM has to compute from their first token on."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._of_worker().drain_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns missing blocks of the requests that `get_transfer_results` has just returned."""
        return self._of_worker().drain_invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns the outcomes of loads."""
        return self._of_worker().drain_outcomes()

    # --- scheduler role

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Stores the manager, which knows the blocks of each request."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._of_scheduler().bind_kv_cache_manager(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Stores the addresses of workers without pipeline parallelism, by tensor-parallel rank."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): found for rank, found in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Stores the workers' addresses, by pipeline-parallel and tensor-parallel rank.

        Under MultiConnector some entries may be another connector's.
        """
        workers = {ranks: found for ranks, found in metadata.items() if isinstance(found, HandshakeMetadata)}
        self._of_scheduler().set_workers(workers)

    def on_new_request(self, request: Request) -> None:
        """Reads the request's transfer parameters."""
        self._of_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of the producer's tokens; `None` while it has not opened the handoff."""
        return self._match(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Returns all groups: vLLM must not zero what a load writes."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Opens a handoff as the producer, or begins a load as the consumer."""
        self._of_scheduler().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the scheduler role's metadata for the worker role."""
        self._loaded_first.scheduled(scheduler_output)
        return self._of_scheduler().build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Processes the worker role's reports on loads."""
        self._of_scheduler().update(connector_output)
        self._loaded_first.loaded(connector_output.finished_recving)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns no event. vLLM calls it at the end of each step: this is where an engine without work waits."""
        self._of_scheduler().wait_while_idle(self)
        return ()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Does the same for a model with one KV cache group; vLLM calls it without its hybrid KV cache manager."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns true if the blocks are leased to a consumer, and the parameters of the response."""
        self._loaded_first.finished(request)
        return self._of_scheduler().finished(request, block_ids)

    def reset_cache(self) -> bool:
        """Withdraws all blocks that consumers may read: vLLM's weights change, it sleeps, or an operator resets it."""
        self._of_scheduler().reset()
        return True

    # --- both

    def get_kv_connector_stats(self) -> KVPipeStats | None:
        """Returns the counts for metrics since the last call; `None` after most steps."""
        if self._scheduler is not None:
            return self._scheduler.drain_stats()
        if self._worker is None or (num_sessions := self._worker.drain_num_sessions()) is None:
            return None
        return KVPipeStats.of_sessions(self._worker.rank, *num_sessions)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPipeStats:
        """Returns the stats of data that another process has sent; without data, empty stats."""
        return KVPipeStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVPipePromMetrics:
        """Registers the connector's Prometheus metrics. vLLM calls this in each API server."""
        return KVPipePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def calls_each_layer_once(vllm_config: VllmConfig) -> bool:
    """True if vLLM calls `save_kv_layer` once for each layer and step: not with micro-batches or drafts."""
    return vllm_config.speculative_config is None and not vllm_config.parallel_config.use_ubatching
