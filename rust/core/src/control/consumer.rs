//! What is watched and asked elsewhere.

use std::time::Instant;

use super::messages::Message;
use super::service::{Asked, Schedulers, Watched};
use super::{Event, Question};
use crate::error::Error;
use crate::handoff::HandoffId;
use crate::reactor::{ReactorContext, SessionKey};
use crate::work::Completer;

impl Schedulers {
    /// The link to an address: the one there is, unless its end is about to be reported, or a new one.
    pub(super) fn session_to(&mut self, cx: &mut ReactorContext, address: &str) -> SessionKey {
        let known = self.by_address.get(address);
        if let Some(&session) = known.filter(|session| !cx.has_failed(**session)) {
            return session;
        }
        let session = cx.connect(address);
        self.by_address.insert(address.to_owned(), session);
        session
    }

    pub(super) fn watch(&mut self, cx: &mut ReactorContext, handoff: HandoffId, producer: &str) {
        let session = self.session_to(cx, producer);
        let watched = Watched::new(session, cx.now + self.timeouts.handoff);
        self.watched.insert(handoff, watched);
        if cx.is_up(session) {
            Self::say(cx, session, &Message::Watch(handoff));
        }
    }

    pub(super) fn ask(
        &mut self,
        cx: &mut ReactorContext,
        address: &str,
        question: Question,
        deadline: Instant,
        completer: Completer<String>,
    ) {
        let session = self.session_to(cx, address);
        let id = cx.token();
        if cx.is_up(session) {
            Self::say(
                cx,
                session,
                &Message::Ask {
                    id,
                    question: question.clone(),
                },
            );
        }
        self.asked.insert(
            id,
            Asked {
                session,
                question,
                deadline,
                completer,
            },
        );
    }

    pub(super) fn watches(&self, handoff: &HandoffId, session: SessionKey) -> bool {
        self.watched
            .get(handoff)
            .is_some_and(|watched| watched.session == session)
    }

    /// Whether the peer tells this for the first time of a handoff that is watched there.
    pub(super) fn is_first(
        &mut self,
        handoff: &HandoffId,
        session: SessionKey,
        is_told: impl FnOnce(&mut Watched) -> &mut bool,
    ) -> bool {
        let watched = self.watched.get_mut(handoff);
        watched
            .filter(|watched| watched.session == session)
            .is_some_and(|watched| !std::mem::replace(is_told(watched), true))
    }

    pub(super) fn unwatch(
        &mut self,
        cx: &mut ReactorContext,
        handoff: HandoffId,
        is_acknowledged: bool,
    ) {
        if let Some(watched) = self.watched.remove(&handoff) {
            Self::say(
                cx,
                watched.session,
                &Message::Unwatch {
                    handoff,
                    is_acknowledged,
                },
            );
        }
    }

    pub(super) fn expire_watches(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let is_late = |watched: &Watched| watched.until <= cx.now;
        let late: Vec<HandoffId> = self
            .watched
            .iter()
            .filter(|(_, watched)| is_late(watched))
            .map(|(id, _)| *id)
            .collect();
        for handoff in late {
            self.unwatch(cx, handoff, false);
            let reason = format!(
                "nothing came within {:?} (handoff_timeout_s)",
                self.timeouts.handoff
            );
            self.events.push(Event::Ended {
                handoff,
                reason,
                is_withdrawn: false,
            });
        }
        self.watched.values().map(|watched| watched.until).min()
    }

    pub(super) fn expire_questions(&mut self, cx: &ReactorContext) -> Option<Instant> {
        let late: Vec<u64> = self
            .asked
            .iter()
            .filter(|(_, asked)| asked.deadline <= cx.now)
            .map(|(id, _)| *id)
            .collect();
        for asked in late.iter().filter_map(|id| self.asked.remove(id)) {
            let text = format!("{} did not answer in time", cx.peer(asked.session));
            asked.completer.complete(Err(Error::Timeout(text)));
        }
        self.asked.values().map(|asked| asked.deadline).min()
    }
}
