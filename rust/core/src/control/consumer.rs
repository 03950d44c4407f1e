//! The consumer's half of the control plane: the handoffs that this engine watches at their producers. A pure state machine,
//! as the producer's half.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::messages::ControlMessage;
use super::service::ControlOutbox;
use super::{ControlEvent, HandoffUpdate};
use crate::ids::{HandoffId, SessionKey};
use crate::multimap::Multimap;
use crate::reactor::Timers;

/// A watched handoff. Its first `Opened` and its first `Finished` count: a peer that repeats them cannot fill the queue of
/// events.
struct HandoffWatch {
    session: SessionKey,
    is_opened: bool,
    is_finished: bool,
}

pub(super) struct ConsumerRole {
    handoff_timeout: Duration,
    watches: HashMap<HandoffId, HandoffWatch>,
    of_sessions: Multimap<SessionKey, HandoffId>,
    deadlines: Timers<HandoffId>,
}

impl ConsumerRole {
    pub(super) fn new(handoff_timeout: Duration) -> Self {
        Self {
            handoff_timeout,
            watches: HashMap::new(),
            of_sessions: Multimap::default(),
            deadlines: Timers::default(),
        }
    }

    /// What its maps hold.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("watches", self.watches.len()),
            ("sessions of watches", self.of_sessions.len()),
            ("deadlines of watches", self.deadlines.len()),
        ]
    }

    /// Watches a handoff at its producer. The producer learns of it now, or when its session is established.
    pub(super) fn watch(&mut self, now: Instant, handoff: HandoffId, session: SessionKey) {
        self.remove(handoff);
        let watch = HandoffWatch {
            session,
            is_opened: false,
            is_finished: false,
        };
        self.watches.insert(handoff, watch);
        self.of_sessions.insert(session, handoff);
        self.deadlines.set(handoff, now + self.handoff_timeout);
    }

    fn remove(&mut self, handoff: HandoffId) -> Option<HandoffWatch> {
        let watch = self.watches.remove(&handoff)?;
        self.of_sessions.remove(watch.session, &handoff);
        self.deadlines.cancel(handoff);
        Some(watch)
    }

    pub(super) fn session_up(&self, out: &mut ControlOutbox, session: SessionKey) {
        for &handoff in self.of_sessions.get(&session) {
            out.send(session, ControlMessage::Watch(handoff));
        }
    }

    pub(super) fn unwatch(
        &mut self,
        out: &mut ControlOutbox,
        handoff: HandoffId,
        is_acknowledged: bool,
    ) {
        if let Some(watch) = self.remove(handoff) {
            let unwatch = ControlMessage::Unwatch {
                handoff,
                is_acknowledged,
            };
            out.send(watch.session, unwatch);
        }
    }

    /// The producer of a watched handoff reports on it.
    pub(super) fn update(
        &mut self,
        out: &mut ControlOutbox,
        session: SessionKey,
        handoff: HandoffId,
        update: HandoffUpdate,
    ) {
        let watch = self.watches.get_mut(&handoff);
        let Some(watch) = watch.filter(|watch| watch.session == session) else {
            return;
        };
        let is_repeated = match &update {
            HandoffUpdate::Opened(_) => std::mem::replace(&mut watch.is_opened, true),
            HandoffUpdate::Finished(_) => std::mem::replace(&mut watch.is_finished, true),
            HandoffUpdate::Ended(_) => self.remove(handoff).is_none(),
        };
        if !is_repeated {
            out.trace(update.name(), &handoff);
            out.events.push(ControlEvent::Updated { handoff, update });
        }
    }

    pub(super) fn session_down(
        &mut self,
        out: &mut ControlOutbox,
        session: SessionKey,
        reason: &str,
    ) {
        for handoff in self.of_sessions.remove_key(&session) {
            self.remove(handoff);
            let reason = reason.to_owned();
            out.events.push(ControlEvent::Lost { handoff, reason });
        }
    }

    /// Ends watches whose handoff took too long, and returns the next deadline.
    pub(super) fn expire(&mut self, out: &mut ControlOutbox, now: Instant) -> Option<Instant> {
        let timeout = self.handoff_timeout;
        while let Some(handoff) = self.deadlines.pop_expired(now) {
            let Some(watch) = self.remove(handoff) else {
                continue;
            };
            let unwatch = ControlMessage::Unwatch {
                handoff,
                is_acknowledged: false,
            };
            out.send(watch.session, unwatch);
            let reason = format!("nothing came within {timeout:?} (handoff_timeout_s)");
            out.events.push(ControlEvent::Lost { handoff, reason });
        }
        self.deadlines.next()
    }
}

#[cfg(test)]
mod tests {
    use super::super::SequenceState;
    use super::super::producer::tests::opening;
    use super::*;

    const ID: HandoffId = [1; 16];

    #[test]
    fn a_producer_that_repeats_itself_causes_each_event_once() {
        let mut consumer = ConsumerRole::new(Duration::from_secs(60));
        let (mut out, now, handoff) = (ControlOutbox::default(), Instant::now(), ID);
        let updates = [
            HandoffUpdate::Opened(opening()),
            HandoffUpdate::Finished(SequenceState::default()),
        ];
        let expected = updates
            .clone()
            .map(|update| ControlEvent::Updated { handoff, update });
        for _ in 0..2 {
            consumer.watch(now, ID, 20);
            for session in [99, 20, 20, 99] {
                for update in updates.clone() {
                    consumer.update(&mut out, session, ID, update);
                }
            }
            assert_eq!(out.events.drain(), expected, "a new watch counts anew");
        }
    }

    #[test]
    fn a_handoff_watched_again_has_the_session_and_the_deadline_of_its_last_watch() {
        let timeout = Duration::from_secs(60);
        let mut consumer = ConsumerRole::new(timeout);
        let (mut out, now) = (ControlOutbox::default(), Instant::now());
        let later = now + timeout / 2;
        consumer.watch(now, ID, 20);
        consumer.watch(later, ID, 21);
        consumer.session_up(&mut out, 20);
        consumer.session_down(&mut out, 20, "lost");
        let next = consumer.expire(&mut out, now + timeout);
        assert_eq!(next, Some(later + timeout));
        assert_eq!((out.messages.len(), out.events.drain().len()), (0, 0));
        consumer.session_up(&mut out, 21);
        assert_eq!(out.messages, [(21, ControlMessage::Watch(ID))]);
        consumer.session_down(&mut out, 21, "lost");
        assert_eq!(out.events.drain().len(), 1);
        assert_eq!(consumer.expire(&mut out, now), None);
    }

    #[test]
    fn only_the_session_of_a_watch_ends_it() {
        let mut consumer = ConsumerRole::new(Duration::from_secs(60));
        let mut out = ControlOutbox::default();
        let ended_update = || HandoffUpdate::Ended("aborted".to_owned());
        consumer.watch(Instant::now(), ID, 20);
        consumer.update(&mut out, 21, ID, ended_update());
        consumer.session_down(&mut out, 21, "lost");
        assert_eq!(out.events.drain(), []);
        consumer.update(&mut out, 20, ID, ended_update());
        consumer.session_down(&mut out, 20, "lost");
        let (handoff, update) = (ID, ended_update());
        let ended = ControlEvent::Updated { handoff, update };
        assert_eq!(out.events.drain(), [ended]);
    }
}
