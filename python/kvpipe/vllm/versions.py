"""Differences between the versions of vLLM that kvpipe supports. Nothing else of kvpipe depends on the version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpipe.connector")

_OLDEST, _NEWEST = "0.30", "0.33"
_TESTED = (_OLDEST, "0.31", "0.32", _NEWEST)
# Releases whose code was compared. For these models they compute the same keys and values (`model_executor/models`,
# `model_executor/layers/rotary_embedding`) ...
_COMPARED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
_COMPARED_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_COMPARED_DTYPES = ("float32", "bfloat16", "float16")
# ... and these backends write them to the same bytes of a block: CPU_ATTN in compiled code, which 0.33 has no build of,
# FLASH_ATTN by `v1/attention/backends/flash_attn.py:do_kv_cache_update`.
_COMPARED_BACKENDS = {"CPU_ATTN": _COMPARED[:3], "FLASH_ATTN": _COMPARED}


def running_version() -> str:
    """Returns the version of vLLM."""
    from vllm import __version__  # noqa: PLC0415 - as it is now

    return str(__version__)


def _minor(version: str) -> str:
    return version.partition("+")[0].rsplit(".", 1)[0]


def check_version() -> None:
    """Refuses a vLLM without the hooks that kvpipe needs, and logs a warning with one that it was not tested with.

    Raises:
        ConfigError: vLLM is 0.29 or older.
    """
    running = running_version()
    if not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"):
        message = (
            f"vLLM {running} is too old: its connectors have no bind_kv_cache_manager; install vLLM {_OLDEST} or newer"
        )
        raise ConfigError(message)
    if _minor(running) not in _TESTED:
        logger.warning("kvpipe was tested with vLLM %s to %s, this is %s; hooks may differ", _OLDEST, _NEWEST, running)


def version_of_kv(config: VllmConfig, kv_cache_dtype: str) -> str:
    """Names the versions of vLLM that compute the same KV as this one for a model.

    They were compared for some models of text, with full attention and without quantization or adapters. For all others
    this version stands alone: a refusal costs a prefill, but KV that means something else costs the answer.

    Args:
        config: The configuration of the engine.
        kv_cache_dtype: The dtype of its KV cache, by name.
    """
    model = config.model_config
    is_compared = (
        model.architecture in _COMPARED_MODELS
        and not (model.trust_remote_code or model.quantization or model.multimodal_config or config.lora_config)
        and model.get_sliding_window() is None
        and kv_cache_dtype in _COMPARED_DTYPES
    )
    return _same_as_running(_COMPARED if is_compared else ())


def attention_version(backend: str) -> str:
    """Names the versions of vLLM whose attention backend of this name writes a block as this one's does."""
    return _same_as_running(_COMPARED_BACKENDS.get(backend, ()))


def _same_as_running(versions: Iterable[str]) -> str:
    same, running = tuple(versions), running_version()
    return ", ".join(same) if running in same else running


def is_sharded(spec: KVCacheSpec, *, is_full: bool) -> bool:
    """True if ranks of decode context parallelism share the tokens of a block. Specs of vLLM 0.30 do not say it.

    Args:
        spec: The layers of a KV cache group.
        is_full: True if they have full attention: it is these whose tokens 0.30 shares.
    """
    return bool(getattr(spec, "dcp_sharded", is_full))


def is_watermarked(config: VllmConfig, params: SamplingParams) -> bool:
    """True if the tokens of a request have a watermark.

    vLLM 0.32 writes that into the request's parameters, where 0.30 and 0.31 have true for each request that does not
    refuse it; without a watermark in the engine's configuration, tokens have none in any version.
    """
    return getattr(config, "watermark_config", None) is not None and getattr(params, "watermarking", None) is not False


class LoadedFirst:
    """Has vLLM 0.30 schedule loaded requests before one that waits for blocks.

    Its scheduler tries the requests that wait in their order, and ends at the first one for which it lacks blocks
    (0.30, `v1/core/sched/scheduler.py:schedule`). Loaded requests behind it keep their blocks and never run: if nothing
    else runs, no block becomes free. It passes over a request whose connector does not know yet what it has. So after
    a step in which nothing could run, a connector says that of all requests that hold no blocks, for one step.
    From 0.31 on, requests that hold blocks come first.
    """

    def __init__(self) -> None:
        self._is_needed = _minor(running_version()) == "0.30"
        # Requests that hold blocks for a load, and those whose load has ended and that have not run since.
        self._loading: set[str] = set()
        self._loaded: set[str] = set()
        self._is_stuck = False

    def is_deferred(self, request: Request) -> bool:
        """True if a request that vLLM matches has to wait for the next step. It is one that holds no blocks."""
        self.finished(request)
        return self._is_stuck and bool(self._loaded)

    def claimed(self, request: Request) -> None:
        """Notes a request that loads if vLLM has blocks for it."""
        if self._is_needed:
            self._loading.add(request.request_id)

    def loaded(self, request_ids: Iterable[str] | None) -> None:
        """Notes the ends of loads. Those of requests that have finished meanwhile hold nothing."""
        if self._loading and request_ids:
            ended = self._loading.intersection(request_ids)
            self._loading -= ended
            self._loaded |= ended

    def scheduled(self, output: SchedulerOutput) -> None:
        """Notes what a step runs. Never two steps in a row defer requests, so that none waits for ever."""
        if self._loaded:
            self._loaded.difference_update(output.num_scheduled_tokens)
        self._is_stuck = bool(self._loaded) and not (output.num_scheduled_tokens or self._is_stuck)

    def finished(self, request: Request) -> None:
        """Forgets a request that has finished, or has no blocks any more."""
        self._loading.discard(request.request_id)
        self._loaded.discard(request.request_id)
