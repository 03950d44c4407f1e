"""A simulated engine whose KV cache stores what it was computed from, so that wrong KV in a forward pass is detected.

vLLM's scheduler, the scheduler role, and what a rank reports are real. `simulated_rank.py` has the rest of a worker.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvpipe.transfer_params import ConsumeParams, parse
from kvpipe.vllm.scheduler_output import scheduled
from tests.vllm.handoff.cache import FULL, Layers, num_blocks
from tests.vllm.handoff.engine import BLOCK, SHAPE, Engine
from tests.vllm.handoff.simulated_rank import Rank, Sizes, Step, Transfer
from tests.vllm.handoff.wire import Wire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.vllm.handoff.metadata import Load, StepMetadata

THEIRS = 8  # what producers sample


@dataclass(frozen=True)
class Mode:
    """Mode in which vLLM runs an engine.

    Attributes:
        is_async: True if a step is scheduled before the one before it is updated; vLLM's default on GPUs.
        sizes: Workers of this engine, and of each other one.
        is_uniproc: True if the worker's hooks run in the scheduler's thread, right after a step is scheduled. Otherwise
            a worker begins and reports in its own time.
        uses_v2: True if the model runner is V2.
        is_late: True if the device runs a forward pass later than the host launches it.
        groups: What the layers of each KV cache group read.
    """

    is_async: bool = False
    sizes: Sizes = field(default_factory=Sizes)
    is_uniproc: bool = True
    uses_v2: bool = False
    is_late: bool = False
    groups: tuple[Layers, ...] = FULL

    @property
    def has_parts(self) -> bool:
        """True if vLLM goes on from the blocks before the first missing one."""
        return self.groups == FULL

    def can_repeat_last(self, length: int) -> bool:
        """True if the last token of a prompt can be computed again from what vLLM keeps of all of it."""
        return all(
            not layers.is_state and layers.first_read(length) // BLOCK == layers.first_read(length - 1) // BLOCK
            for layers in self.groups
        )

    def specs(self) -> list[KVCacheSpec]:
        """The groups as vLLM's."""
        return [_spec(layers) for layers in self.groups]

    def apply(self, config: VllmConfig) -> None:
        """Sets what vLLM's CPU platform does not let a user choose."""
        config.scheduler_config.async_scheduling = self.is_async
        config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = self.sizes.ours


def _spec(layers: Layers) -> KVCacheSpec:
    match layers.kind:
        case "window":
            return SlidingWindowSpec(**SHAPE, sliding_window=layers.reach)
        case "chunk":
            return ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=layers.reach)
        case "state":
            mode = "align" if layers.block_size == BLOCK else "none"
            shapes, dtypes = ((4, 32), (4, 32, 32)), (torch.float32, torch.float32)
            return MambaSpec(block_size=layers.block_size, shapes=shapes, dtypes=dtypes, mamba_cache_mode=mode)
    return FullAttentionSpec(**SHAPE)


@dataclass
class SentLoad:
    """A load as the workers know it from the scheduler role, until vLLM knows of its end."""

    load: Load
    is_committed: bool
    is_cancelled: bool = False
    is_broken: bool = False
    has_ended: bool = False


class World:
    """One engine, its simulated workers, and the invariants that every step checks."""

    def __init__(self, config: VllmConfig, mode: Mode | None = None) -> None:
        self.mode = mode or Mode()
        self.mode.apply(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(self.mode.uses_v2)))
            self.engine = Engine(config, num_blocks(self.mode.groups), self.mode.specs())
            self._depth = config.max_concurrent_batches
        self.engine.role._out.control.close()
        self.engine.role._consuming._num_heads = self.mode.sizes.num_heads
        self.wire = self.engine.role._out.control = Wire(self.mode.sizes.theirs)
        self.requests: list[Request] = []
        self.handoffs: dict[str, bytes] = {}
        self.foreign: set[bytes] = set()
        self.given: dict[bytes, tuple[int, ...]] = {}
        self.seen: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.loads: dict[str, SentLoad] = {}
        self.loaded: set[str] = set()
        self.continued: set[str] = set()
        self.steps: deque[Step] = deque()
        self._by_id: dict[str, Request] = {}
        self._incomplete: set[str] = set()
        self._aggregator = KVOutputAggregator(self.mode.sizes.ours)
        self.unforced: set[bytes] = set()
        facts = self.handoffs, self.given, self.foreign, self.seen, self.mode.groups
        modes = {name: getattr(self.mode, name) for name in ("sizes", "uses_v2", "is_async", "is_late", "has_parts")}
        self.ranks = [Rank(*facts, rank=rank, **modes) for rank in range(self.mode.sizes.ours)]
        match = self.engine.role.match
        self.engine.role.match = lambda request, num_local: self._claimed(request, num_local, match(request, num_local))

    @property
    def pool(self) -> Any:
        return self.engine.scheduler.kv_cache_manager.block_pool

    @property
    def transfers(self) -> list[tuple[Rank, Transfer]]:
        """The loads of all ranks, each with what comes from each rank of its producer."""
        return [(rank, transfer) for rank in self.ranks for load in rank.transfers.values() for transfer in load]

    @property
    def exposed(self) -> list[bytes]:
        """Handoffs of which some rank exposes blocks."""
        return sorted({handoff for rank in self.ranks for handoff in rank.exposed})

    def tables(self, request_id: str) -> list[list[int]]:
        """The blocks of a request in each group; 0 is none."""
        return [list(table) for table in self.engine.scheduler.kv_cache_manager.get_block_ids(request_id)]

    def blocks(self, request_id: str) -> list[int]:
        """The blocks of a request."""
        return [block_id for table in self.tables(request_id) for block_id in table if block_id]

    # --- requests

    def add(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> Request:
        request = self.engine.add(prompt, max_tokens, params)
        self.requests.append(request)
        self._by_id[request.request_id] = request
        found = parse(params)
        if found is not None:
            self.handoffs[request.request_id] = found.handoff
            if isinstance(found, ConsumeParams) and found.tokens:
                self.given[found.handoff] = found.tokens
        return request

    def unfinished(self) -> list[Request]:
        return [request for request in self.requests if not request.is_finished()]

    def _claimed(self, request: Request, num_local: int, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        """A claim is all of the prompt that is not here, never nothing, never twice at a time."""
        num_claimed, is_async = answer
        assert request.request_id not in self.loads, "a request is asked about its KV while it is loaded"
        if num_claimed is None or num_claimed == 0:
            assert not is_async, "(0, True) ends the engine"
            return answer
        assert is_async, "a load never holds up a step"
        assert num_local + num_claimed == request.num_prompt_tokens == request.num_tokens, (
            "a claim ends with the prompt"
        )
        return answer

    # --- a step

    def step(self, *, is_prompt: bool = False) -> None:
        """Schedules a step, and ends the oldest one if vLLM's batch queue is full, as `step_with_batch_queue` does."""
        self.begin_step(is_prompt=is_prompt)
        self._make_room()

    def begin_step(self, *, is_prompt: bool = False) -> None:
        """The first half of a step: it is scheduled and sent. `is_prompt`: loads that begin in it fail in it too."""
        self._make_room()
        step = self._schedule(is_prompt=is_prompt)
        self.steps.append(step)
        for rank in self.ranks:
            rank.send(step)
        if self.mode.is_uniproc:
            for rank in self.ranks:
                while rank.can_go_on():
                    rank.go_on()
            self._exposed_blocks_are_held()
        self.seen["two steps under way"] += len(self.steps) > 1

    def _make_room(self) -> None:
        if len(self.steps) == self._depth:
            self._update(self.steps.popleft())

    def drain(self) -> None:
        """Ends the steps that are under way."""
        while self.steps:
            self._update(self.steps.popleft())

    def _schedule(self, *, is_prompt: bool) -> Step:
        output = self.engine.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self._note_preemptions(output)
        self._note_loads(metadata)
        self._loads_receive_commits_and_cancels()
        self._check_restores(output, metadata)
        request_ids = list(output.num_scheduled_tokens)
        handoffs = {self.handoffs[request_id] for request_id in request_ids if request_id in self.handoffs}
        return Step(
            output,
            self._by_id,
            tables={request_id: self.tables(request_id) for request_id in request_ids},
            num_preemptions={request_id: self._by_id[request_id].num_preemptions for request_id in request_ids},
            expected_tokens={handoff: self._known_token(handoff) for handoff in handoffs},
            leased={lease.handoff: self.blocks(lease.request_id) for lease in metadata.leased},
            is_prompt=is_prompt,
        )

    def _update(self, step: Step) -> None:
        results = [rank.complete(step) for rank in self.ranks]
        assert len({str(result.sampled_token_ids) for result in results}) == 1, "ranks sample alike"
        result = results[0] if len(results) == 1 else self._aggregator.aggregate(results)
        report = result.kv_connector_output
        if report is not None:
            self._check_report(report)
        self._check_tokens(step)
        self.engine.deliver(self.engine.scheduler.update_from_output(step.output, result))
        self._check_answers(step)
        if report is not None:
            self._note_ended_loads(report)
        self.check()

    def _note_preemptions(self, output: SchedulerOutput) -> None:
        for request_id in output.preempted_req_ids or ():
            request = self.engine.scheduler.requests.get(request_id)
            role = "plain"
            if (handoff := self.handoffs.get(request_id)) is not None:
                role = "producing" if handoff in self.wire.produced else "consuming"
            when = "decode" if request is not None and request.num_output_tokens else "prefill"
            self.seen[f"{role} request preempted in {when}"] += 1
            if request is not None and self._continues_after(request, [THEIRS]):
                self.seen["continued request preempted before its second token"] += 1
            if request is not None and 0 < request.num_output_tokens < len(self.given.get(handoff, ())):
                self.seen["resumed request preempted between its tokens"] += 1

    def _note_loads(self, metadata: StepMetadata) -> None:
        for load in metadata.loads:
            assert load.request_id not in self.loads, "one load at a time for each request"
            self._check_parts(load)
            assert all(self.pool.blocks[block_id].ref_cnt == 1 for block_id in load.block_ids), "and to no other"
            self.loads[load.request_id] = SentLoad(load, load.has_state)
        by_handoff = {sent.load.handoff: sent for sent in self.loads.values()}
        for handoff in metadata.states:
            if handoff in by_handoff:
                by_handoff[handoff].is_committed = True
        for cancel in metadata.cancels:
            if cancel.handoff in by_handoff:
                by_handoff[cancel.handoff].is_cancelled = True
        for handoff in metadata.committed:
            if handoff in by_handoff:
                by_handoff[handoff].has_ended = True
                assert not by_handoff[handoff].is_cancelled, "a load that is cancelled is not committed"
            assert self.wire.watched[handoff].is_finished, "without the sequence state nothing is committed"
            self.seen["load committed by the scheduler"] += 1

    def _check_parts(self, load: Load) -> None:
        """A load goes to its request's blocks: all that the next token reads, and that are not here."""
        length, manager = self._by_id[load.request_id].num_prompt_tokens, self.engine.scheduler.kv_cache_manager
        blocks = manager.get_blocks(load.request_id).blocks
        for layers, (first, block_ids), of_group in zip(self.mode.groups, load.parts, blocks, strict=True):
            needed = range(layers.block_of(layers.first_read(length)), -(-length // layers.block_size))
            begin = first + (needed.start if layers.is_state else 0)
            wanted = range(begin, begin + len(block_ids))
            assert block_ids == [of_group[at].block_id for at in wanted], "a load goes to its request's blocks"
            assert needed.start <= wanted.start <= wanted.stop == needed.stop, "what the next token reads is loaded"
            assert all(of_group[at].block_hash is not None for at in range(needed.start, wanted.start)), "or is here"

    def _loads_receive_commits_and_cancels(self) -> None:
        """An obsolete or refused load is ended in the next step; one that may be committed is committed."""
        for sent in self.loads.values():
            if sent.load.refusal or sent.has_ended:
                continue
            watched = self.wire.watched[sent.load.handoff]
            is_aborted = self._by_id[sent.load.request_id].is_finished()
            is_over = is_aborted or watched.is_ended or self._is_useless(sent.load)
            assert sent.is_cancelled or not is_over, "a load is cancelled if it has to be"
            assert is_over or sent.is_broken or not sent.is_cancelled, "no load is cancelled that may be committed"
            is_useless = self._is_useless(sent.load)
            assert is_useless or sent.is_committed == watched.is_finished, "a load is committed with the sequence state"

    def _is_useless(self, load: Load) -> bool:
        """True if the producer's token cannot be forced, and nothing else can come of what is loaded."""
        length = self._by_id[load.request_id].num_prompt_tokens
        is_finished = self.wire.watched[load.handoff].is_finished
        return is_finished and load.handoff in self.unforced and not self.mode.can_repeat_last(length)

    def _check_restores(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """Restored is the last block of each prompt that is all here and not computed in, and no other."""
        expected = []
        for request_id, num_before, num_new in scheduled(output):
            if request_id not in self.loaded:
                continue
            self.loaded.remove(request_id)
            request, tables = self._by_id[request_id], self.tables(request_id)
            end = request.num_prompt_tokens
            is_continued = request.num_output_tokens > 0
            assert (num_before, num_new) == (end - 1 + is_continued, 1), (
                "of a loaded prompt one token at most is computed"
            )
            if is_continued:
                assert list(request.output_token_ids) == [THEIRS], "it continues after what the producer has sampled"
                self.continued.add(request_id)
                self.seen["request continued"] += 1
            else:
                places = enumerate(zip(self.mode.groups, tables, strict=True))
                last = [(index, table[layers.block_of(num_before)]) for index, (layers, table) in places]
                expected += [(index, block_id) for index, block_id in last if block_id]
        assert sorted(metadata.restores) == sorted(expected), "the last block of a loaded prompt is restored"
        self.seen["last block restored"] += len(expected)
        ready = {block_id for ready in metadata.ready for block_id in ready.block_ids}
        self.seen["restored block announced for another request"] += len(ready & {block_id for _, block_id in expected})

    def _known_token(self, handoff: bytes) -> int | None:
        """The first token of a consuming request, as far as this engine was told."""
        watched = self.wire.watched.get(handoff)
        if watched is None or handoff in self.given:
            return next(iter(self.given.get(handoff, ())), None)
        return THEIRS if watched.is_finished and handoff not in self.foreign | self.unforced else None

    # --- promises

    def _check_report(self, report: KVConnectorOutput) -> None:
        """vLLM does not survive a report of a request that it does not know, and computes again what is invalid."""
        for request_id in {*(report.finished_recving or ()), *(report.finished_sending or ())}:
            assert request_id in self.engine.scheduler.requests, "vLLM knows no request of this report"
        self.sent.update(report.finished_sending or ())
        for request in self.engine.scheduler.running:
            used = report.invalid_block_ids.intersection(self.blocks(request.request_id))
            assert not used, "invalid blocks are those of a request that runs"
        for request_id, sent in self.loads.items():
            sent.is_broken |= request_id in getattr(report.kv_connector_worker_meta, "broken", ())
            if request_id in report.failed_recving or not report.invalid_block_ids.isdisjoint(sent.load.block_ids):
                self._incomplete.add(request_id)

    def _note_ended_loads(self, report: KVConnectorOutput) -> None:
        for request_id in report.finished_recving or ():
            del self.loads[request_id]
            if request_id not in self._incomplete:
                self.loaded.add(request_id)
            else:
                watched = self.wire.watched[self.handoffs[request_id]]
                assert not watched.is_acknowledged, "a handoff is acknowledged of which blocks are missing"
            self._incomplete.discard(request_id)

    def _check_tokens(self, step: Step) -> None:
        """Workers compute the tokens that the scheduler counts, unless it has preempted or aborted a request."""
        for request_id, first, end in step.spans():
            request = self._by_id[request_id]
            if request.num_preemptions == step.num_preemptions[request_id] and not request.is_finished():
                assert step.computed[request_id] == list(request.all_token_ids[first:end]), (
                    "a worker computes other tokens than the scheduler counts"
                )

    def _check_answers(self, step: Step) -> None:
        """Clients have got each output once, in order. A producer's token comes with the next one, or not at all."""
        for request_id in step.output.num_scheduled_tokens:
            sent, request = self.engine.sent.get(request_id, []), self._by_id[request_id]
            is_unsent = not sent and self._continues_after(request, [THEIRS])
            assert is_unsent or sent == list(request.output_token_ids), "a client has got other tokens than vLLM counts"

    def _continues_after(self, request: Request, outputs: list[int]) -> bool:
        return request.request_id in self.continued and list(request.output_token_ids) == outputs

    def check(self) -> None:
        """Between any two hooks no block that others write or read can be given to another request."""
        for rank in self.ranks:
            writing = [it for load in rank.transfers.values() for it in load if it.is_writing]
            written = [(block_id, it.source.destination_slice) for it in writing for block_id in it.load.block_ids]
            assert len(written) == len(set(written)), "two loads write into one block"
            assert all(self.pool.blocks[block_id].ref_cnt == 1 for block_id, _ in written), (
                "a block is free during its load"
            )
            acknowledged = [it for it in writing if self.wire.watched[it.load.handoff].is_acknowledged]
            assert not acknowledged, "a handoff is acknowledged of which a rank lacks blocks"
            leased = itertools.chain.from_iterable(rank.leased.values())
            assert all(self.pool.blocks[block_id].ref_cnt > 0 for block_id in leased), "a block is free while leased"
        assert all(count == 1 for count in self.sent.values()), "finished_sending comes once for each request"
        ended = [request_id for request_id in self._by_id if request_id not in self.engine.scheduler.requests]
        handoffs = {self.handoffs.get(request_id, b"") for request_id in ended}
        handoffs -= self.engine.role._consuming._unacknowledged.keys()
        watches = [self.wire.watched[handoff] for handoff in handoffs & self.wire.watched.keys()]
        assert all(watched.is_over for watched in watches), "a watch outlives its request"

    def _exposed_blocks_are_held(self) -> None:
        """Once a step has begun, no block is free that consumers may read."""
        for rank in self.ranks:
            for exposed in rank.exposed.values():
                exposed_ids = itertools.chain.from_iterable(exposed.block_ids)
                assert all(self.pool.blocks[block_id].ref_cnt > 0 for block_id in exposed_ids), (
                    "an exposed block is free"
                )
            rank.exposed_blocks_are_kept()

    def is_at_rest(self) -> bool:
        return not (self.engine.scheduler.requests or self.transfers or self.exposed or self.loads)

    def check_rest(self) -> None:
        """When all has ended, all blocks are free and nothing is remembered."""
        assert not self.engine.scheduler.requests
        assert not self.loads
        assert not self.transfers
        assert not self.exposed, "consumers do not know that blocks are not exposed any more"
        assert not any(rank.leased for rank in self.ranks)
        assert not self._aggregator._recv_remaining_count, "of a load some ranks have reported the end, and others not"
        assert not self._aggregator._send_remaining_count
        assert self.engine.num_free_blocks == num_blocks(self.mode.groups) - 1
        assert len(self.engine.role._producing) == len(self.engine.role._consuming) == 0
        assert all(produced.state == "ended" for produced in self.wire.produced.values()), (
            "a handoff outlives its request"
        )
        assert all(len(results) == 1 for results in self.wire.results.values()), "a handoff has one result"
        assert self.wire.results.keys() == self.wire.watched.keys() | self.given.keys(), (
            "each consumed handoff has a result"
        )
