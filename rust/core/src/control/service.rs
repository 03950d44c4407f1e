//! Both roles of the control plane on its node's thread: what is lent here, and what is watched elsewhere.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use super::messages::Message;
use super::{Event, Opening, Patience, Question, SequenceState};
use crate::error::{Error, Result};
use crate::events::Events;
use crate::handoff::HandoffId;
use crate::identity::Identity;
use crate::node::{Io, LinkId, Service};
use crate::recent::Recent;
use crate::work::Completer;

/// Watches that may wait for handoffs that are not open.
const PARKED_CAP: usize = 1024;

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
        is_taken: bool,
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
}

struct Lent {
    opening: Opening,
    state: Option<SequenceState>,
    /// When it ends unless somebody watches it; set once finished.
    lease_ends: Option<Instant>,
    watchers: HashSet<LinkId>,
    /// The last consumer left before prefill had finished.
    is_abandoned: bool,
}

struct Watched {
    link: LinkId,
    until: Instant,
}

struct Asked {
    link: LinkId,
    question: Question,
    deadline: Instant,
    completer: Completer<String>,
}

pub(super) struct Schedulers {
    events: Events<Event>,
    patience: Patience,
    description: String,
    lent: HashMap<HandoffId, Lent>,
    ended: Recent<String>,
    results: Recent<String>,
    /// Requests that have come but are not scheduled: their watches wait as long as it takes.
    expected: HashSet<HandoffId>,
    parked: Vec<(HandoffId, LinkId, Instant)>,
    watched: HashMap<HandoffId, Watched>,
    asked: HashMap<u64, Asked>,
    by_address: HashMap<String, LinkId>,
}

impl Schedulers {
    pub(super) fn new(events: Events<Event>, patience: Patience) -> Self {
        Self {
            events,
            patience,
            description: "{}".to_owned(),
            lent: HashMap::new(),
            ended: Recent::default(),
            results: Recent::default(),
            expected: HashSet::new(),
            parked: Vec::new(),
            watched: HashMap::new(),
            asked: HashMap::new(),
            by_address: HashMap::new(),
        }
    }

    fn say(io: &mut Io, link: LinkId, message: &Message) {
        io.send(link, &message.encode());
    }

    // --- producer

    fn open(&mut self, io: &mut Io, handoff: HandoffId, opening: Opening) {
        self.expected.remove(&handoff);
        if let Some(reason) = self.ended.get(&handoff) {
            // Released or withdrawn before it was opened.
            return self.events.push(Event::Released {
                handoff,
                reason: reason.clone(),
            });
        }
        // Opened again, in a new generation, it keeps those who watch it.
        let watchers = self.lent.remove(&handoff).map(|lent| lent.watchers);
        let watchers = watchers.unwrap_or_default();
        for &link in &watchers {
            let opening = opening.clone();
            Self::say(io, link, &Message::Opened { handoff, opening });
        }
        let lent = Lent {
            opening,
            state: None,
            lease_ends: None,
            watchers,
            is_abandoned: false,
        };
        self.lent.insert(handoff, lent);
        let parked = std::mem::take(&mut self.parked);
        for (id, link, until) in parked {
            if id == handoff {
                self.watch_here(io, link, handoff);
            } else {
                self.parked.push((id, link, until));
            }
        }
    }

    fn finish(&mut self, io: &mut Io, handoff: HandoffId, state: SequenceState) {
        let lease_ends = io.now + self.patience.lease;
        let Some(lent) = self.lent.get_mut(&handoff) else {
            let reason = self
                .ended
                .get(&handoff)
                .map_or("it was never opened", String::as_str)
                .to_owned();
            return self.events.push(Event::Released { handoff, reason });
        };
        lent.lease_ends = Some(lease_ends);
        for &link in &lent.watchers {
            Self::say(
                io,
                link,
                &Message::Finished {
                    handoff,
                    state: state.clone(),
                },
            );
        }
        lent.state = Some(state);
        if lent.is_abandoned {
            self.release(io, handoff, "its consumer is gone");
        }
    }

    /// Ends a lent handoff and tells whoever watches it. `None`: it was not lent.
    fn end(&mut self, io: &mut Io, handoff: HandoffId, reason: &str) -> Option<Lent> {
        self.expected.remove(&handoff);
        self.ended.insert(handoff, reason.to_owned());
        let lent = self.lent.remove(&handoff);
        let waiting = self.parked.extract_if(.., |(id, ..)| *id == handoff);
        let mut told: Vec<LinkId> = waiting.map(|(_, link, _)| link).collect();
        told.extend(lent.iter().flat_map(|lent| &lent.watchers));
        for link in told {
            let reason = reason.to_owned();
            Self::say(io, link, &Message::Gone { handoff, reason });
        }
        lent
    }

    /// Ends a lent handoff from outside: the scheduler is told to free its blocks.
    fn release(&mut self, io: &mut Io, handoff: HandoffId, reason: &str) -> bool {
        let was_lent = self.end(io, handoff, reason).is_some();
        if was_lent {
            self.events.push(Event::Released {
                handoff,
                reason: reason.to_owned(),
            });
        }
        was_lent
    }

    fn watch_here(&mut self, io: &mut Io, link: LinkId, handoff: HandoffId) {
        if let Some(lent) = self.lent.get_mut(&handoff) {
            lent.watchers.insert(link);
            lent.is_abandoned = false;
            Self::say(
                io,
                link,
                &Message::Opened {
                    handoff,
                    opening: lent.opening.clone(),
                },
            );
            if let Some(state) = lent.state.clone() {
                Self::say(io, link, &Message::Finished { handoff, state });
            }
        } else if let Some(reason) = self.ended.get(&handoff) {
            Self::say(
                io,
                link,
                &Message::Gone {
                    handoff,
                    reason: reason.clone(),
                },
            );
        } else if self.parked.len() >= PARKED_CAP {
            let reason = "too many watches wait for handoffs that are not open".to_owned();
            Self::say(io, link, &Message::Gone { handoff, reason });
        } else {
            self.parked
                .push((handoff, link, io.now + self.patience.open));
        }
    }

    fn unwatch_here(&mut self, io: &mut Io, link: LinkId, handoff: HandoffId, is_taken: bool) {
        let num_parked = self.parked.len();
        self.parked
            .retain(|(id, other, _)| (*id, *other) != (handoff, link));
        if self.parked.len() < num_parked && !is_taken {
            // Nobody is left to read it: once opened, it is given back at once.
            self.ended
                .insert(handoff, "its consumer gave up".to_owned());
        }
        let Some(lent) = self
            .lent
            .get_mut(&handoff)
            .filter(|lent| lent.watchers.contains(&link))
        else {
            return;
        };
        lent.watchers.remove(&link);
        if is_taken {
            // Its workers have told ours, if no message was lost; this frees the blocks in any case.
            self.release(io, handoff, "it has been taken");
        } else {
            self.abandon(io, handoff, "its consumer gave up");
        }
    }

    fn abandon(&mut self, io: &mut Io, handoff: HandoffId, reason: &str) {
        let Some(lent) = self
            .lent
            .get_mut(&handoff)
            .filter(|lent| lent.watchers.is_empty())
        else {
            return;
        };
        if lent.state.is_some() {
            self.release(io, handoff, reason);
        } else {
            lent.is_abandoned = true;
        }
    }

    fn answer(&mut self, io: &mut Io, question: &Question) -> String {
        match question {
            Question::Describe => self.description.clone(),
            Question::Release(handoff) => {
                let was_lent = self.release(io, *handoff, "it was released");
                was_lent.to_string()
            }
            Question::Result(handoff) => self
                .results
                .get(handoff)
                .map_or("null".to_owned(), Clone::clone),
        }
    }

    // --- consumer and asker

    /// The link to an address: the one there is, unless its end is about to be reported, or a new one.
    fn link_to(&mut self, io: &mut Io, address: &str) -> LinkId {
        let known = self.by_address.get(address);
        if let Some(&link) = known.filter(|link| !io.has_failed(**link)) {
            return link;
        }
        let link = io.connect(address);
        self.by_address.insert(address.to_owned(), link);
        link
    }

    fn watch(&mut self, io: &mut Io, handoff: HandoffId, producer: &str) {
        let link = self.link_to(io, producer);
        self.watched.insert(
            handoff,
            Watched {
                link,
                until: io.now + self.patience.handoff,
            },
        );
        if io.is_up(link) {
            Self::say(io, link, &Message::Watch(handoff));
        }
    }

    fn ask(
        &mut self,
        io: &mut Io,
        address: &str,
        question: Question,
        deadline: Instant,
        completer: Completer<String>,
    ) {
        let link = self.link_to(io, address);
        let id = io.token();
        if io.is_up(link) {
            Self::say(
                io,
                link,
                &Message::Ask {
                    id,
                    question: question.clone(),
                },
            );
        }
        self.asked.insert(
            id,
            Asked {
                link,
                question,
                deadline,
                completer,
            },
        );
    }

    fn watches(&self, handoff: &HandoffId, link: LinkId) -> bool {
        self.watched
            .get(handoff)
            .is_some_and(|watched| watched.link == link)
    }

    fn unwatch(&mut self, io: &mut Io, handoff: HandoffId, is_taken: bool) {
        if let Some(watched) = self.watched.remove(&handoff) {
            Self::say(io, watched.link, &Message::Unwatch { handoff, is_taken });
        }
    }

    fn told(&mut self, io: &mut Io, link: LinkId, message: Message) {
        match message {
            Message::Watch(handoff) => self.watch_here(io, link, handoff),
            Message::Unwatch { handoff, is_taken } => {
                self.unwatch_here(io, link, handoff, is_taken);
            }
            Message::Ask { id, question } => {
                let json = self.answer(io, &question);
                Self::say(io, link, &Message::Answer { id, json });
            }
            Message::Opened { handoff, opening } if self.watches(&handoff, link) => {
                self.events.push(Event::Opened { handoff, opening });
            }
            Message::Finished { handoff, state } if self.watches(&handoff, link) => {
                self.events.push(Event::Finished { handoff, state });
            }
            Message::Gone { handoff, reason } if self.watches(&handoff, link) => {
                self.watched.remove(&handoff);
                self.events.push(Event::Gone { handoff, reason });
            }
            Message::Answer { id, json } => {
                let is_asked = self.asked.get(&id).is_some_and(|asked| asked.link == link);
                if is_asked && let Some(asked) = self.asked.remove(&id) {
                    asked.completer.complete(Ok(json));
                }
            }
            // Of a handoff that is not watched any more.
            Message::Opened { .. } | Message::Finished { .. } | Message::Gone { .. } => {}
        }
    }

    fn expire_leases(&mut self, io: &mut Io) -> Option<Instant> {
        let now = io.now;
        let is_late =
            |lent: &Lent| lent.watchers.is_empty() && lent.lease_ends.is_some_and(|at| at <= now);
        let late: Vec<HandoffId> = self
            .lent
            .iter()
            .filter(|(_, lent)| is_late(lent))
            .map(|(id, _)| *id)
            .collect();
        for handoff in late {
            self.release(io, handoff, "its lease ended before a consumer came");
        }
        self.lent
            .values()
            .filter(|lent| lent.watchers.is_empty())
            .filter_map(|lent| lent.lease_ends)
            .min()
    }

    fn expire_parked(&mut self, io: &mut Io) -> Option<Instant> {
        let (late, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.parked)
            .into_iter()
            .partition(|(id, _, until)| *until <= io.now && !self.expected.contains(id));
        self.parked = kept;
        for (handoff, link, _) in late {
            let reason = "the handoff is not known to its producer".to_owned();
            Self::say(io, link, &Message::Gone { handoff, reason });
        }
        let unknown = |(id, ..): &&(HandoffId, LinkId, Instant)| !self.expected.contains(id);
        let parked = self.parked.iter().filter(unknown);
        parked.map(|(_, _, until)| *until).min()
    }

    fn expire_watches(&mut self, io: &mut Io) -> Option<Instant> {
        let is_late = |watched: &Watched| watched.until <= io.now;
        let late: Vec<HandoffId> = self
            .watched
            .iter()
            .filter(|(_, watched)| is_late(watched))
            .map(|(id, _)| *id)
            .collect();
        for handoff in late {
            self.unwatch(io, handoff, false);
            let reason = format!(
                "nothing came within {:?} (handoff_timeout_s)",
                self.patience.handoff
            );
            self.events.push(Event::Gone { handoff, reason });
        }
        self.watched.values().map(|watched| watched.until).min()
    }

    fn expire_questions(&mut self, io: &Io) -> Option<Instant> {
        let late: Vec<u64> = self
            .asked
            .iter()
            .filter(|(_, asked)| asked.deadline <= io.now)
            .map(|(id, _)| *id)
            .collect();
        for asked in late.iter().filter_map(|id| self.asked.remove(id)) {
            let text = format!("{} did not answer in time", io.peer(asked.link));
            asked.completer.complete(Err(Error::Timeout(text)));
        }
        self.asked.values().map(|asked| asked.deadline).min()
    }
}

impl Service for Schedulers {
    type Command = Command;

    fn command(&mut self, io: &mut Io, command: Command) {
        match command {
            Command::Describe { json } => self.description = json,
            Command::Expect { handoff } => {
                self.expected.insert(handoff);
            }
            Command::Open { handoff, opening } => self.open(io, handoff, opening),
            Command::Finish { handoff, state } => self.finish(io, handoff, state),
            Command::Withdraw { handoff, reason } => {
                self.end(io, handoff, &reason);
            }
            Command::Watch { handoff, producer } => self.watch(io, handoff, &producer),
            Command::Unwatch { handoff, is_taken } => self.unwatch(io, handoff, is_taken),
            Command::SetResult { handoff, json } => self.results.insert(handoff, json),
            Command::Ask {
                address,
                question,
                deadline,
                completer,
            } => {
                self.ask(io, &address, question, deadline, completer);
            }
        }
    }

    fn link_up(&mut self, io: &mut Io, link: LinkId, peer: &Identity) {
        let (address, engine) = (io.peer(link), &peer.engine_id);
        self.events.push_minor(Event::Log(format!(
            "control.open peer={address} engine_id={engine}"
        )));
        for (&handoff, _) in self
            .watched
            .iter()
            .filter(|(_, watched)| watched.link == link)
        {
            Self::say(io, link, &Message::Watch(handoff));
        }
        for (&id, asked) in self.asked.iter().filter(|(_, asked)| asked.link == link) {
            Self::say(
                io,
                link,
                &Message::Ask {
                    id,
                    question: asked.question.clone(),
                },
            );
        }
    }

    fn link_down(&mut self, io: &mut Io, link: LinkId, error: Error) {
        self.events
            .push_minor(Event::Log(format!("control.closed {error}")));
        self.by_address.retain(|_, other| *other != link);
        self.parked.retain(|(_, other, _)| *other != link);
        let watching: Vec<HandoffId> = self
            .lent
            .iter()
            .filter(|(_, lent)| lent.watchers.contains(&link))
            .map(|(id, _)| *id)
            .collect();
        for handoff in watching {
            if let Some(lent) = self.lent.get_mut(&handoff) {
                lent.watchers.remove(&link);
            }
            self.abandon(io, handoff, "its consumer is gone");
        }
        let lost: Vec<HandoffId> = self
            .watched
            .iter()
            .filter(|(_, watched)| watched.link == link)
            .map(|(id, _)| *id)
            .collect();
        for handoff in lost {
            self.watched.remove(&handoff);
            self.events.push(Event::Gone {
                handoff,
                reason: error.to_string(),
            });
        }
        let unanswered: Vec<u64> = self
            .asked
            .iter()
            .filter(|(_, asked)| asked.link == link)
            .map(|(id, _)| *id)
            .collect();
        for asked in unanswered.iter().filter_map(|id| self.asked.remove(id)) {
            asked.completer.complete(Err(error.clone()));
        }
    }

    fn frame(&mut self, io: &mut Io, link: LinkId, frame: &[u8]) -> Result<()> {
        self.told(io, link, Message::decode(frame)?);
        Ok(())
    }

    fn timer(&mut self, io: &mut Io) -> Option<Instant> {
        let deadlines = [
            self.expire_leases(io),
            self.expire_parked(io),
            self.expire_watches(io),
            self.expire_questions(io),
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
