//! The consumer's half of the control plane: the handoffs that this engine watches at their producers. A pure state machine,
//! as the producer's half.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::messages::ControlMessage;
use super::service::ControlOutbox;
use super::{ControlEvent, HandoffUpdate};
use crate::error::{Error, FailureCause};
use crate::ids::{HandoffId, SessionKey};
use crate::multimap::Multimap;
use crate::reactor::Timers;

/// Stage of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WatchStage {
    /// The session is not up.
    Connecting,
    /// The session is not up, and the consumer has given the handoff up. WATCH and UNWATCH are sent together when it is: a
    /// producer frees only blocks that were watched.
    GivenUp,
    /// WATCH has been sent.
    Sent,
}

/// A watched handoff. Its first `Opened` and its first `Finished` count: a peer that repeats them cannot fill the queue of
/// events.
struct HandoffWatch {
    session: SessionKey,
    stage: WatchStage,
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

    /// Sizes of its maps.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("watches", self.watches.len()),
            ("sessions of watches", self.of_sessions.len()),
            ("deadlines of watches", self.deadlines.len()),
        ]
    }

    /// Watches a handoff at its producer, which learns of it with [`send`](Self::send).
    pub(super) fn watch(&mut self, now: Instant, handoff: HandoffId, session: SessionKey) {
        self.remove(handoff);
        let watch = HandoffWatch {
            session,
            stage: WatchStage::Connecting,
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

    /// Sends a watch to its producer, whose session is up.
    pub(super) fn send(&mut self, out: &mut ControlOutbox, handoff: HandoffId) {
        let Some(watch) = self.watches.get_mut(&handoff) else {
            return;
        };
        let stage = std::mem::replace(&mut watch.stage, WatchStage::Sent);
        out.send(watch.session, ControlMessage::Watch(handoff));
        if stage == WatchStage::GivenUp {
            self.unwatch(out, handoff, false);
        }
    }

    pub(super) fn session_up(&mut self, out: &mut ControlOutbox, session: SessionKey) {
        let watched: Vec<_> = self.of_sessions.get(&session).copied().collect();
        for handoff in watched {
            self.send(out, handoff);
        }
    }

    pub(super) fn unwatch(
        &mut self,
        out: &mut ControlOutbox,
        handoff: HandoffId,
        is_acknowledged: bool,
    ) {
        let watch = self.watches.get_mut(&handoff);
        if let Some(watch) = watch.filter(|watch| watch.stage != WatchStage::Sent) {
            watch.stage = WatchStage::GivenUp;
        } else if let Some(watch) = self.remove(handoff) {
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
        error: &Error,
    ) {
        for handoff in self.of_sessions.remove_key(&session) {
            let watch = self.remove(handoff);
            if watch.is_some_and(|watch| watch.stage == WatchStage::GivenUp) {
                continue;
            }
            out.events.push(ControlEvent::Lost {
                handoff,
                reason: error.to_string(),
                cause: error.cause(),
            });
        }
    }

    /// Ends watches whose handoff took too long, and returns the next deadline.
    pub(super) fn expire(&mut self, out: &mut ControlOutbox, now: Instant) -> Option<Instant> {
        let timeout = self.handoff_timeout;
        while let Some(handoff) = self.deadlines.pop_expired(now) {
            let watch = self.remove(handoff);
            let Some(watch) = watch.filter(|watch| watch.stage != WatchStage::GivenUp) else {
                continue;
            };
            let unwatch = ControlMessage::Unwatch {
                handoff,
                is_acknowledged: false,
            };
            out.send(watch.session, unwatch);
            out.events.push(ControlEvent::Lost {
                handoff,
                reason: format!("nothing came within {timeout:?} (handoff_timeout_s)"),
                cause: FailureCause::Timeout,
            });
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
        consumer.session_down(&mut out, 20, &Error::Closed("lost".to_owned()));
        let next = consumer.expire(&mut out, now + timeout);
        assert_eq!(next, Some(later + timeout));
        assert_eq!((out.messages.len(), out.events.drain().len()), (0, 0));
        consumer.session_up(&mut out, 21);
        assert_eq!(out.messages, [(21, ControlMessage::Watch(ID))]);
        consumer.session_down(&mut out, 21, &Error::Closed("lost".to_owned()));
        assert_eq!(out.events.drain().len(), 1);
        assert_eq!(consumer.expire(&mut out, now), None);
    }

    #[test]
    fn a_handoff_given_up_before_its_session_is_up_is_released_then() {
        let mut consumer = ConsumerRole::new(Duration::from_secs(60));
        let (mut out, now, handoff) = (ControlOutbox::default(), Instant::now(), ID);
        consumer.watch(now, ID, 20);
        consumer.unwatch(&mut out, ID, false);
        assert_eq!(out.messages, []);
        consumer.session_up(&mut out, 20);
        let unwatch = ControlMessage::Unwatch {
            handoff,
            is_acknowledged: false,
        };
        let told = [(20, ControlMessage::Watch(ID)), (20, unwatch)];
        assert_eq!(out.messages, told);
        assert!(consumer.watches.is_empty());
    }

    #[test]
    fn a_handoff_given_up_whose_session_never_comes_up_is_forgotten_without_an_event() {
        let timeout = Duration::from_secs(60);
        for is_lost in [true, false] {
            let mut consumer = ConsumerRole::new(timeout);
            let (mut out, now) = (ControlOutbox::default(), Instant::now());
            consumer.watch(now, ID, 20);
            consumer.unwatch(&mut out, ID, false);
            if is_lost {
                consumer.session_down(&mut out, 20, &Error::Closed("refused".to_owned()));
            } else {
                consumer.expire(&mut out, now + timeout);
            }
            assert_eq!((out.messages.len(), out.events.drain().len()), (0, 0));
            assert!(consumer.watches.is_empty());
        }
    }

    #[test]
    fn a_lost_handoff_has_the_kind_of_its_failure() {
        let timeout = Duration::from_secs(60);
        let text = || "what a peer says".to_owned();
        for (error, cause) in [
            (Error::Connect(text()), FailureCause::Unreachable),
            (Error::Authentication(text()), FailureCause::Refused),
            (Error::lost("10.0.0.1:1", text()), FailureCause::Lost),
        ] {
            let (mut consumer, mut out) = (ConsumerRole::new(timeout), ControlOutbox::default());
            consumer.watch(Instant::now(), ID, 20);
            consumer.session_down(&mut out, 20, &error);
            let (handoff, reason) = (ID, error.to_string());
            let lost = ControlEvent::Lost {
                handoff,
                reason,
                cause,
            };
            assert_eq!(out.events.drain(), [lost]);
        }
        let (mut consumer, mut out) = (ConsumerRole::new(timeout), ControlOutbox::default());
        let now = Instant::now();
        consumer.watch(now, ID, 20);
        consumer.expire(&mut out, now + timeout);
        let events = out.events.drain();
        assert!(
            matches!(&events[..], [ControlEvent::Lost { cause, .. }] if *cause == FailureCause::Timeout),
            "{events:?}"
        );
    }

    #[test]
    fn only_the_session_of_a_watch_ends_it() {
        let mut consumer = ConsumerRole::new(Duration::from_secs(60));
        let mut out = ControlOutbox::default();
        let ended_update = || HandoffUpdate::Ended("aborted".to_owned());
        consumer.watch(Instant::now(), ID, 20);
        consumer.update(&mut out, 21, ID, ended_update());
        consumer.session_down(&mut out, 21, &Error::Closed("lost".to_owned()));
        assert_eq!(out.events.drain(), []);
        consumer.update(&mut out, 20, ID, ended_update());
        consumer.session_down(&mut out, 20, &Error::Closed("lost".to_owned()));
        let (handoff, update) = (ID, ended_update());
        let ended = ControlEvent::Updated { handoff, update };
        assert_eq!(out.events.drain(), [ended]);
    }
}
