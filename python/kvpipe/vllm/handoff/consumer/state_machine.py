"""The state machine of a handoff that this engine consumes: from the watch at its producer to the result.

A load needs all blocks verified on all ranks, and the sequence state of the producer. If the state comes first, the
workers end the load: they know it, and report once they have the blocks. If the blocks come first, the scheduler role
commits the load. It goes one way or the other, never both: vLLM does not survive a second report.

The machine knows neither vLLM nor the network. Each event returns the actions to perform. An event that a phase does
not name changes nothing, because messages cross.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import Enum

from kvpipe.vllm.handoff.metadata import LoadOutcome


class Phase(Enum):
    """Stage of a handoff at its consumer."""

    WAITING = "waiting"  # for the producer to open it
    OPENED = "opened"  # the producer has scheduled its request: a load may begin
    SAMPLED = "sampled"  # as OPENED, and the sequence state is here
    LOADING = "loading"  # the workers read blocks; the sequence state is not here
    VERIFIED = "verified"  # all ranks have all blocks; the sequence state is not here
    COMMITTED = "committed"  # blocks and state are here; vLLM does not know yet
    FINISHING = "finishing"  # the workers know the sequence state, and end the load
    BROKEN = "broken"  # a rank has ended the load before the sequence state was here
    CANCELLED = "cancelled"  # nothing more comes from the producer; the workers end the load
    ABORTED = "aborted"  # the request has ended, and the workers may still write into its blocks
    DROPPED = "dropped"  # the request has ended after the commit; vLLM does not know of the commit yet
    PARTIAL = "partial"  # the load has ended without some blocks; the producer still leases them
    PARTIAL_SAMPLED = "partial_sampled"  # as PARTIAL, and the sequence state is here
    LOADED = "loaded"  # all blocks are here
    LOST = "lost"  # no load runs, and the KV cannot arrive
    LOCAL = "local"  # this engine computes what is missing
    REPORTED = "reported"  # the prompt is computed, and the result reported
    FORGOTTEN = "forgotten"  # the request has ended, and the result is reported


class Event(Enum):
    """Event of a handoff."""

    OPENED = "opened"  # the producer has scheduled its request
    STATE_RECEIVED = "state_received"  # the producer has sampled its token
    ENDED = "ended"  # the producer ended the handoff, or is lost
    DIFFERED = "differed"  # the producer computes something else, or samples a token that this engine cannot use
    GIVEN_UP = "given_up"  # this engine needs no load
    ALLOCATED = "allocated"  # vLLM has allocated the blocks of a load
    BLOCKS_VERIFIED = "blocks_verified"  # the last rank has verified all blocks
    WORKER_BROKEN = "worker_broken"  # a rank has lost blocks that it had verified, and ends the load when told to
    WORKER_ENDED = "worker_ended"  # a rank has ended the load
    RECEIVED_ALL = "received_all"  # the end of a load that has all blocks is reported to vLLM
    RECEIVED_PART = "received_part"  # the end of a load that lacks blocks is reported to vLLM
    PREEMPTED = "preempted"  # vLLM has preempted the request
    COMPUTED = "computed"  # a step computes the rest of the prompt
    FINISHED = "finished"  # vLLM has ended the request


class Action(Enum):
    """Consequence of an event."""

    UNWATCH = "unwatch"  # tell the producer that its blocks are not needed any more
    ACKNOWLEDGE = "acknowledge"  # tell the producer that its blocks are here
    FINISH = "finish"  # tell the workers that the sequence state is here: they end the load
    COMMIT = "commit"  # tell the workers that the load has ended, and then vLLM
    CANCEL = "cancel"  # have the workers end the load
    REPORT = "report"  # report the result
    FORGET = "forget"  # forget the request


class Watch(Enum):
    """The watch of a handoff at its producer."""

    OPEN = "open"
    HELD = "held"  # the workers do not know of a commit yet; the producer would end the load that they still have
    OVER = "over"  # the producer knows, or was not named


_END_WATCH = frozenset({Action.UNWATCH, Action.ACKNOWLEDGE})

_OPENED_ROWS = {
    Event.ENDED: (Phase.LOST, ()),
    Event.DIFFERED: (Phase.LOST, (Action.UNWATCH,)),
    Event.GIVEN_UP: (Phase.LOCAL, (Action.UNWATCH,)),
    Event.FINISHED: (Phase.FORGOTTEN, (Action.UNWATCH, Action.REPORT, Action.FORGET)),
}
_LOADING_ROWS = {
    Event.ENDED: (Phase.CANCELLED, (Action.CANCEL,)),
    Event.FINISHED: (Phase.ABORTED, (Action.CANCEL,)),
}
# The sequence state comes with a token that this engine cannot use.
_STATELESS_ROWS = {
    Event.DIFFERED: (Phase.CANCELLED, (Action.UNWATCH, Action.CANCEL)),
    **_LOADING_ROWS,
}
_PARTIAL_ROWS = {
    Event.ENDED: (Phase.LOCAL, ()),
    Event.COMPUTED: (Phase.REPORTED, (Action.UNWATCH, Action.REPORT)),
    Event.FINISHED: (Phase.FORGOTTEN, (Action.UNWATCH, Action.REPORT, Action.FORGET)),
}
# The producer has no part in it any more.
_COMPUTING_ROWS = {
    Event.COMPUTED: (Phase.REPORTED, (Action.REPORT,)),
    Event.FINISHED: (Phase.FORGOTTEN, (Action.REPORT, Action.FORGET)),
}

# Next phase and actions. What ends a watch is done only while the watch is open.
TRANSITIONS: dict[Phase, dict[Event, tuple[Phase, tuple[Action, ...]]]] = {
    Phase.WAITING: {
        Event.OPENED: (Phase.OPENED, ()),
        Event.ENDED: (Phase.LOST, ()),
        Event.GIVEN_UP: (Phase.LOCAL, (Action.UNWATCH,)),
        Event.FINISHED: (Phase.FORGOTTEN, (Action.UNWATCH, Action.REPORT, Action.FORGET)),
    },
    Phase.OPENED: {
        Event.STATE_RECEIVED: (Phase.SAMPLED, ()),
        Event.ALLOCATED: (Phase.LOADING, ()),
        **_OPENED_ROWS,
    },
    Phase.SAMPLED: {
        Event.ALLOCATED: (Phase.FINISHING, ()),
        **_OPENED_ROWS,
    },
    Phase.LOADING: {
        Event.STATE_RECEIVED: (Phase.FINISHING, (Action.FINISH,)),
        Event.BLOCKS_VERIFIED: (Phase.VERIFIED, ()),
        Event.WORKER_BROKEN: (Phase.BROKEN, (Action.CANCEL,)),
        Event.WORKER_ENDED: (Phase.BROKEN, ()),
        **_STATELESS_ROWS,
    },
    Phase.VERIFIED: {
        Event.STATE_RECEIVED: (Phase.COMMITTED, (Action.COMMIT,)),
        Event.WORKER_BROKEN: (Phase.BROKEN, (Action.CANCEL,)),
        **_STATELESS_ROWS,
    },
    Phase.COMMITTED: {
        Event.RECEIVED_ALL: (Phase.LOADED, ()),
        Event.FINISHED: (Phase.DROPPED, ()),
    },
    Phase.FINISHING: {
        Event.WORKER_ENDED: (Phase.FINISHING, ()),
        Event.RECEIVED_ALL: (Phase.LOADED, (Action.ACKNOWLEDGE,)),
        Event.RECEIVED_PART: (Phase.PARTIAL_SAMPLED, ()),
        **_LOADING_ROWS,
    },
    Phase.BROKEN: {
        Event.STATE_RECEIVED: (Phase.FINISHING, (Action.FINISH,)),
        Event.WORKER_BROKEN: (Phase.BROKEN, (Action.CANCEL,)),
        Event.WORKER_ENDED: (Phase.BROKEN, ()),
        Event.RECEIVED_ALL: (Phase.LOADED, (Action.ACKNOWLEDGE,)),
        Event.RECEIVED_PART: (Phase.PARTIAL, ()),
        **_STATELESS_ROWS,
    },
    Phase.CANCELLED: {
        Event.WORKER_ENDED: (Phase.CANCELLED, ()),
        Event.RECEIVED_ALL: (Phase.LOADED, ()),
        Event.RECEIVED_PART: (Phase.LOCAL, ()),
        Event.FINISHED: (Phase.ABORTED, (Action.CANCEL,)),
    },
    Phase.ABORTED: {
        Event.STATE_RECEIVED: (Phase.ABORTED, (Action.FINISH,)),
        Event.ENDED: (Phase.ABORTED, ()),
        Event.WORKER_ENDED: (Phase.ABORTED, ()),
        Event.RECEIVED_ALL: (Phase.FORGOTTEN, (Action.ACKNOWLEDGE, Action.REPORT, Action.FORGET)),
        Event.RECEIVED_PART: (Phase.FORGOTTEN, (Action.UNWATCH, Action.REPORT, Action.FORGET)),
    },
    Phase.DROPPED: {
        Event.RECEIVED_ALL: (Phase.FORGOTTEN, (Action.REPORT, Action.FORGET)),
    },
    Phase.PARTIAL: {
        Event.STATE_RECEIVED: (Phase.PARTIAL_SAMPLED, ()),
        Event.PREEMPTED: (Phase.OPENED, ()),
        **_PARTIAL_ROWS,
    },
    Phase.PARTIAL_SAMPLED: {
        Event.PREEMPTED: (Phase.SAMPLED, ()),
        **_PARTIAL_ROWS,
    },
    Phase.LOADED: _COMPUTING_ROWS,
    Phase.LOST: {
        # Under the policy that lost KV fails its request, vLLM fails it by a failed load.
        Event.ALLOCATED: (Phase.CANCELLED, ()),
        **_COMPUTING_ROWS,
    },
    Phase.LOCAL: _COMPUTING_ROWS,
    Phase.REPORTED: {
        Event.FINISHED: (Phase.FORGOTTEN, (Action.FORGET,)),
    },
    Phase.FORGOTTEN: {},
}


@dataclass
class HandoffLoad:
    """One handoff at its consumer.

    Attributes:
        phase: Its phase.
        watch: Its watch at the producer.
        outcome: The merged outcome of the load's workers; `None` before one has ended it, or without a load.
    """

    phase: Phase = Phase.WAITING
    watch: Watch = Watch.OPEN
    outcome: LoadOutcome | None = None
    _verified: list[LoadOutcome] = field(default_factory=list)

    @classmethod
    def without_producer(cls) -> HandoffLoad:
        """Returns one that nothing is loaded of."""
        return cls(Phase.LOCAL, Watch.OVER)

    def on(self, event: Event) -> tuple[Action, ...]:
        """Goes to the next phase. Without a transition for this event, nothing changes."""
        transition = TRANSITIONS[self.phase].get(event)
        if transition is None:
            return ()
        self.phase, actions = transition
        if event is Event.ALLOCATED:
            self.outcome, self._verified = None, []
        elif event is Event.ENDED:
            self.watch = Watch.OVER
        if Action.COMMIT in actions:
            self.outcome, self.watch = functools.reduce(LoadOutcome.merged, self._verified), Watch.HELD
        if self.watch is not Watch.OPEN:
            return tuple(action for action in actions if action not in _END_WATCH)
        if not _END_WATCH.isdisjoint(actions):
            self.watch = Watch.OVER
        return actions

    def blocks_verified(self, ranks: list[LoadOutcome], num_ranks: int) -> None:
        """Some ranks of this engine have verified all of their blocks, and lack the sequence state."""
        if self.phase is Phase.LOADING:
            self._verified += ranks
            if len(self._verified) == num_ranks:
                self.on(Event.BLOCKS_VERIFIED)

    def worker_ended(self, outcome: LoadOutcome) -> None:
        """One rank has ended the load, or several in one step. The outcome of a committed load is fixed."""
        if Event.WORKER_ENDED in TRANSITIONS[self.phase]:
            # Ranks may report in different steps.
            self.outcome = outcome if self.outcome is None else self.outcome.merged(outcome)
            self.on(Event.WORKER_ENDED)

    def received(self) -> tuple[Action, ...]:
        """The load has ended on all ranks, which is reported to vLLM."""
        return self.on(Event.RECEIVED_ALL if self.has_all_blocks else Event.RECEIVED_PART)

    @property
    def has_all_blocks(self) -> bool:
        """True if the last load has brought all blocks."""
        return self.outcome is not None and self.outcome.is_loaded

    def acknowledged(self) -> tuple[Action, ...]:
        """The workers know of the commit."""
        if self.watch is not Watch.HELD:
            return ()
        self.watch = Watch.OVER
        return (Action.ACKNOWLEDGE,)
