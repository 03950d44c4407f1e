//! Both roles of the control plane on its reactor's thread: what is leased here, and what is watched elsewhere.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use super::messages::Message;
use super::subscriptions::{Awaited, Subscription};
use super::{ControlTimeouts, Event, Opening, Question, SequenceState};
use crate::error::{Error, Result};
use crate::events::Events;
use crate::handoff::HandoffId;
use crate::net::identity::Identity;
use crate::reactor::{ReactorContext, Service, SessionKey};
use crate::recent::RecentHandoffs;
use crate::session::fair_waitlist::{FairWaitlist, Waiter};
use crate::trace::{Trace, Track};
use crate::work::Completer;

/// Watches that may wait for handoffs that are not open; as many subscriptions may wait.
pub(super) const PARKED_CAP: usize = 1024;

#[derive(Debug)]
pub(super) enum Command {
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
    Ask {
        address: String,
        question: Question,
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

pub(super) struct Watched {
    pub(super) session: SessionKey,
    pub(super) until: Instant,
    /// What has been told of it: each counts once, because nobody may drain what a peer repeats.
    pub(super) is_opened: bool,
    pub(super) is_finished: bool,
}

impl Watched {
    pub(super) fn new(session: SessionKey, until: Instant) -> Self {
        Self {
            session,
            until,
            is_opened: false,
            is_finished: false,
        }
    }
}

pub(super) struct Asked {
    pub(super) session: SessionKey,
    pub(super) question: Question,
    pub(super) deadline: Instant,
    pub(super) completer: Completer<String>,
}

/// A watch of a handoff that is not open, and until when it waits.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) handoff: HandoffId,
    pub(super) session: SessionKey,
    pub(super) until: Instant,
}

impl Parked {
    pub(super) fn is_of(&self, session: SessionKey, handoff: HandoffId) -> bool {
        (self.session, self.handoff) == (session, handoff)
    }
}

impl Waiter for Parked {
    fn session(&self) -> SessionKey {
        self.session
    }
}

pub(super) struct Schedulers {
    pub(super) events: Events<Event>,
    pub(super) trace: Trace,
    pub(super) timeouts: ControlTimeouts,
    pub(super) description: String,
    pub(super) leased: HashMap<HandoffId, LeasedHandoff>,
    pub(super) ended: RecentHandoffs<String>,
    pub(super) results: RecentHandoffs<String>,
    /// Requests that have come but are not scheduled: their watches wait as long as it takes.
    pub(super) expected: HashSet<HandoffId>,
    pub(super) parked: FairWaitlist<Parked>,
    pub(super) subscriptions: FairWaitlist<Subscription>,
    pub(super) watched: HashMap<HandoffId, Watched>,
    pub(super) asked: HashMap<u64, Asked>,
    pub(super) by_address: HashMap<String, SessionKey>,
}

impl Schedulers {
    pub(super) fn new(events: Events<Event>, timeouts: ControlTimeouts) -> Self {
        Self {
            events,
            trace: Trace::default(),
            timeouts,
            description: "{}".to_owned(),
            leased: HashMap::new(),
            ended: RecentHandoffs::default(),
            results: RecentHandoffs::default(),
            expected: HashSet::new(),
            parked: FairWaitlist::new(PARKED_CAP),
            subscriptions: FairWaitlist::new(PARKED_CAP),
            watched: HashMap::new(),
            asked: HashMap::new(),
            by_address: HashMap::new(),
        }
    }

    pub(super) fn say(cx: &mut ReactorContext, session: SessionKey, message: &Message) {
        cx.send(session, &message.encode());
    }

    fn told(&mut self, cx: &mut ReactorContext, session: SessionKey, message: Message) {
        match message {
            Message::Watch(handoff) => {
                self.trace.instant(Track::Reactor, "watched", &handoff, &[]);
                self.watch_here(cx, session, handoff);
            }
            Message::Unwatch {
                handoff,
                is_acknowledged,
            } => {
                self.unwatch_here(cx, session, handoff, is_acknowledged);
            }
            Message::Ask { id, question } => self.asked_here(cx, session, id, &question),
            Message::Opened { handoff, opening }
                if self.is_first(&handoff, session, |watched| &mut watched.is_opened) =>
            {
                self.trace.instant(Track::Reactor, "opened", &handoff, &[]);
                self.events.push(Event::Opened { handoff, opening });
            }
            Message::Finished { handoff, state }
                if self.is_first(&handoff, session, |watched| &mut watched.is_finished) =>
            {
                self.trace
                    .instant(Track::Reactor, "finished", &handoff, &[]);
                self.events.push(Event::Finished { handoff, state });
            }
            Message::Ended { handoff, reason } if self.watches(&handoff, session) => {
                self.watched.remove(&handoff);
                self.trace.instant(Track::Reactor, "ended", &handoff, &[]);
                self.events.push(Event::Ended {
                    handoff,
                    reason,
                    is_withdrawn: true,
                });
            }
            Message::Answer { id, json } => {
                let is_asked = self
                    .asked
                    .get(&id)
                    .is_some_and(|asked| asked.session == session);
                if is_asked && let Some(asked) = self.asked.remove(&id) {
                    asked.completer.complete(Ok(json));
                }
            }
            // Of a handoff that is not watched any more, or once more.
            Message::Opened { .. } | Message::Finished { .. } | Message::Ended { .. } => {}
        }
    }

    /// Answers a question, or keeps it until it can be answered.
    fn asked_here(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        question: &Question,
    ) {
        let until = cx.now + self.timeouts.open;
        let later = |handoff, awaited| Subscription {
            handoff,
            session,
            id,
            awaited,
            until,
        };
        let json = match *question {
            Question::Describe => self.description.clone(),
            Question::Release(handoff) => {
                let was_lent = self.release(cx, handoff, "it was released");
                was_lent.to_string()
            }
            Question::Result(handoff) => self
                .results
                .get(&handoff)
                .map_or("null".to_owned(), Clone::clone),
            // Of a time that no clock knows nothing is noted.
            Question::Progress { handoff, remaining } => (cx.now.checked_add(remaining))
                .is_some_and(|ends_at| self.progress(&handoff, ends_at))
                .to_string(),
            Question::Subscribe { handoff, lead } => {
                return self.subscribe_here(cx, later(handoff, Awaited::End { lead }));
            }
            Question::Watched(handoff) => {
                return self.subscribe_here(cx, later(handoff, Awaited::Consumer));
            }
        };
        Self::say(cx, session, &Message::Answer { id, json });
    }
}

impl Service for Schedulers {
    type Command = Command;

    fn command(&mut self, cx: &mut ReactorContext, command: Command) {
        match command {
            Command::Describe { json } => self.description = json,
            Command::Expect { handoff } => {
                self.expected.insert(handoff);
            }
            Command::Open { handoff, opening } => self.open(cx, handoff, opening),
            Command::Progress { handoff, ends_at } => {
                self.progress(&handoff, ends_at);
            }
            Command::Finish { handoff, state } => self.finish(cx, handoff, state),
            Command::Withdraw { handoff, reason } => {
                self.end(cx, handoff, &reason);
            }
            Command::Watch { handoff, producer } => self.watch(cx, handoff, &producer),
            Command::Unwatch {
                handoff,
                is_acknowledged,
            } => self.unwatch(cx, handoff, is_acknowledged),
            Command::SetResult { handoff, json } => self.results.insert(handoff, json),
            Command::Ask {
                address,
                question,
                deadline,
                completer,
            } => {
                self.ask(cx, &address, question, deadline, completer);
            }
            Command::Trace(trace) => self.trace = trace,
        }
    }

    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, peer: &Identity) {
        let (address, engine) = (cx.peer(session), &peer.engine_id);
        self.events.push_minor(Event::Log(format!(
            "control.open peer={address} engine_id={engine}"
        )));
        for (&handoff, _) in self
            .watched
            .iter()
            .filter(|(_, watched)| watched.session == session)
        {
            Self::say(cx, session, &Message::Watch(handoff));
        }
        let here = self
            .asked
            .iter()
            .filter(|(_, asked)| asked.session == session);
        let mut waiting: Vec<_> = here.map(|(&id, asked)| (id, &asked.question)).collect();
        // In the order in which they were asked: a later word on a prefill's end replaces an earlier one.
        waiting.sort_unstable_by_key(|(id, _)| *id);
        for (id, question) in waiting {
            let question = question.clone();
            Self::say(cx, session, &Message::Ask { id, question });
        }
    }

    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error) {
        self.events
            .push_minor(Event::Log(format!("control.closed {error}")));
        self.by_address.retain(|_, other| *other != session);
        self.parked.remove_if(|watch| watch.session == session);
        self.subscriptions.remove_if(|it| it.session == session);
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
            self.events.push(Event::Ended {
                handoff,
                reason: error.to_string(),
                is_withdrawn: false,
            });
        }
        let unanswered: Vec<u64> = self
            .asked
            .iter()
            .filter(|(_, asked)| asked.session == session)
            .map(|(id, _)| *id)
            .collect();
        for asked in unanswered.iter().filter_map(|id| self.asked.remove(id)) {
            asked.completer.complete(Err(error.clone()));
        }
    }

    fn frame(&mut self, cx: &mut ReactorContext, session: SessionKey, frame: &[u8]) -> Result<()> {
        self.told(cx, session, Message::decode(frame)?);
        Ok(())
    }

    fn timer(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let deadlines = [
            self.expire_leases(cx),
            self.expire_parked(cx),
            self.expire_watches(cx),
            self.expire_questions(cx),
            // Last: what the others have ended is told too.
            self.expire_subscriptions(cx),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn log(&mut self, text: String) {
        self.events
            .push_minor(Event::Log(format!("control.refused {text}")));
    }
}

#[cfg(test)]
mod tests;
