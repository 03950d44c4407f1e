"""The scheduler role as a consumer: requests whose KV another engine computes, from arrival to result."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvpipe.connector.commits import Commits
from kvpipe.connector.metadata import Load, merge
from kvpipe.connector.model_files import NOT_COMPARED
from kvpipe.connector.requests import Consumed, Handoffs, LossReason, prompt_hash

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.connector.adapters import Adapters
    from kvpipe.connector.continuing import Continuations
    from kvpipe.connector.first_token_support import FirstTokenSupport
    from kvpipe.connector.outbox import Outbox
    from kvpipe.connector.sampling import Sampling

logger = init_logger("vllm.kvpipe.scheduler")


class Consuming:
    """Handoffs that this engine consumes.

    Args:
        outbox: Outgoing messages to producers and workers.
        first_token_support: Whether this engine can force the producer's first token.
        adapters: Identifies the LoRA adapters of requests.
        sampling: How this engine samples first tokens.
        continuations: Requests that continue after the producer's token.
        block_size: Tokens of a block.
        num_ranks: Workers of this engine.
        is_recomputed: Whether this engine computes lost KV; otherwise lost KV fails its request.
    """

    def __init__(
        self,
        outbox: Outbox,
        first_token_support: FirstTokenSupport,
        adapters: Adapters,
        sampling: Sampling,
        continuations: Continuations,
        *,
        block_size: int,
        num_ranks: int,
        is_recomputed: bool,
    ) -> None:
        self._out = outbox
        self._first_token_support = first_token_support
        self._adapters = adapters
        self._sampling = sampling
        self._continuations = continuations
        self._block_size = block_size
        self._is_recomputed = is_recomputed
        self._consumed: Handoffs[Consumed] = Handoffs()
        self._commits = Commits(num_ranks)
        # Loads that begin with the step under way, and when that step and the one before were scheduled.
        self._beginning: list[Consumed] = []
        self._step_s = self._step_before_s = 0.0

    def __contains__(self, request_id: str) -> bool:
        return self._consumed.get(request_id) is not None

    def __len__(self) -> int:
        return len(self._consumed)

    def add(self, request: Request, consumed: Consumed) -> None:
        """Adds a new request, and watches its handoff if it needs KV from the producer."""
        consumed.unsupported_reason = self._first_token_support.unsupported_reason(request)
        self._check_first_token(consumed)
        self._consumed.add(request.request_id, consumed)
        if consumed.phase == "waiting":
            # Not only when it is scheduled: a watch extends the producer's lease while the request queues here.
            self._out.control.watch(consumed.handoff, consumed.producer)

    def release_unused(self, refused: Consumed) -> None:
        """Has the producer free the blocks of a handoff that no request and no worker here uses."""
        if self._consumed.of(refused.handoff) is None and not self._commits.is_unacknowledged(refused.handoff):
            self._out.control.watch(refused.handoff, refused.producer)
            self._out.control.unwatch(refused.handoff, False)  # noqa: FBT003 - a native method

    def _check_first_token(self, consumed: Consumed) -> None:
        if consumed.first_token is not None:
            reason = self._first_token_support.refusal(consumed.first_token)
            consumed.unsupported_reason = reason or consumed.unsupported_reason

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens the producer provides: `(None, False)` while it has not opened the handoff."""
        consumed = self._consumed.get(request.request_id)
        if consumed is None:
            return 0, False
        consumed.note_preemptions()
        if consumed.phase == "waiting":
            return None, False
        # vLLM can compute the last prompt token itself; alone it is not worth a load.
        wanted = request.num_prompt_tokens - num_local_tokens
        has_output = request.num_tokens != request.num_prompt_tokens
        is_wanted = wanted > 1 and not has_output
        if consumed.phase == "opened" and self._is_same_prompt(consumed, request):
            if not is_wanted and not has_output and consumed.awaits_first_token():
                return None, False
            if not is_wanted:
                self._give_up(consumed, "everything was in the own prefix cache", LossReason.CACHED)
        if is_wanted and (consumed.phase == "opened" or self._fails(consumed)):
            consumed.num_local_tokens = num_local_tokens
            return wanted, True
        return 0, False

    def _fails(self, consumed: Consumed) -> bool:
        """Whether a request fails because its KV cannot arrive. vLLM fails it by a failed load, so one is claimed."""
        return consumed.phase == "ended" and consumed.is_lost and not self._is_recomputed

    def _is_same_prompt(self, consumed: Consumed, request: Request) -> bool:
        """Compares prompts once: a full engine matches its first waiting request in every step."""
        if consumed.is_same_prompt is None and consumed.opening is not None:
            difference, loss = self._difference(consumed.opening, request)
            consumed.is_same_prompt = not difference
            if difference:
                self._give_up(consumed, difference, loss)
                consumed.is_lost = True
        return bool(consumed.is_same_prompt)

    def _difference(self, opening: dict[str, Any], request: Request) -> tuple[str, LossReason]:
        """What the producer computes that this request is not, and its kind for metrics; empty if it is the same."""
        if (opening["prompt_hash"], opening["num_tokens"]) != (prompt_hash(request), request.num_prompt_tokens):
            return "the producer computed another prompt", LossReason.OTHER_PROMPT
        ours, theirs = self._adapters.describe(request), opening["adapter"]
        if ours != theirs or NOT_COMPARED in ours:
            message = f"LoRA adapter is {ours or 'none'} here and {theirs or 'none'} at the producer"
            return message, LossReason.OTHER_ADAPTER
        return "", LossReason.NONE

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begins the load into newly allocated blocks."""
        consumed = self._consumed.get(request.request_id)
        if consumed is None or num_external_tokens == 0:
            if consumed is not None and consumed.phase in ("waiting", "opened"):
                self._give_up(consumed, "the scheduler did not want it", LossReason.NOT_SCHEDULED)
            return
        if consumed.phase == "opened" or self._fails(consumed):
            first = consumed.num_local_tokens // self._block_size
            end = -(-(consumed.num_local_tokens + num_external_tokens) // self._block_size)
            self._begin_load(consumed, first, list(blocks.get_block_ids()[0][first:end]))

    def _begin_load(self, consumed: Consumed, first: int, block_ids: list[int]) -> None:
        refusal = consumed.reason if consumed.phase == "ended" else ""
        opening = {} if refusal or consumed.opening is None else consumed.opening
        consumed.phase, consumed.outcome, consumed.verified = "loading", None, []
        consumed.last_block_id = block_ids[-1]
        self._beginning.append(consumed)
        self._out.trace.instant("admitted", consumed.handoff, blocks=len(block_ids))
        self._out.step.loads.append(
            Load(
                request_id=consumed.request.request_id,
                handoff=consumed.handoff,
                first=first,
                block_ids=block_ids,
                ranks=opening.get("ranks", []),
                is_committed=consumed.has_state,
                refusal=refusal,
            )
        )

    def _give_up(self, consumed: Consumed, reason: str, loss: LossReason) -> None:
        consumed.phase, consumed.reason, consumed.loss = "ended", reason, loss
        self._out.control.unwatch(consumed.handoff, False)  # noqa: FBT003 - a native method

    def begin_step(self, now_s: float) -> None:
        """Notes that a step is scheduled."""
        self._step_before_s, self._step_s = self._step_s, now_s

    def scheduled(self, request_id: str, num_before: int, num_new: int) -> None:
        """Forces a scheduled request's first token, restores its last block, and reports when its prompt is done."""
        self._force(request_id)
        self._restore(request_id, num_before, num_new)
        self._count(request_id, num_before, num_new)

    def _force(self, request_id: str) -> None:
        """Forces the producer's token, in each step until there is an output, because a step may be preempted."""
        consumed = self._consumed.get(request_id)
        if consumed is None or consumed.first_token is None or consumed.unsupported_reason:
            return
        if consumed.request.num_output_tokens == 0:
            self._out.step.first_tokens[consumed.handoff] = consumed.first_token
            consumed.is_exact = True

    def _restore(self, request_id: str, num_before: int, num_new: int) -> None:
        """Has the workers restore a prompt's last block in the first step after a load, if that computes one token.

        Not with speculative decoding: a draft model writes into that block, too.
        """
        consumed = self._consumed.get(request_id)
        if consumed is None or consumed.last_block_id is None:
            return
        is_last_token = (num_before, num_new) == (consumed.num_prompt_tokens - 1, 1)
        if is_last_token and not self._first_token_support.is_speculative:
            self._out.step.restores.append(consumed.last_block_id)
        consumed.last_block_id = None

    def _count(self, request_id: str, num_before: int, num_new: int) -> None:
        """Counts the prompt tokens that this engine computes, and reports the result when the prompt is done."""
        consumed = self._consumed.get(request_id)
        if consumed is None or consumed.is_reported:
            return
        consumed.num_computed += max(0, min(num_before + num_new, consumed.num_prompt_tokens) - num_before)
        if num_before + num_new >= consumed.num_prompt_tokens:
            self._out.trace.instant("scheduled", consumed.handoff)
            self._out.step.first_steps.append(consumed.handoff)
            self._report(consumed)

    def _report(self, consumed: Consumed) -> None:
        consumed.is_reported, consumed.is_leased = True, False
        # The workers must know of a commit before the producer ends the handoff: it would end the load they still have.
        if consumed.producer and not self._commits.is_unacknowledged(consumed.handoff):
            self._out.control.unwatch(consumed.handoff, False)  # noqa: FBT003 - a native method
        report = consumed.report()
        self._out.control.set_result(consumed.handoff, json.dumps(report))
        fields = " ".join(f"{name}={value}" for name, value in report.items() if value != "")
        logger.info("handoff.end %s", fields)
        self._count_handoff(consumed, report)

    def _count_handoff(self, consumed: Consumed, report: dict[str, Any]) -> None:
        """Adds a handoff's result to the metrics. Tokens that did not come count only where a request needed them."""
        is_needed = report["result"] != "aborted"
        wanted = consumed.num_prompt_tokens - consumed.num_local_tokens
        received = 0
        missing = report["recomputed_tokens"]
        if consumed.outcome is not None:
            missing = min(wanted, report["blocks_missing"] * self._block_size)
            received = wanted - missing
        self._out.stats.add_handoff(
            report["result"],
            consumed.loss_reason().value,
            handover_s=None if consumed.ending else report["handover_ms"] / 1000,
            received_tokens=received,
            missing_tokens=missing if is_needed else 0,
            recomputed_tokens=report["recomputed_tokens"],
            received_bytes=report["bytes"],
        )

    def receive_outcomes(self, output: KVConnectorOutput) -> None:
        """Processes the workers' reports: ended loads, verified loads, and acknowledged commits."""
        self._measure_steps(time.monotonic())
        reports = output.kv_connector_worker_meta
        for request_id, outcome in getattr(reports, "outcomes", {}).items():
            self._note_outcome(request_id, outcome)
        for request_id, ranks in getattr(reports, "verified", {}).items():
            if (consumed := self._consumed.get(request_id)) is not None:
                self._commits.blocks_verified(request_id, consumed, ranks)
        for handoff in getattr(reports, "acknowledged", ()):
            self._commits.acknowledged(handoff)
            self._out.control.unwatch(handoff, True)  # noqa: FBT003 - a native method
        self._commits.drop_unacknowledged(output)

    def _measure_steps(self, now_s: float) -> None:
        """Notes how long steps have kept the loads that began with this one: it, and what was left of the one before.

        A request that waited longer waited for blocks, or for its producer, which no earlier arrival shortens.
        """
        for consumed in self._beginning:
            consumed.steps_s = now_s - max(consumed.arrived_at, self._step_before_s)
        self._beginning.clear()

    def report_committed(self, output: KVConnectorOutput) -> None:
        """Adds locally committed loads to `finished_recving` and forgets them."""
        self._commits.report(output)
        for request_id in output.finished_recving or ():
            self._received(request_id)

    def _note_outcome(self, request_id: str, outcome: dict[str, Any]) -> None:
        consumed = self._consumed.get(request_id)
        # The outcome of a committed load is fixed, whatever ends the producer's handoff afterwards.
        if consumed is not None and not self._commits.is_unacknowledged(consumed.handoff):
            # Ranks may report in different steps.
            consumed.outcome = outcome if consumed.outcome is None else merge(consumed.outcome, outcome)
            self._commits.is_over(request_id)

    def _received(self, request_id: str) -> None:
        self._commits.is_over(request_id)
        consumed = self._consumed.get(request_id)
        if consumed is None:
            return
        is_loaded = consumed.outcome is not None and consumed.outcome["is_loaded"]
        consumed.phase = "done"
        self._out.trace.instant("received", consumed.handoff)
        if consumed.outcome is None or consumed.outcome["num_missing"]:
            consumed.last_block_id = None
        if is_loaded:
            consumed.is_leased = False
        if is_loaded and not self._commits.is_unacknowledged(consumed.handoff):
            self._out.control.unwatch(consumed.handoff, True)  # noqa: FBT003 - a native method
        self._continue(consumed, is_loaded=is_loaded)
        # After an incomplete load the producer keeps the blocks until the prompt is computed: see `note_preemptions`.
        if consumed.ending:
            self._forget(request_id, consumed)

    def _continue(self, consumed: Consumed, *, is_loaded: bool) -> None:
        """Has a loaded request continue after the producer's token, if it qualifies. Otherwise it is forced."""
        token = consumed.first_token
        if not is_loaded or token is None or consumed.ending or consumed.unsupported_reason:
            return
        if self._continuations.begin(consumed.request, token):
            consumed.is_exact = True

    def finished(self, request: Request) -> None:
        """Cancels the load of a finished request, or reports its result if no load runs."""
        self._continuations.forget(request)
        consumed = self._consumed.get(request.request_id)
        if consumed is None:
            return
        consumed.ending = "failed" if request.status == RequestStatus.FINISHED_ERROR else "aborted"
        if consumed.phase == "loading":
            self._commits.is_over(request.request_id)
            consumed.loss = LossReason.ABORTED
            # The worker role still writes into the blocks; vLLM frees them when it reports the end of the load. Nobody
            # uses them, so that the producer is not asked whether they count.
            self._out.step.cancels.append((consumed.handoff, "the request was aborted", True))
            return
        if consumed.phase in ("waiting", "opened"):
            self._give_up(consumed, "the request was aborted", LossReason.ABORTED)
        self._forget(request.request_id, consumed)

    def _forget(self, request_id: str, consumed: Consumed) -> None:
        self._consumed.pop(request_id)
        if not consumed.is_reported:
            self._report(consumed)

    def on_opened(self, event: dict[str, Any]) -> None:
        """Notes that the producer has scheduled the request."""
        consumed = self._consumed.of(event["handoff"])
        if consumed is not None and consumed.phase == "waiting":
            consumed.phase, consumed.opening, consumed.is_leased = "opened", event, True

    def on_finished(self, event: dict[str, Any]) -> None:
        """Processes the sequence state: the producer has sampled its token."""
        consumed = self._consumed.of(event["handoff"])
        if consumed is None:
            return
        consumed.has_state = True
        if consumed.first_token is None and event["output_ids"] and self._is_same_prompt(consumed, consumed.request):
            self._note_first_token(consumed, event)
        if self._commits.state_received(consumed.request.request_id, consumed):
            self._out.step.committed.append(consumed.handoff)
        elif consumed.phase == "loading":
            self._out.step.commits.append(consumed.handoff)

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
        consumed.is_leased = False
        loss = LossReason(event["cause"])
        if consumed.phase == "loading":
            consumed.loss = loss
            self._out.step.cancels.append((consumed.handoff, event["reason"], event["is_withdrawn"]))
        elif consumed.phase in ("waiting", "opened"):
            consumed.phase, consumed.reason, consumed.loss = "ended", event["reason"], loss
            consumed.is_lost = True
