//! What is watched and queried elsewhere.

use std::time::Instant;

use super::messages::ControlMessage;
use super::service::{ControlService, HandoffWatch, PendingQuery};
use super::{ControlEvent, ControlQuery};
use crate::error::Error;
use crate::ids::{HandoffId, SessionKey};
use crate::reactor::ReactorContext;
use crate::work::Completer;

impl ControlService {
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
        let watched = HandoffWatch::new(session, cx.now + self.timeouts.handoff);
        self.watched.insert(handoff, watched);
        if cx.is_up(session) {
            Self::say(cx, session, &ControlMessage::Watch(handoff));
        }
    }

    pub(super) fn ask(
        &mut self,
        cx: &mut ReactorContext,
        address: &str,
        query: ControlQuery,
        deadline: Instant,
        completer: Completer<String>,
    ) {
        let session = self.session_to(cx, address);
        let id = cx.token();
        if cx.is_up(session) {
            Self::say(
                cx,
                session,
                &ControlMessage::Query {
                    id,
                    query: query.clone(),
                },
            );
        }
        self.queries.insert(
            id,
            PendingQuery {
                session,
                query,
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
        is_told: impl FnOnce(&mut HandoffWatch) -> &mut bool,
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
                &ControlMessage::Unwatch {
                    handoff,
                    is_acknowledged,
                },
            );
        }
    }

    pub(super) fn expire_watches(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let is_late = |watched: &HandoffWatch| watched.until <= cx.now;
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
            self.events.push(ControlEvent::Ended {
                handoff,
                reason,
                is_withdrawn: false,
            });
        }
        self.watched.values().map(|watched| watched.until).min()
    }

    pub(super) fn expire_queries(&mut self, cx: &ReactorContext) -> Option<Instant> {
        let late: Vec<u64> = self
            .queries
            .iter()
            .filter(|(_, queries)| queries.deadline <= cx.now)
            .map(|(id, _)| *id)
            .collect();
        for queries in late.iter().filter_map(|id| self.queries.remove(id)) {
            let text = format!("{} did not answer in time", cx.peer(queries.session));
            queries.completer.complete(Err(Error::Timeout(text)));
        }
        self.queries.values().map(|queries| queries.deadline).min()
    }
}
