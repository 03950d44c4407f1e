"""The worker role: this rank's agent, its KV cache as regions, and exactly-once reports to vLLM.

It runs on the worker's main thread. Hooks send commands to the Rust thread and drain its events. No hook waits, except
for the registration at the start. It needs torch and no vLLM: the facade reads vLLM's configuration.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpipe import _kvpipe
from kvpipe._machine import machine
from kvpipe._transport import transport
from kvpipe.config import resolve_tokens
from kvpipe.exceptions import ConfigError, KVPipeError, TransferTimeoutError
from kvpipe.vllm.amx import permit_tiles
from kvpipe.vllm.device import HostOrder, check_device, check_ucx, one_device, order_of
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from kvpipe.vllm.handoff.consumer.pipeline_stages import PipelineStage, pipeline_stages
from kvpipe.vllm.handoff.consumer.rank_loads import RankLoads
from kvpipe.vllm.handoff.consumer.rank_sources import rank_sources
from kvpipe.vllm.handoff.integrity import choose_integrity
from kvpipe.vllm.handoff.metadata import HandshakeMetadata, Load, LoadOutcome, ReadyRange, StepMetadata, WorkerOutcomes
from kvpipe.vllm.handoff.producer.progress import Progress
from kvpipe.vllm.handoff.producer.rank_leases import RankLeases
from kvpipe.vllm.kept_blocks import KeptBlocks
from kvpipe.vllm.layer_cache import LayerCache
from kvpipe.vllm.rank_properties import ANY_SIZE, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from kvpipe.vllm.handoff.config import ConnectorConfig

logger = logging.getLogger("vllm.kvpipe.worker")


@dataclass(frozen=True, kw_only=True)
class WorkerEngine:
    """Properties of an engine that a worker role needs.

    Attributes:
        rank: Number of this worker, by pipeline-parallel rank, then by tensor-parallel rank.
        engine_id: vLLM's id of the engine.
        kv_role: vLLM's name of its role, for the trace.
        num_blocks: Blocks of its KV cache.
        groups: Names of the layers of each KV cache group.
        num_ranks: Ranks of tensor parallelism.
        num_stages: Stages of its pipeline.
        num_heads: KV heads of the model; 1 if all ranks have the same latent KV; 0 if blocks have no slices by head.
        num_hooked_layers: Layers for which vLLM calls `save_layer`.
        has_parts: True if some blocks of a prompt are of use without the others.
        device: vLLM's type of the device that has the cache.
        is_by_layer: True if vLLM calls `save_layer` once for each layer and step.
        objection_to_validate: Reason for which its blocks may change before a handoff is marked as ended; empty if they
            do not.
    """

    rank: int
    engine_id: str
    kv_role: str
    num_blocks: int
    groups: Sequence[Sequence[str]]
    num_ranks: int = 1
    num_stages: int = 1
    num_heads: int = 0
    num_hooked_layers: int
    has_parts: bool = True
    device: str = "cpu"
    is_by_layer: bool = True
    objection_to_validate: str = ""


class WorkerRole:
    """Loads the KV blocks of one rank, and exposes them to consumers.

    Attributes:
        rank: Number of this worker.

    Args:
        engine: Its engine.
        config: Settings of the connector.

    Raises:
        ConfigError: The device cannot be used.
        TransportUnavailableError: UCX cannot reach the device.
    """

    def __init__(self, engine: WorkerEngine, config: ConnectorConfig) -> None:
        self.rank = engine.rank
        self._engine = engine
        self._config = config
        self._integrity = choose_integrity(config.integrity, engine.objection_to_validate, engine.device)
        check_device(engine.device)
        check_ucx(engine.device)
        self._addresses = config.addresses
        self._properties: list[tuple[str, str]] = []
        self._trace = WorkerTrace(config, f"{engine.kv_role} worker {engine.rank} {engine.engine_id}")
        self._agent: _kvpipe.Agent | None = None
        self._order = HostOrder()
        # By layer, and for each KV cache group.
        self._regions: dict[str, list[_kvpipe.Region]] = {}
        self._group_regions: list[list[_kvpipe.Region]] = []
        self._group_of = {name: index for index, names in enumerate(engine.groups) for name in names}
        self._is_by_layer = engine.is_by_layer
        self._step: StepMetadata | None = None
        self._ready: dict[int, _kvpipe.ReadyBlocks] = {}
        self._is_step_empty = self._is_step_by_layer = False
        self._kept = KeptBlocks()
        self._unsaved: dict[str, list[_kvpipe.Region]] = {}
        self._loads = RankLoads(has_parts=engine.has_parts)
        self._leases = RankLeases()
        # The last stage's layers are the last ones of a step.
        reports = engine.rank == engine.num_ranks * (engine.num_stages - 1)
        self._progress = Progress(engine.engine_id, is_silent=not reports)
        self._num_sessions: tuple[int, int] | None = None

    def register(self, kv_caches: dict[str, torch.Tensor], properties: Sequence[tuple[str, str]] = ()) -> None:
        """Starts the agent and registers each layer's cache as regions.

        Args:
            kv_caches: The cache of each layer, see `layer_cache`.
            properties: This rank's additions to the engine's fingerprint.

        Raises:
            TransportUnavailableError: There is no UCX, or the cache is on a device that it cannot reach.
            ConfigError: The caches are on several devices, or the blocks of a layer cannot be moved.
        """
        device = one_device(kv_caches)
        permit_tiles()
        self._order = order_of(device)
        self._agent = _kvpipe.Agent(
            self._addresses.agent,
            resolve_tokens(),
            transport(),
            self._engine.engine_id,
            silence=self._config.silence_s,
            integrity=self._integrity,
            first_block_timeout=self._config.handoff_timeout_s,
        )
        self._agent.trace_to(self._trace.lines)
        caches = [self._layer_cache(name, kv_caches[name]) for name in self._own_layers(kv_caches)]
        self._regions = {cache.name: cache.register(self._agent) for cache in caches}
        by_group = [[cache for cache in caches if cache.name in names] for names in map(set, self._engine.groups)]
        self._group_regions = [_joined(self._regions[cache.name] for cache in of_group) for of_group in by_group]
        is_divisible = self._engine.num_heads > 0 and all(cache.layout.is_by_head for cache in caches)
        size = ANY_SIZE if is_divisible else str(self._engine.num_ranks)
        orders = joined(cache.layout.order for cache in caches)
        self._properties = [*properties, ("kv block", orders), ("tensor parallel size", size)]
        self._kept = KeptBlocks([[cache.blocks for cache in of_group] for of_group in by_group])
        address = self._agent.address or ""
        logger.info(
            "agent.listen address=%s advertised=%s regions=%d",
            address,
            self._addresses.advertised(address),
            sum(map(len, self._regions.values())),
        )

    def _layer_cache(self, name: str, cache: torch.Tensor) -> LayerCache:
        num_in_model = self._engine.num_heads
        num_heads = max(1, num_in_model // self._engine.num_ranks) if num_in_model else 0
        return LayerCache.of(name, cache, self._engine.num_blocks, num_heads)

    def _own_layers(self, kv_caches: dict[str, torch.Tensor]) -> list[str]:
        """Returns the layers with a cache of their own. Others use that of a layer before them (Gemma 3n).

        Raises:
            ConfigError: A layer of a KV cache group has no cache. Or one belongs to no group, and its cache is no other
                layer's.
        """
        if absent := next((name for name in self._group_of if name not in kv_caches), ""):
            message = f"layer {absent}: it is in a KV cache group of vLLM, and vLLM gives it no cache; report the model"
            raise ConfigError(message)
        own = [name for name in kv_caches if name in self._group_of]
        addresses = {kv_caches[name].data_ptr() for name in own}
        for name, cache in kv_caches.items():
            if name not in self._group_of and cache.data_ptr() not in addresses:
                message = f"layer {name}: it is in none of vLLM's {len(self._engine.groups)} KV cache groups"
                raise ConfigError(message)
        return own

    def handshake(self) -> HandshakeMetadata | None:
        """Returns the address of this rank's agent."""
        if self._agent is None or self._agent.address is None:
            return None
        return HandshakeMetadata(
            self._addresses.advertised(self._agent.address),
            bytes(self._agent.incarnation),
            PENDING_FIRST_TOKENS.has_processor,
            self._properties,
            [tuple(names) for names in self._engine.groups],
            machine(),
        )

    # --- every step

    def prepare_step(self, step: StepMetadata) -> None:
        """Ends handoffs and copies blocks that are to be restored, before this step writes into any block.

        Between this and `begin_step` vLLM's V1 runner moves recurrent states that a step continues to their next block.
        """
        if self._agent is None:
            return
        self._kept.keep(step.restores)
        for end in step.ended:
            self._agent.end(end.handoff, end.reason)
            self._leases.ended(end.handoff)

    def begin_step(self, step: StepMetadata) -> None:
        """Begins and ends loads before the forward pass."""
        agent = self._agent
        is_empty = step.is_empty()
        if agent is None or (is_empty and self._is_step_empty):  # an empty step after an empty one changes nothing
            return
        self._is_step_empty = is_empty
        self._begin_transfers(agent, step)
        self._loads.begin_step(step)
        for handoff in (*step.states, *step.committed):
            agent.commit(handoff)
        for cancel in step.cancels:
            agent.cancel(cancel.handoff, cancel.reason, cancel.is_withdrawn)
        for lease in step.leased:
            self._leases.add(lease)
        if step.ready:
            self._step, self._ready, self._unsaved = step, _by_group(step.ready), dict(self._regions)
            self._is_step_by_layer = self._is_by_layer and not _announces_restored(step)
            self._progress.begin_step(step, self._engine.num_hooked_layers, time.monotonic())
        if step.first_tokens or PENDING_FIRST_TOKENS.of(self._engine.engine_id):
            PENDING_FIRST_TOKENS.set(self._engine.engine_id, "KVPipeConnector", step.first_tokens)
        self._trace.begin_step(step)

    def _begin_transfers(self, agent: _kvpipe.Agent, step: StepMetadata) -> None:
        """Announces cached blocks, and begins loads. Both wait for the steps before, which the device may still run.

        Those steps compute cached blocks, and use the blocks of a load for the requests that had them.
        """
        if not (step.cached or step.loads):
            return
        event, failure = None, ""
        try:
            event = self._order.record()
        except KVPipeError as error:
            failure = self._event_failed(agent, step.cached, error)
        if step.cached and not failure:
            for group, blocks in _by_group(step.cached).items():
                agent.mark_ready(blocks, self._group_regions[group], event)
        for load in step.loads:
            if refusal := self._refusal(load) or failure or self._load(agent, load, event):
                # The scheduler role knows the kind of its own refusal.
                cause = "" if load.refusal else "other"
                num_missing = len(load.block_ids)
                outcome = LoadOutcome(is_loaded=False, num_missing=num_missing, reason=refusal, cause=cause)
                self._loads.refuse(load, outcome)

    def _load(self, agent: _kvpipe.Agent, load: Load, event: _kvpipe.CudaEvent | None) -> str:
        """Begins a load. Returns the reason for which that is not possible; empty if it has begun."""
        num_layers = [len(names) for names in self._engine.groups]
        try:
            stages = pipeline_stages(load.stages, len(load.ranks), num_layers)
            sources = rank_sources(self.rank, self._engine.num_ranks, stages[0].num_ranks, self._engine.num_heads)
        except ConfigError as error:
            return str(error)
        # A stage may have no layer of the groups that lack blocks.
        found = [(stage, parts) for stage in stages if (parts := self._parts(load, stage))]
        loads = [(stage.first_rank + source.rank, source, parts) for stage, parts in found for source in sources]
        if not loads:
            return "no block of it is wanted"
        self._loads.begin(load, [[block_id for part in parts for block_id in part[2]] for _, _, parts in loads])
        for number, (rank, source, parts) in enumerate(loads):
            address, incarnation = load.ranks[rank]
            agent.load(
                load.handoff,
                address,
                incarnation,
                parts,
                load.has_state,
                event,
                rank=number,
                destination_slice=source.destination_slice,
                source_slice=source.source_slice,
                is_shared=source.is_shared,
            )
        return ""

    def _parts(self, load: Load, stage: PipelineStage) -> list[tuple[list[_kvpipe.Region], int, list[int]]]:
        """Returns the parts of a load that come from a stage of the producer: regions of its layers, and blocks."""
        parts = []
        for names, layers, (first, block_ids) in zip(self._engine.groups, stage.layers, load.parts, strict=True):
            if block_ids and (regions := _joined(self._regions[name] for name in names[layers])):
                parts.append((regions, first, block_ids))
        return parts

    def _refusal(self, load: Load) -> str:
        """Reason for which a load cannot begin; empty if it can."""
        if load.refusal:
            return load.refusal
        if load.handoff in self._loads:
            return "its handoff is being loaded already"
        return ""

    def save_layer(self, layer_name: str) -> None:
        """Marks this step's blocks as ready in a layer whose attention is done. Most steps have none."""
        if not self._ready or self._agent is None or not self._is_step_by_layer or self._order.is_capturing():
            return
        if (regions := self._unsaved.pop(layer_name, None)) is not None:
            self._trace.layers_computed()
            if (ready := self._ready.get(self._group_of[layer_name])) is not None:
                self._mark_ready(self._agent, ready, regions)
            if not self._order.is_async:
                self._progress.layer_saved(time.monotonic())
        elif layer_name in self._regions:
            self._withdraw_step(self._agent, layer_name)

    def _mark_ready(self, agent: _kvpipe.Agent, ready: _kvpipe.ReadyBlocks, regions: list[_kvpipe.Region]) -> None:
        """Announces the step's blocks in some regions once the device has computed what was launched so far."""
        try:
            event = self._order.record()
        except KVPipeError as error:
            self._event_failed(agent, () if self._step is None else self._step.ready, error)
            self._forget_ready()
            return
        agent.mark_ready(ready, regions, event)

    def _event_failed(self, agent: _kvpipe.Agent, ranges: Sequence[ReadyRange], error: KVPipeError) -> str:
        """Ends the handoffs whose blocks may not be computed, and returns the reason."""
        reason = f"the device records no event: {error}"
        logger.error("event.failed %s", reason)
        for each in ranges:
            agent.end(each.handoff, reason)
        return reason

    def _withdraw_step(self, agent: _kvpipe.Agent, layer_name: str) -> None:
        """Ends the step's handoffs, whose announced blocks may have changed, and announces by step from now on."""
        logger.error("layer.twice name=%s blocks are announced once a step from now on", layer_name)
        self._is_by_layer = False
        for ready in () if self._step is None else self._step.ready:
            agent.end(ready.handoff, f"layer {layer_name} was computed twice in a step")
        self._forget_ready()

    def finish_layers(self) -> None:
        """Ends the forward pass when the model's layers are computed, unless draft layers or micro-batches follow."""
        if self._is_by_layer:
            self.end_forward()

    def end_forward(self, *, has_failed: bool = False) -> None:
        """Restores blocks, and marks this step's blocks as ready in the remaining layers, after the forward pass.

        Args:
            has_failed: True if the forward pass raised: the remaining layers have the KV of others yet, and are not
                marked.
        """
        self._kept.put_back()
        if has_failed:
            self._forget_ready()
        if self._ready and self._agent is not None:
            if self._unsaved:
                self._trace.layers_computed()
            for group, ready in list(self._ready.items()):
                names = (name for name in self._engine.groups[group] if name in self._unsaved)
                if regions := _joined(self._unsaved[name] for name in names):
                    self._mark_ready(self._agent, ready, regions)
            self._forget_ready()
        self._trace.end_forward()

    def _forget_ready(self) -> None:
        self._step, self._ready, self._unsaved = None, {}, {}

    def finished(self) -> tuple[set[str], set[str]]:
        """Returns requests whose lease has ended, and requests whose load has ended, each exactly once."""
        if self._agent is not None:
            for event in self._agent.drain():
                self._on_event(self._agent, event)
        return self._leases.drain_sent(), self._loads.drain_received()

    def _on_event(self, agent: _kvpipe.Agent, event: dict[str, Any]) -> None:
        if event["event"] == "log":
            logger.info("%s", event["text"])
        elif event["event"] == "acknowledged":
            self._leases.acknowledged(event["handoff"])
        elif event["event"] == "blocks_verified":
            self._loads.blocks_verified(event["handoff"], LoadOutcome.of(event, is_loaded=True), event["rank"])
        else:
            outcome, missing = LoadOutcome.of(event, is_loaded="reason" not in event), event.get("missing", ())
            if self._loads.ended(event["handoff"], outcome, missing, event["rank"]):
                agent.cancel(event["handoff"], outcome.reason, is_withdrawn=False)

    def drain_invalid_block_ids(self) -> set[int]:
        """Returns missing blocks of the loads that `finished` has just reported."""
        return self._loads.drain_invalid_block_ids()

    def drain_failed(self) -> set[str]:
        """Returns those of the requests that `finished` has just reported that vLLM has to compute anew."""
        return self._loads.drain_failed()

    def drain_outcomes(self) -> WorkerOutcomes | None:
        """Returns ended and verified loads for the scheduler role; `None` if there is nothing to report."""
        return self._loads.drain_outcomes()

    def drain_num_sessions(self) -> tuple[int, int] | None:
        """Returns the number of sessions that read remotely, and of those that stream, if they have changed."""
        if self._agent is None or (num_sessions := self._agent.num_sessions) == self._num_sessions:
            return None
        self._num_sessions = num_sessions
        return num_sessions

    def close(self) -> None:
        """Closes the agent, which notifies its peers."""
        self._progress.close()
        if self._agent is None:
            return
        try:
            self._agent.close()
        except TransferTimeoutError as error:  # harmless: the caches' memory ends with this process
            logger.warning("agent.pending_reads %s", error)


def _by_group(ranges: list[ReadyRange]) -> dict[int, _kvpipe.ReadyBlocks]:
    """Returns the ready blocks of each KV cache group that has some."""
    parts: dict[int, list[tuple[bytes, int, list[int]]]] = {}
    for each in ranges:
        parts.setdefault(each.group, []).append((each.handoff, each.first, each.block_ids))
    return {group: _kvpipe.ReadyBlocks(of_group) for group, of_group in parts.items()}


def _joined(regions: Iterable[list[_kvpipe.Region]]) -> list[_kvpipe.Region]:
    return [region for of_layer in regions for region in of_layer]


def _announces_restored(step: StepMetadata) -> bool:
    """True if another request's consumer gets a restored block, which has other bytes until the forward pass ends."""
    restored = {block_id for _, block_id in step.restores}
    return any(not restored.isdisjoint(ready.block_ids) for ready in step.ready)


class WorkerTrace:
    """Traces the layers of a prefill and the first step of a decode as spans. It costs nothing without a file.

    Rust traces the other events of a handoff where they happen.

    Attributes:
        lines: The trace file.
    """

    def __init__(self, config: ConnectorConfig, process: str) -> None:
        self.lines = _kvpipe.Trace(config.trace, process)
        self._step: StepMetadata | None = None
        self._began_s = self._since_s = 0.0
        self._num_layers = 0

    def begin_step(self, step: StepMetadata) -> None:
        """Notes the step and its time, before the forward pass."""
        if self.lines.is_on:
            self._step = step
            self._began_s = self._since_s = time.monotonic()
            self._num_layers = 0

    def layers_computed(self) -> None:
        """Writes a span since the last call, for each handoff of this step."""
        if self._step is not None:
            for ready in self._step.ready:
                facts = {"layer": self._num_layers, "first": ready.first, "blocks": len(ready.block_ids)}
                self.lines.span("computed", ready.handoff, self._since_s, **facts)
            self._since_s = time.monotonic()
            self._num_layers += 1

    def end_forward(self) -> None:
        """Writes the span of a request's first step, after the forward pass."""
        if self._step is not None:
            for handoff in self._step.first_steps:
                self.lines.span("first step", handoff, self._began_s)
            self._step = None
