"""How blocks of handoffs are known to be the producer's: by checksums, or by asking the producer after the last read.

The producer may be asked only where it marks the end of a handoff before a block of it changes. Whether vLLM's hooks
allow that depends on the engine's configuration, see `engine_checks.objection_to_validate`.
"""

from __future__ import annotations

import logging

from kvpipe.exceptions import ConfigError

logger = logging.getLogger("vllm.kvpipe.integrity")


def choose_integrity(setting: str, objection: str, device: str) -> str:
    """Returns the integrity with which the worker's agent starts, for a cache on this type of device.

    Raises:
        ConfigError: There are neither checksums nor validation for the cache.
    """
    is_on_host = device == "cpu"
    if setting == "checksum" and not is_on_host:
        message = f'integrity=checksum: blocks on {device} have no checksums; write "integrity": "validate" or "auto"'
        raise ConfigError(message)
    wants_validate = setting == "validate" or not is_on_host
    if wants_validate and objection and not is_on_host:
        message = f"KV cache on {device} has no checksums, and validation is not possible: {objection}"
        raise ConfigError(message)
    if wants_validate and objection:
        logger.warning("integrity.fallback checksums instead of validation: %s", objection)
        # Unlike `checksum`, it accepts producers that validate.
        return "auto"
    logger.info("integrity.set integrity=%s", setting)
    return setting
