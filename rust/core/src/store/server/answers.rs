//! Answers to clients: what follows from a change of the state.

use std::sync::Arc;

use super::super::content::Content;
use super::super::messages::{Carried, StoreMessage};
use super::super::state::{Holder, StoreAction};
use super::Server;
use crate::clock;
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

    fn act(&mut self, cx: &mut Cx<'_>, action: StoreAction<Arc<Content>>) {
        match action {
            StoreAction::Reserved(holder) => self.reserved(cx, holder),
            StoreAction::Occupied(holder) => {
                self.arrivals.remove(&holder);
                StoreMessage::Occupied.send(cx.links, holder.0, holder.1);
            }
            StoreAction::Refused(holder, error) => {
                self.arrivals.remove(&holder);
                StoreMessage::Refused(error).send(cx.links, holder.0, holder.1);
            }
            StoreAction::Offered(holder, content) => self.offer(cx, holder, &content),
            StoreAction::Nothing(holder) => {
                StoreMessage::Nothing.send(cx.links, holder.0, holder.1);
            }
            StoreAction::Expired(holder) => {
                if !self.remove_arrival(cx, holder) {
                    self.exposed.withdraw(cx, holder.0, holder.1);
                }
                StoreMessage::Ended.send(cx.links, holder.0, holder.1);
            }
            StoreAction::Save(id, key, content) => {
                if let Some(jobs) = &self.disk {
                    jobs.disk.save(id, key, content);
                }
            }
            StoreAction::Erase(id) => {
                if let Some(jobs) = &self.disk {
                    jobs.disk.erase(id);
                }
            }
            StoreAction::Load(id, num_bytes) => self.begin_load(cx, id, num_bytes),
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
