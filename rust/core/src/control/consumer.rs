//! What is watched and asked elsewhere.

use std::time::Instant;

use super::messages::Message;
use super::service::{Asked, Schedulers, Watched};
use super::{Event, Question};
use crate::error::Error;
use crate::handoff::HandoffId;
use crate::node::{Io, LinkId};
use crate::work::Completer;

impl Schedulers {
    /// The link to an address: the one there is, unless its end is about to be reported, or a new one.
    pub(super) fn link_to(&mut self, io: &mut Io, address: &str) -> LinkId {
        let known = self.by_address.get(address);
        if let Some(&link) = known.filter(|link| !io.has_failed(**link)) {
            return link;
        }
        let link = io.connect(address);
        self.by_address.insert(address.to_owned(), link);
        link
    }

    pub(super) fn watch(&mut self, io: &mut Io, handoff: HandoffId, producer: &str) {
        let link = self.link_to(io, producer);
        let watched = Watched::new(link, io.now + self.patience.handoff);
        self.watched.insert(handoff, watched);
        if io.is_up(link) {
            Self::say(io, link, &Message::Watch(handoff));
        }
    }

    pub(super) fn ask(
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

    pub(super) fn watches(&self, handoff: &HandoffId, link: LinkId) -> bool {
        self.watched
            .get(handoff)
            .is_some_and(|watched| watched.link == link)
    }

    /// Whether the peer tells this for the first time of a handoff that is watched there.
    pub(super) fn is_first(
        &mut self,
        handoff: &HandoffId,
        link: LinkId,
        is_told: impl FnOnce(&mut Watched) -> &mut bool,
    ) -> bool {
        let watched = self.watched.get_mut(handoff);
        watched
            .filter(|watched| watched.link == link)
            .is_some_and(|watched| !std::mem::replace(is_told(watched), true))
    }

    pub(super) fn unwatch(&mut self, io: &mut Io, handoff: HandoffId, is_taken: bool) {
        if let Some(watched) = self.watched.remove(&handoff) {
            Self::say(io, watched.link, &Message::Unwatch { handoff, is_taken });
        }
    }

    pub(super) fn expire_watches(&mut self, io: &mut Io) -> Option<Instant> {
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
            self.events.push(Event::Gone {
                handoff,
                reason,
                is_withdrawn: false,
            });
        }
        self.watched.values().map(|watched| watched.until).min()
    }

    pub(super) fn expire_questions(&mut self, io: &Io) -> Option<Instant> {
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
