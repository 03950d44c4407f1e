"""vLLM's real scheduler with the connector in its scheduler role; the workers' word comes from the test."""

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpipe.vllm.first_token.sampling import Sampling
from kvpipe.vllm.handoff.metadata import HandshakeMetadata, Load, LoadOutcome, StepMetadata, WorkerOutcomes

BLOCK = 32
STEP_TOKENS = 256
NUM_BLOCKS = 100


def engine_config(
    model: str, arguments: Mapping[str, Any] | None = None, transfer: Mapping[str, Any] | None = None, **extra: Any
) -> VllmConfig:
    """A real configuration of an engine with the connector.

    `arguments` are vLLM's, `transfer` is of its KVTransferConfig, and `extra` is the connector's.
    """
    plain = {"max_model_len": 2048, "block_size": BLOCK, "max_num_batched_tokens": STEP_TOKENS}
    return EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(
            **{
                "kv_connector": "KVPipeConnector",
                "kv_connector_module_path": "kvpipe.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"listen": "127.0.0.1:0", **extra},
                **(transfer or {}),
            }
        ),
        **plain | dict(arguments or {}),
    ).create_engine_config()


SHAPE = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}


def cache_config(num_blocks: int = NUM_BLOCKS, specs: Sequence[KVCacheSpec] = ()) -> KVCacheConfig:
    """The cache of a tiny model, of one group or of one for each of these specs."""
    groups = [
        KVCacheGroupSpec([f"layer.{3 * index + number}" for number in range(3)], spec)
        for index, spec in enumerate(specs or [FullAttentionSpec(**SHAPE)])
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def sampling(reasoning_parser: str = "", logits_processors: tuple[str, ...] = (), watermark: object = None) -> Sampling:
    """Sampling of an engine with these settings."""
    structured = SimpleNamespace(reasoning_parser=reasoning_parser, enable_in_reasoning=False)
    model = SimpleNamespace(logits_processors=logits_processors)
    config = SimpleNamespace(structured_outputs_config=structured, model_config=model, watermark_config=watermark)
    return Sampling(config)


SAMPLING = sampling()


class Engine:
    """A scheduler, and what its workers would answer.

    Attributes:
        connector_stats: The connector's reports to vLLM's metrics, in the order of the steps.
        sent: Tokens that clients have got, by request id.

    `match_unit` are tokens of which the prefix cache finds all or none. `workers` is what its workers say.
    """

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int = NUM_BLOCKS,
        specs: Sequence[KVCacheSpec] = (),
        match_unit: int = BLOCK,
        workers: Sequence[HandshakeMetadata] = (HandshakeMetadata("127.0.0.1:1", bytes(16), forces_first_tokens=True),),
    ) -> None:
        config.cache_config.num_gpu_blocks = num_blocks
        cache = cache_config(num_blocks, specs)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in cache.kv_cache_groups)),
            hash_block_size=match_unit,
            log_stats=True,
        )
        self.connector_stats: list[dict[str, Any]] = []
        self.sent: dict[str, list[int]] = {}
        self.role = self.scheduler.connector._scheduler
        self.role.set_workers({(0, rank): worker for rank, worker in enumerate(workers)})
        self._numbers = itertools.count()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(match_unit, sha256)

    def new_request(
        self, prompt: list[int], max_tokens: int = 4, params: dict[str, Any] | None = None, **more: Any
    ) -> Request:
        """Makes a request with a router's transfer parameters."""
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=max_tokens, extra_args=extra, ignore_eos=True)
        more = {"sampling_params": sampling} | more
        request = Request(
            request_id=more.pop("request_id", f"request-{next(self._numbers)}"),
            prompt_token_ids=prompt,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        request.sampling_params.update_from_generation_config({}, 2)
        return request

    def add(self, *arguments: Any, **more: Any) -> Request:
        """Adds a request, see `new_request`."""
        request = self.new_request(*arguments, **more)
        self.scheduler.add_request(request)
        return request

    def step(self, **worker: Any) -> tuple[SchedulerOutput, StepMetadata]:
        """One step: schedule, sample where a prompt is complete, report. `worker`: fields of its connector output."""
        output = self.scheduler.schedule()
        self.end(output, **worker)
        return output, output.kv_connector_metadata

    def end(self, output: SchedulerOutput, **worker: Any) -> None:
        """The second half of a step."""
        self.deliver(self.scheduler.update_from_output(output, self.run(output, **worker)))

    def run(self, output: SchedulerOutput, **worker: Any) -> ModelRunnerOutput:
        """Output of the workers for a step."""
        sampled = [self._sample(request_id) for request_id in output.num_scheduled_tokens]
        words = KVConnectorOutput(**worker)
        return ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={request_id: index for index, request_id in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=sampled,
            kv_connector_output=None if is_unreported(output, words) else words,
        )

    def deliver(self, by_client: Mapping[int, EngineCoreOutputs]) -> None:
        """Notes a step's outputs for clients."""
        for outputs in by_client.values():
            for sent in outputs.outputs:
                self.sent.setdefault(sent.request_id, []).extend(sent.new_token_ids)
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats is not None:
                self.connector_stats.append(outputs.scheduler_stats.kv_connector_stats)

    def _sample(self, request_id: str) -> list[int]:
        request = self.scheduler.requests.get(request_id)
        return [7] if request is None or request.num_computed_tokens >= request.num_tokens else []

    def abort(self, request: Request) -> None:
        """The client has left."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def finish_all(self) -> None:
        """Ends what is left, as an abort of everything."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        """Ends the connector."""
        self.scheduler.connector.shutdown()


def is_unreported(output: SchedulerOutput, words: KVConnectorOutput) -> bool:
    """True if vLLM's worker drops the connector's output: an empty one, after a step without tokens."""
    return not output.num_scheduled_tokens and words.is_empty()


def outcome(request: Request | Load, *, is_loaded: bool = True, **facts: Any) -> WorkerOutcomes:
    """The worker's word on one load. `facts`: what it is to say beside that."""
    known = {"num_bytes": 1, "transport": "cma", "elapsed_s": 0.1, "cause": "" if is_loaded else "other"}
    return WorkerOutcomes({request.request_id: LoadOutcome(is_loaded, **known | facts)})


def new_id() -> str:
    """A handoff id as the proxy mints it."""
    return secrets.token_hex(16)
