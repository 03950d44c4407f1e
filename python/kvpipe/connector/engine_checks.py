"""Requirements of kvpipe's connectors on an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpipe.connector")

_TESTED_VLLM = "0.32"
# Their blocks belong to a request until it ends, and only its own tokens are written into them.
_PLAIN_SPECS = (FullAttentionSpec, MLAAttentionSpec)


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


def warn_of_untested_vllm() -> None:
    """Logs a warning with a vLLM that kvpipe was not tested with."""
    from vllm import __version__  # noqa: PLC0415

    if __version__.partition("+")[0].rsplit(".", 1)[0] != _TESTED_VLLM:
        logger.warning(
            "kvpipe was tested with vLLM %s.x, this is %s; hooks may differ",
            _TESTED_VLLM,
            __version__,
        )


def objection_to_validate(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why a block may change before the worker role can mark its handoff as ended; empty if none does."""
    if vllm_config.model_config.enable_sleep_mode:
        return "sleep mode discards KV without calling the connector's worker role"
    specs = {type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups}
    if other := sorted(spec.__name__ for spec in specs.difference(_PLAIN_SPECS)):
        return f"vLLM may free or rewrite blocks of a running request in a cache of {', '.join(other)}"
    if vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing:
        return "the V2 model runner zeroes blocks before it calls the connector"
    return ""


def calls_each_layer_once(vllm_config: VllmConfig) -> bool:
    """True if vLLM calls `save_kv_layer` once for each layer and step: not with micro-batches or drafts."""
    return vllm_config.speculative_config is None and not vllm_config.parallel_config.use_ubatching
