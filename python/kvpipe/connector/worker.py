"""The worker role: this rank's agent, its KV cache as regions, and exactly-once reports to vLLM.

It runs on the worker's main thread. Hooks send commands to the Rust thread and drain its events. No hook waits, except
for the registration at the start.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from kvpipe import _kvpipe
from kvpipe._transport import transport
from kvpipe.config import resolve_token
from kvpipe.connector.amx import permit_tiles
from kvpipe.connector.fingerprint import attention_properties
from kvpipe.connector.first_token import PENDING_FIRST_TOKENS
from kvpipe.connector.integrity import choose_integrity
from kvpipe.connector.metadata import HandshakeMetadata, Load, StepMetadata, WorkerOutcomes
from kvpipe.connector.progress import Progress
from kvpipe.connector.restore import KeptBlocks
from kvpipe.connector.stats import KVPipeStats
from kvpipe.exceptions import ConfigError, TransferTimeoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvpipe.connector.config import ConnectorConfig

logger = init_logger("vllm.kvpipe.worker")


# Fields of an outcome, with their values for a load that never began.
_FACTS: dict[str, Any] = {
    "num_bytes": 0,
    "num_received": 0,
    "num_missing": 0,
    "num_retried": 0,
    "num_validated": 0,
    "num_compared": 0,
    "num_corrupt": 0,
    "transport": "",
    "elapsed_s": 0.0,
    "backlog_s": 0.0,
    "reason": "",
    "cause": "",
}


class WorkerRole:
    """Loads the KV blocks of one rank, and exposes them to consumers.

    Args:
        vllm_config: vLLM's configuration.
        config: Settings of the connector.
        objection_to_validate: Why its blocks may change before a handoff is marked as ended; empty if they do not.
    """

    def __init__(self, vllm_config: VllmConfig, config: ConnectorConfig, *, objection_to_validate: str = "") -> None:
        self._rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._config = config
        self._addresses = config.addresses
        self._vllm_config = vllm_config
        self._properties: list[tuple[str, str]] = []
        self._objection_to_validate = objection_to_validate
        role = vllm_config.kv_transfer_config.kv_role
        self._trace = WorkerTrace(config, f"{role} worker {self._rank} {self._engine_id}")
        self._agent: _kvpipe.Agent | None = None
        self._regions: dict[str, _kvpipe.Region] = {}
        self._is_by_layer = _calls_each_layer_once(vllm_config)
        self._step = StepMetadata()
        self._ready: _kvpipe.ReadyBlocks | None = None
        self._is_step_by_layer = False
        self._kept = KeptBlocks()
        self._unsaved: dict[str, _kvpipe.Region] = {}
        self._loading: dict[bytes, Load] = {}
        self._leased: dict[bytes, str] = {}
        self._released: set[bytes] = set()
        self._received: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._progress = Progress(self._rank, self._engine_id)
        self._verified: dict[str, list[dict[str, Any]]] = {}
        self._acknowledged: list[bytes] = []
        self._num_sessions: tuple[int, int] | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Starts the agent and registers each layer's cache, `[num_blocks, …]`, as a region.

        Raises:
            TransportUnavailableError: There is no UCX, or the cache is on a device that it cannot reach.
            ConfigError: A cache is not in host memory, or a layer's blocks are not contiguous.
        """
        [device] = {cache.device.type for cache in kv_caches.values()} or {"cpu"}
        permit_tiles()
        self._properties = attention_properties(self._vllm_config)
        integrity = choose_integrity(self._config.integrity, self._objection_to_validate, device)
        self._agent = _kvpipe.Agent(
            self._addresses.agent,
            resolve_token(),
            transport(),
            self._engine_id,
            silence=self._config.silence_s,
            integrity=integrity,
            interface=self._addresses.interface,
        )
        self._agent.trace_to(self._trace.lines)
        for name, cache in kv_caches.items():
            self._regions[name] = self._register_layer(self._agent, name, cache)
        self._kept = KeptBlocks(kv_caches.values())
        address = self._agent.address or ""
        logger.info(
            "agent.listen address=%s advertised=%s regions=%d",
            address,
            self._addresses.advertised(address),
            len(kv_caches),
        )

    def _register_layer(self, agent: _kvpipe.Agent, name: str, cache: torch.Tensor) -> _kvpipe.Region:
        if cache.device.type != "cpu":
            message = f"KV cache is on {cache.device}; kvpipe supports vLLM's CPU build only"
            raise ConfigError(message)
        if not cache[0].is_contiguous():
            message = f"layer {name}: its blocks are not contiguous (strides {cache.stride()}), and cannot be moved"
            raise ConfigError(message)
        block_bytes = cache[0].numel() * cache.element_size()
        stride = cache.stride(0) * cache.element_size()
        span = (cache.shape[0] - 1) * stride + block_bytes
        offset = cache.storage_offset() * cache.element_size()
        plain = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage(), offset, (span,))
        registered = agent.register(name, plain.numpy(), block_bytes, stride)
        registered.wait(None)
        region: _kvpipe.Region = registered.result()
        return region

    def handshake(self) -> HandshakeMetadata | None:
        """Returns the address of this rank's agent."""
        if self._agent is None or self._agent.address is None:
            return None
        return HandshakeMetadata(
            self._addresses.advertised(self._agent.address),
            bytes(self._agent.incarnation),
            PENDING_FIRST_TOKENS.has_processor,
            self._properties,
        )

    # --- every step

    def end_handoffs(self, step: StepMetadata) -> None:
        """Ends handoffs before this step writes into their blocks."""
        if self._agent is None:
            return
        for handoff, reason in step.ended:
            self._agent.end(handoff, reason)
            self._released.add(handoff)

    def begin_step(self, step: StepMetadata) -> None:
        """Begins and ends loads before the forward pass."""
        agent = self._agent
        if agent is None:
            return
        self._kept.keep(step.restores)
        if step.cached:
            agent.mark_ready(_kvpipe.ReadyBlocks(step.cached), list(self._regions.values()))
        for load in step.loads:
            self._load(agent, load)
        for handoff in step.commits:
            agent.commit(handoff)
        for handoff in step.committed:
            self._loading.pop(handoff, None)
            agent.commit(handoff)
        self._acknowledged = step.committed
        for handoff, reason, is_withdrawn in step.cancels:
            agent.cancel(handoff, reason, is_withdrawn)
        for handoff, request_id in step.leased:
            self._leased[handoff] = request_id
        if step.ready:
            self._step, self._ready, self._unsaved = step, _kvpipe.ReadyBlocks(step.ready), dict(self._regions)
            self._is_step_by_layer = self._is_by_layer and not _announces_restored(step)
            self._progress.begin_step(step, len(self._regions), time.monotonic())
        PENDING_FIRST_TOKENS.set("KVPipeConnector", step.first_tokens)
        self._trace.begin_step(step)

    def _load(self, agent: _kvpipe.Agent, load: Load) -> None:
        if refusal := self._refusal(load):
            num_blocks = len(load.block_ids)
            ending = {"missing": range(num_blocks), "num_missing": num_blocks, "reason": refusal}
            # The scheduler role knows the kind of its own refusal.
            self._end_load(load, ending | ({} if load.refusal else {"cause": "other"}))
            return
        self._loading[load.handoff] = load
        address, incarnation = load.ranks[self._rank]
        agent.load(
            load.handoff,
            address,
            incarnation,
            load.first,
            load.block_ids,
            load.is_committed,
        )

    def _refusal(self, load: Load) -> str:
        """Why a load cannot begin; empty if it can."""
        if load.refusal:
            return load.refusal
        if load.handoff in self._loading:
            return "its handoff is being loaded already"
        if self._rank >= len(load.ranks):
            return f"the producer has {len(load.ranks)} workers, none for rank {self._rank}"
        return ""

    def save_layer(self, layer_name: str) -> None:
        """Marks this step's blocks as ready in a layer whose attention is done. Most steps have none."""
        if self._ready is None or self._agent is None or not self._is_step_by_layer:
            return
        if (region := self._unsaved.pop(layer_name, None)) is not None:
            self._trace.layers_computed()
            self._agent.mark_ready(self._ready, [region])
            self._progress.layer_saved(time.monotonic())
        elif layer_name in self._regions:
            self._withdraw_step(self._agent, layer_name)

    def _withdraw_step(self, agent: _kvpipe.Agent, layer_name: str) -> None:
        """Ends the step's handoffs, whose announced blocks may have changed, and announces by step from now on."""
        logger.error("layer.twice name=%s blocks are announced once a step from now on", layer_name)
        self._is_by_layer = False
        for handoff, *_ in self._step.ready:
            agent.end(handoff, f"layer {layer_name} was computed twice in a step")
        self._forget_ready()

    def end_forward(self) -> None:
        """Restores blocks, and marks this step's blocks as ready in the remaining layers, after the forward pass."""
        self._kept.put_back()
        if self._ready is not None and self._agent is not None and self._unsaved:
            self._trace.layers_computed()
            self._agent.mark_ready(self._ready, list(self._unsaved.values()))
        self._trace.end_forward()
        self._forget_ready()

    def _forget_ready(self) -> None:
        self._step, self._ready, self._unsaved = StepMetadata(), None, {}

    def finished(self) -> tuple[set[str], set[str]]:
        """Returns requests whose lease has ended, and requests whose load has ended, each exactly once."""
        sent: set[str] = set()
        for event in self._agent.drain() if self._agent is not None else ():
            if event["event"] == "log":
                logger.info("%s", event["text"])
            elif event["event"] == "acknowledged":
                self._released.add(event["handoff"])
            elif event["event"] == "blocks_verified":
                self._note_verified(event)
            elif (load := self._loading.pop(event["handoff"], None)) is not None:
                self._end_load(load, event)
        received, self._received = self._received, set()
        for handoff in self._released & self._leased.keys():
            sent.add(self._leased.pop(handoff))
        # A handoff that ended before its request finished is never leased, so it is forgotten.
        self._released.intersection_update(self._leased)
        return sent, received

    def _note_verified(self, event: dict[str, Any]) -> None:
        if (load := self._loading.get(event["handoff"])) is not None:
            self._verified[load.request_id] = [_facts(event, is_loaded=True)]

    def _end_load(self, load: Load, event: dict[str, Any]) -> None:
        missing = [load.block_ids[index] for index in event.get("missing", ())]
        self._invalid_block_ids.update(missing)
        self._received.add(load.request_id)
        self._verified.pop(load.request_id, None)
        self._outcomes[load.request_id] = _facts(event, is_loaded="reason" not in event)

    def take_invalid_block_ids(self) -> set[int]:
        """Returns missing blocks of the loads that `finished` has just reported."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def take_outcomes(self) -> WorkerOutcomes | None:
        """Returns ended and verified loads for the scheduler role; `None` if there is nothing to report.

        After a step without tokens, vLLM calls the scheduler role only if there is a report. So commits are always
        acknowledged, and each step of a load reports: its sequence state may have arrived meanwhile.
        """
        if not (self._outcomes or self._verified or self._acknowledged or self._loading):
            return None
        acknowledged, self._acknowledged = self._acknowledged, []
        outcomes, self._outcomes = self._outcomes, {}
        verified, self._verified = self._verified, {}
        return WorkerOutcomes(outcomes, verified, acknowledged)

    def take_stats(self) -> KVPipeStats | None:
        """Returns the number of sessions by data path if it has changed since the last call."""
        if self._agent is None or (num_sessions := self._agent.num_sessions) == self._num_sessions:
            return None
        self._num_sessions = num_sessions
        num_remote_read, num_stream = num_sessions
        stats = KVPipeStats()
        stats.set_sessions(self._rank, num_remote_read=num_remote_read, num_stream=num_stream)
        return stats

    def close(self) -> None:
        """Closes the agent, which notifies its peers."""
        self._progress.close()
        if self._agent is None:
            return
        try:
            self._agent.close()
        except TransferTimeoutError as error:  # harmless: the caches' memory ends with this process
            logger.warning("agent.pending_reads %s", error)


def _facts(event: dict[str, Any], *, is_loaded: bool) -> dict[str, Any]:
    facts = {name: event.get(name, default) for name, default in _FACTS.items()}
    return {"is_loaded": is_loaded, **facts}


def _calls_each_layer_once(vllm_config: VllmConfig) -> bool:
    """Whether vLLM calls `save_kv_layer` once for each layer and step: not with micro-batches or drafts."""
    return vllm_config.speculative_config is None and not vllm_config.parallel_config.use_ubatching


def _announces_restored(step: StepMetadata) -> bool:
    """Whether another request's consumer gets a restored block, which has other bytes until the forward pass ends."""
    restored = set(step.restores)
    return any(not restored.isdisjoint(block_ids) for _, _, block_ids in step.ready)


class WorkerTrace:
    """Traces the layers of a prefill and the first step of a decode as spans. It costs nothing without a file.

    Rust traces the other events of a handoff where they happen.

    Attributes:
        lines: The trace file.
    """

    def __init__(self, config: ConnectorConfig, process: str) -> None:
        self.lines = _kvpipe.Trace(config.trace, process)
        self._step = StepMetadata()
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
        if self.lines.is_on:
            for handoff, first, block_ids in self._step.ready:
                facts = {"layer": self._num_layers, "first": first, "blocks": len(block_ids)}
                self.lines.span("computed", handoff, self._since_s, **facts)
            self._since_s = time.monotonic()
            self._num_layers += 1

    def end_forward(self) -> None:
        """Writes the span of a request's first step, after the forward pass."""
        for handoff in self._step.first_steps:
            self.lines.span("first step", handoff, self._began_s)
        self._step = StepMetadata()
