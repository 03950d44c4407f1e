//! Answers to clients: what follows from a change of the state.

use std::sync::Arc;

use super::super::carrying::{carry, withdraw_parts};
use super::super::content::Content;
use super::super::messages::{Carried, EntryMessage};
use super::super::state::{EntryAction, Holder};
use super::super::{INLINE_CAP, source_id};
use super::Server;
use crate::clock;
use crate::error::Result;
use crate::transfer::Cx;

impl Server {
    /// Does what the state asks for, until it asks for nothing more.
    pub(super) fn run_actions(&mut self, cx: &mut Cx<'_>) {
        loop {
            let actions = self.shared.drain_client_actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.act(cx, action);
            }
        }
    }

    fn act(&mut self, cx: &mut Cx<'_>, action: EntryAction<Arc<Content>>) {
        match action {
            EntryAction::Reserved(holder) => self.reserved(cx, holder),
            EntryAction::Occupied(holder) => {
                if self.remove_arrival(cx, holder) {
                    EntryMessage::Occupied.send(cx.links, holder.0, holder.1);
                }
            }
            EntryAction::Refused(holder, error) => {
                // Otherwise its client has withdrawn it, and has its answer.
                if self.remove_arrival(cx, holder) {
                    EntryMessage::Refused(error).send(cx.links, holder.0, holder.1);
                }
            }
            EntryAction::Offered(holder, content) => self.offer(cx, holder, &content),
            EntryAction::Nothing(holder) => {
                EntryMessage::Nothing.send(cx.links, holder.0, holder.1);
            }
            EntryAction::Expired(holder) => {
                if !self.remove_arrival(cx, holder) {
                    self.withdraw_parts(cx, holder);
                }
                EntryMessage::Ended.send(cx.links, holder.0, holder.1);
            }
            EntryAction::Save(id, key, content) => {
                if let Some(jobs) = &self.disk {
                    jobs.disk.save(id, key, &content);
                }
            }
            EntryAction::Erase(id) => {
                if let Some(jobs) = &self.disk {
                    jobs.disk.erase(id);
                }
            }
            EntryAction::Load(id, num_bytes) => self.begin_load(cx, id, num_bytes),
        }
    }

    /// Describes an entry to the operation that holds it. The reader of a value verifies all of it, so that nothing is
    /// hashed here.
    fn offer(&mut self, cx: &mut Cx<'_>, holder: Holder, content: &Content) {
        let is_held = self.change(|state| state.entries.is_held(holder));
        if is_held != Ok(true) {
            // The client is lost, or has released the operation.
            return;
        }
        let (session, operation) = holder;
        let record = content.description.to_record();
        let carried = record.and_then(|record| Ok((record, self.carry(cx, holder, content)?)));
        match carried {
            Ok((record, parts)) => {
                let message = EntryMessage::Offer {
                    checksum: content.checksum,
                    record,
                    parts,
                };
                message.send(cx.links, session, operation);
            }
            Err(error) => {
                self.release(cx, holder);
                EntryMessage::Refused(error).send(cx.links, session, operation);
            }
        }
    }

    fn carry(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        content: &Content,
    ) -> Result<Vec<Carried<'static>>> {
        let (exposed, mut space) = (&mut self.exposed, INLINE_CAP);
        let parts = content.parts.iter().enumerate();
        parts
            .map(|(index, part)| {
                let source = (session, source_id(operation, index));
                let bytes = (&part.buffer, part.memory.as_ref());
                carry(cx, exposed, source, self.integrity, bytes, &mut space)
            })
            .collect()
    }

    /// Ends the exposure of an operation's entry.
    pub(super) fn withdraw_parts(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        withdraw_parts(cx, &mut self.exposed, holder);
    }

    /// Ends whatever an operation holds or waits for.
    pub(super) fn release(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        self.remove_arrival(cx, holder);
        self.withdraw_parts(cx, holder);
        let now = clock::now();
        let _ = self.change(|state| state.entries.release(holder, now));
    }
}
