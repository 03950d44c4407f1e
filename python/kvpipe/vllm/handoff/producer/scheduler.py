"""The scheduler role as a producer: requests whose KV another engine reads, until the end of their lease."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvpipe import transfer_params
from kvpipe.exceptions import ConfigError
from kvpipe.vllm.handoff.handoffs import Handoffs
from kvpipe.vllm.handoff.metadata import HandoffEnd, HandoffLease, PrefillRest
from kvpipe.vllm.prefill_clock import PrefillClock
from kvpipe.vllm.prompt_hash import prompt_hash
from kvpipe.vllm.scheduler_output import scheduled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvpipe.vllm.first_token.sampling import Sampling
    from kvpipe.vllm.handoff.cache_groups import CacheGroups
    from kvpipe.vllm.handoff.outbox import HandoffOutbox
    from kvpipe.vllm.handoff.producer.produced import Produced
    from kvpipe.vllm.lora_adapters import Adapters

_FINISH_REASONS = {
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_STOPPED: "stop",
}


class ProducerScheduler:
    """Handoffs that this engine produces.

    Args:
        outbox: Outgoing messages to consumers and workers.
        adapters: Identifies the LoRA adapters of requests.
        sampling: This engine's sampling of first tokens.
        engine_id: Name of this engine.
        groups: KV cache groups of this engine.

    Attributes:
        ranks: Address and incarnation of each of this engine's workers, by pipeline-parallel rank, then by
            tensor-parallel rank, once known.
        stages: For each stage of its pipeline, the number of layers of each KV cache group; empty if there is one.
        manager: Knows the blocks of each request; `None` before vLLM provides it.
        num_leased_blocks: Blocks of finished requests that are leased.
    """

    def __init__(
        self, outbox: HandoffOutbox, adapters: Adapters, sampling: Sampling, engine_id: str, groups: CacheGroups
    ) -> None:
        self.ranks: list[tuple[str, bytes]] = []
        self.stages: list[list[int]] = []
        self.manager: KVCacheManager | None = None
        self._out = outbox
        self._adapters = adapters
        self._sampling = sampling
        self._engine_id = engine_id
        self._groups = groups
        self._produced: Handoffs[Produced] = Handoffs()
        # For each request that vLLM has matched for the next step, its tokens in this engine's prefix cache.
        self._num_local_tokens: dict[Request, int] = {}
        # Blocks that another connector of a MultiConnector loads within a step, by request, until the request has
        # finished: vLLM learns after the step that they could not be loaded, and with asynchronous scheduling later.
        self._loaded_in_step: dict[str, set[int]] = {}
        self.num_leased_blocks = 0
        self._clock = PrefillClock()

    def __len__(self) -> int:
        return len(self._produced)

    def refuse(self, handoff: bytes, reason: str) -> None:
        """Ends a handoff of which this engine produces nothing, so that no consumer waits for it."""
        if self._produced.of(handoff) is None:
            self._out.control.withdraw(handoff, reason)

    def add(self, request: Request, produced: Produced) -> None:
        """Adds a new request.

        Raises:
            ConfigError: The workers' addresses are unknown.
        """
        if not self.ranks:
            message = "the addresses of this engine's workers are unknown; put KVPipeConnector first in MultiConnector"
            raise ConfigError(message)
        self._produced.add(request.request_id, produced)
        self._out.control.expect(produced.handoff)
        # Not in the step that opens it: 131,072 tokens take a millisecond.
        produced.prompt_hash = prompt_hash(request)

    def allocated(self, request: Request) -> None:
        """Opens the handoff once blocks are allocated."""
        produced = self._produced.get(request.request_id)
        if produced is not None and not produced.is_open:
            produced.is_open = True
            self._out.trace.instant("opened", produced.handoff)
            what = produced.prompt_hash, request.num_prompt_tokens, self.ranks, self._adapters.describe(request)
            self._out.control.open(produced.handoff, *what, stages=self.stages)

    def matched(self, request: Request, num_local_tokens: int) -> None:
        """Notes the number of a request's tokens in this engine's prefix cache."""
        self._num_local_tokens[request] = num_local_tokens

    def scheduled(self, output: SchedulerOutput, now_s: float) -> None:
        """Predicts when the prefills of scheduled requests end, and announces their ready blocks."""
        self._clock.scheduled(output.total_num_scheduled_tokens, now_s)
        for request, num_local in self._num_local_tokens.items():
            if request.request_id in output.num_scheduled_tokens:
                self._note_loads(request, num_local)
        if self._produced:
            self._announce_scheduled(output, now_s)
        self._num_local_tokens.clear()

    def _note_loads(self, request: Request, num_local: int) -> None:
        """Notes the blocks of a request that another connector loads within the step in which it is admitted."""
        num_before = request.num_computed_tokens
        if request.prefill_stats is not None and not request.num_preemptions:
            # vLLM gives connectors a multiple of a block. A hit may end within the next block, which vLLM then copies.
            num_local = request.prefill_stats.num_local_cached_tokens
        if num_local < num_before and self.manager is not None:
            loaded: set[int] = set()
            for group, blocks in zip(self._groups, self.manager.get_block_ids(request.request_id), strict=True):
                loaded.update(blocks[num_local // group.block_size : group.num_blocks(num_before)])
            self._loaded_in_step[request.request_id] = loaded

    def _announce_scheduled(self, output: SchedulerOutput, now_s: float) -> None:
        # A search of all requests of the step, which is made once, and only if a cached block is shared.
        written = functools.cache(lambda: self._written_blocks(output))
        for produced, num_before, num_new in self._produced.scheduled(output):
            self._predict(produced, num_before, num_new, now_s)
            self._announce(produced, num_before, num_new, written)

    def _written_blocks(self, output: SchedulerOutput) -> set[int]:
        num_local_tokens = {request.request_id: num for request, num in self._num_local_tokens.items()}
        return written_blocks(output, self.manager, num_local_tokens, self._groups)

    def _announce(self, produced: Produced, num_before: int, num_new: int, written: Callable[[], set[int]]) -> None:
        """Announces the blocks that are ready before this step, and those that are ready after it.

        A block that another connector loads within a step, and those after it, are announced when the request has
        finished: a consumer that loses this engine computes on with the blocks that it has, and must not have one that
        could not be loaded.
        """
        if not produced.is_open or produced.is_withdrawn or self.manager is None:
            return
        lists = self.manager.get_blocks(produced.request.request_id).blocks
        if produced.num_cached_tokens is None:
            produced.num_cached_tokens = num_before
            num_local = self._num_local_tokens.get(produced.request, num_before)
            ranges = [produced.ready(index, num_local) for index in range(len(lists))]
            local = [blocks[each.start : each.stop] for blocks, each in zip(lists, ranges, strict=True)]
            # A step that writes a shared block has a request that holds it, too.
            is_shared = any(block.ref_cnt > 1 for blocks in local for block in blocks)
            unsure = (written() if is_shared else set[int]()).union(*self._loaded_in_step.values())
            for index, blocks in enumerate(local):
                cached = [block.block_id for block in blocks]
                if not unsure.isdisjoint(cached):
                    cached = list(itertools.takewhile(lambda block_id: block_id not in unsure, cached))
                self._out.step.cached.extend(produced.announce(index, cached))
        for index, blocks in enumerate(lists):
            ready = [blocks[at].block_id for at in produced.ready(index, num_before + num_new)]
            if all(loaded.isdisjoint(ready) for loaded in self._loaded_in_step.values()):
                self._out.step.ready.extend(produced.announce(index, ready))

    def _predict(self, produced: Produced, num_before: int, num_new: int, now_s: float) -> None:
        """Reports when a producing request's prefill will end, if the engine's speed is known."""
        if not produced.is_open or num_new < 1 or num_before >= produced.num_prompt_tokens:
            return
        remaining_s = self._clock.remaining_s(produced.num_prompt_tokens - num_before, num_new, now_s)
        if remaining_s is not None:
            self._out.control.progress(produced.handoff, remaining_s)
        beyond_s = self._clock.beyond_s(produced.num_prompt_tokens - num_before, num_new)
        if beyond_s is not None:
            self._out.step.progress.append(PrefillRest(produced.handoff, beyond_s))
            self._out.step.control = self._out.local_address

    def preempted(self, request_id: str) -> None:
        """Withdraws the blocks of a preempted request, because they may change."""
        self._loaded_in_step.pop(request_id, None)
        produced = self._produced.pop(request_id)
        if produced is not None:
            self._withdraw(produced, "the producer preempted the request")

    def _withdraw(self, produced: Produced, reason: str) -> None:
        """Withdraws blocks before they may change: notifies consumers, and stops announcements."""
        self._out.control.withdraw(produced.handoff, reason)
        self._out.step.ended.append(HandoffEnd(produced.handoff, reason))

    def step_ended(self, now_s: float) -> None:
        """Notes that the oldest step under way has ended."""
        self._clock.ended(now_s)

    def sent(self, request_id: str) -> None:
        """Forgets a request whose leased blocks are free again."""
        produced = self._produced.pop(request_id)
        if produced is not None:
            self._count_leased(-produced.num_leased_blocks)

    def leased_requests(self) -> set[str]:
        """Returns ids of finished requests whose blocks a consumer may read."""
        produced = self._produced.values()
        return {it.request.request_id for it in produced if it.is_leased and not it.is_withdrawn}

    def _count_leased(self, num_more: int) -> None:
        self.num_leased_blocks += num_more
        self._out.stats.set_leased_blocks(self.num_leased_blocks)

    def withdraw_invalid(self, invalid_block_ids: set[int]) -> None:
        """Withdraws announced blocks that another connector of a MultiConnector could not load."""
        for produced in self._produced.values():
            if not invalid_block_ids.isdisjoint(produced.announced_ids):
                self._withdraw(produced, "the producer has to compute its blocks again")
                produced.is_withdrawn = True

    def withdraw_all(self, reason: str) -> None:
        """Withdraws the blocks of all handoffs that are open. The leased ones are freed when the workers know of it."""
        for produced in self._produced.values():
            if produced.is_open and not produced.is_withdrawn:
                self._withdraw(produced, reason)
                produced.is_withdrawn = True

    def finished(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Returns true if a finished request's blocks are leased to a consumer, and parameters for its response."""
        self._loaded_in_step.pop(request.request_id, None)
        produced = self._produced.get(request.request_id)
        if produced is None:
            return False, None
        reason = _FINISH_REASONS.get(request.status)
        if reason is None or not produced.is_open or produced.is_withdrawn:
            self._produced.pop(request.request_id)
            self._withdraw(produced, f"the producer ended the request: {request.status.name}")
            return False, None
        for index, of_group in enumerate(block_ids):
            ready = [of_group[at] for at in produced.ready(index, produced.num_prompt_tokens)]
            self._out.step.cached.extend(produced.announce(index, ready))
        null_id = -1 if self.manager is None else int(self.manager.block_pool.null_block.block_id)
        if null_id in produced.announced_ids:
            self._produced.pop(request.request_id)
            self._withdraw(produced, "vLLM freed a block of the prompt that the next token needs")
            return False, None
        produced.is_leased = True
        produced.num_leased_blocks = sum(len(of_group) - of_group.count(null_id) for of_group in block_ids)
        self._count_leased(produced.num_leased_blocks)
        self._out.trace.instant("sampled", produced.handoff)
        self._out.step.leased.append(HandoffLease(produced.handoff, request.request_id))
        self._out.control.finish(
            produced.handoff,
            list(request.output_token_ids),
            reason,
            produced.num_cached_tokens or 0,
            self._sampling.hash(request),
        )
        return True, transfer_params.produced(
            produced.handoff.hex(),
            self._out.address,
            engine_id=self._engine_id,
            parallel_size=len(self.ranks) // max(1, len(self.stages)),
            num_tokens=produced.num_prompt_tokens,
            block_ids=block_ids,
            first_token=request.output_token_ids[0],
        )

    def on_released(self, event: dict[str, Any]) -> None:
        """Ends a handoff whose blocks no consumer will read any more."""
        produced = self._produced.of(event["handoff"])
        if produced is not None:
            self._out.step.ended.append(HandoffEnd(produced.handoff, event["reason"]))
            produced.is_withdrawn = True


def written_blocks(
    output: SchedulerOutput, manager: KVCacheManager, num_local_tokens: Mapping[str, int], groups: CacheGroups
) -> set[int]:
    """Returns full blocks that this step writes, which vLLM already shares by hash and counts as cached.

    Args:
        output: The step.
        manager: Knows the blocks of each request.
        num_local_tokens: For requests admitted in this step, tokens found in this engine's prefix cache. Another
            connector loads the tokens between these and those computed before, within this step.
        groups: KV cache groups of this engine.
    """
    written: set[int] = set()
    for request_id, num_before, num_new in scheduled(output):
        num_local = num_local_tokens.get(request_id, num_before)
        for index, group in enumerate(groups):
            first, end = num_local // group.block_size, (num_before + num_new) // group.block_size
            if first < end:  # most requests of a step decode, within a block
                written.update(manager.get_block_ids(request_id)[index][first:end])
    return written
