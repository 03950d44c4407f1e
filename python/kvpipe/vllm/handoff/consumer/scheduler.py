"""The scheduler role as a consumer: requests whose KV another engine computes, from arrival to result."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvpipe.exceptions import ConfigError
from kvpipe.vllm.handoff.consumer.consumed import Consumed, LossReason
from kvpipe.vllm.handoff.consumer.deadlock import DeadlockTimer
from kvpipe.vllm.handoff.consumer.pipeline_stages import pipeline_stages
from kvpipe.vllm.handoff.consumer.rank_sources import rank_sources
from kvpipe.vllm.handoff.consumer.state_machine import Action, Event, Phase
from kvpipe.vllm.handoff.handoffs import Handoffs
from kvpipe.vllm.handoff.metadata import Cancel, Load, LoadOutcome, WorkerOutcomes
from kvpipe.vllm.model_files import NOT_COMPARED
from kvpipe.vllm.prompt_hash import prompt_hash
from kvpipe.vllm.scheduler_output import output_position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.vllm.first_token.continuing_scheduler import Continuations
    from kvpipe.vllm.first_token.sampling import Sampling
    from kvpipe.vllm.first_token.support import FirstTokenSupport
    from kvpipe.vllm.handoff.cache_groups import CacheGroup, CacheGroups
    from kvpipe.vllm.handoff.outbox import HandoffOutbox
    from kvpipe.vllm.lora_adapters import Adapters

logger = init_logger("vllm.kvpipe.scheduler")

_OPENED = (Phase.OPENED, Phase.SAMPLED)
_BEFORE_LOAD = (Phase.WAITING, *_OPENED)
# vLLM has not been reported the end of the load.
_DURING_LOAD = (
    *(Phase.LOADING, Phase.VERIFIED, Phase.COMMITTED, Phase.FINISHING, Phase.BROKEN),
    *(Phase.CANCELLED, Phase.ABORTED, Phase.DROPPED),
)


class ConsumerScheduler:
    """Handoffs that this engine consumes.

    Args:
        outbox: Outgoing messages to producers and workers.
        first_token_support: This engine's support for forcing the producer's first token.
        adapters: Identifies the LoRA adapters of requests.
        sampling: This engine's sampling of first tokens.
        continuations: Requests that continue after the producer's token.
        groups: KV cache groups of this engine.
        num_ranks: Workers of this engine.
        tensor_parallel_size: Those of them that share the heads of each layer.
        num_heads: KV heads of the model; 0 if blocks have no slices by head.
        is_recomputed: True if this engine computes lost KV; otherwise lost KV fails its request.
        uses_v2: True if its model runner is V2.
    """

    def __init__(
        self,
        outbox: HandoffOutbox,
        first_token_support: FirstTokenSupport,
        adapters: Adapters,
        sampling: Sampling,
        continuations: Continuations,
        *,
        groups: CacheGroups,
        num_ranks: int,
        tensor_parallel_size: int,
        num_heads: int,
        is_recomputed: bool,
        uses_v2: bool,
    ) -> None:
        self._out = outbox
        self._first_token_support = first_token_support
        self._adapters = adapters
        self._sampling = sampling
        self._continuations = continuations
        self._groups = groups
        self._is_recomputed = is_recomputed
        self._uses_v2 = uses_v2
        self._consumed: Handoffs[Consumed] = Handoffs()
        self._num_ranks = num_ranks
        self._tensor_parallel_size = tensor_parallel_size
        self._num_heads = num_heads
        # Committed loads: those that the workers have not acknowledged, and do not report afterwards, and those that
        # vLLM does not know of.
        self._unacknowledged: dict[bytes, Consumed] = {}
        self._unreported: set[str] = set()
        self._deadlock = DeadlockTimer()
        # Loaded requests whose first step writes other bytes into their last blocks, which are restored after it.
        self._repeating: dict[str, Consumed] = {}
        # Loads that begin with the step under way, and when that step and the one before were scheduled.
        self._beginning: list[Consumed] = []
        self._step_s = self._step_before_s = 0.0

    def __contains__(self, request_id: str) -> bool:
        return self._consumed.get(request_id) is not None

    def __len__(self) -> int:
        return len(self._consumed)

    def add(self, request: Request, consumed: Consumed) -> None:
        """Adds a new request, and watches its handoff if it needs KV from the producer.

        Raises:
            ConfigError: Its handoff belongs to another request, or did until a step that has not ended.
        """
        if consumed.handoff in self._unacknowledged:  # whose end would end the watch of this one
            request_id = self._unacknowledged[consumed.handoff].request.request_id
            message = f"handoff {consumed.handoff.hex()} belongs to request {request_id}"
            raise ConfigError(message)
        consumed.unsupported_reason = self._first_token_support.unsupported_reason(request)
        self._check_first_token(consumed)
        self._consumed.add(request.request_id, consumed)
        if consumed.load.phase is Phase.WAITING:
            # Not only when it is scheduled: a watch extends the producer's lease while the request queues here.
            self._out.control.watch(consumed.handoff, consumed.producer)
            # Not in the step that begins its load: 131,072 tokens take a millisecond.
            consumed.prompt_hash = prompt_hash(request)

    def release_unused(self, refused: Consumed) -> None:
        """Has the producer free the blocks of a handoff that no request and no worker here uses."""
        if self._consumed.of(refused.handoff) is None and refused.handoff not in self._unacknowledged:
            self._out.control.watch(refused.handoff, refused.producer)
            self._out.control.unwatch(refused.handoff, False)  # noqa: FBT003 - a native method

    def _check_first_token(self, consumed: Consumed) -> None:
        if consumed.first_token is not None:
            reason = self._first_token_support.refusal(consumed.given_tokens or (consumed.first_token,))
            consumed.unsupported_reason = reason or consumed.unsupported_reason

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of the producer's tokens: `(None, False)` while it has not opened the handoff."""
        if self._repeating and self._would_read_repeated(request, num_local_tokens):
            return None, False
        consumed = self._consumed.get(request.request_id)
        if consumed is None:
            return 0, False
        if consumed.note_preemptions():
            self._consumed.unsettle(consumed)
        if consumed.load.outcome is None:
            consumed.num_local_tokens = num_local_tokens
        if consumed.load.phase is Phase.WAITING or self._is_behind_others(consumed):
            return None, False
        # vLLM can compute the last prompt token itself; alone it is not worth a load.
        wanted = request.num_prompt_tokens - num_local_tokens
        has_output = request.num_tokens != request.num_prompt_tokens
        is_wanted = wanted > 1 and not has_output
        if consumed.load.phase in _OPENED and self._is_same_prompt(consumed, request) and not is_wanted:
            if not has_output and consumed.awaits_first_token():
                return None, False
            self._load_nothing(consumed, Event.GIVEN_UP, "everything was in the own prefix cache", LossReason.CACHED)
        if is_wanted and consumed.load.phase in _OPENED and (reason := self._objection(consumed)):
            self._load_nothing(consumed, Event.GIVEN_UP, reason, LossReason.UNFORCED)
        if is_wanted and self._is_claimable(consumed):
            consumed.num_local_tokens = num_local_tokens
            return wanted, True
        return 0, False

    def awaits_producer(self, request_id: str) -> bool:
        """True if a request waits for a message of its producer, and for nothing here."""
        consumed = self._consumed.get(request_id)
        return consumed is not None and (consumed.load.phase is Phase.WAITING or consumed.awaits_first_token())

    def _is_behind_others(self, consumed: Consumed) -> bool:
        """True once after a load that vLLM has thrown away.

        To compute the prompt takes more blocks than the load had, if there are windows. While vLLM has not enough, it
        looks at no other request whose load has ended, which would free some. Left out once, it comes after these.
        """
        outcome = consumed.load.outcome
        if consumed.is_behind_others or self._groups.has_parts or outcome is None or outcome.is_loaded:
            return False
        consumed.is_behind_others = True
        return True

    def _is_claimable(self, consumed: Consumed) -> bool:
        """True if a load may begin. Where lost KV fails its request, vLLM fails it by a failed load: one is claimed."""
        phase = consumed.load.phase
        return phase in _OPENED or (phase is Phase.LOST and not self._is_recomputed)

    def _objection(self, consumed: Consumed) -> str:
        """Reason for which the KV of a prompt is of no use here; empty if it is.

        vLLM computes the last token of a loaded prompt again. If some layers cannot do that with what is loaded, its
        logits are wrong, and the producer's first token has to stand for them; see `CacheGroup.can_repeat_last`.
        """
        if self._groups.can_repeat_last(consumed.num_prompt_tokens):
            return ""
        if self._uses_v2 and self._groups.moves_state(consumed.num_prompt_tokens):
            return "the V2 model runner moves the recurrent state of such a prompt before it calls the connector"
        params = consumed.request.sampling_params
        reason = consumed.unsupported_reason
        if not reason and params is not None and params.num_logprobs is not None:
            reason = "log probabilities of the first token"
        if not reason and consumed.first_token is None and consumed.load.phase is not Phase.OPENED:
            reason = "the producer's is not known"
        return reason and f"the last prompt token cannot be computed twice, nor the first token forced: {reason}"

    def _would_read_repeated(self, request: Request, num_local_tokens: int) -> bool:
        """True if a request has found in the prefix cache what this step may overwrite for a while."""
        return any(
            repeating.num_prompt_tokens <= num_local_tokens
            and repeating.request is not request
            # A request that was preempted may find its outputs, too.
            and request.all_token_ids[: repeating.num_prompt_tokens] == repeating.request.prompt_token_ids
            for repeating in self._repeating.values()
        )

    def _is_same_prompt(self, consumed: Consumed, request: Request) -> bool:
        """Compares prompts once: a full engine matches its first waiting request in every step."""
        if consumed.is_same_prompt is None and consumed.opening is not None:
            difference, loss = self._difference(consumed, consumed.opening, request)
            consumed.is_same_prompt = not difference
            if difference:
                self._load_nothing(consumed, Event.DIFFERED, difference, loss)
        return bool(consumed.is_same_prompt)

    def _difference(self, consumed: Consumed, opening: dict[str, Any], request: Request) -> tuple[str, LossReason]:
        """The first difference of the producer's request from this one, and its kind for metrics; empty without one."""
        if (opening["prompt_hash"], opening["num_tokens"]) != (consumed.prompt_hash, request.num_prompt_tokens):
            return "the producer computed another prompt", LossReason.OTHER_PROMPT
        ours, theirs = self._adapters.describe(request), opening["adapter"]
        if ours != theirs or NOT_COMPARED in ours:
            message = f"LoRA adapter is {ours or 'none'} here and {theirs or 'none'} at the producer"
            return message, LossReason.OTHER_ADAPTER
        if len(set(opening["ranks"])) < len(opening["ranks"]):
            return "the producer names a worker for two of its ranks; report its version", LossReason.REFUSED
        num_layers = [len(group.layer_names) for group in self._groups]
        try:
            stages = pipeline_stages(opening["stages"], len(opening["ranks"]), num_layers)
            rank_sources(0, self._tensor_parallel_size, stages[0].num_ranks, self._num_heads)
        except ConfigError as error:
            return str(error), LossReason.REFUSED
        return "", LossReason.NONE

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begins the load into newly allocated blocks."""
        consumed = self._consumed.get(request.request_id)
        if consumed is None:
            return
        if num_external_tokens == 0:
            self._load_nothing(consumed, Event.GIVEN_UP, "the scheduler did not want it", LossReason.NOT_SCHEDULED)
        elif self._is_claimable(consumed):
            num_tokens = consumed.num_prompt_tokens
            lists = zip(self._groups, blocks.blocks, strict=True)
            self._begin_load(consumed, [_lacking_blocks(group, of_group, num_tokens) for group, of_group in lists])

    def _begin_load(self, consumed: Consumed, parts: list[tuple[int, list[int]]]) -> None:
        refusal = consumed.reason if consumed.load.phase is Phase.LOST else ""
        opening = {} if refusal or consumed.opening is None else consumed.opening
        consumed.load.on(Event.ALLOCATED)
        consumed.is_behind_others = False
        consumed.last_blocks = [(index, block_ids[-1]) for index, (_, block_ids) in enumerate(parts) if block_ids]
        self._beginning.append(consumed)
        num_blocks = sum(len(block_ids) for _, block_ids in parts)
        self._out.trace.instant("admitted", consumed.handoff, blocks=num_blocks)
        self._out.step.loads.append(
            Load(
                request_id=consumed.request.request_id,
                handoff=consumed.handoff,
                parts=parts,
                ranks=opening.get("ranks", []),
                has_state=consumed.load.phase is Phase.FINISHING,
                refusal=refusal,
                stages=opening.get("stages", []),
            )
        )

    def _load_nothing(self, consumed: Consumed, event: Event, reason: str, loss: LossReason) -> None:
        """Ends a handoff, unless a load of it has begun."""
        if consumed.load.phase in _BEFORE_LOAD:
            consumed.reason, consumed.loss = reason, loss
            self._perform(consumed, consumed.load.on(event))

    def give_way(self, ours: bytes, num_leased_blocks: int, now_s: float) -> None:
        """Gives up the load that waits first, if nothing moves because another engine waits for this one's blocks.

        Args:
            ours: Incarnation of this engine's first worker.
            num_leased_blocks: Blocks that are leased, if the step computes nothing and a request lacks blocks; else 0.
            now_s: Time of the step.
        """
        if num_leased_blocks and any(it.load.phase in _DURING_LOAD for it in self._consumed.values()):
            num_leased_blocks = 0
        self._deadlock.note(num_leased_blocks, now_s)
        if not num_leased_blocks:
            return
        waiting = (it for it in self._consumed.values() if it.load.phase in _OPENED and _producer_of(it))
        if (first := next(waiting, None)) is not None and self._deadlock.is_due(ours, _producer_of(first), now_s):
            reason = "this engine and its producer would have waited for each other's blocks"
            self._load_nothing(first, Event.GIVEN_UP, reason, LossReason.GAVE_WAY)

    def _perform(self, consumed: Consumed, actions: tuple[Action, ...], cancel: Cancel | None = None) -> None:
        """Does what an event of a load causes. `cancel` is what the workers get if that is to cancel it."""
        step = self._out.step
        for action in actions:
            match action:
                case Action.UNWATCH | Action.ACKNOWLEDGE:
                    self._out.control.unwatch(consumed.handoff, action is Action.ACKNOWLEDGE)
                case Action.FINISH:
                    step.states.append(consumed.handoff)
                case Action.COMMIT:
                    step.committed.append(consumed.handoff)
                    self._unacknowledged[consumed.handoff] = consumed
                    self._unreported.add(consumed.request.request_id)
                case Action.CANCEL if cancel is not None:
                    # The last one of a load counts: its blocks may be withdrawn after a rank has lost some.
                    step.cancels = [*(it for it in step.cancels if it.handoff != cancel.handoff), cancel]
                case Action.REPORT:
                    self._report(consumed)
                case Action.FORGET:
                    self._consumed.pop(consumed.request.request_id)

    def scheduled(self, output: SchedulerOutput, now_s: float) -> None:
        """Forces scheduled requests' first outputs, restores their last blocks, and reports whose prompt is done."""
        self._step_before_s, self._step_s = self._step_s, now_s
        for consumed, num_before, num_new in self._consumed.scheduled(output):
            self._force(consumed)
            self._restore(consumed, num_before, num_new)
            self._count(consumed, num_before, num_new)
            if consumed.load.phase is Phase.REPORTED and consumed.request.num_output_tokens >= consumed.num_forced:
                # Nothing of it is left for later steps, and there may be hundreds like it.
                self._consumed.settle(consumed)

    def _force(self, consumed: Consumed) -> None:
        """Forces the producer's token, or those that the request brought, in steps that may sample such an output."""
        if consumed.first_token is None or consumed.unsupported_reason:
            return
        if output_position(consumed.request) < consumed.num_forced:
            self._out.step.first_tokens[consumed.handoff] = consumed.first_token
            consumed.is_exact = True

    def _restore(self, consumed: Consumed, num_before: int, num_new: int) -> None:
        """Has the workers restore a prompt's last blocks in the first step after a load, if that computes one token.

        Not with speculative decoding: a draft model writes into these blocks, too.
        """
        if not consumed.last_blocks:
            return
        is_last_token = (num_before, num_new) == (consumed.num_prompt_tokens - 1, 1)
        if is_last_token and not self._first_token_support.is_speculative:
            self._out.step.restores.extend(consumed.last_blocks)
        consumed.last_blocks = []
        self._repeating.pop(consumed.request.request_id, None)

    def _count(self, consumed: Consumed, num_before: int, num_new: int) -> None:
        """Counts the prompt tokens that this engine computes, and reports the result when the prompt is done."""
        if consumed.load.phase is Phase.REPORTED:
            return
        consumed.num_computed += max(0, min(num_before + num_new, consumed.num_prompt_tokens) - num_before)
        if num_before + num_new >= consumed.num_prompt_tokens:
            self._out.trace.instant("scheduled", consumed.handoff)
            self._out.step.first_steps.append(consumed.handoff)
            self._perform(consumed, consumed.load.on(Event.COMPUTED))

    def _report(self, consumed: Consumed) -> None:
        report = consumed.report()
        self._out.control.set_result(consumed.handoff, json.dumps(report))
        # The log has the reason of the transport once a session, see `session.stream` and `session.slow`.
        shown = {name: value for name, value in report.items() if value != "" and name != "transport_reason"}
        fields = " ".join(f"{name}={value}" for name, value in shown.items())
        logger.info("handoff.end %s", fields)
        self._count_handoff(consumed, report)

    def _count_handoff(self, consumed: Consumed, report: dict[str, Any]) -> None:
        """Adds a handoff's result to the metrics. Tokens that did not come count only where a request needed them."""
        is_needed = report["result"] != "aborted"
        wanted = consumed.num_prompt_tokens - consumed.num_local_tokens
        received = 0
        missing = report["recomputed_tokens"]
        if consumed.load.outcome is not None:
            missing = self._num_missing_tokens(wanted, consumed.load.outcome)
            received = wanted - missing
        self._out.stats.add_handoff(
            report["result"],
            consumed.loss_reason().value,
            handover_s=None if consumed.load.phase is Phase.FORGOTTEN else report["handover_ms"] / 1000,
            received_tokens=received,
            missing_tokens=missing if is_needed else 0,
            recomputed_tokens=report["recomputed_tokens"],
            received_bytes=report["bytes"],
        )

    def _num_missing_tokens(self, num_wanted: int, outcome: LoadOutcome) -> int:
        """Tokens that did not come: all of them, if vLLM cannot go on from the blocks before the first missing one."""
        if self._groups.has_parts:
            return min(num_wanted, outcome.num_missing * self._groups[0].block_size)
        return 0 if outcome.is_loaded else num_wanted

    def is_idle(self) -> bool:
        """True if a step has nothing to report here."""
        return not (self._consumed or self._unacknowledged)

    def receive_outcomes(self, output: KVConnectorOutput) -> None:
        """Processes the workers' reports: ended loads, verified loads, and acknowledged commits."""
        self._measure_steps(time.monotonic())
        # Under MultiConnector it may be another connector's.
        if isinstance(output.kv_connector_worker_meta, WorkerOutcomes):
            self._receive_loads(output.kv_connector_worker_meta)
            for handoff in output.kv_connector_worker_meta.acknowledged:
                if (consumed := self._unacknowledged.pop(handoff, None)) is not None:
                    self._perform(consumed, consumed.load.acknowledged())
        if output.finished_recving and self._unacknowledged:
            # A second report of a load ends the engine.
            committed = {consumed.request.request_id for consumed in self._unacknowledged.values()}
            output.finished_recving = output.finished_recving - committed

    def _receive_loads(self, reports: WorkerOutcomes) -> None:
        for request_id, outcome in reports.outcomes.items():
            if (consumed := self._consumed.get(request_id)) is not None:
                consumed.load.worker_ended(outcome)
        for request_id, ranks in reports.verified.items():
            if (consumed := self._consumed.get(request_id)) is not None:
                consumed.load.blocks_verified(ranks, self._num_ranks)
        for request_id in reports.broken:
            if (consumed := self._consumed.get(request_id)) is not None:
                cancel = Cancel(consumed.handoff, "a rank has lost blocks that it had verified", is_withdrawn=False)
                self._perform(consumed, consumed.load.on(Event.WORKER_BROKEN), cancel)

    def _measure_steps(self, now_s: float) -> None:
        """Notes how long steps have kept the loads that began with this one: it, and what was left of the one before.

        A request that waited longer waited for blocks, or for its producer, which no earlier arrival shortens.
        """
        for consumed in self._beginning:
            consumed.steps_s = now_s - max(consumed.arrived_at, self._step_before_s)
        self._beginning.clear()

    def report_committed(self, output: KVConnectorOutput) -> None:
        """Adds committed loads to `finished_recving`, which vLLM reads after this hook."""
        if self._unreported:
            output.finished_recving = (output.finished_recving or set()) | self._unreported
            self._unreported = set()
        for request_id in output.finished_recving or ():
            self._received(request_id)

    def _received(self, request_id: str) -> None:
        consumed = self._consumed.get(request_id)
        if consumed is None:
            return
        phase = consumed.load.phase
        actions = consumed.load.received()
        if consumed.load.phase is phase:  # another connector's load
            return
        self._out.trace.instant("received", consumed.handoff)
        outcome = consumed.load.outcome
        if outcome is None or outcome.num_missing or not (outcome.is_loaded or self._groups.has_parts):
            consumed.last_blocks = []
        self._perform(consumed, actions)
        if consumed.load.phase is Phase.LOADED:
            self._continue(consumed)
            if not consumed.request.num_output_tokens and not self._groups.can_repeat_last(consumed.num_prompt_tokens):
                self._repeating[request_id] = consumed

    def _continue(self, consumed: Consumed) -> None:
        """Has a loaded request continue after the producer's token, if it qualifies. Otherwise it is forced."""
        token = consumed.first_token
        if token is not None and not consumed.unsupported_reason and self._continuations.begin(consumed.request, token):
            consumed.is_exact = True

    def finished(self, request: Request) -> None:
        """Cancels the load of a finished request, or reports its result if no load runs."""
        self._continuations.forget(request)
        self._repeating.pop(request.request_id, None)
        consumed = self._consumed.get(request.request_id)
        if consumed is None:
            return
        reason = "the request was aborted"
        self._load_nothing(consumed, Event.FINISHED, reason, LossReason.ABORTED)
        # The worker role still writes into the blocks of a load; vLLM frees them when it reports the end. They are
        # unused, so that the producer is not asked to validate them.
        actions = consumed.load.on(Event.FINISHED)
        if consumed.load.phase is Phase.ABORTED and consumed.loss is LossReason.NONE:
            consumed.loss = LossReason.ABORTED
        self._perform(consumed, actions, Cancel(consumed.handoff, reason, is_withdrawn=True))

    def on_opened(self, event: dict[str, Any]) -> None:
        """Notes that the producer has scheduled the request."""
        consumed = self._consumed.of(event["handoff"])
        if consumed is not None and consumed.load.phase is Phase.WAITING:
            consumed.opening = event
            consumed.load.on(Event.OPENED)

    def on_finished(self, event: dict[str, Any]) -> None:
        """Processes the sequence state: the producer has sampled its token."""
        consumed = self._consumed.of(event["handoff"])
        if consumed is None:
            return
        if consumed.first_token is None and event["output_ids"] and self._is_same_prompt(consumed, consumed.request):
            self._note_first_token(consumed, event)
        reason = self._objection(consumed) if consumed.load.phase in _DURING_LOAD else ""
        if reason and (actions := consumed.load.on(Event.DIFFERED)):
            consumed.loss = LossReason.UNFORCED
            self._perform(consumed, actions, Cancel(consumed.handoff, reason, is_withdrawn=True))
        else:
            self._perform(consumed, consumed.load.on(Event.STATE_RECEIVED))

    def _note_first_token(self, consumed: Consumed, state: dict[str, Any]) -> None:
        if state["sampling_hash"] == self._sampling.hash(consumed.request):
            consumed.first_token = state["output_ids"][0]
            self._check_first_token(consumed)
        elif not consumed.unsupported_reason:
            consumed.unsupported_reason = "the producer sampled with other parameters"

    def on_ended(self, event: dict[str, Any]) -> None:
        """Ends a handoff: the producer will send no more KV, or has withdrawn its blocks."""
        consumed = self._consumed.of(event["handoff"])
        if consumed is None:
            return
        loss = LossReason(event["cause"])
        self._load_nothing(consumed, Event.ENDED, event["reason"], loss)
        if actions := consumed.load.on(Event.ENDED):
            consumed.loss = loss
            self._perform(consumed, actions, Cancel(consumed.handoff, event["reason"], event["is_withdrawn"]))


def _lacking_blocks(group: CacheGroup, blocks: Sequence[KVCacheBlock], num_tokens: int) -> tuple[int, list[int]]:
    """Returns the blocks of a prompt that a group needs and has not found in the prefix cache, and where they begin."""
    needed = group.ready(num_tokens, num_tokens)
    first = next((at for at in needed if blocks[at].block_hash is None), needed.stop)
    block_ids = [blocks[at].block_id for at in range(first, needed.stop)]
    return first - group.num_uncounted(num_tokens), block_ids


def _producer_of(consumed: Consumed) -> bytes:
    """The incarnation of its producer's first worker; empty if that is not known."""
    ranks = (consumed.opening or {}).get("ranks") or [("", b"")]
    incarnation: bytes = ranks[0][1]
    return incarnation
