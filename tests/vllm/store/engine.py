"""vLLM's real scheduler with both roles of the store connector, and a model whose KV depends on all tokens before.

The model runner is simulated. The value of a slot is computed from the slot before it in the cache and the token, and
the sampled token from the last slot: KV of another prompt changes every later value and the output.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpipe.vllm.first_token.logits_processor import ForcedOutputs
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from kvpipe.vllm.scheduler_output import scheduled
from tests.vllm.handoff.engine import BLOCK, cache_config, engine_config, is_unreported
from tests.vllm.store.stores import URL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

CHUNK = 2 * BLOCK
LAYERS = ("layer.0", "layer.1")
NUM_BLOCKS = 100
DEADLINE_S = 20


def store_config(model: str, store: str, role: str = "kv_both", **extra: Any) -> VllmConfig:
    """A real configuration of an engine with the connector. `extra` is the connector's."""
    plain = {"store": store if "://" in store else URL + store, "chunk_size": CHUNK, "always_load": True}
    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvpipe.store_connector",
        "kv_role": role,
        "kv_connector_extra_config": plain | extra,
    }
    return engine_config(model, transfer=transfer)


class Attention(torch.nn.Module, AttentionLayerBase):
    """A layer by which a worker finds its model."""

    def get_attn_backend(self) -> type[Backend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


class Backend:
    """An attention backend."""

    @staticmethod
    def get_name() -> str:
        return "TEST"


class Model(torch.nn.Module):
    """Weights that vLLM has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.arange(64.0).reshape(8, 8))
        self.linear = torch.nn.Linear(8, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(32.0).reshape(4, 8))
            self.linear.bias.zero_()
        self.attention = Attention()


def following(value: int, token: int) -> int:
    """The value of a slot, from the slot before it."""
    return (value * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 61)


def history(tokens: list[int]) -> list[int]:
    """Expected content of the slots of a sequence."""
    return list(itertools.accumulate(tokens, following, initial=0))[1:]


class Engine:
    """An engine, its worker, and what every step checks: nothing is computed on KV that is not its own."""

    def __init__(
        self,
        model: str,
        store: str,
        *,
        num_blocks: int = NUM_BLOCKS,
        num_ranks: int = 1,
        role: str = "kv_both",
        is_checked: bool = True,
        weights: torch.nn.Module | None = None,
        config: VllmConfig | None = None,
        layers: Sequence[str] = LAYERS,
        **extra: Any,
    ) -> None:
        self.is_checked = is_checked
        config = config or store_config(model, store, role, **extra)
        self.weights = weights or Model()
        config.compilation_config.static_forward_context["layer"] = self.weights.attention
        config.parallel_config.world_size = num_ranks
        config.cache_config.num_gpu_blocks = num_blocks
        self._engine_id = str(config.kv_transfer_config.engine_id)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache_config(num_blocks),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.num_blocks = num_blocks
        # Tests add this to every token that is sampled here.
        self.sampled_offset = 0
        self.role = self.scheduler.connector._scheduler
        self.workers: list[KVConnectorBase_V1] = []
        self.caches = {
            f"{rank} {name}": torch.zeros((num_blocks, BLOCK), dtype=torch.int64)
            for rank in range(num_ranks)
            for name in layers
        }
        for rank in range(num_ranks):
            config.parallel_config.rank = rank
            worker = type(self.scheduler.connector)(config, KVConnectorRole.WORKER, cache_config(num_blocks))
            worker.register_kv_caches({name: self.caches[f"{rank} {name}"] for name in layers})
            self.workers.append(worker)
        self._aggregator = KVOutputAggregator(num_ranks)
        self.answers: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.stats: dict[str, dict[str, float]] = {}
        self._rows: dict[str, list[int]] = {}
        self._numbers = itertools.count()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def add(self, prompt: list[int], max_tokens: int = 3, params: dict[str, Any] | None = None, **more: Any) -> Request:
        """Adds a request."""
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=max_tokens, extra_args=extra, ignore_eos=True)
        request = Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=prompt,
            pooling_params=None,
            block_hasher=self._hasher,
            **{"sampling_params": sampling} | more,
        )
        request.sampling_params.update_from_generation_config({}, 2)
        self.scheduler.add_request(request)
        return request

    def answer(self, prompt: list[int], max_tokens: int = 3, **more: Any) -> list[int]:
        """Answer to a request."""
        request = self.add(prompt, max_tokens, **more)
        self.until(request.is_finished)
        return self.answers[request.request_id]

    def until(self, condition: Any) -> None:
        """Steps until a condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come to hold in time"
            self.step()

    def step(self) -> SchedulerOutput:
        """One step: schedules, loads, computes, saves, reports."""
        output, result = self.begin_step()
        self._update(self.scheduler.update_from_output(output, result))
        if not output.num_scheduled_tokens:
            time.sleep(0.001)  # as vLLM does
        return output

    def begin_step(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The part of a step before the scheduler gets its result."""
        output = self.scheduler.schedule()
        for worker in self.workers:
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
        self._update_rows(output)
        sampled = self._compute(output)
        return output, self._aggregator.aggregate([self._result(worker, output, sampled) for worker in self.workers])

    def _result(
        self, worker: KVConnectorBase_V1, output: SchedulerOutput, sampled: dict[str, list[int]]
    ) -> ModelRunnerOutput:
        """Runs the worker of one rank after the forward pass, and returns its report."""
        worker.start_load_kv(None)
        worker.wait_for_save()
        sent, received = worker.get_finished(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={request_id: index for index, request_id in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=[sampled[request_id] for request_id in output.num_scheduled_tokens],
            kv_connector_output=None if is_unreported(output, report) else report,
        )

    def _update(self, outputs: Any) -> None:
        for found in outputs.values():
            for sent in found.outputs:
                self.answers.setdefault(sent.request_id, []).extend(sent.new_token_ids)
            if found.scheduler_stats is not None and found.scheduler_stats.kv_connector_stats is not None:
                self._count(found.scheduler_stats.kv_connector_stats)

    def _count(self, data: dict[str, Any]) -> None:
        for counter, values in data.items():
            counted = self.stats.setdefault(counter, {})
            for label, amount in values.items():
                is_state = counter in ("breakers", "forcing", "namespaces")
                counted[label] = amount if is_state else counted.get(label, 0) + amount

    def count(self, counter: str, label: str = "none") -> float:
        """A counter of the connector's."""
        return self.stats.get(counter, {}).get(label, 0)

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._rows[new.req_id] = list(new.prompt_token_ids or ())

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """The forward pass: all requests of a step write, then read."""
        spans = []
        for request_id, num_before, num_new in scheduled(output):
            request = self.scheduler.requests[request_id]
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            spans.append((request_id, request, table, num_before, num_before + num_new))
            self.num_computed[request_id] = self.num_computed.get(request_id, 0) + num_new
        # A request may share a block that another one writes in this step, and goes on after it.
        for _, request, table, first, end in sorted(spans, key=lambda span: span[3]):
            self._write(table, list(request.all_token_ids), first, end)
        for request_id, request, table, _, end in spans:
            if self.is_checked:
                tokens = list(request.all_token_ids)[:end]
                assert self.slots(table, end) == [history(tokens)] * len(self.caches), f"{request_id}: wrong KV"
        return {request_id: self._sample(request, table, end) for request_id, request, table, _, end in spans}

    def _write(self, table: list[int], tokens: list[int], first: int, end: int) -> None:
        value = self._slot(next(iter(self.caches)), table, first - 1) if first else 0
        for at in range(first, end):
            value = following(value, tokens[at])
            for cache in self.caches.values():
                cache[table[at // BLOCK], at % BLOCK] = value

    def _slot(self, layer: str, table: list[int], at: int) -> int:
        return int(self.caches[layer][table[at // BLOCK], at % BLOCK])

    def slots(self, table: list[int], end: int) -> list[list[int]]:
        """Content of the cache for a sequence, for each layer."""
        return [cache[table].flatten()[:end].tolist() for cache in self.caches.values()]

    def _sample(self, request: Request, table: list[int], end: int) -> list[int]:
        if request.num_computed_tokens < request.num_tokens:
            return []
        forced = ForcedOutputs.of(request.sampling_params)
        pending = PENDING_FIRST_TOKENS.of(self._engine_id)
        if forced is not None and (token := forced.token(pending, request.num_output_tokens)) is not None:
            return [token]
        return [self.sampled_offset + 10 + sum(self._slot(layer, table, end - 1) for layer in self.caches) % 1000]

    def abort(self, request: Request) -> None:
        """The client has left."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def is_at_rest(self) -> bool:
        """True if all requests have ended and all blocks are free."""
        return not self.scheduler.requests and self.num_free_blocks == self.num_blocks - 1

    def saved(self) -> None:
        """Steps until no thread saves."""
        self.until(lambda: not any(worker._worker._saver._in_flight for worker in self.workers))

    def close(self) -> None:
        """Ends the connector."""
        self.scheduler.connector.shutdown()
        for worker in self.workers:
            worker.shutdown()


def answered(prompt: list[int], max_tokens: int = 3, num_ranks: int = 1, num_layers: int = len(LAYERS)) -> list[int]:
    """Answer of an engine without a store."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(10 + num_ranks * num_layers * history(tokens)[-1] % 1000)
    return tokens[len(prompt) :]
