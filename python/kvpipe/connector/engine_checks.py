"""What kvpipe's connectors need of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpipe.connector")

_TESTED_VLLM = "0.32"


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
