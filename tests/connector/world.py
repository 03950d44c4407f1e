"""A simulated engine whose KV cache stores what it was computed from, so that wrong KV in a forward pass is detected.

vLLM's scheduler and the scheduler role are real. The model runner is simulated: it writes and reads the cache, begins
and ends loads, and reports as `kvpipe.connector.worker` does, each load and each lease exactly once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvpipe.connector.metadata import WorkerOutcomes
from kvpipe.transfer_params import ConsumeParams, parse
from tests.connector.cache import NUM_BLOCKS, Cache
from tests.connector.engine import BLOCK, Engine, is_unreported, outcome
from tests.connector.wire import Wire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvpipe.connector.metadata import Load, StepMetadata

NUM_FREE = NUM_BLOCKS - 1
THEIRS = 8  # what producers sample


@dataclass
class Transfer:
    """A load of the worker, until it is reported."""

    load: Load
    is_committed: bool
    is_cancelled: bool = False
    is_withdrawn: bool = False
    is_verified: bool = False
    is_reported: bool = False
    ending: tuple[bool, list[int]] | None = None


@dataclass
class Exposed:
    """Blocks that are announced to consumers."""

    request: Request
    block_ids: list[int] = field(default_factory=list)


@dataclass
class RemoteRead:
    """A consumer that reads exposed blocks one after the other, and asks then whether their grant still holds."""

    handoff: bytes
    exposed: Exposed
    slots: list[int | None] = field(default_factory=list)


@dataclass
class Row:
    """What vLLM's V1 model runner knows of a request: the scheduler tells of changes only."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)


class World:
    """One engine, its simulated workers, and the invariants that every step checks."""

    def __init__(self, config: VllmConfig) -> None:
        self.engine = Engine(config, NUM_BLOCKS)
        self.engine.role._out.control.close()
        self.wire = self.engine.role._out.control = Wire()
        self.cache = Cache()
        self.transfers: dict[str, Transfer] = {}
        self.exposed: dict[bytes, Exposed] = {}
        self.remote_reads: list[RemoteRead] = []
        self.leased: dict[bytes, str] = {}
        self.released: set[bytes] = set()
        self.requests: list[Request] = []
        self.handoffs: dict[str, bytes] = {}
        self.foreign: set[bytes] = set()
        self.acknowledged: list[bytes] = []
        self.given: dict[bytes, int] = {}
        self.loaded: set[str] = set()
        self.rows: dict[str, Row] = {}
        self.seen: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        match = self.engine.role.match
        self.engine.role.match = lambda request, num_local: self._claimed(request, num_local, match(request, num_local))

    @property
    def pool(self) -> Any:
        return self.engine.scheduler.kv_cache_manager.block_pool

    def table(self, request_id: str) -> list[int]:
        return self.engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]

    # --- requests

    def add(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> Request:
        request = self.engine.add(prompt, max_tokens, params)
        self.requests.append(request)
        found = parse(params)
        if found is not None:
            self.handoffs[request.request_id] = found.handoff
            if isinstance(found, ConsumeParams) and found.first_token is not None:
                self.given[found.handoff] = found.first_token
        return request

    def unfinished(self) -> list[Request]:
        return [request for request in self.requests if not request.is_finished()]

    def _claimed(self, request: Request, num_local: int, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        """A claim is all of the prompt that is not here, never nothing, never twice at a time."""
        num_claimed, is_async = answer
        assert request.request_id not in self.transfers, "a request is asked about its KV while it is loaded"
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
        """Schedules, computes, reports. `is_prompt`: loads that begin in this step fail in it too."""
        output = self.engine.scheduler.schedule()
        step = output.kv_connector_metadata
        self._note_preemptions(output)
        self._update_rows(output)
        self.acknowledged = step.committed
        self._consumers_go_on()
        self._begin(step)
        self._consumers_go_on()
        self._loads_receive_commits_and_cancels()
        if is_prompt:
            for load in step.loads:
                self.transfers[load.request_id].ending = (False, list(range(len(load.block_ids))))
        self._expose(step.cached)
        self._exposed_blocks_are_kept()
        self._check_restores(output, step)
        kept = {block_id: list(self.cache.slots[block_id]) for block_id in step.restores}
        self._compute(output)
        self._round(output, kept)
        self._exposed_blocks_are_kept()
        self._consumers_go_on()
        for block_id, slots in kept.items():
            self.cache.slots[block_id] = slots
        self._expose(step.ready)
        self._exposed_blocks_are_kept()
        sampled = [self._sample(request_id, step) for request_id in output.num_scheduled_tokens]
        for request_id, tokens in zip(output.num_scheduled_tokens, sampled, strict=True):
            self.rows[request_id].output += tokens
        report = self._report()
        result = ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={request_id: index for index, request_id in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=sampled,
            kv_connector_output=None if is_unreported(output, report) else report,
        )
        self._consumers_go_on()
        self.engine.scheduler.update_from_output(output, result)
        self.check()

    def _note_preemptions(self, output: SchedulerOutput) -> None:
        for request_id in output.preempted_req_ids or ():
            request = self.engine.scheduler.requests.get(request_id)
            role = "plain"
            if (handoff := self.handoffs.get(request_id)) is not None:
                role = "producing" if handoff in self.wire.produced else "consuming"
            when = "decode" if request is not None and request.num_output_tokens else "prefill"
            self.seen[f"{role} request preempted in {when}"] += 1

    def _update_rows(self, output: SchedulerOutput) -> None:
        """What the model runner does first in a step."""
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = Row(list(new.prompt_token_ids or ()))
        cached = output.scheduled_cached_reqs
        for request_id, num_output in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            del self.rows[request_id].output[num_output:]

    def _begin(self, step: StepMetadata) -> None:
        """`handle_preemptions` and `bind_connector_metadata`."""
        for handoff, _ in step.ended:
            self.exposed.pop(handoff, None)
            self.released.add(handoff)
        for handoff in step.committed:
            self._end_committed(handoff)
        for load in step.loads:
            self._begin_load(load)
        by_handoff = {transfer.load.handoff: transfer for transfer in self.transfers.values()}
        for handoff in step.commits:
            if handoff in by_handoff:
                by_handoff[handoff].is_committed = True
        for handoff, _, is_withdrawn in step.cancels:
            if (transfer := by_handoff.get(handoff)) is not None:
                is_aborted = self.engine.scheduler.requests[transfer.load.request_id].is_finished()
                transfer.is_cancelled = True
                transfer.is_withdrawn |= is_withdrawn and transfer.ending is None
                if transfer.is_withdrawn:
                    self.cache.spoil(transfer.load.block_ids)
                    self.seen["load withdrawn by its producer"] += not is_aborted
        for handoff, request_id in step.leased:
            assert handoff not in self.leased, "a request is leased once"
            self.leased[handoff] = request_id
            self.seen["lease"] += 1

    def _end_committed(self, handoff: bytes) -> None:
        """Ends a load that the scheduler role has committed, which the worker does not report."""
        transfer = next(transfer for transfer in self.transfers.values() if transfer.load.handoff == handoff)
        assert transfer.is_reported, "blocks that are not verified are not committed"
        assert not transfer.is_committed, "a load is committed once"
        assert not transfer.is_cancelled, "a load that is cancelled is not committed"
        assert self.wire.watched[handoff].is_finished, "without the sequence state nothing is committed"
        del self.transfers[transfer.load.request_id]
        self.loaded.add(transfer.load.request_id)
        self.seen["load committed by the scheduler"] += 1

    def blocks_verified(self, transfer: Transfer) -> None:
        """All blocks of a load have arrived; nothing writes into them any more."""
        transfer.is_verified = True
        self._arrive(transfer.load, [])
        self.seen["load verified before its sequence state"] += not transfer.is_committed

    def _begin_load(self, load: Load) -> None:
        assert load.request_id not in self.transfers, "one load at a time for each request"
        request = self.engine.scheduler.requests[load.request_id]
        end = -(-request.num_prompt_tokens // BLOCK)
        assert load.block_ids == self.table(load.request_id)[load.first : end], "a load goes to its request's blocks"
        assert all(self.pool.blocks[block_id].ref_cnt == 1 for block_id in load.block_ids), "and to nobody else's"
        self.cache.spoil(load.block_ids)
        self.transfers[load.request_id] = Transfer(load, load.is_committed)
        if load.refusal:
            self.transfers[load.request_id].ending = (False, list(range(len(load.block_ids))))
            self.seen["load refused"] += 1
        self.seen["load"] += 1
        self.seen["load beyond the own cache"] += bool(load.first)

    def _compute(self, output: SchedulerOutput) -> None:
        """The forward pass: all requests of a step write, then read."""
        spans = []
        for request_id, num_before, num_new in _scheduled(output):
            assert request_id not in self.transfers, "no request is computed while it is loaded"
            request, row = self.engine.scheduler.requests[request_id], self.rows[request_id]
            end = num_before + num_new
            assert [*row.prompt, *row.output][num_before:end] == list(request.all_token_ids[num_before:end]), (
                "a worker computes other tokens than the scheduler counts"
            )
            history = self.cache.history(request.all_token_ids[:end])
            spans.append((request_id, self.table(request_id), history, num_before, num_before + num_new))
        for _, table, history, first, end in spans:
            self.cache.write(table, history, first, end)
        for request_id, table, history, _, end in spans:
            assert self.cache.holds(table, history, 0, end), f"{request_id} was computed on KV that is not its own"

    def _check_restores(self, output: SchedulerOutput, step: StepMetadata) -> None:
        """Restored is the last block of each prompt that is all here and not computed in, and no other."""
        expected = []
        for request_id, num_before, num_new in _scheduled(output):
            if request_id not in self.loaded:
                continue
            self.loaded.remove(request_id)
            request, table = self.engine.scheduler.requests[request_id], self.table(request_id)
            end = request.num_prompt_tokens
            is_continued = request.num_output_tokens > 0
            assert (num_before, num_new) == (end - 1 + is_continued, 1), (
                "of a loaded prompt one token at most is computed"
            )
            history = self.cache.history(request.prompt_token_ids)
            assert self.cache.holds(table, history, 0, end), "what is kept is the KV of the prompt"
            if is_continued:
                assert list(request.output_token_ids) == [THEIRS], "it continues after what the producer has sampled"
                self.seen["request continued"] += 1
            else:
                expected.append(table[num_before // BLOCK])
        assert sorted(step.restores) == sorted(expected), "the last block of a loaded prompt is restored"
        self.seen["last block restored"] += len(expected)
        ready = {block_id for _, _, block_ids in step.ready for block_id in block_ids}
        self.seen["restored block announced for another request"] += len(ready & set(expected))

    def _round(self, output: SchedulerOutput, kept: dict[int, list[int | None]]) -> None:
        """What a forward pass computes again is not to the bit what the producer has computed."""
        for request_id, num_before, num_new in _scheduled(output):
            block_id = self.table(request_id)[num_before // BLOCK]
            if num_new == 1 and block_id in kept:
                self.cache.slots[block_id][num_before % BLOCK] = None

    def _expose(self, parts: list[tuple[bytes, int, list[int]]]) -> None:
        """Exposes ready blocks to consumers."""
        for handoff, first, block_ids in parts:
            if handoff not in self.exposed:
                request_id = next(key for key, value in self.handoffs.items() if value == handoff)
                self.exposed[handoff] = Exposed(self.engine.scheduler.requests[request_id])
            exposed = self.exposed[handoff]
            assert first == len(exposed.block_ids), "blocks become ready in the order of the prompt, each once"
            exposed.block_ids += block_ids

    def read_exposed(self, handoff: bytes) -> None:
        """A consumer without checksums begins to read what is exposed of a handoff."""
        self.remote_reads.append(RemoteRead(handoff, self.exposed[handoff]))

    def _consumers_go_on(self) -> None:
        """Each consumer reads a block, or asks after its last one: what it then counts is the KV of the prompt."""
        for read in list(self.remote_reads):
            block_ids = read.exposed.block_ids
            num_read = len(read.slots) // BLOCK
            if num_read < len(block_ids):
                read.slots += self.cache.slots[block_ids[num_read]]
                continue
            self.remote_reads.remove(read)
            is_valid = self.exposed.get(read.handoff) is read.exposed
            history = self.cache.history(read.exposed.request.prompt_token_ids)
            end = min(len(read.slots), len(history))
            is_right = read.slots[:end] == history[:end]
            assert is_right or not is_valid, "a block that had changed was validated"
            self.seen["consumer validated its blocks"] += is_valid
            self.seen["consumer read changed blocks"] += not is_right

    def _sample(self, request_id: str, step: StepMetadata) -> list[int]:
        request = self.engine.scheduler.requests[request_id]
        if request.num_computed_tokens < request.num_tokens:
            return []
        handoff = self.handoffs.get(request_id, b"")
        token = step.first_tokens.get(handoff)
        if request.num_output_tokens:
            assert token is None, "a token is forced at the first output only"
        else:
            assert token == self._known_token(handoff), "what the producer has sampled comes first"
        return [7 if token is None else token]

    def _known_token(self, handoff: bytes) -> int | None:
        """The first token of a consuming request, as far as this engine was told."""
        watched = self.wire.watched.get(handoff)
        if watched is None or handoff in self.given:
            return self.given.get(handoff)
        return THEIRS if watched.is_finished and handoff not in self.foreign else None

    def _report(self) -> KVConnectorOutput:
        """`get_finished` and what goes with it."""
        ended = [transfer for transfer in self.transfers.values() if transfer.ending is not None]
        outcomes, invalid = {}, set()
        for transfer in ended:
            is_loaded, missing = transfer.ending
            load = transfer.load
            del self.transfers[load.request_id]
            invalid |= {load.block_ids[index] for index in missing}
            outcomes |= outcome(load, is_loaded=is_loaded, num_missing=len(missing)).outcomes
            if not missing:
                self.loaded.add(load.request_id)
            if not transfer.is_verified:
                self._arrive(load, missing)
        verified = self._newly_verified()
        sending = {self.leased.pop(handoff) for handoff in self.released & self.leased.keys()}
        self.released &= self.leased.keys()
        for request_id in sending:
            self.exposed.pop(self.handoffs[request_id], None)
            self.sent[request_id] += 1
        for request_id in {*outcomes, *sending}:
            assert request_id in self.engine.scheduler.requests, "vLLM knows no request of this report"
        has_reports = outcomes or verified or self.acknowledged or self.transfers
        return KVConnectorOutput(
            finished_recving=set(outcomes),
            finished_sending=sending,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=WorkerOutcomes(outcomes, verified, self.acknowledged) if has_reports else None,
        )

    def _newly_verified(self) -> dict[str, list[dict[str, Any]]]:
        """Loads that are verified, each once. The worker knows the scheduler role's answer a step later."""
        new = [transfer for transfer in self.transfers.values() if transfer.is_verified and not transfer.is_reported]
        for transfer in new:
            transfer.is_reported = True
        return {who.load.request_id: [outcome(who.load).outcomes[who.load.request_id]] for who in new}

    def _arrive(self, load: Load, missing: list[int]) -> None:
        """The other blocks hold the KV that the producer computed."""
        if load.handoff in self.foreign:
            return
        request = self.engine.scheduler.requests[load.request_id]
        history = self.cache.history(request.prompt_token_ids)
        table = self.table(load.request_id)
        for index in set(range(len(load.block_ids))) - set(missing):
            first = (load.first + index) * BLOCK
            self.cache.write(table, history, first, min(first + BLOCK, len(history)))

    # --- promises

    def check(self) -> None:
        """Between any two hooks no block that others write or read can be given to another request."""
        writing = [transfer for transfer in self.transfers.values() if not transfer.is_verified]
        written = [block_id for transfer in writing for block_id in transfer.load.block_ids]
        assert len(written) == len(set(written)), "two loads write into one block"
        assert all(self.pool.blocks[block_id].ref_cnt == 1 for block_id in written), "a block is free during its load"
        held = [block_id for handoff in self.leased for block_id in self.exposed[handoff].block_ids]
        assert all(self.pool.blocks[block_id].ref_cnt > 0 for block_id in held), "a block is free while it is leased"
        assert all(count == 1 for count in self.sent.values()), "finished_sending comes once for each request"
        ended = [request.request_id for request in self.requests if request.is_finished()]
        waited_for = [self.wire.watched.get(self.handoffs.get(who, b"")) for who in ended if who not in self.transfers]
        assert all(watched is None or watched.is_over for watched in waited_for), "a watch outlives its request"

    def _exposed_blocks_are_kept(self) -> None:
        """In each step consumers find the KV of the prompt, or the worker knows that the handoff has ended."""
        for exposed in self.exposed.values():
            assert all(self.pool.blocks[block_id].ref_cnt > 0 for block_id in exposed.block_ids), (
                "an exposed block is free"
            )
            history = self.cache.history(exposed.request.prompt_token_ids)
            end = min(len(exposed.block_ids) * BLOCK, len(history))
            assert self.cache.holds(exposed.block_ids, history, 0, end), "an exposed block has changed"

    def _loads_receive_commits_and_cancels(self) -> None:
        """A load that nobody needs or serves is ended in the next step; one that may be committed is."""
        for transfer in self.transfers.values():
            if transfer.load.refusal:
                continue
            watched = self.wire.watched[transfer.load.handoff]
            is_aborted = self.engine.scheduler.requests[transfer.load.request_id].is_finished()
            assert transfer.is_cancelled == (is_aborted or watched.is_ended), "a load is cancelled if it has to be"
            assert transfer.is_committed == watched.is_finished, "a load is committed with the sequence state"

    def check_rest(self) -> None:
        """When all has ended, all blocks are free and nothing is remembered."""
        assert not self.engine.scheduler.requests
        assert not self.transfers
        assert not self.leased
        assert not self.exposed, "consumers do not know that blocks are not exposed any more"
        assert self.engine.num_free_blocks == NUM_FREE
        assert len(self.engine.role._producing) == len(self.engine.role._consuming) == 0
        assert all(produced.state == "ended" for produced in self.wire.produced.values()), (
            "a handoff outlives its request"
        )
        assert all(len(results) == 1 for results in self.wire.results.values()), "a handoff has one result"
        assert self.wire.results.keys() == self.wire.watched.keys() | self.given.keys(), (
            "each consumed handoff has a result"
        )


def _scheduled(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    cached = output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(request_id, before[request_id], count) for request_id, count in output.num_scheduled_tokens.items()]
