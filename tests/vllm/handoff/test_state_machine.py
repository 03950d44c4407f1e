"""The state machine of a consumed handoff: each pair of phase and event, and any order of events."""

import ast
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvpipe.vllm.handoff.consumer import state_machine
from kvpipe.vllm.handoff.consumer.state_machine import TRANSITIONS, Action, Event, HandoffLoad, Phase, Watch
from kvpipe.vllm.handoff.metadata import LoadOutcome
from tests.peers import ROOT

PAGE = ROOT / "docs/internals/connector.md"
# Between a load's first block and its last one.
WRITTEN = {Phase.LOADING, Phase.FINISHING, Phase.BROKEN, Phase.CANCELLED, Phase.ABORTED}
IS_LOADED, HAS_FAILED = LoadOutcome(is_loaded=True), LoadOutcome(is_loaded=False, num_missing=1, reason="lost")
STATELESS = (Phase.LOADING, Phase.VERIFIED, Phase.BROKEN)

NUM_WALKS = 20_000
# Events that the walks must have met for their silence to mean anything.
MUST_BE_SEEN = {(phase, event) for phase, events in TRANSITIONS.items() for event in events}


def drawn() -> dict[tuple[Phase, Event], Phase]:
    """The transitions in the drawing, and in the table of what the end of a request does."""
    [diagram] = re.findall(r"```mermaid\n(stateDiagram.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[tuple[Phase, Event], Phase] = {}
    for phase, after, events in re.findall(r"^ +(\w+) --> (\w+): (.+)$", diagram, re.MULTILINE):
        for event in events.split(", "):
            assert (Phase(phase), Event(event)) not in found
            found[Phase(phase), Event(event)] = Phase(after)
    for phases, after in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE):
        for phase in re.findall(r"`(\w+)`", phases):
            found[Phase(phase), Event.FINISHED] = Phase(after)
    return found


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
def test_each_event_is_a_transition_that_is_drawn_or_changes_nothing(phase: Phase) -> None:
    transitions = drawn()
    for event, watch in itertools.product(Event, Watch):
        machine = HandoffLoad(phase, watch, IS_LOADED, [IS_LOADED])
        actions = machine.on(event)
        if (after := transitions.get((phase, event))) is not None:
            assert machine.phase is after, event
        else:
            assert (machine.phase, machine.watch, machine.outcome, actions) == (phase, watch, IS_LOADED, ()), event


def test_the_drawing_has_no_transition_but_those_of_the_code() -> None:
    assert drawn() == {
        (phase, event): after for phase, events in TRANSITIONS.items() for event, (after, _) in events.items()
    }


def test_a_commit_and_an_end_by_the_workers_exclude_each_other() -> None:
    for phase, events in TRANSITIONS.items():
        for after, actions in events.values():
            assert (Action.COMMIT in actions) == (after is Phase.COMMITTED), phase
    for phase in (Phase.COMMITTED, Phase.DROPPED):
        assert {Event.WORKER_ENDED, Event.RECEIVED_PART, Event.STATE_RECEIVED}.isdisjoint(TRANSITIONS[phase])


def test_the_module_needs_no_vllm() -> None:
    tree = ast.parse(Path(state_machine.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    # Of the metadata, see `test_core`.
    assert imported == {"__future__", "dataclasses", "enum", "functools", "kvpipe.vllm.handoff.metadata"}


# --- any order of events


@dataclass
class Walk:
    """A producer, the workers of some ranks and vLLM, all at random, around one machine.

    Attributes:
        choice: The source of random choices.
        num_ranks: Ranks of the consumer.
        sent: Unread messages of the producer, in order.
        reading: Ranks whose workers may still write.
        unreported: Outcomes of ranks that are not reported yet.
    """

    choice: random.Random
    num_ranks: int
    machine: HandoffLoad = field(default_factory=HandoffLoad)
    sent: list[Event] = field(default_factory=list)
    has_opened: bool = False
    has_sampled: bool = False
    has_ended: bool = False
    reading: set[int] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    ended: dict[int, LoadOutcome] = field(default_factory=dict)
    is_loading: bool = False
    is_committed: bool = False
    knows_state: bool = False
    is_cancelled: bool = False
    has_finished: bool = False
    unreported: bool = False
    unacknowledged: bool = False
    done: Counter[Action] = field(default_factory=Counter)
    ends_of_watch: int = 0
    seen: set[tuple[Phase, Event]] = field(default_factory=set)

    def on(self, event: Event) -> None:
        self._note(event)
        self._perform(self.machine.on(event))

    def _note(self, event: Event) -> None:
        self.seen.add((self.machine.phase, event))

    def _perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self.done[action] += 1
            if action in (Action.UNWATCH, Action.ACKNOWLEDGE):
                self.ends_of_watch += 1
                assert not self.unacknowledged, "the workers know of a commit before the producer does"
            if action is Action.ACKNOWLEDGE:
                assert self.machine.has_all_blocks, "blocks are acknowledged that are here"
            if action is Action.FINISH:
                assert not self.is_committed, "what is committed is not ended by the workers"
                self.knows_state = True
            if action is Action.CANCEL:
                assert not self.is_committed, "what is committed is not cancelled"
                self.is_cancelled = True
            if action is Action.COMMIT:
                assert (self.verified, self.ended) == (set(range(self.num_ranks)), {}), "all ranks have all blocks"
                assert (self.knows_state, self.is_cancelled) == (False, False), "the workers do not end it"
                assert self.has_sampled, "the sequence state is here"
                self.is_committed = self.unreported = self.unacknowledged = True
            if action in (Action.REPORT, Action.FORGET):
                assert self.done[action] == 1, "a handoff is reported once, and forgotten once"
                assert not self.is_loading, "blocks are not freed while they are written"

    def step(self) -> None:
        """One thing that can happen now."""
        self.choice.choice(self._possible())()
        assert not self.reading or self.machine.phase in WRITTEN, "a phase in which blocks are written"
        assert self.ends_of_watch <= 1, "its watch ends once"
        if self.is_loading and self.machine.phase in (Phase.CANCELLED, Phase.ABORTED):
            assert self.is_cancelled, "the workers are to end the load"
        if self.is_loading and self.machine.phase is Phase.FINISHING:
            assert self.knows_state, "the workers have the sequence state"

    def _possible(self) -> list[Callable[[], None]]:
        possible = [self._producer_sends, self._deliver]
        if self.is_loading and not self.is_committed:
            possible += [self._rank_goes_on] * 3
            if len(self.ended) == self.num_ranks:
                possible += [self._receive] * 3
        if self.unreported:
            possible += [self._receive_committed] * 2
        if self.unacknowledged:
            possible += [self._acknowledge, self._end_too_late]
        if not self.has_finished:
            possible += [self._vllm] * 3
        if self.choice.random() < 0.2:
            possible.append(self._finish)
        return possible

    def _producer_sends(self) -> None:
        """Sends the producer's next message: it opens, samples, and may end at any time."""
        if self.has_ended:
            return
        if self.choice.random() < 0.15:
            self.has_ended = True
            self.sent.append(Event.ENDED)
        elif not self.has_opened:
            self.has_opened = True
            self.sent.append(Event.OPENED)
        elif not self.has_sampled and self.choice.random() < 0.5:
            self.has_sampled = True
            self.sent.append(Event.STATE_RECEIVED)

    def _deliver(self) -> None:
        if self.sent and self.machine.phase is not Phase.FORGOTTEN:
            event = self.sent.pop(0)
            if event is Event.STATE_RECEIVED and self.machine.phase in STATELESS and self.choice.random() < 0.2:
                event = Event.DIFFERED  # the token that comes with it is of no use here
            was_open = self.machine.watch is Watch.OPEN
            self.on(event)
            self.ends_of_watch += event is Event.ENDED and was_open

    def _rank_goes_on(self) -> None:
        """A rank verifies its blocks, or ends: in failure at any time, and in success if it knows the state."""
        rank = self.choice.randrange(self.num_ranks)
        if rank in self.ended:
            return
        if rank in self.reading and self.choice.random() < 0.6:
            self.reading.remove(rank)
            self.verified.add(rank)
            if not self.knows_state:
                phase = self.machine.phase
                self.machine.blocks_verified([LoadOutcome(is_loaded=True, num_received=1)], self.num_ranks)
                if self.machine.phase is not phase:
                    self.seen.add((phase, Event.BLOCKS_VERIFIED))
        elif rank in self.verified - self.broken and self.knows_state and self.choice.random() < 0.7:
            self._end(rank, IS_LOADED)
        elif rank in self.verified and not (self.knows_state or self.is_cancelled):
            if self.choice.random() < 0.2:
                self.broken.add(rank)
                self.on(Event.WORKER_BROKEN)
                assert self.is_cancelled, "a rank that is broken is told to end the load"
        elif self.is_cancelled or self.choice.random() < 0.2:
            self._end(rank, HAS_FAILED)

    def _end(self, rank: int, outcome: LoadOutcome) -> None:
        self.reading.discard(rank)
        self.ended[rank] = outcome
        self._note(Event.WORKER_ENDED)
        self.machine.worker_ended(outcome)

    def _receive(self) -> None:
        assert not self.reading
        self.is_loading = False
        self._note(Event.RECEIVED_ALL if self.machine.has_all_blocks else Event.RECEIVED_PART)
        phase = self.machine.phase
        self._perform(self.machine.received())
        assert self.machine.phase is not phase
        is_loaded = all(outcome.is_loaded for outcome in self.ended.values())
        assert self.machine.has_all_blocks == is_loaded

    def _receive_committed(self) -> None:
        self.unreported = self.is_loading = False
        self._note(Event.RECEIVED_ALL)
        self._perform(self.machine.received())
        assert self.machine.has_all_blocks

    def _end_too_late(self) -> None:
        """A rank fails before it knows of the commit."""
        outcome = self.machine.outcome
        self.on(Event.WORKER_BROKEN)
        self.machine.worker_ended(HAS_FAILED)
        assert self.machine.outcome is outcome, "the outcome of a committed load is fixed"

    def _acknowledge(self) -> None:
        self.unacknowledged = False
        self._perform(self.machine.acknowledged())

    def _vllm(self) -> None:
        """VLLM asks, allocates, preempts or computes; not while it waits for a load."""
        if self.is_loading:
            return
        phase = self.machine.phase
        if phase in (Phase.OPENED, Phase.SAMPLED, Phase.LOST) and self.choice.random() < 0.6:
            self._begin_load()
        elif phase in (Phase.OPENED, Phase.SAMPLED):
            self.on(self.choice.choice([Event.DIFFERED, Event.GIVEN_UP]))
        elif phase is Phase.WAITING:
            if self.choice.random() < 0.1:
                self.on(Event.GIVEN_UP)
        else:
            self.on(self.choice.choice([Event.PREEMPTED, Event.COMPUTED]))

    def _begin_load(self) -> None:
        is_refused = self.machine.phase is Phase.LOST
        self.on(Event.ALLOCATED)
        self.is_loading, self.is_committed, self.is_cancelled = True, False, is_refused
        self.knows_state = self.machine.phase is Phase.FINISHING
        self.verified, self.broken, self.ended = set(), set(), {}
        self.reading = set() if is_refused else set(range(self.num_ranks))
        if is_refused:
            for rank in range(self.num_ranks):
                self._end(rank, HAS_FAILED)

    def _finish(self) -> None:
        if not self.has_finished:
            self.has_finished = True
            self.on(Event.FINISHED)

    def end(self) -> None:
        """Everybody comes to an end."""
        self._finish()
        while self.is_loading and not self.is_committed:
            for rank in set(range(self.num_ranks)) - self.ended.keys():
                self._end(rank, HAS_FAILED)
            self._receive()
        if self.unreported:
            self._receive_committed()
        if self.unacknowledged:
            self._acknowledge()
        assert self.machine.phase is Phase.FORGOTTEN
        assert (self.done[Action.REPORT], self.done[Action.FORGET]) == (1, 1)
        assert (self.machine.watch, self.ends_of_watch) == (Watch.OVER, 1)


def test_the_invariants_hold_in_any_order_of_events() -> None:
    choice, seen = random.Random(6), set()
    for _ in range(NUM_WALKS):
        walk = Walk(choice, num_ranks=choice.choice([1, 2, 3]))
        for _ in range(choice.randrange(60)):
            walk.step()
        walk.end()
        seen |= walk.seen
    # No worker ends a load in success without the sequence state, which the scheduler role tells it.
    assert MUST_BE_SEEN - seen == {(Phase.BROKEN, Event.RECEIVED_ALL)}


def test_a_load_without_a_producer_watches_and_loads_nothing() -> None:
    machine = HandoffLoad.without_producer()
    assert machine.on(Event.COMPUTED) == (Action.REPORT,)
    assert machine.on(Event.FINISHED) == (Action.FORGET,)


def test_outcomes_of_ranks_are_merged() -> None:
    ours = LoadOutcome(is_loaded=True, num_bytes=1, num_received=4, num_compared=3, transport="cma", elapsed_s=2.0)
    theirs = LoadOutcome(is_loaded=False, num_bytes=2, num_received=3, num_missing=1, elapsed_s=1.0, reason="lost")
    merged = LoadOutcome(
        is_loaded=False, num_bytes=3, num_received=3, num_missing=1, num_compared=3, transport="cma", elapsed_s=2.0,
        reason="lost",
    )  # fmt: skip
    assert ours.merged(theirs) == theirs.merged(ours) == merged


def test_the_transport_of_merged_outcomes_is_that_of_the_rank_with_a_reason() -> None:
    fast = LoadOutcome(is_loaded=True, transport="cma")
    slow = LoadOutcome(is_loaded=True, transport="tcp", transport_reason="process_vm_readv is refused")
    for merged in (fast.merged(slow), slow.merged(fast)):
        assert (merged.transport, merged.transport_reason) == ("tcp", "process_vm_readv is refused")
