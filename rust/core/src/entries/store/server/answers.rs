//! Answers to clients: what follows from a change of the state.

use std::sync::Arc;

use super::super::content::Content;
use super::super::messages::{Carried, StoreMessage};
use super::Server;
use crate::clock;
use crate::entries::state::{EntryAction, Holder};
use crate::error::{Error, Result};
use crate::integrity::Integrity;
use crate::transfer::Cx;

impl Server {
    /// Does what the state asks for, until it asks for nothing more.
    pub(super) fn run_actions(&mut self, cx: &mut Cx<'_>) {
        while let Some(action) = self.state.next_action() {
            self.act(cx, action);
        }
    }

    fn act(&mut self, cx: &mut Cx<'_>, action: EntryAction<Arc<Content>>) {
        match action {
            EntryAction::Reserved(holder) => self.reserved(cx, holder),
            EntryAction::Occupied(holder) => {
                self.arrivals.remove(&holder);
                StoreMessage::Occupied.send(cx.links, holder.0, holder.1);
            }
            EntryAction::Refused(holder, error) => {
                self.arrivals.remove(&holder);
                StoreMessage::Refused(error).send(cx.links, holder.0, holder.1);
            }
            EntryAction::Offered(holder, content) => self.offer(cx, holder, &content),
            EntryAction::Nothing(holder) => {
                StoreMessage::Nothing.send(cx.links, holder.0, holder.1);
            }
            EntryAction::Expired(holder) => {
                if !self.remove_arrival(cx, holder) {
                    self.exposed.withdraw(cx, holder.0, holder.1);
                }
                StoreMessage::Ended.send(cx.links, holder.0, holder.1);
            }
            EntryAction::Save(id, key, content) => {
                if let Some(jobs) = &self.disk {
                    jobs.disk.save(id, key, content);
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

    /// Describes a value to the operation that holds it. The reader verifies all of it, so that nothing is hashed here.
    fn offer(&mut self, cx: &mut Cx<'_>, holder: Holder, content: &Content) {
        let (session, operation) = holder;
        match self.carry(cx, holder, content) {
            Ok(bytes) => {
                let message = StoreMessage::Offer {
                    checksum: content.checksum,
                    record: (&content.record[..]).into(),
                    bytes,
                };
                message.send(cx.links, session, operation);
            }
            Err(error) => {
                self.state.release(holder, clock::now());
                StoreMessage::Refused(error).send(cx.links, session, operation);
            }
        }
    }

    fn carry(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): Holder,
        content: &Content,
    ) -> Result<Carried<'static>> {
        let len = content.buffer.len();
        if let Some(memory) = &content.memory {
            let memory = (Arc::clone(memory), len);
            let described =
                (self.exposed).expose_memory(cx, session, operation, memory, Integrity::None)?;
            return Ok(Carried::Offered(described));
        }
        let bytes = content.buffer.bytes(0, len);
        let bytes = bytes.ok_or_else(|| Error::Unavailable("the value is not here".to_owned()))?;
        Ok(Carried::Inline(bytes.to_vec().into()))
    }

    /// Ends whatever an operation holds or waits for.
    pub(super) fn release(&mut self, cx: &mut Cx<'_>, holder: Holder) {
        self.remove_arrival(cx, holder);
        self.exposed.withdraw(cx, holder.0, holder.1);
        self.state.release(holder, clock::now());
    }
}
