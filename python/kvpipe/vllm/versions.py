"""Differences between the versions of vLLM that kvpipe supports. Nothing else of kvpipe depends on the version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

logger = init_logger("vllm.kvpipe.connector")

_OLDEST = "0.30"
_TESTED = "0.32"


def check_version() -> None:
    """Refuses a vLLM without the hooks that kvpipe needs, and logs a warning with one that it was not tested with.

    Raises:
        ConfigError: vLLM is 0.29 or older.
    """
    from vllm import __version__  # noqa: PLC0415 - as it is now

    if not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"):
        message = (
            f"vLLM {__version__} is too old: its connectors have no bind_kv_cache_manager; install vLLM {_OLDEST} or "
            "newer"
        )
        raise ConfigError(message)
    if __version__.partition("+")[0].rsplit(".", 1)[0] != _TESTED:
        logger.warning("kvpipe was tested with vLLM %s.x, this is %s; hooks may differ", _TESTED, __version__)


def is_watermarked(config: VllmConfig, params: SamplingParams) -> bool:
    """True if the tokens of a request have a watermark.

    vLLM 0.32 writes that into the request's parameters, where 0.30 and 0.31 have true for each request that does not
    refuse it; without a watermark in the engine's configuration, tokens have none in any version.
    """
    return getattr(config, "watermark_config", None) is not None and getattr(params, "watermarking", None) is not False
