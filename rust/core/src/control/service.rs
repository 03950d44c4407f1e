//! Both roles of the control plane on its reactor's thread: what is leased here, and what is watched elsewhere.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use super::deferred_queries::{Condition, DeferredQuery};
use super::messages::ControlMessage;
use super::{ControlEvent, ControlQuery, ControlTimeouts, Opening, SequenceState};
use crate::error::{Error, Result};
use crate::events::Events;
use crate::ids::RecentHandoffs;
use crate::ids::{HandoffId, SessionKey};
use crate::net::identity::Identity;
use crate::reactor::{ReactorContext, Service};
use crate::session::fair_waitlist::{FairWaitlist, Waiter};
use crate::trace::{Trace, Track};
use crate::work::Completer;

/// Watches that may wait for handoffs that are not open; as many deferred queries may wait.
pub(super) const PENDING_CAP: usize = 1024;

#[derive(Debug)]
pub(super) enum ControlCommand {
    Describe {
        json: String,
    },
    Expect {
        handoff: HandoffId,
    },
    Open {
        handoff: HandoffId,
        opening: Opening,
    },
    Progress {
        handoff: HandoffId,
        ends_at: Instant,
    },
    Finish {
        handoff: HandoffId,
        state: SequenceState,
    },
    Withdraw {
        handoff: HandoffId,
        reason: String,
    },
    Watch {
        handoff: HandoffId,
        producer: String,
    },
    Unwatch {
        handoff: HandoffId,
        is_acknowledged: bool,
    },
    SetResult {
        handoff: HandoffId,
        json: String,
    },
    Query {
        address: String,
        query: ControlQuery,
        deadline: Instant,
        completer: Completer<String>,
    },
    Trace(Trace),
}

pub(super) struct LeasedHandoff {
    pub(super) opening: Opening,
    pub(super) state: Option<SequenceState>,
    /// When its prefill is predicted to end.
    pub(super) ends_at: Option<Instant>,
    /// When it ends unless somebody watches it; set once finished.
    pub(super) lease_ends: Option<Instant>,
    pub(super) watchers: HashSet<SessionKey>,
    /// The last consumer left before prefill had finished.
    pub(super) is_abandoned: bool,
}

pub(super) struct HandoffWatch {
    pub(super) session: SessionKey,
    pub(super) until: Instant,
    /// What has been told of it: each counts once, because nobody may drain what a peer repeats.
    pub(super) is_opened: bool,
    pub(super) is_finished: bool,
}

impl HandoffWatch {
    pub(super) fn new(session: SessionKey, until: Instant) -> Self {
        Self {
            session,
            until,
            is_opened: false,
            is_finished: false,
        }
    }
}

pub(super) struct PendingQuery {
    pub(super) session: SessionKey,
    pub(super) query: ControlQuery,
    pub(super) deadline: Instant,
    pub(super) completer: Completer<String>,
}

/// A watch of a handoff that is not open, and until when it waits.
#[derive(Debug)]
pub(super) struct PendingWatch {
    pub(super) handoff: HandoffId,
    pub(super) session: SessionKey,
    pub(super) until: Instant,
}

impl PendingWatch {
    pub(super) fn is_of(&self, session: SessionKey, handoff: HandoffId) -> bool {
        (self.session, self.handoff) == (session, handoff)
    }
}

impl Waiter for PendingWatch {
    fn session(&self) -> SessionKey {
        self.session
    }
}

pub(super) struct ControlService {
    pub(super) events: Events<ControlEvent>,
    pub(super) trace: Trace,
    pub(super) timeouts: ControlTimeouts,
    pub(super) description: String,
    pub(super) leased: HashMap<HandoffId, LeasedHandoff>,
    pub(super) ended: RecentHandoffs<String>,
    pub(super) results: RecentHandoffs<String>,
    /// Requests that have come but are not scheduled: their watches wait as long as it takes.
    pub(super) expected: HashSet<HandoffId>,
    pub(super) pending: FairWaitlist<PendingWatch>,
    pub(super) deferred_queries: FairWaitlist<DeferredQuery>,
    pub(super) watched: HashMap<HandoffId, HandoffWatch>,
    pub(super) queries: HashMap<u64, PendingQuery>,
    pub(super) by_address: HashMap<String, SessionKey>,
}

impl ControlService {
    pub(super) fn new(events: Events<ControlEvent>, timeouts: ControlTimeouts) -> Self {
        Self {
            events,
            trace: Trace::default(),
            timeouts,
            description: "{}".to_owned(),
            leased: HashMap::new(),
            ended: RecentHandoffs::default(),
            results: RecentHandoffs::default(),
            expected: HashSet::new(),
            pending: FairWaitlist::new(PENDING_CAP),
            deferred_queries: FairWaitlist::new(PENDING_CAP),
            watched: HashMap::new(),
            queries: HashMap::new(),
            by_address: HashMap::new(),
        }
    }

    pub(super) fn say(cx: &mut ReactorContext, session: SessionKey, message: &ControlMessage) {
        cx.send(session, &message.encode());
    }

    fn told(&mut self, cx: &mut ReactorContext, session: SessionKey, message: ControlMessage) {
        match message {
            ControlMessage::Watch(handoff) => {
                self.trace.instant(Track::Reactor, "watched", &handoff, &[]);
                self.watch_here(cx, session, handoff);
            }
            ControlMessage::Unwatch {
                handoff,
                is_acknowledged,
            } => {
                self.unwatch_here(cx, session, handoff, is_acknowledged);
            }
            ControlMessage::Query { id, query } => self.asked_here(cx, session, id, &query),
            ControlMessage::Opened { handoff, opening }
                if self.is_first(&handoff, session, |watched| &mut watched.is_opened) =>
            {
                self.trace.instant(Track::Reactor, "opened", &handoff, &[]);
                self.events.push(ControlEvent::Opened { handoff, opening });
            }
            ControlMessage::Finished { handoff, state }
                if self.is_first(&handoff, session, |watched| &mut watched.is_finished) =>
            {
                self.trace
                    .instant(Track::Reactor, "finished", &handoff, &[]);
                self.events.push(ControlEvent::Finished { handoff, state });
            }
            ControlMessage::Ended { handoff, reason } if self.watches(&handoff, session) => {
                self.watched.remove(&handoff);
                self.trace.instant(Track::Reactor, "ended", &handoff, &[]);
                self.events.push(ControlEvent::Ended {
                    handoff,
                    reason,
                    is_withdrawn: true,
                });
            }
            ControlMessage::Reply { id, json } => {
                let is_asked = self
                    .queries
                    .get(&id)
                    .is_some_and(|queries| queries.session == session);
                if is_asked && let Some(queries) = self.queries.remove(&id) {
                    queries.completer.complete(Ok(json));
                }
            }
            // Of a handoff that is not watched any more, or once more.
            ControlMessage::Opened { .. }
            | ControlMessage::Finished { .. }
            | ControlMessage::Ended { .. } => {}
        }
    }

    /// Answers a query, or keeps it until it can be answered.
    fn asked_here(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        query: &ControlQuery,
    ) {
        let until = cx.now + self.timeouts.open;
        let later = |handoff, condition| DeferredQuery {
            handoff,
            session,
            id,
            condition,
            until,
        };
        let json = match *query {
            ControlQuery::Describe => self.description.clone(),
            ControlQuery::Release(handoff) => {
                let was_lent = self.release(cx, handoff, "it was released");
                was_lent.to_string()
            }
            ControlQuery::Result(handoff) => self
                .results
                .get(&handoff)
                .map_or("null".to_owned(), Clone::clone),
            // Of a time that no clock knows nothing is noted.
            ControlQuery::Progress { handoff, remaining } => (cx.now.checked_add(remaining))
                .is_some_and(|ends_at| self.progress(&handoff, ends_at))
                .to_string(),
            ControlQuery::Subscribe { handoff, lead } => {
                return self.subscribe_here(cx, later(handoff, Condition::End { lead }));
            }
            ControlQuery::Watched(handoff) => {
                return self.subscribe_here(cx, later(handoff, Condition::Consumer));
            }
        };
        Self::say(cx, session, &ControlMessage::Reply { id, json });
    }
}

impl Service for ControlService {
    type Command = ControlCommand;

    fn command(&mut self, cx: &mut ReactorContext, command: ControlCommand) {
        match command {
            ControlCommand::Describe { json } => self.description = json,
            ControlCommand::Expect { handoff } => {
                self.expected.insert(handoff);
            }
            ControlCommand::Open { handoff, opening } => self.open(cx, handoff, opening),
            ControlCommand::Progress { handoff, ends_at } => {
                self.progress(&handoff, ends_at);
            }
            ControlCommand::Finish { handoff, state } => self.finish(cx, handoff, state),
            ControlCommand::Withdraw { handoff, reason } => {
                self.end(cx, handoff, &reason);
            }
            ControlCommand::Watch { handoff, producer } => self.watch(cx, handoff, &producer),
            ControlCommand::Unwatch {
                handoff,
                is_acknowledged,
            } => self.unwatch(cx, handoff, is_acknowledged),
            ControlCommand::SetResult { handoff, json } => self.results.insert(handoff, json),
            ControlCommand::Query {
                address,
                query,
                deadline,
                completer,
            } => {
                self.ask(cx, &address, query, deadline, completer);
            }
            ControlCommand::Trace(trace) => self.trace = trace,
        }
    }

    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, peer: &Identity) {
        let (address, engine) = (cx.peer(session), &peer.engine_id);
        self.events.push_minor(ControlEvent::Log(format!(
            "control.open peer={address} engine_id={engine}"
        )));
        for (&handoff, _) in self
            .watched
            .iter()
            .filter(|(_, watched)| watched.session == session)
        {
            Self::say(cx, session, &ControlMessage::Watch(handoff));
        }
        let here = self
            .queries
            .iter()
            .filter(|(_, queries)| queries.session == session);
        let mut waiting: Vec<_> = here.map(|(&id, queries)| (id, &queries.query)).collect();
        // In the order in which they were made: a later word on a prefill's end replaces an earlier one.
        waiting.sort_unstable_by_key(|(id, _)| *id);
        for (id, query) in waiting {
            let query = query.clone();
            Self::say(cx, session, &ControlMessage::Query { id, query });
        }
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.events
            .push_minor(ControlEvent::Log(format!("control.closed {error}")));
        self.by_address.retain(|_, other| *other != session);
        self.pending.remove_if(|watch| watch.session == session);
        self.deferred_queries.remove_if(|it| it.session == session);
        let watching: Vec<HandoffId> = self
            .leased
            .iter()
            .filter(|(_, leased)| leased.watchers.contains(&session))
            .map(|(id, _)| *id)
            .collect();
        for handoff in watching {
            if let Some(leased) = self.leased.get_mut(&handoff) {
                leased.watchers.remove(&session);
            }
            self.abandon(cx, handoff, "its consumer is gone");
        }
        let lost: Vec<HandoffId> = self
            .watched
            .iter()
            .filter(|(_, watched)| watched.session == session)
            .map(|(id, _)| *id)
            .collect();
        for handoff in lost {
            self.watched.remove(&handoff);
            self.events.push(ControlEvent::Ended {
                handoff,
                reason: error.to_string(),
                is_withdrawn: false,
            });
        }
        let unanswered: Vec<u64> = self
            .queries
            .iter()
            .filter(|(_, queries)| queries.session == session)
            .map(|(id, _)| *id)
            .collect();
        for queries in unanswered.iter().filter_map(|id| self.queries.remove(id)) {
            queries.completer.complete(Err(error.clone()));
        }
    }

    fn frame(&mut self, cx: &mut ReactorContext, session: SessionKey, frame: &[u8]) -> Result<()> {
        self.told(cx, session, ControlMessage::decode(frame)?);
        Ok(())
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let deadlines = [
            self.expire_leases(cx),
            self.expire_pending(cx),
            self.expire_watches(cx),
            self.expire_queries(cx),
            // Last: what the others have ended is told too.
            self.expire_deferred(cx),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn log(&mut self, text: String) {
        self.events
            .push_minor(ControlEvent::Log(format!("control.refused {text}")));
    }
}

#[cfg(test)]
mod tests;
