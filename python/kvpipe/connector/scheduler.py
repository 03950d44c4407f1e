"""The scheduler role: which requests produce or consume a handoff, and what has become of it.

Runs on EngineCore's main thread. Sockets, deadlines and leases live in the Rust thread of `Control`; a hook only hands
commands to it and drains its events.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvpipe import _kvpipe
from kvpipe.config import resolve_token
from kvpipe.connector.consuming import Consuming
from kvpipe.connector.fingerprint import fingerprint
from kvpipe.connector.first_token_support import FirstTokenSupport
from kvpipe.connector.outbox import Outbox
from kvpipe.connector.producing import Producing
from kvpipe.connector.requests import Consumed, Produced, parse
from kvpipe.connector.steps import scheduled
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.connector.config import ConnectorConfig
    from kvpipe.connector.metadata import HandshakeMetadata, StepMetadata

# A child of vLLM's logger: vLLM gives handlers to that one only.
logger = init_logger("vllm.kvpipe.scheduler")


class SchedulerRole:
    """Handoffs of one engine, as its scheduler sees them."""

    def __init__(self, vllm_config: VllmConfig, config: ConnectorConfig) -> None:
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._role = str(vllm_config.kv_transfer_config.kv_role)
        self._first_token_support = FirstTokenSupport(vllm_config)
        self._reasoning_parser = str(vllm_config.structured_outputs_config.reasoning_parser or "")
        self._fingerprint = fingerprint(vllm_config)
        control = _kvpipe.Control(
            config.listen,
            resolve_token(),
            self._engine_id,
            self._fingerprint,
            silence=config.silence_s,
            lease=config.lease_s,
            open_timeout=config.open_timeout_s,
            handoff_timeout=config.handoff_timeout_s,
        )
        trace = _kvpipe.Trace(config.trace, f"{self._role} scheduler {self._engine_id}")
        control.trace_to(trace)
        self._out = Outbox(control, trace)
        block_size = vllm_config.cache_config.block_size
        self._producing = Producing(self._out, block_size)
        self._consuming = Consuming(
            self._out,
            self._first_token_support,
            block_size=block_size,
            vocab_size=vllm_config.model_config.get_vocab_size(),
            num_ranks=vllm_config.parallel_config.world_size,
            is_recomputed=config.on_load_failure == "recompute",
        )
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "log": self._on_log,
            "released": self._producing.on_released,
            "opened": self._consuming.on_opened,
            "finished": self._consuming.on_finished,
            "gone": self._consuming.on_ended,
        }
        logger.info(
            "control.listen address=%s engine_id=%s role=%s",
            self.address,
            self._engine_id,
            self._role,
        )

    @property
    def address(self) -> str:
        """The control port, as `host:port`."""
        return self._out.control.address or ""

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Takes the manager, which knows the blocks of each request."""
        self._producing.manager = manager

    def set_workers(self, workers: dict[int, HandshakeMetadata]) -> None:
        """Takes the addresses of this engine's workers, by tensor-parallel rank."""
        ranks = [(workers[rank].address, workers[rank].incarnation) for rank in sorted(workers)]
        self._first_token_support.are_workers_ready = bool(workers) and all(
            worker.forces_first_tokens for worker in workers.values()
        )
        self._producing.ranks = ranks
        if not ranks:
            # MultiConnector hands over one connector's metadata only.
            logger.error("this engine lends nothing: its workers' addresses are unknown; list kvpipe first")
        description = {
            "engine_id": self._engine_id,
            "role": self._role,
            "ranks": [address for address, _ in ranks],
            "fingerprint": dict(self._fingerprint),
            "forces_first_tokens": self._first_token_support.is_supported(),
            "reasoning_parser": self._reasoning_parser,
        }
        self._out.control.describe_as(json.dumps(description))

    # --- requests

    def on_new_request(self, request: Request) -> None:
        """Notes what the proxy wants with a request; without its parameters the request is none of ours."""
        try:
            self._note(request)
        except ConfigError as error:
            logger.warning("request.ignored request_id=%s: %s", request.request_id, error)

    def _note(self, request: Request) -> None:
        wanted = parse(request)
        if wanted is not None:
            self._out.trace.instant("queued", wanted.handoff, tokens=wanted.num_prompt_tokens)
        if isinstance(wanted, Produced):
            self._producing.add(request, wanted)
        elif isinstance(wanted, Consumed):
            self._consuming.add(request, wanted)

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens come from the producer: `(None, False)` as long as it has not opened the handoff."""
        self._producing.matched(request.request_id, num_local_tokens)
        if request.request_id in self._consuming:
            self._drain_events()
        return self._consuming.match(request, num_local_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks have been allocated: opens a producing request's handoff, or begins a consuming one's load."""
        self._producing.allocated(request)
        self._consuming.allocated(request, blocks, num_external_tokens)

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished: whether its blocks are held for a consumer, and what its answer says about it."""
        self._consuming.finished(request)
        return self._producing.finished(request)

    # --- every step

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the worker role has to know before this step's forward pass."""
        self._drain_events()
        for request_id in output.preempted_req_ids or ():
            self._producing.preempted(request_id)
        now_s = time.monotonic()
        self._producing.begin_step(output.total_num_scheduled_tokens, now_s)
        for request_id, num_before, num_new in scheduled(output):
            self._producing.scheduled(output, request_id, num_before, num_new, now_s)
            self._consuming.scheduled(request_id, num_before, num_new)
        self._producing.end_step()
        return self._out.take_step()

    def update(self, output: KVConnectorOutput) -> None:
        """Takes the worker role's word on the loads that ended in this step, and that it has ended."""
        self._producing.step_ended(time.monotonic())
        self._consuming.receive_outcomes(output)
        # The sequence state may have come during the step.
        self._drain_events()
        self._consuming.report_committed(output)
        for request_id in output.finished_sending or ():
            self._producing.sent(request_id)
        if output.invalid_block_ids:
            self._producing.withdraw_invalid(output.invalid_block_ids)

    # --- what the Rust thread has to say

    def _drain_events(self) -> None:
        for event in self._out.control.drain():
            self._handlers[event["event"]](event)

    def _on_log(self, event: dict[str, Any]) -> None:
        logger.info("%s", event["text"])

    def close(self) -> None:
        """Ends the control plane; consumers are told."""
        self._out.control.close()
