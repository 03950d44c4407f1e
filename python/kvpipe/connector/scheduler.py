"""The scheduler role: which requests produce or consume a handoff, and what has become of it.

Runs on EngineCore's main thread. Sockets, deadlines and leases live in the Rust thread of `Control`; a hook only hands
commands to it and drains its events.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvpipe import _kvpipe
from kvpipe.config import resolve_token
from kvpipe.connector.commits import Commits
from kvpipe.connector.fingerprint import fingerprint
from kvpipe.connector.metadata import HandshakeMetadata, Load, StepMetadata, merge
from kvpipe.connector.obstacles import Obstacles
from kvpipe.connector.prediction import PrefillClock
from kvpipe.connector.requests import Consumed, Handoffs, Produced, parse, prompt_hash
from kvpipe.connector.steps import scheduled, written_blocks
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.connector.config import ConnectorConfig

# A child of vLLM's logger: vLLM gives handlers to that one only.
logger = init_logger("vllm.kvpipe.scheduler")

_FINISH_REASONS = {
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_STOPPED: "stop",
}


class SchedulerRole:
    """Handoffs of one engine, as its scheduler sees them."""

    def __init__(self, vllm_config: VllmConfig, config: ConnectorConfig) -> None:
        self._block_size = vllm_config.cache_config.block_size
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._role = str(vllm_config.kv_transfer_config.kv_role)
        self._is_recomputed = config.on_load_failure == "recompute"
        self._manager: KVCacheManager | None = None
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._ranks: list[tuple[str, bytes]] = []
        self._obstacles = Obstacles(vllm_config)
        self._reasoning_parser = str(vllm_config.structured_outputs_config.reasoning_parser or "")
        self._produced: Handoffs[Produced] = Handoffs()
        self._consumed: Handoffs[Consumed] = Handoffs()
        self._commits = Commits(vllm_config.parallel_config.world_size)
        self._step = StepMetadata()
        self._num_local_tokens: dict[str, int] = {}
        self._clock = PrefillClock()
        self._trace = _kvpipe.Trace(config.trace, f"{self._role} scheduler {self._engine_id}")
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "log": self._on_log,
            "released": self._on_released,
            "opened": self._on_opened,
            "finished": self._on_finished,
            "gone": self._on_gone,
        }
        self._fingerprint = fingerprint(vllm_config)
        self._control = _kvpipe.Control(
            config.listen,
            resolve_token(),
            self._engine_id,
            self._fingerprint,
            silence=config.silence_s,
            lease=config.lease_s,
            open_timeout=config.open_timeout_s,
            handoff_timeout=config.handoff_timeout_s,
        )
        self._control.trace_to(self._trace)
        logger.info(
            "control.listen address=%s engine_id=%s role=%s",
            self.address,
            self._engine_id,
            self._role,
        )

    @property
    def address(self) -> str:
        """The control port, as `host:port`."""
        return self._control.address or ""

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Takes the manager, which knows the blocks of each request."""
        self._manager = manager

    def set_workers(self, workers: dict[int, HandshakeMetadata]) -> None:
        """Takes the addresses of this engine's workers, by tensor-parallel rank."""
        self._ranks = [(workers[rank].address, workers[rank].incarnation) for rank in sorted(workers)]
        self._obstacles.are_workers_ready = bool(workers) and all(
            worker.forces_first_tokens for worker in workers.values()
        )
        if not self._ranks:
            # MultiConnector hands over one connector's metadata only.
            logger.error("this engine lends nothing: its workers' addresses are unknown; list kvpipe first")
        description = {
            "engine_id": self._engine_id,
            "role": self._role,
            "ranks": [address for address, _ in self._ranks],
            "fingerprint": dict(self._fingerprint),
            "forces_first_tokens": self._obstacles.are_none(),
            "reasoning_parser": self._reasoning_parser,
        }
        self._control.describe_as(json.dumps(description))

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
            self._trace.instant("queued", wanted.handoff, tokens=wanted.num_prompt_tokens)
        if isinstance(wanted, Produced):
            if not self._ranks:
                message = "this engine cannot lend: its workers' addresses are unknown"
                raise ConfigError(message)
            self._produced.add(request.request_id, wanted)
            self._control.expect(wanted.handoff)
        elif isinstance(wanted, Consumed):
            wanted.obstacle = self._obstacles.of(request)
            self._check_first_token(wanted)
            self._consumed.add(request.request_id, wanted)
            if wanted.phase == "waiting":
                # At once, not when the request is scheduled: a watch keeps the producer's lease while it queues here.
                self._control.watch(wanted.handoff, wanted.producer)

    # --- consumer

    def _check_first_token(self, consumed: Consumed) -> None:
        token = consumed.first_token
        if token is not None and not 0 <= token < self._vocab_size:
            # The sampler would die of it, and the engine with it.
            consumed.obstacle = f"first token {token} is outside the vocabulary of {self._vocab_size}"

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens come from the producer: `(None, False)` as long as it has not opened the handoff."""
        self._num_local_tokens[request.request_id] = num_local_tokens
        consumed = self._consumed.get(request.request_id)
        if consumed is None:
            return 0, False
        self._take_events()
        consumed.note_preemptions()
        if consumed.phase == "waiting":
            return None, False
        # vLLM computes the last prompt token itself in any case: alone, it is nothing to move.
        wanted = request.num_prompt_tokens - num_local_tokens
        has_output = request.num_tokens != request.num_prompt_tokens
        is_wanted = wanted > 1 and not has_output
        if consumed.phase == "opened" and self._is_same_prompt(consumed, request):
            if not is_wanted and not has_output and consumed.awaits_first_token():
                return None, False
            if not is_wanted:
                self._give_up(consumed, "everything was in the own prefix cache")
        if is_wanted and (consumed.phase == "opened" or self._fails(consumed)):
            consumed.num_local_tokens = num_local_tokens
            return wanted, True
        return 0, False

    def _fails(self, consumed: Consumed) -> bool:
        """Whether a request fails whose KV cannot come. vLLM lets it fail by a load, so one is claimed, and refused."""
        return consumed.phase == "gone" and consumed.is_lost and not self._is_recomputed

    def _is_same_prompt(self, consumed: Consumed, request: Request) -> bool:
        """Compares prompts once: a full engine asks for its first request in every step."""
        if consumed.is_same_prompt is None and consumed.opening is not None:
            theirs = consumed.opening["prompt_hash"], consumed.opening["num_tokens"]
            consumed.is_same_prompt = theirs == (prompt_hash(request), request.num_prompt_tokens)
            if not consumed.is_same_prompt:
                self._give_up(consumed, "the producer computed another prompt")
                consumed.is_lost = True
        return bool(consumed.is_same_prompt)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks have been allocated: opens a producing request's handoff, or begins a consuming one's load."""
        produced = self._produced.get(request.request_id)
        if produced is not None and not produced.is_open:
            produced.is_open = True
            self._trace.instant("opened", produced.handoff)
            hashed = prompt_hash(request)
            self._control.open(produced.handoff, hashed, request.num_prompt_tokens, 0, self._ranks)
        consumed = self._consumed.get(request.request_id)
        if consumed is None or num_external_tokens == 0:
            if consumed is not None and consumed.phase in ("waiting", "opened"):
                self._give_up(consumed, "the scheduler did not want it")
            return
        if consumed.phase == "opened" or self._fails(consumed):
            first = consumed.num_local_tokens // self._block_size
            end = -(-(consumed.num_local_tokens + num_external_tokens) // self._block_size)
            self._begin_load(consumed, first, list(blocks.get_block_ids()[0][first:end]))

    def _begin_load(self, consumed: Consumed, first: int, block_ids: list[int]) -> None:
        refusal = consumed.reason if consumed.phase == "gone" else ""
        opening = {} if refusal or consumed.opening is None else consumed.opening
        consumed.phase, consumed.outcome, consumed.whole = "loading", None, []
        self._trace.instant("admitted", consumed.handoff, blocks=len(block_ids))
        self._step.loads.append(
            Load(
                request_id=consumed.request.request_id,
                handoff=consumed.handoff,
                generation=opening.get("generation", 0),
                first=first,
                block_ids=block_ids,
                ranks=opening.get("ranks", []),
                is_committed=consumed.has_state,
                refusal=refusal,
            )
        )

    def _give_up(self, consumed: Consumed, reason: str) -> None:
        consumed.phase, consumed.reason = "gone", reason
        self._control.unwatch(consumed.handoff, False)  # noqa: FBT003 - a native method

    # --- every step

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the worker role has to know before this step's forward pass."""
        self._take_events()
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        now_s = time.monotonic()
        self._clock.scheduled(output.total_num_scheduled_tokens, now_s)
        for request_id, num_before, num_new in scheduled(output):
            self._predict(request_id, num_before, num_new, now_s)
            self._produce(output, request_id, num_before, num_new)
            self._force(request_id)
            self._count(request_id, num_before, num_new)
        self._num_local_tokens.clear()
        step, self._step = self._step, StepMetadata()
        return step

    def _produce(self, output: SchedulerOutput, request_id: str, num_before: int, num_new: int) -> None:
        """Announces the blocks that are final before this step, and those that are after it."""
        produced = self._produced.get(request_id)
        if produced is None or not produced.is_open or produced.is_withdrawn or self._manager is None:
            return
        block_ids = self._manager.get_block_ids(request_id)[0]
        if produced.num_cached_tokens is None:
            produced.num_cached_tokens = num_before
            written = written_blocks(output, self._manager, self._num_local_tokens, self._block_size)
            cached = itertools.takewhile(
                lambda block: block not in written, block_ids[: num_before // self._block_size]
            )
            self._step.cached.extend(produced.announce(list(cached)))
        num_final = produced.num_final(num_before + num_new, self._block_size)
        self._step.finals.extend(produced.announce(list(block_ids[produced.num_announced : num_final])))

    def _predict(self, request_id: str, num_before: int, num_new: int, now_s: float) -> None:
        """Says when a producing request's prefill will end, if its engine's speed is known."""
        produced = self._produced.get(request_id)
        if produced is None or not produced.is_open or num_new < 1 or num_before >= produced.num_prompt_tokens:
            return
        remaining_s = self._clock.remaining_s(produced.num_prompt_tokens - num_before, num_new, now_s)
        if remaining_s is not None:
            self._control.progress(produced.handoff, remaining_s)
        beyond_s = self._clock.beyond_s(produced.num_prompt_tokens - num_before, num_new)
        if beyond_s is not None:
            self._step.progress.append((produced.handoff, beyond_s))
            self._step.control = self.address

    def _preempted(self, request_id: str) -> None:
        produced = self._produced.pop(request_id)
        if produced is not None:
            self._withdraw(produced, "the producer preempted the request")

    def _withdraw(self, produced: Produced, reason: str) -> None:
        """Before blocks may change: consumers are told, and the worker stops announcing them."""
        self._control.withdraw(produced.handoff, reason)
        self._step.ended.append((produced.handoff, reason))

    def _force(self, request_id: str) -> None:
        """Has the producer's token come first; said until there is an output, for the step may be preempted."""
        consumed = self._consumed.get(request_id)
        if consumed is None or consumed.first_token is None or consumed.obstacle:
            return
        if consumed.request.num_output_tokens == 0:
            self._step.first_tokens[consumed.handoff] = consumed.first_token
            consumed.is_forced = True

    def _count(self, request_id: str, num_before: int, num_new: int) -> None:
        """Counts the prompt tokens that a consuming request computes itself; reports when its prompt is done."""
        consumed = self._consumed.get(request_id)
        if consumed is None or consumed.is_reported:
            return
        consumed.num_computed += max(0, min(num_before + num_new, consumed.num_prompt_tokens) - num_before)
        if num_before + num_new >= consumed.num_prompt_tokens:
            self._trace.instant("scheduled", consumed.handoff)
            self._report(consumed)

    def _report(self, consumed: Consumed) -> None:
        consumed.is_reported, consumed.is_held = True, False
        # The producer must not be told before our workers know of a commit: it would end the load that they have.
        if not self._commits.is_untaken(consumed.handoff):
            self._control.unwatch(consumed.handoff, False)  # noqa: FBT003 - a native method
        report = consumed.report()
        self._control.set_result(consumed.handoff, json.dumps(report))
        fields = " ".join(f"{name}={value}" for name, value in report.items() if value != "")
        logger.info("handoff.end %s", fields)

    def update(self, output: KVConnectorOutput) -> None:
        """Takes the worker role's word on the loads that ended in this step, and that it has ended."""
        self._clock.ended(time.monotonic())
        words = output.kv_connector_worker_meta
        for request_id, outcome in getattr(words, "outcomes", {}).items():
            self._note_outcome(request_id, outcome)
        for request_id, ranks in getattr(words, "whole", {}).items():
            if (consumed := self._consumed.get(request_id)) is not None:
                self._commits.blocks_are_here(request_id, consumed, ranks)
        for handoff in getattr(words, "taken", ()):
            self._commits.taken(handoff)
            self._control.unwatch(handoff, True)  # noqa: FBT003 - a native method
        self._commits.ended(output)
        # The sequence state may have come during the step.
        self._take_events()
        self._commits.tell(output)
        for request_id in output.finished_recving or ():
            self._received(request_id)
        for request_id in output.finished_sending or ():
            self._produced.pop(request_id)
        if output.invalid_block_ids:
            self._withdraw_invalid(output.invalid_block_ids)

    def _note_outcome(self, request_id: str, outcome: dict[str, Any]) -> None:
        consumed = self._consumed.get(request_id)
        # What was committed stays as it was then, whatever ends the producer's handoff afterwards.
        if consumed is not None and not self._commits.is_untaken(consumed.handoff):
            # One rank's word may come steps before the last one's.
            consumed.outcome = outcome if consumed.outcome is None else merge(consumed.outcome, outcome)
            self._commits.is_over(request_id)

    def _received(self, request_id: str) -> None:
        self._commits.is_over(request_id)
        consumed = self._consumed.get(request_id)
        if consumed is None:
            return
        is_loaded = consumed.outcome is not None and consumed.outcome["is_loaded"]
        consumed.phase = "done"
        self._trace.instant("received", consumed.handoff)
        if is_loaded:
            consumed.is_held = False
        if is_loaded and not self._commits.is_untaken(consumed.handoff):
            self._control.unwatch(consumed.handoff, True)  # noqa: FBT003 - a native method
        # Of one that is not, the producer keeps the blocks until the prompt is computed: see `note_preemptions`.
        if consumed.ending:
            self._forget(request_id, consumed)

    def _withdraw_invalid(self, invalid_block_ids: set[int]) -> None:
        """Another connector of a MultiConnector could not load what this one has announced as final."""
        for produced in self._produced.values():
            if not invalid_block_ids.isdisjoint(produced.announced_ids):
                self._withdraw(produced, "the producer has to compute its blocks again")
                produced.is_withdrawn = True

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished: whether its blocks are held for a consumer, and what its answer says about it."""
        consumed = self._consumed.get(request.request_id)
        if consumed is not None:
            is_failed = request.status == RequestStatus.FINISHED_ERROR
            self._consumed_finished(request.request_id, consumed, "failed" if is_failed else "aborted")
        produced = self._produced.get(request.request_id)
        if produced is None:
            return False, None
        reason = _FINISH_REASONS.get(request.status)
        if reason is None or not produced.is_open or produced.is_withdrawn:
            self._produced.pop(request.request_id)
            self._withdraw(produced, f"the producer ended the request: {request.status.name}")
            return False, None
        produced.is_held = True
        self._trace.instant("sampled", produced.handoff)
        self._step.held.append((produced.handoff, request.request_id))
        self._control.finish(produced.handoff, list(request.output_token_ids), reason, produced.num_cached_tokens or 0)
        facts = {
            "handoff": produced.handoff.hex(),
            "num_tokens": produced.num_prompt_tokens,
            "first_token": request.output_token_ids[0],
        }
        return True, {"kvpipe": facts}

    def _consumed_finished(self, request_id: str, consumed: Consumed, ending: str) -> None:
        consumed.ending = ending
        if consumed.phase == "loading":
            self._commits.is_over(request_id)
            # The worker still writes into the blocks: vLLM frees them when it reports the end of the load.
            self._step.cancels.append((consumed.handoff, "the request was aborted", False))
            return
        if consumed.phase in ("waiting", "opened"):
            self._give_up(consumed, "the request was aborted")
        self._forget(request_id, consumed)

    def _forget(self, request_id: str, consumed: Consumed) -> None:
        self._consumed.pop(request_id)
        if not consumed.is_reported:
            self._report(consumed)

    # --- what the Rust thread has to say

    def _take_events(self) -> None:
        for event in self._control.drain():
            self._handlers[event["event"]](event)

    def _on_log(self, event: dict[str, Any]) -> None:
        logger.info("%s", event["text"])

    def _on_released(self, event: dict[str, Any]) -> None:
        """Nobody will read a produced request's blocks (any more)."""
        produced = self._produced.of(event["handoff"])
        if produced is not None:
            self._step.ended.append((produced.handoff, event["reason"]))
            produced.is_withdrawn = True

    def _on_opened(self, event: dict[str, Any]) -> None:
        consumed = self._consumed.of(event["handoff"])
        if consumed is not None and consumed.phase == "waiting":
            consumed.phase, consumed.opening, consumed.is_held = "opened", event, True

    def _on_finished(self, event: dict[str, Any]) -> None:
        consumed = self._consumed.of(event["handoff"])
        if consumed is None:
            return
        consumed.has_state = True
        if consumed.first_token is None and event["output_ids"] and self._is_same_prompt(consumed, consumed.request):
            consumed.first_token = event["output_ids"][0]
            self._check_first_token(consumed)
        if self._commits.state_is_here(consumed.request.request_id, consumed):
            self._step.committed.append(consumed.handoff)
        elif consumed.phase == "loading":
            self._step.commits.append(consumed.handoff)

    def _on_gone(self, event: dict[str, Any]) -> None:
        consumed = self._consumed.of(event["handoff"])
        if consumed is None:
            return
        consumed.is_held = False
        if consumed.phase == "loading":
            self._step.cancels.append((consumed.handoff, event["reason"], event["is_withdrawn"]))
        elif consumed.phase in ("waiting", "opened"):
            consumed.phase, consumed.reason, consumed.is_lost = "gone", event["reason"], True

    def close(self) -> None:
        """Ends the control plane; consumers are told."""
        self._control.close()
