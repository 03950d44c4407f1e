"""Requests that continue after the producer's first token: one step to the second token, instead of two.

Otherwise the first step after a load computes the last prompt token again, and the sampler is made to choose the
producer's token. Here the scheduler role appends the token to the request's output before vLLM schedules the request.
vLLM then computes the token at the position after the prompt, and samples the second one. The client needs both:
`ContinuingScheduler` puts the first one before the second in the output of that step.

vLLM's V1 model runner gets the token as the last one of the prompt, because a new request has no output there. The V2
model runner gets all tokens of a new request, and counts those after the prompt as output.
docs/internals/second-token.md has the lines of vLLM that this depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvpipe.vllm.versions import is_watermarked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpipe.scheduler")


@dataclass
class _Continued:
    """Requests of this engine that continue after the producer's token.

    Attributes:
        tokens: Those tokens by request id.
        unsent: Ids of requests whose clients have not got theirs yet.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    unsent: set[str] = field(default_factory=set)


# By engine, because two of them may use the same request ids. Global, because vLLM makes the scheduler and the
# connector, and neither has a reference to the scheduler role.
_CONTINUED: dict[str, _Continued] = {}


def _continued(vllm_config: VllmConfig) -> _Continued:
    transfer = vllm_config.kv_transfer_config
    return _CONTINUED.setdefault("" if transfer is None else str(transfer.engine_id), _Continued())


class ContinuingScheduler(Scheduler):
    """vLLM's scheduler, for engines that consume handoffs: `--scheduler-cls`.

    With asynchronous scheduling an instance is of the subclass of vLLM's asynchronous scheduler below.
    """

    def __new__(cls, vllm_config: VllmConfig, *_args: Any, **_kwargs: Any) -> Self:
        """Makes the scheduler of vLLM's own choice, which depends on the configuration: vLLM names one class."""
        is_asynchronous = cls is ContinuingScheduler and vllm_config.scheduler_config.async_scheduling
        made: Self = super().__new__(AsyncContinuingScheduler if is_asynchronous else cls)
        return made

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._continued = _continued(vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedules a step. V1 workers get the first token of a continued request as the last one of its prompt."""
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        if self._continued.tokens and not self.use_v2_model_runner:
            for new in output.scheduled_new_reqs:
                if (token := self._continued.tokens.get(new.req_id)) is not None:
                    new.prompt_token_ids = [*(new.prompt_token_ids or ()), token]
            cached = output.scheduled_cached_reqs
            for index, request_id in enumerate(cached.req_ids):
                cached.num_output_tokens[index] -= request_id in self._continued.tokens
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Processes the tokens of a step. Clients get the first token of a continued request with the second one."""
        unsent = {request_id: self._continued.tokens[request_id] for request_id in self._continued.unsent}
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)
        if unsent:
            for output in (output for of_client in outputs.values() for output in of_client.outputs):
                if output.new_token_ids and output.request_id in unsent:
                    output.new_token_ids = [unsent[output.request_id], *output.new_token_ids]
                    self._continued.unsent.discard(output.request_id)
        return outputs


class AsyncContinuingScheduler(ContinuingScheduler, AsyncScheduler):
    """The same with asynchronous scheduling: the outputs of two steps may be unknown, also that of the first one."""


class Continuations:
    """Requests of one engine that continue after the producer's first token.

    Args:
        vllm_config: vLLM's configuration. Without `ContinuingScheduler` no request continues.
        block_sizes: Tokens of a block of each KV cache group.

    Attributes:
        manager: vLLM's, which knows the free blocks; set by the scheduler role.
    """

    def __init__(self, vllm_config: VllmConfig, block_sizes: Sequence[int]) -> None:
        refusal, is_wanted = _refusal(vllm_config), _is_wanted(vllm_config)
        self._is_on = is_wanted and not refusal
        if is_wanted and refusal:
            logger.warning("continuing.off every request takes one step more to its second token: %s", refusal)
        self._config = vllm_config
        self._uses_v2 = bool(vllm_config.use_v2_model_runner)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._block_sizes = block_sizes
        self._continued = _continued(vllm_config)
        self.manager: KVCacheManager | None = None

    def begin(self, request: Request, token: int) -> bool:
        """Appends the producer's token to a request whose prompt has been loaded. Returns true if it did."""
        if not (self._is_on and self._is_supported(request, token) and self._has_room(request)):
            return False
        request.append_output_token_ids(token)
        self._continued.tokens[request.request_id] = token
        self._continued.unsent.add(request.request_id)
        return True

    def _is_supported(self, request: Request, token: int) -> bool:
        params = request.sampling_params
        return (
            params is not None
            and not request.mm_features
            and not request.resumable
            and request.num_output_tokens == 0
            # V1 workers know a preempted request already, without the token.
            and request.num_preemptions == 0
            # There is a second token, and a position for it.
            and request.max_tokens > 1
            and request.num_tokens + 1 < self._max_model_len
            and token not in params.all_stop_token_ids
            and _is_plain(params)
            and not is_watermarked(self._config, params)
            and (self._uses_v2 or _depends_on_tokens_only(params))
        )

    def _has_room(self, request: Request) -> bool:
        """True if the position after the prompt has a block in each group.

        vLLM schedules a loaded request before any other that waits, and does not preempt it. Without a block it would
        wait, and all others with it, for a request that runs, and there may be none.
        """
        num_new = sum(request.num_tokens % block_size == 0 for block_size in self._block_sizes)
        num_others = len(self._continued.unsent) * len(self._block_sizes)
        free = 0 if self.manager is None else int(self.manager.block_pool.get_num_free_blocks())
        return bool(num_new == 0 or free >= num_new + num_others)

    def forget(self, request: Request) -> None:
        """Forgets a request that has finished. The step in which it finishes still sends its token."""
        self._continued.tokens.pop(request.request_id, None)
        self._continued.unsent.discard(request.request_id)


def _is_wanted(vllm_config: VllmConfig) -> bool:
    config = vllm_config.scheduler_config
    return config.scheduler_cls is not None and issubclass(config.get_scheduler_cls(), ContinuingScheduler)


def _refusal(vllm_config: VllmConfig) -> str:
    """Reason for which no request of an engine continues; empty if some do."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if vllm_config.structured_outputs_config.reasoning_parser:
        return "a reasoning parser, which may expect one token at a time"
    if vllm_config.model_config.return_sampling_mask:
        return "sampling masks, of which the token would have none"
    plugins = [entry.value for entry in entry_points(group="vllm.logits_processors")]
    others = [name for name in plugins if not name.startswith("kvpipe.")]
    if others or vllm_config.model_config.logits_processors:
        return "logits processors, which would not see the token as an output"
    return ""


def _is_plain(params: SamplingParams) -> bool:
    """True if the first token of a request only has to be in its output: no entry of its own, no grammar."""
    return (
        params.num_logprobs is None
        and params.prompt_logprobs is None
        and params.structured_outputs is None
        and params.thinking_token_budget is None
        and params.trace_decode_token_ids is None
    )


def _depends_on_tokens_only(params: SamplingParams) -> bool:
    """True if the second token depends on the tokens before it, and not on which of them are output.

    A seeded generator of V1 advances with each token, and this engine has not sampled the first one.
    """
    return (
        params.sampling_type != SamplingType.RANDOM_SEED
        and (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0, 0, 1)
        and not params.min_tokens
        and not params.bad_words
    )
