"""Requirements of kvpipe's connectors on the configuration of an engine, its failure policy among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpipe.connector")

_DEFAULT_POLICY = "recompute"
_VLLMS_POLICY = "fail"
# vLLM's settings with which it can unmap the memory of a KV cache. On CUDA devices the first one sets the second.
_UNMAPPING_SETTINGS = ("enable_sleep_mode", "enable_cumem_allocator")
# Connectors of vLLM that read the same parameters of requests.
_SAME_PARAMS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector")


def check_memory_stays(model: ModelConfig) -> None:
    """Refuses engines that can take the memory of the KV cache away, and give it other memory.

    vLLM does so on `/sleep` and `/release_kv_cache_memory`. Up to 0.32 it does not call the worker role before.

    Raises:
        ConfigError: Sleep mode or the cumem allocator is on.
    """
    if setting := next((name for name in _UNMAPPING_SETTINGS if getattr(model, name)), ""):
        flag = f"--{setting.replace('_', '-')}"
        message = f"{flag}: vLLM can unmap the KV cache, whose addresses kvpipe keeps; start vLLM without it"
        raise ConfigError(message)


def check_cascade(model: ModelConfig) -> None:
    """Refuses cascade attention, which vLLM has up to 0.31, for engines whose blocks kvpipe holds.

    vLLM takes a block for part of the prefix of all running requests if as many hold it as are running. A request that
    does not share the block would be computed with it.

    Raises:
        ConfigError: It is on.
    """
    if not model.disable_cascade_attn and hasattr(KVCacheCoordinator, "get_num_common_prefix_blocks"):
        message = (
            "--no-disable-cascade-attn: vLLM counts the blocks that kvpipe holds on GPUs as those of a common prefix; "
            "start vLLM without it"
        )
        raise ConfigError(message)


def check_context_parallel(parallel: ParallelConfig) -> None:
    """Refuses prefill context parallelism, whose ranks have different tokens.

    Raises:
        ConfigError: It is on.
    """
    if parallel.prefill_context_parallel_size > 1:
        size = parallel.prefill_context_parallel_size
        message = f"--prefill-context-parallel-size {size}: kvpipe was not tested with it; start vLLM without it"
        raise ConfigError(message)


def check_pipeline(config: VllmConfig, *, is_consumer: bool) -> None:
    """Refuses pipelines with which kvpipe does not hand over.

    Raises:
        ConfigError: An engine that consumes handoffs has several stages. Or vLLM calls the connector after the forward
            pass on the last one alone: the V1 model runner does so with speculative decoding.
    """
    num_stages = config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return
    if config.speculative_config is not None and not config.use_v2_model_runner:
        message = (
            f"pipeline parallel size is {num_stages}: with speculative decoding vLLM's V1 model runner does not call "
            "connectors on all stages; start this instance without --speculative-config, or with "
            "VLLM_USE_V2_MODEL_RUNNER=1"
        )
        raise ConfigError(message)
    if is_consumer:
        message = (
            f"pipeline parallel size is {num_stages}: an engine that consumes handoffs has one stage; start it with "
            '--pipeline-parallel-size 1, or with "kv_role": "kv_producer" if it only prefills'
        )
        raise ConfigError(message)


def check_cache(kv_cache_config: KVCacheConfig) -> None:
    """Refuses KV caches in which a token position can have no block, or more than one.

    Raises:
        ConfigError: The model has other groups than one of full attention.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
    message = f"model unsupported: kvpipe needs one KV cache group of full attention, this model has {kinds or 'none'}"
    raise ConfigError(message)


def load_failure_policy(on_load_failure: str, vllms: str) -> str:
    """Returns `recompute` or `fail`.

    vLLM does not keep whether its `fail` was written or is its default, so that `fail` alone does not count. A request
    that is computed again is answered right.

    Args:
        on_load_failure: The connector's setting; empty: not given.
        vllms: `kv_load_failure_policy`.

    Raises:
        ConfigError: Both are given and differ.
    """
    if not on_load_failure:
        if vllms == _VLLMS_POLICY:
            logger.info(
                "config.set kv_load_failure_policy=%s; to have requests fail, write %s into kv_connector_extra_config",
                _DEFAULT_POLICY,
                '"on_load_failure": "fail"',
            )
            return _DEFAULT_POLICY
        return vllms
    if vllms not in (_VLLMS_POLICY, on_load_failure):
        message = (
            f"on_load_failure={on_load_failure!r} and kv_load_failure_policy={vllms!r} differ; write "
            f'"kv_load_failure_policy": "{vllms}" alone into --kv-transfer-config, without on_load_failure'
        )
        raise ConfigError(message)
    return on_load_failure


def check_parent(policy: str, connector: str = "KVPipeConnector", *, is_consumer: bool = False) -> None:
    """Checks what an engine was configured with, where kvpipe is one of several connectors.

    A connector of MultiConnector gets its own part of that alone. vLLM has all of it while a worker starts.

    Args:
        policy: This connector's policy for KV that does not come.
        connector: Name of this connector.
        is_consumer: True if it loads into blocks that vLLM frees only after the steps that write them, if the engine is
            a consumer.

    Raises:
        ConfigError: vLLM would do something else, or another connector reads the same parameters of requests.
    """
    engine = get_current_vllm_config_or_none()
    parent = None if engine is None else engine.kv_transfer_config
    if parent is None or parent.kv_connector != "MultiConnector":
        return
    reads_params = connector == "KVPipeConnector"
    names = [str(part.get("kv_connector")) for part in parent.kv_connector_extra_config.get("connectors", ())]
    if other := next((name for name in names if reads_params and name in _SAME_PARAMS), ""):
        message = (
            f"MultiConnector has {other} beside KVPipeConnector: both read the same kv_transfer_params, and would "
            "take each other's handoffs; leave one of them"
        )
        raise ConfigError(message)
    if is_consumer and not parent.is_kv_consumer:
        message = (
            f"under MultiConnector vLLM reads kv_role at the top level, where it is {parent.kv_role!r}, and "
            f'{connector} consumes; write "kv_role": "kv_both" beside "kv_connector": "MultiConnector"'
        )
        raise ConfigError(message)
    if parent.kv_load_failure_policy != policy:
        message = (
            f"under MultiConnector vLLM reads kv_load_failure_policy at the top level, where it is "
            f"{parent.kv_load_failure_policy!r}, and {connector} has {policy!r}; write "
            f'"kv_load_failure_policy": "{policy}" beside "kv_connector": "MultiConnector"'
        )
        raise ConfigError(message)
