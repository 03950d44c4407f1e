"""A simulated worker process of one rank, with a cache that stores what it was computed from.

It calls `RankLoads` and `RankLeases` as the worker role does. Its host runs vLLM's hooks; its device runs the forward
passes in their order, at once or when the test has it do so.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvpipe.vllm.handoff.consumer.rank_loads import RankLoads
from kvpipe.vllm.handoff.consumer.rank_sources import RankSource, rank_sources
from kvpipe.vllm.handoff.producer.rank_leases import RankLeases
from kvpipe.vllm.scheduler_output import scheduled
from tests.vllm.handoff.cache import Cache, Layers, Slot
from tests.vllm.handoff.engine import BLOCK, is_unreported, outcome
from tests.vllm.handoff.test_rank_sources import heads_of, slice_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvpipe.vllm.handoff.metadata import Load, LoadOutcome, ReadyRange, StepMetadata, WorkerOutcomes


@dataclass(frozen=True)
class Sizes:
    """Tensor parallel sizes, and the KV heads of the model.

    Attributes:
        ours: Ranks of this engine.
        theirs: Ranks of each engine that it loads from, or that loads from it.
        num_heads: KV heads of the model; 1 if all ranks have the same latent KV.
    """

    ours: int = 1
    theirs: int = 1
    num_heads: int = 1

    def consumers(self, rank: int) -> dict[int, bool]:
        """Ranks of a consumer that load from a rank of this engine, each with whether others do so, too."""
        return {
            number: source.is_shared
            for number in range(self.theirs)
            for source in rank_sources(number, self.theirs, self.ours, self.num_heads)
            if source.rank == rank
        }


@dataclass
class Transfer:
    """What the agent of one rank loads from a rank of the producer, until the end of the whole load has been reported.

    Attributes:
        source: That rank, and the slices.
        number: Its number among those of the load.
        missing: Positions of the blocks that are not here, once it has ended.
    """

    load: Load
    request: Request
    source: RankSource
    number: int
    is_committed: bool
    is_cancelled: bool = False
    is_withdrawn: bool = False
    is_verified: bool = False
    missing: list[int] | None = None

    @property
    def has_ended(self) -> bool:
        return self.missing is not None

    @property
    def is_writing(self) -> bool:
        return not (self.is_verified or self.has_ended)


@dataclass
class Exposed:
    """Blocks that are announced to consumers, of each group, and the position of the first of them."""

    request: Request
    block_ids: list[list[int]]
    first: list[int | None]


@dataclass
class RemoteRead:
    """A consumer that reads exposed blocks one after the other, and asks then whether their grant still holds.

    Attributes:
        num_pauses: Number of calls without a read after each block.
        read: Group, position and content of each block that was read.
    """

    handoff: bytes
    exposed: Exposed
    num_pauses: int
    read: list[tuple[int, int, list[Slot]]] = field(default_factory=list)
    pauses_left: int = 0


@dataclass
class Row:
    """A model runner's state of a request: the scheduler sends changes only.

    Attributes:
        prompt: Tokens that came with the new request; V2 gets outputs too.
        num_prompt: Number of these that it takes for the prompt.
        output: Tokens since then.
    """

    prompt: list[int]
    num_prompt: int
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


@dataclass
class Step:
    """A step on its way from the scheduler to the workers and back.

    Attributes:
        output: vLLM's, with the metadata of the scheduler role.
        requests: All requests by id.
        tables: The blocks of its requests in each group, by id.
        num_preemptions: Number of preemptions of each before the step.
        expected_tokens: The token that each handoff of the step forces; `None` where its worker samples.
        leased: The blocks of each handoff that it leases.
        is_prompt: True if its loads fail in it.
        computed: The tokens that each request computes, by request id; filled by rank 0.
    """

    output: SchedulerOutput
    requests: dict[str, Request]
    tables: dict[str, list[list[int]]]
    num_preemptions: dict[str, int]
    expected_tokens: dict[bytes, int | None]
    leased: dict[bytes, list[int]]
    is_prompt: bool = False
    computed: dict[str, list[int]] = field(default_factory=dict)

    @property
    def metadata(self) -> StepMetadata:
        return self.output.kv_connector_metadata

    def spans(self) -> list[tuple[str, int, int]]:
        """Each request with its tokens before and after the step."""
        return [(request_id, first, first + count) for request_id, first, count in scheduled(self.output)]


@dataclass
class Pass:
    """A forward pass that the device has not run, and what is announced when it has."""

    step: Step
    announced: list[ReadyRange] = field(default_factory=list)


class Rank:
    """One rank of an engine.

    Args:
        handoffs: The handoff of each request that has one, by request id.
        given: The tokens that resumed requests bring, by handoff.
        foreign: Handoffs whose producer computes another prompt.
        seen: Counts what happens.
        groups: What the layers of each KV cache group read.
        rank: Its number.
        sizes: Ranks of this engine and of others.
        has_parts: True if vLLM goes on from the blocks before the first missing one.
        uses_v2: True if the model runner is V2; otherwise V1.
        is_async: True if vLLM schedules asynchronously.
        is_late: True if forward passes run when the test has them do so; otherwise they run at once.
    """

    def __init__(
        self,
        handoffs: dict[str, bytes],
        given: dict[bytes, tuple[int, ...]],
        foreign: set[bytes],
        seen: Counter[str],
        groups: tuple[Layers, ...],
        *,
        rank: int,
        sizes: Sizes,
        has_parts: bool,
        uses_v2: bool,
        is_async: bool,
        is_late: bool,
    ) -> None:
        self._rank = rank
        self._sizes = sizes
        self._handoffs = handoffs
        self._given = given
        self._foreign = foreign
        self._seen = seen
        self._uses_v2 = uses_v2
        self._is_async = is_async
        self._is_late = is_late
        self.cache = Cache(groups, tuple(heads_of(rank, sizes.ours, sizes.num_heads)))
        self.transfers: dict[bytes, list[Transfer]] = {}
        self.consumers = sizes.consumers(rank)
        self.exposed: dict[bytes, Exposed] = {}
        self.remote_reads: list[RemoteRead] = []
        self.leased: dict[bytes, list[int]] = {}
        self.passes: deque[Pass] = deque()
        self._loads, self._leases = RankLoads(has_parts=has_parts), RankLeases()
        self._events: deque[tuple[Transfer, LoadOutcome, list[int] | None]] = deque()
        self._ended: set[bytes] = set()
        self._acknowledged: set[bytes] = set()
        # With the ranks of their consumers that have all blocks.
        self._read: set[tuple[bytes, int]] = set()
        self._rows: dict[str, Row] = {}
        # Requests of the pass before: V1's persistent batch.
        self._batch: set[str] = set()
        self._sent: deque[Step] = deque()
        self._begun: deque[Step] = deque()
        self._reports: dict[int, KVConnectorOutput] = {}
        self._sampled: dict[int, dict[str, list[int]]] = {}

    # --- what the host does

    def send(self, step: Step) -> None:
        """The executor sends a step."""
        self._sent.append(step)

    def can_go_on(self) -> bool:
        return bool(self._sent or self._begun)

    def go_on(self) -> None:
        """The host goes on: it reports on the step that it has begun, or begins the next one."""
        if self._begun:
            step = self._begun.popleft()
            self._reports[id(step)] = self._report()
            return
        step = self._sent.popleft()
        self._begin(step.metadata, step)
        self.passes.append(Pass(step))
        self._begun.append(step)
        if not self._is_late:
            self.run_pass()

    def complete(self, step: Step) -> ModelRunnerOutput:
        """Goes on until a step is over, and returns its result."""
        while id(step) not in self._reports:
            self.go_on()
        while id(step) not in self._sampled:
            self.run_pass()
        report, sampled = self._reports.pop(id(step)), self._sampled.pop(id(step))
        request_ids = list(step.output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[sampled[request_id] for request_id in request_ids],
            kv_connector_output=None if is_unreported(step.output, report) else report,
        )

    def _begin(self, metadata: StepMetadata, step: Step) -> None:
        """`handle_preemptions` and `bind_connector_metadata`."""
        for end in metadata.ended:
            self.exposed.pop(end.handoff, None)
            self._ended.add(end.handoff)
            self._leases.ended(end.handoff)
        self.consumers_go_on()
        self._announce_cached(metadata.cached, step)
        for load in metadata.loads:
            self._begin_load(load, step)
        for handoff in metadata.committed:
            self._commit(handoff)
        for handoff in metadata.states:
            self._seen["sequence state known with one source verified"] += self.is_partly_verified(handoff)
            for transfer in self.transfers.get(handoff, ()):
                transfer.is_committed = True
        for cancel in metadata.cancels:
            self._cancel(cancel.handoff, is_withdrawn=cancel.is_withdrawn)
        self._loads.begin_step(metadata)
        self._forget_transfers()
        for lease in metadata.leased:
            assert lease.handoff not in self._leases, "a request is leased once"
            self._leases.add(lease)
            self.leased[lease.handoff] = step.leased[lease.handoff]
            self._seen["lease"] += 1
        self.consumers_go_on()

    def _announce_cached(self, cached: list[ReadyRange], step: Step) -> None:
        """Announces blocks of earlier steps, when the device has run these."""
        if self.passes:
            self.passes[-1].announced += cached
        else:
            self._expose(cached, step)

    def _begin_load(self, load: Load, step: Step) -> None:
        assert load.handoff not in self.transfers, "one load at a time for each handoff"
        self.cache.spoil(load.block_ids)
        self._seen["load"] += 1
        self._seen["load beyond the own cache"] += self.cache.groups[0].kind == "full" and bool(load.parts[0][0])
        missing = list(range(len(load.block_ids)))
        if load.refusal:
            self._loads.refuse(load, _facts(outcome(load, is_loaded=False, num_missing=len(missing))))
            return
        sources = rank_sources(self._rank, self._sizes.ours, len(load.ranks), self._sizes.num_heads)
        self._loads.begin(load, [load.block_ids] * len(sources))
        transfers = [
            Transfer(load, step.requests[load.request_id], source, number, load.has_state)
            for number, source in enumerate(sources)
        ]
        self.transfers[load.handoff] = transfers
        if step.is_prompt:
            for transfer in transfers:
                self.end_transfer(transfer, missing, is_loaded=False)

    def _commit(self, handoff: bytes) -> None:
        """Ends a load that the scheduler role has committed, which the worker does not report."""
        for transfer in self.transfers[handoff]:
            assert transfer.is_verified, "blocks that are not verified are not committed"
            assert not transfer.is_committed, "a load is committed once"
        self._seen["load of several sources committed by the scheduler"] += len(self.transfers[handoff]) > 1

    def _cancel(self, handoff: bytes, *, is_withdrawn: bool) -> None:
        self._seen["load withdrawn with one source verified"] += is_withdrawn and self.is_partly_verified(handoff)
        for transfer in self.transfers.get(handoff, ()):
            transfer.is_cancelled = True
            transfer.is_withdrawn |= is_withdrawn and not transfer.has_ended
            if transfer.is_withdrawn:
                self.cache.spoil(transfer.load.block_ids)
                self._seen["load withdrawn by its producer"] += not transfer.request.is_finished()

    def is_partly_verified(self, handoff: bytes) -> bool:
        """True if of a load all blocks are here from some ranks of the producer, and not from others."""
        return {it.is_verified for it in self.transfers.get(handoff, ())} == {False, True}

    def _report(self) -> KVConnectorOutput:
        """`get_finished`, after which the events of the agent are known, and what goes with it."""
        while self._events:
            self._on_event(*self._events.popleft())
        received, sent = self._loads.drain_received(), self._leases.drain_sent()
        self._forget_transfers()
        for request_id in sent:
            handoff = self._handoffs[request_id]
            self.exposed.pop(handoff, None)
            self.leased.pop(handoff)
            is_read = not self.unread(handoff)
            assert handoff in self._ended or is_read, "a lease ends before all ranks of its consumer have its blocks"
            is_shared = any(self.consumers.values())
            self._seen["lease of shared blocks ended when all ranks had them"] += is_shared and is_read
        assert self._acknowledged.isdisjoint(self.leased), "a lease ends with its consumer's acknowledgement"
        return KVConnectorOutput(
            finished_recving=received,
            finished_sending=sent,
            failed_recving=self._loads.drain_failed(),
            invalid_block_ids=self._loads.drain_invalid_block_ids(),
            kv_connector_worker_meta=self._loads.drain_outcomes(),
        )

    def _on_event(self, transfer: Transfer, facts: LoadOutcome, missing: list[int] | None) -> None:
        """`WorkerRole._on_event`: without `missing` all blocks are verified."""
        handoff = transfer.load.handoff
        if missing is None:
            self._loads.blocks_verified(handoff, facts, transfer.number)
        elif self._loads.ended(handoff, facts, missing, transfer.number):
            transfers = self.transfers[handoff]
            is_other_verified = any(it.is_verified for it in transfers if it is not transfer)
            self._seen["load of which one source failed and another was verified"] += is_other_verified
            self._cancel(handoff, is_withdrawn=False)
        if not facts.is_loaded:
            others = self.transfers.get(handoff, ())
            assert all(it.has_ended or it.is_cancelled for it in others), "a load goes on of which a source has failed"

    def _forget_transfers(self) -> None:
        self.transfers = {handoff: it for handoff, it in self.transfers.items() if handoff in self._loads}

    # --- what peers do

    def blocks_verified(self, transfer: Transfer) -> None:
        """All blocks have arrived from a rank of the producer; nothing of it is written any more."""
        transfer.is_verified = True
        self._arrive(transfer, [])
        self._events.append((transfer, _facts(outcome(transfer.load)), None))
        self._seen["load verified before its sequence state"] += not transfer.is_committed

    def end_transfer(self, transfer: Transfer, missing: list[int], *, is_loaded: bool) -> None:
        """The agent has ended what comes from a rank of the producer, without the blocks at some positions."""
        transfer.missing = missing
        if not transfer.is_verified:
            self._arrive(transfer, missing)
        facts = _facts(outcome(transfer.load, is_loaded=is_loaded, num_missing=len(missing)))
        self._events.append((transfer, facts, missing))
        self._note_end(transfer, is_loaded=is_loaded)

    def _note_end(self, transfer: Transfer, *, is_loaded: bool) -> None:
        transfers = self.transfers[transfer.load.handoff]
        if len(transfers) == 1:
            return
        ended = [it.missing for it in transfers if it.missing]
        self._seen["sources that lack different blocks"] += any(missing != transfer.missing for missing in ended)
        self._seen["source ended after the load was cancelled"] += transfer.is_cancelled
        is_late = not is_loaded and all(it.is_verified for it in transfers)
        self._seen["source failed after all were verified"] += is_late

    def _arrive(self, transfer: Transfer, missing: list[int]) -> None:
        """The other blocks hold the KV that the producer computed, of the heads that come from there."""
        load, source = transfer.load, transfer.source
        if load.handoff in self._foreign:
            return
        theirs = heads_of(source.rank, self._sizes.theirs, self._sizes.num_heads)
        heads = tuple(slice_of(theirs, source.source_slice))
        history = self.cache.history(transfer.request.prompt_token_ids, heads)
        number = 0
        for layers, (first, block_ids) in zip(self.cache.groups, load.parts, strict=True):
            for position, block_id in enumerate(block_ids, first):
                if number not in missing:
                    self.cache.fill(block_id, self._content(layers, history, position), source.destination_slice)
                number += 1

    def _content(self, layers: Layers, history: list[Slot], position: int) -> list[Slot]:
        """What a block of a prompt holds."""
        if layers.is_state:
            return [history[-1], *[None] * (BLOCK - 1)]
        known = history[position * BLOCK : (position + 1) * BLOCK]
        return [*known, *[None] * (BLOCK - len(known))]

    def _is_content(self, layers: Layers, history: list[Slot], position: int, slots: list[Slot]) -> bool:
        """True if a block holds a part of a prompt; what is behind the prompt does not matter."""
        end = 1 if layers.is_state else min(BLOCK, len(history) - position * BLOCK)
        return slots[:end] == self._content(layers, history, position)[:end]

    def unread(self, handoff: bytes) -> list[int]:
        """Ranks of the consumer that load from here, and have not got all blocks."""
        return [number for number in self.consumers if (handoff, number) not in self._read]

    def consumer_has_blocks(self, handoff: bytes, number: int) -> None:
        """A rank of the consumer has all blocks of a handoff. It acknowledges them if no other loads from here."""
        self._read.add((handoff, number))
        self._seen["shared blocks that one rank has and another reads"] += bool(self.unread(handoff))
        if not self.consumers[number]:
            self._seen["acknowledged before the worker knows of the lease"] += handoff not in self.leased
            self.exposed.pop(handoff, None)
            self._acknowledged.add(handoff)
            self._leases.acknowledged(handoff)

    def read_exposed(self, handoff: bytes, num_pauses: int) -> None:
        """A consumer without checksums begins to read what is exposed of a handoff."""
        self.remote_reads.append(RemoteRead(handoff, self.exposed[handoff], num_pauses))

    def consumers_go_on(self) -> None:
        """Each consumer reads a block, or asks after its last one: what it then counts is the KV of the prompt."""
        for read in list(self.remote_reads):
            read.pauses_left -= 1
            if read.pauses_left >= 0:
                continue
            read.pauses_left = read.num_pauses
            blocks = self._exposed_blocks(read.exposed)
            if len(read.read) < len(blocks):
                group, position, block_id = blocks[len(read.read)]
                read.read.append((group, position, list(self.cache.slots[block_id])))
                continue
            self.remote_reads.remove(read)
            is_valid = self.exposed.get(read.handoff) is read.exposed
            history = self.cache.history(read.exposed.request.prompt_token_ids)
            is_right = all(
                self._is_content(self.cache.groups[group], history, position, slots)
                for group, position, slots in read.read
            )
            assert is_right or not is_valid, "a block that had changed was validated"
            self._seen["consumer validated its blocks"] += is_valid
            self._seen["consumer read changed blocks"] += not is_right

    # --- what the device does

    def run_pass(self) -> None:
        """Runs the oldest forward pass: all of its requests write, then read."""
        forward = self.passes.popleft()
        step, metadata = forward.step, forward.step.metadata
        self._update_rows(step.output)
        for block_id in step.output.new_block_ids_to_zero or ():
            self.cache.slots[block_id] = [None] * BLOCK
        states = self._states(step)
        if self._uses_v2:
            self._move_states(step, states)
        kept = {block_id: list(self.cache.slots[block_id]) for _, block_id in metadata.restores}
        self._check_kept(step, kept)
        self.consumers_go_on()
        if not self._uses_v2:
            self._move_states(step, states)
        self._compute(step, kept, states)
        self._round(step, kept)
        self.consumers_go_on()
        for block_id, slots in kept.items():
            self.cache.slots[block_id] = slots
        self._expose([*metadata.ready, *forward.announced], step)
        self.exposed_blocks_are_kept()
        sampled = {request_id: self._sample(step, request_id, end) for request_id, _, end in step.spans()}
        for request_id, tokens in sampled.items():
            self._rows[request_id].output += tokens
        self._sampled[id(step)] = sampled

    def _update_rows(self, output: SchedulerOutput) -> None:
        """First task of the model runner in a step. V2 gets a resumed request as a new one, with all its tokens.

        V1 cuts its own outputs to the scheduler's number. With asynchronous scheduling it has the tokens of the pass
        before on the device only: a request that was not in it gets its outputs from the scheduler.
        """
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self._uses_v2 else new.prompt_token_ids
            self._rows[new.req_id] = Row(list(tokens or ()), num_prompt=new.prompt_len)
        cached = output.scheduled_cached_reqs
        for request_id, num_output in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if self._uses_v2:
                continue
            row, is_in_batch = self._rows[request_id], request_id in self._batch - cached.resumed_req_ids
            del row.output[max(0, num_output) :]
            if self._is_async and num_output > 0 and not is_in_batch:
                row.output = cached.all_token_ids[request_id][-num_output:]
        self._batch = set(output.num_scheduled_tokens)

    def _states(self, step: Step) -> dict[tuple[str, int], Slot]:
        """The states from which requests go on, by request and group."""
        return {
            (request_id, index): self.cache.slots[step.tables[request_id][index][layers.block_of(first - 1)]][0]
            for index, layers in enumerate(self.cache.groups)
            for request_id, first, _ in step.spans()
            if layers.is_state and first
        }

    def _move_states(self, step: Step, states: dict[tuple[str, int], Slot]) -> None:
        """A state goes to the block that it is written into, if that is another one."""
        for request_id, first, end in step.spans():
            for index, layers in enumerate(self.cache.groups):
                if layers.is_state and first and layers.block_of(first - 1) != layers.block_of(end - 1):
                    block_id = step.tables[request_id][index][layers.block_of(end - 1)]
                    self.cache.slots[block_id][0] = states[request_id, index]

    def _compute(self, step: Step, kept: dict[int, list[Slot]], states: dict[tuple[str, int], Slot]) -> None:
        """All requests write, then all read. What a request computes from wrong KV is wrong, too."""
        for request_id, first, end in step.spans():
            tokens = self._rows[request_id].tokens[:end]
            assert len(tokens) == end, "a worker computes tokens that it has not"
            step.computed[request_id] = tokens[first:]
            for layers, table in zip(self.cache.groups, step.tables[request_id], strict=True):
                self.cache.write(layers, table, self.cache.history(tokens), first, end)
        wrong = {span[0] for span in step.spans() if not self._reads_its_own(step, span, states)}
        for request_id, first, _ in step.spans():
            if request_id in wrong:
                assert self._is_replaced(step, request_id, kept), f"{request_id} was computed on KV that is not its own"
                self._seen["first token forced in place of a wrong one"] += 1
                self._spoil_token(step, request_id, first)
        for span in step.spans():
            assert span[0] in wrong or self._reads_its_own(step, span, states), "it has read what another one replaces"

    def _reads_its_own(self, step: Step, span: tuple[str, int, int], states: dict[tuple[str, int], Slot]) -> bool:
        """True if a request goes on from its own states, and reads its own tokens."""
        request_id, first, end = span
        history = self.cache.history(self._rows[request_id].tokens[:end])
        for index, (layers, table) in enumerate(zip(self.cache.groups, step.tables[request_id], strict=True)):
            if layers.is_state:
                is_own = first == 0 or states[request_id, index] == history[first - 1]
            else:
                is_own = self.cache.holds(layers, table, history, layers.first_read(first), end)
            if not is_own:
                return False
        return True

    def _spoil_token(self, step: Step, request_id: str, position: int) -> None:
        for layers, table in zip(self.cache.groups, step.tables[request_id], strict=True):
            if block_id := table[layers.block_of(position)]:
                self.cache.slots[block_id][0 if layers.is_state else position % BLOCK] = None

    def _is_repeated(self, step: Step, request_id: str, kept: dict[int, list[Slot]]) -> bool:
        """True if a step computes the last token of a prompt again, and its blocks are restored."""
        _, first, end = next(span for span in step.spans() if span[0] == request_id)
        return end == first + 1 and any(
            table[layers.block_of(first)] in kept
            for layers, table in zip(self.cache.groups, step.tables[request_id], strict=True)
        )

    def _is_replaced(self, step: Step, request_id: str, kept: dict[int, list[Slot]]) -> bool:
        """True if what a step computes is thrown away: its token is forced, and its blocks are restored."""
        handoff = self._handoffs.get(request_id, b"")
        return self._is_repeated(step, request_id, kept) and handoff in step.metadata.first_tokens

    def _check_kept(self, step: Step, kept: dict[int, list[Slot]]) -> None:
        for request_id, first, _ in step.spans():
            if self._is_repeated(step, request_id, kept):
                history = self.cache.history(step.requests[request_id].prompt_token_ids)
                assert first + 1 == len(history)
                assert self.cache.holds_for(step.tables[request_id], history, len(history)), (
                    "what is kept is the KV of the prompt"
                )

    def _round(self, step: Step, kept: dict[int, list[Slot]]) -> None:
        """A recomputed slot differs in some bits from the producer's."""
        for request_id, first, _ in step.spans():
            if self._is_repeated(step, request_id, kept):
                self._spoil_token(step, request_id, first)

    def _sample(self, step: Step, request_id: str, end: int) -> list[int]:
        tokens, request = self._rows[request_id].tokens, step.requests[request_id]
        if self._uses_v2:
            assert self._rows[request_id].num_prompt == request.num_prompt_tokens, "V2 tells prompt from output"
        if end < len(tokens):
            return []
        position = len(tokens) - request.num_prompt_tokens
        handoff = self._handoffs.get(request_id, b"")
        token, given = step.metadata.first_tokens.get(handoff), self._given.get(handoff, ())
        if position:
            is_given = position < len(given)
            assert (token is not None) == is_given, "further outputs are forced if the request brings them"
            self._seen["further token forced"] += is_given
            return [given[position] if is_given else 7]
        assert token == step.expected_tokens.get(handoff), "what the producer has sampled comes first"
        return [7 if token is None else token]

    # --- what is exposed

    def _expose(self, parts: list[ReadyRange], step: Step) -> None:
        """Exposes ready blocks to consumers, except of handoffs that have ended."""
        for part in parts:
            if part.handoff in self._ended or part.handoff in self._acknowledged:
                continue
            num_groups = len(self.cache.groups)
            nothing = Exposed(
                self._request_of(part.handoff, step), [[] for _ in range(num_groups)], [None] * num_groups
            )
            exposed = self.exposed.setdefault(part.handoff, nothing)
            if exposed.first[part.group] is None:
                exposed.first[part.group] = part.first
                assert part.first <= self._first_needed(part.group, exposed.request), (
                    "a consumer needs blocks before it"
                )
            expected = exposed.first[part.group] + len(exposed.block_ids[part.group])
            assert part.first == expected, "blocks become ready in the order of the prompt, each once"
            exposed.block_ids[part.group] += part.block_ids

    def _first_needed(self, group: int, request: Request) -> int:
        layers, length = self.cache.groups[group], len(request.prompt_token_ids)
        return 0 if layers.is_state else layers.first_read(length) // BLOCK

    def _exposed_blocks(self, exposed: Exposed) -> list[tuple[int, int, int]]:
        """Group, position and id of each exposed block."""
        firsts = enumerate(zip(exposed.first, exposed.block_ids, strict=True))
        return [(group, at, it) for group, (first, ids) in firsts for at, it in enumerate(ids, first or 0)]

    def _request_of(self, handoff: bytes, step: Step) -> Request:
        return next(it for request_id, it in step.requests.items() if self._handoffs.get(request_id) == handoff)

    def exposed_blocks_are_kept(self) -> None:
        """Whenever a consumer reads exposed blocks, they hold the KV of the prompt."""
        for exposed in self.exposed.values():
            history = self.cache.history(exposed.request.prompt_token_ids)
            for group, position, block_id in self._exposed_blocks(exposed):
                assert self._is_content(self.cache.groups[group], history, position, self.cache.slots[block_id]), (
                    "an exposed block has changed"
                )


def _facts(report: WorkerOutcomes) -> LoadOutcome:
    (facts,) = report.outcomes.values()
    return facts
