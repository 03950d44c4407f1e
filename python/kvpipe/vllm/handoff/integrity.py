"""Integrity of the blocks of handoffs: by checksums, or by asking the producer after the last read.

The producer may be asked only where it marks the end of a handoff before a block of it changes. Whether vLLM's hooks
allow that depends on the engine's configuration. The worker role needs no vLLM for its choice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvpipe.integrity")


def choose_integrity(setting: str, objection: str, device: str) -> str:
    """Returns the integrity with which the worker's agent starts, for a cache on this type of device."""
    wants_validate = setting == "validate" or (setting == "auto" and device != "cpu")
    if wants_validate and objection:
        logger.warning("integrity.fallback checksums instead of validation: %s", objection)
        # Unlike `checksum`, it accepts producers that validate.
        return "prefer-checksum"
    logger.info("integrity.set integrity=%s", setting)
    return setting


def objection_to_validate(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Reason for which a block may change before the worker role can mark its handoff as ended; empty if none does.

    Announced blocks are those that the token after the prompt needs: their request keeps them, and no later token of it
    is written into them before it ends.
    """
    if vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing:
        return "the V2 model runner zeroes blocks before it calls the connector"
    return ""
