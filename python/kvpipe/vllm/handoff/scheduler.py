"""The scheduler role: requests that produce or consume a handoff, from their arrival to the handoff's result.

It runs on EngineCore's main thread. The Rust thread of `Control` owns sockets, deadlines and leases; hooks send it
commands and drain its events.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvpipe import __version__ as kvpipe_version
from kvpipe import _kvpipe
from kvpipe.config import resolve_tokens
from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import ProduceParams, parse
from kvpipe.vllm.fingerprint import fingerprint
from kvpipe.vllm.first_token.continuing_scheduler import Continuations
from kvpipe.vllm.first_token.logits_processor import hide_handoff_from_workers
from kvpipe.vllm.first_token.sampling import Sampling
from kvpipe.vllm.first_token.support import FirstTokenSupport
from kvpipe.vllm.handoff.allowed_producers import AllowedProducers
from kvpipe.vllm.handoff.consumer.consumed import Consumed
from kvpipe.vllm.handoff.consumer.scheduler import ConsumerScheduler
from kvpipe.vllm.handoff.idle_wait import IdleWait, engine_core
from kvpipe.vllm.handoff.outbox import HandoffOutbox
from kvpipe.vllm.handoff.producer.produced import Produced
from kvpipe.vllm.handoff.producer.scheduler import ProducerScheduler
from kvpipe.vllm.handoff.requests import read_params
from kvpipe.vllm.lora_adapters import Adapters
from kvpipe.vllm.model_files import NOT_COMPARED
from kvpipe.vllm.rank_properties import merge_layers
from kvpipe.vllm.versions import running_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.vllm.handoff.cache_groups import CacheGroups
    from kvpipe.vllm.handoff.config import ConnectorConfig
    from kvpipe.vllm.handoff.metadata import HandshakeMetadata, StepMetadata
    from kvpipe.vllm.handoff.stats import KVPipeStats

PRODUCER, CONSUMER = "kv_producer", "kv_consumer"

# vLLM installs handlers on its own logger only, so this one is its child.
logger = init_logger("vllm.kvpipe.scheduler")


class SchedulerRole:
    """The handoffs of one engine, on the side of its scheduler."""

    def __init__(self, vllm_config: VllmConfig, config: ConnectorConfig, groups: CacheGroups) -> None:
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._role = str(vllm_config.kv_transfer_config.kv_role)
        self._first_token_support = FirstTokenSupport(vllm_config)
        self._reasoning_parser = str(vllm_config.structured_outputs_config.reasoning_parser or "")
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._groups = groups
        self._fingerprint = fingerprint(vllm_config)
        for name, value in self._fingerprint:
            if NOT_COMPARED in value:
                logger.warning("fingerprint.incomplete %s is %s", name, value)
        if groups.has_state and self._first_token_support.is_speculative and self._role != PRODUCER:
            logger.warning("handoff.local every prompt is computed here: recurrent states need a forced first token")
        self._config = config
        self._data_parallel_index = vllm_config.parallel_config.data_parallel_index
        self._is_listening = False
        # True if vLLM has matched a request and has not allocated blocks for it since.
        self._lacks_blocks = False
        # Requests that waited for their producer when vLLM matched them for the last step, and for the next one.
        self._waiting: set[str] = set()
        self._matched_waiting: set[str] = set()
        self._idle_wait = IdleWait(engine_core())
        self._allowed_producers = AllowedProducers(config.allowed_producers)
        self._out = HandoffOutbox(_kvpipe.Trace(config.trace, f"{self._role} scheduler {self._engine_id}"))
        self._adapters, self._sampling = Adapters(), Sampling(vllm_config)
        self._producing = ProducerScheduler(self._out, self._adapters, self._sampling, self._engine_id, groups)
        self._continuations = Continuations(vllm_config, [group.block_size for group in groups])
        self._consuming = ConsumerScheduler(
            self._out,
            self._first_token_support,
            self._adapters,
            self._sampling,
            self._continuations,
            groups=groups,
            num_ranks=vllm_config.parallel_config.world_size,
            tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
            num_heads=groups.num_heads(vllm_config),
            is_recomputed=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
            uses_v2=bool(vllm_config.use_v2_model_runner),
        )
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "log": self._on_log,
            "released": self._producing.on_released,
            "opened": self._consuming.on_opened,
            "finished": self._consuming.on_finished,
            "ended": self._consuming.on_ended,
        }

    @property
    def _data_parallel_rank(self) -> int | None:
        """The rank of this engine; None if its server has no other.

        vLLM sets `data_parallel_size` to 1 in engines of dense models, and ends the id of each rank with the rank
        (0.32, v1/engine/core.py:run_engine_core).
        """
        index = int(self._data_parallel_index)
        return index if self._engine_id.endswith(f"_dp{index}") else None

    @property
    def address(self) -> str:
        """The control port, as other instances reach it: `host:port`."""
        return self._out.address

    def _listen(self) -> None:
        config, addresses, index = self._config, self._config.addresses, self._data_parallel_index
        control = _kvpipe.Control(
            addresses.control(index),
            resolve_tokens(),
            self._engine_id,
            self._fingerprint,
            silence=config.silence_s,
            lease=config.lease_s,
            open_timeout=config.open_timeout_s,
            handoff_timeout=config.handoff_timeout_s,
        )
        control.trace_to(self._out.trace)
        if self._role != PRODUCER:
            control.allow_checks(*self._allowed_producers.hosts())
        bound = control.address or ""
        self._out.control, self._is_listening = control, True
        self._idle_wait.watch(control)
        self._out.address = addresses.advertised_control(bound, index)
        self._out.local_address = addresses.local(bound)
        logger.info(
            "control.listen address=%s advertised=%s engine_id=%s role=%s",
            bound,
            self.address,
            self._engine_id,
            self._role,
        )

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Stores the manager, which knows the blocks of each request."""
        self._producing.manager = self._continuations.manager = manager

    def set_workers(self, workers: dict[tuple[int, int], HandshakeMetadata]) -> None:
        """Stores the addresses of this engine's workers, by pipeline-parallel and tensor-parallel rank.

        The first time it opens the control port.
        """
        ranks = [(workers[rank].address, workers[rank].incarnation) for rank in sorted(workers)]
        stages = [workers[rank].layers for rank in sorted(workers) if rank[1] == 0]
        self._first_token_support.are_workers_ready = bool(workers) and all(
            worker.forces_first_tokens for worker in workers.values()
        )
        self._producing.ranks = ranks
        groups = self._groups
        if len(stages) > 1:
            groups = groups.of_stages(stages)
            self._producing.stages = [[len(names) for names in stage] for stage in stages]
        if not ranks:
            # MultiConnector passes on the handshake metadata of one connector only.
            logger.error("workers.unknown no KV is sent; put KVPipeConnector first in MultiConnector")
        if not self._is_listening:
            self._fingerprint.append(("kv cache groups", groups.describe()))
            self._fingerprint += merge_layers([workers[rank].properties for rank in sorted(workers)])
            self._listen()
        description = {
            "engine_id": self._engine_id,
            "role": self._role,
            "ranks": [address for address, _ in ranks],
            "fingerprint": dict(self._fingerprint),
            "forces_first_tokens": self._first_token_support.is_supported(),
            "reasoning_parser": self._reasoning_parser,
            "max_model_len": self._max_model_len,
            "data_parallel_rank": self._data_parallel_rank,
            "address": self.address,
            "versions": {"kvpipe": kvpipe_version, "vllm": running_version()},
            "prefix_hash_seed": os.environ.get("PYTHONHASHSEED"),
            "machines": [workers[rank].machine for rank in sorted(workers)],
        }
        self._out.control.describe_as(json.dumps(description))

    # --- requests

    def on_new_request(self, request: Request) -> None:
        """Reads the transfer parameters of a request; a request without them takes no part."""
        self._adapters.note(request)
        try:
            if request.abort_immediately:
                self._release_refused(request)
            else:
                self._note(request)
        except ConfigError as error:
            hide_handoff_from_workers(request)
            self._refuse_to_produce(request, str(error))
            logger.warning(
                "request.ignored request_id=%s KV transfer is disabled for it: %s", request.request_id, error
            )

    def _refuse_to_produce(self, request: Request, reason: str) -> None:
        """Tells consumers that may watch already that this handoff will not come."""
        try:
            wanted = parse(request.kv_transfer_params)
        except ConfigError:
            return
        if isinstance(wanted, ProduceParams) and wanted.handoff is not None:
            self._producing.refuse(wanted.handoff, f"the producer ignores the request: {reason}")

    def _release_refused(self, request: Request) -> None:
        """Releases the handoff of a request that the API server refused: vLLM adds one that is aborted in its place.

        vLLM does so too when it answers with an error later. The engine's own request then ends the handoff.
        """
        refused = self._read_params(request)
        if isinstance(refused, Consumed) and refused.producer:
            self._consuming.release_unused(refused)

    def _check_role(self, wanted: Produced | Consumed) -> None:
        """Refuses a request that is not of this instance's role.

        Raises:
            ConfigError: It is not. The blocks that its producer keeps for it are released.
        """
        if self._role == CONSUMER and isinstance(wanted, Produced):
            message = "kv_role=kv_consumer: this instance produces no handoffs; start it with kv_role=kv_both"
            raise ConfigError(message)
        if self._role == PRODUCER and isinstance(wanted, Consumed):
            if wanted.producer:
                self._consuming.release_unused(wanted)
            message = "kv_role=kv_producer: this instance consumes no handoffs; start it with kv_role=kv_both"
            raise ConfigError(message)

    def _read_params(self, request: Request) -> Produced | Consumed | None:
        return read_params(request, self._allowed_producers, self._max_model_len, self._groups)

    def _note(self, request: Request) -> None:
        wanted = self._read_params(request)
        if wanted is not None:
            self._check_role(wanted)
            self._out.trace.instant("queued", wanted.handoff, tokens=wanted.num_prompt_tokens)
        if isinstance(wanted, Produced):
            self._producing.add(request, wanted)
        elif isinstance(wanted, Consumed):
            self._consuming.add(request, wanted)

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of the producer's tokens: `(None, False)` while it has not opened the handoff."""
        self._producing.matched(request, num_local_tokens)
        if request.request_id in self._consuming:
            self._drain_events()
        num_tokens, is_async = self._consuming.match(request, num_local_tokens)
        self._lacks_blocks = num_tokens is not None
        if num_tokens is None and self._consuming.awaits_producer(request.request_id):
            self._matched_waiting.add(request.request_id)
        return num_tokens, is_async

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Opens a producing request's handoff, or begins a consuming one's load, once blocks are allocated."""
        self._lacks_blocks = False
        self._producing.allocated(request)
        self._consuming.allocated(request, blocks, num_external_tokens)

    def finished(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Returns true if a finished request's blocks are leased to a consumer, and parameters for its response."""
        self._consuming.finished(request)
        return self._producing.finished(request, block_ids)

    # --- every step

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Returns the worker role's tasks of this step."""
        self._drain_events()
        for request_id in output.preempted_req_ids or ():
            self._producing.preempted(request_id)
        now_s = time.monotonic()
        self._producing.scheduled(output, now_s)
        self._consuming.scheduled(output, now_s)
        self._give_way(output, now_s)
        step = self._out.drain_step()
        self._waiting, self._matched_waiting = self._matched_waiting, set()
        has_work = output.total_num_scheduled_tokens or output.finished_req_ids or output.preempted_req_ids
        self._idle_wait.scheduled(is_idle=not has_work and step.is_empty())
        return step

    def wait_while_idle(self, connector: KVConnectorBase_V1) -> None:
        """Waits at the end of a step without work if no request can go on before another engine does something.

        Args:
            connector: The connector of this role.
        """
        is_due = self._idle_wait.is_due() and self._out.step.is_empty() and self._out.stats.is_empty()
        if not is_due:
            return
        # If requests wait for leased blocks, an engine that consumes gives way after a time.
        may_lack_blocks = connector if self._consuming.is_idle() else None
        if self._idle_wait.has_only(self._waiting | self._producing.leased_requests(), may_lack_blocks):
            self._idle_wait.wait()

    def _give_way(self, output: SchedulerOutput, now_s: float) -> None:
        is_stuck = self._lacks_blocks and not output.total_num_scheduled_tokens
        self._lacks_blocks = False
        if self._producing.ranks:
            num_leased_blocks = self._producing.num_leased_blocks if is_stuck else 0
            self._consuming.give_way(self._producing.ranks[0][1], num_leased_blocks, now_s)

    def update(self, output: KVConnectorOutput) -> None:
        """Processes the worker role's report on the step that has ended and on its loads."""
        self._producing.step_ended(time.monotonic())
        if not self._consuming.is_idle():
            self._consuming.receive_outcomes(output)
            # The sequence state may have arrived during the step.
            self._drain_events()
            self._consuming.report_committed(output)
        for request_id in output.finished_sending or ():
            self._producing.sent(request_id)
        if output.invalid_block_ids:
            self._producing.withdraw_invalid(output.invalid_block_ids)

    def drain_stats(self) -> KVPipeStats | None:
        """Returns the counts for metrics since the last call; `None` if there are none."""
        return self._out.drain_stats()

    def reset(self) -> None:
        """Withdraws what is announced of all handoffs that this engine produces."""
        self._producing.withdraw_all("the producer's cache was reset")

    # --- events of the Rust thread

    def _drain_events(self) -> None:
        for event in self._out.control.drain():
            self._handlers[event["event"]](event)

    def _on_log(self, event: dict[str, Any]) -> None:
        logger.info("%s", event["text"])

    def close(self) -> None:
        """Closes the control plane, which notifies consumers."""
        if self._is_listening:
            self._out.control.close()
