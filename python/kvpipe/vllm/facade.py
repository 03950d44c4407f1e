"""The base of both connector classes: a facade over the scheduler role or the worker role of their process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvpipe.vllm.engine_checks import check_context_parallel, check_memory_stays, load_failure_policy
from kvpipe.vllm.versions import LoadedFirst, check_version

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class Role(Protocol):
    """A connector's part in one process."""

    def close(self) -> None:
        """Ends its threads and sessions."""


class MatchingRole(Role, Protocol):
    """A connector's part in the process of the scheduler."""

    def match(self, request: Request, num_local_tokens: int, /) -> tuple[int | None, bool]:
        """Returns the number of tokens to load, `None` while it is not known, and true if steps go on meanwhile."""


SchedulerT = TypeVar("SchedulerT", bound=MatchingRole)
WorkerT = TypeVar("WorkerT", bound=Role)


class Facade(KVConnectorBase_V1, Generic[SchedulerT, WorkerT]):
    """A connector of which a process has one role. The subclass makes it.

    Source: `vllm/distributed/kv_transfer/kv_connector/v1/base.py` of vLLM 0.32.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version()
        check_memory_stays(vllm_config.model_config)
        check_context_parallel(vllm_config.parallel_config)
        self._scheduler: SchedulerT | None = None
        self._worker: WorkerT | None = None
        self._loaded_first = LoadedFirst()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003 - vLLM's signature
        """Returns false: vLLM 0.33 asks at the start, and refuses sleep mode; the constructor does in each version."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns the layout in which a block has its KV heads one after the other, for peers with other ranks.

        Both connectors have the same one, so that all engines share the KV in a store.
        """
        is_latent = vllm_config.model_config is not None and vllm_config.model_config.use_mla
        return None if is_latent else "LBHNC"

    def _set_load_failure_policy(self, on_load_failure: str) -> None:
        """Sets what vLLM reads after the constructor; under MultiConnector it reads the parent's."""
        transfer = self._kv_transfer_config
        transfer.kv_load_failure_policy = load_failure_policy(on_load_failure, transfer.kv_load_failure_policy)

    def _of_scheduler(self) -> SchedulerT:
        if self._scheduler is None:
            message = "a scheduler hook was called in the worker role"
            raise RuntimeError(message)
        return self._scheduler

    def _of_worker(self) -> WorkerT:
        if self._worker is None:
            message = "a worker hook was called in the scheduler role"
            raise RuntimeError(message)
        return self._worker

    def _match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answers `get_num_new_matched_tokens`."""
        if self._loaded_first.is_deferred(request):
            return None, False
        num_tokens, is_async = self._of_scheduler().match(request, num_computed_tokens)
        if request.skip_reading_prefix_cache:  # it wants log probabilities of its prompt; vLLM 0.30 would load
            return 0, False
        if is_async:
            self._loaded_first.claimed(request)
        return num_tokens, is_async

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Does nothing: loads begin in `bind_connector_metadata`, which vLLM calls before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: vLLM schedules a request only after its load has ended."""

    def shutdown(self) -> None:
        """Closes the role of this process, which notifies its peers."""
        for role in (self._scheduler, self._worker):
            if role is not None:
                role.close()
