//! Answers to clients: an insert has its space or is visible; a select has its entry, or there is none.

use super::super::Items;
use super::super::messages::LookupMessage;
use super::LookupServer;
use crate::clock;
use crate::entries::state::{EntryAction, Holder};
use crate::error::{Error, Result};
use crate::transfer::Cx;

impl LookupServer {
    /// Does what the shared state has for clients.
    pub(super) fn answer_clients(&mut self, cx: &mut Cx<'_>) {
        for action in self.shared.drain_client_actions() {
            match action {
                EntryAction::Reserved(holder) => self.reserved(cx, holder),
                EntryAction::Refused(holder, error) => self.refuse_insert(cx, holder, error),
                EntryAction::Offered(holder, items) => self.offer(cx, holder, &items),
                EntryAction::Nothing((session, operation)) => {
                    LookupMessage::Nothing.send(cx.links, session, operation);
                }
                // Entries of a buffer have neither other ends nor a disk.
                EntryAction::Occupied(_)
                | EntryAction::Expired(_)
                | EntryAction::Save(..)
                | EntryAction::Erase(_)
                | EntryAction::Load(..) => {}
            }
        }
    }

    /// An insert has its space: fetches its tensors.
    fn reserved(&mut self, cx: &mut Cx<'_>, (session, operation): Holder) {
        let client = self.clients.get(&session);
        // Otherwise the client is lost or has withdrawn the insert, which has freed its space.
        let Some(insert) = client.and_then(|client| client.inserts.get(&operation)) else {
            return;
        };
        if insert.is_cancelled {
            return self.refuse_insert(cx, (session, operation), late());
        }
        self.tensors.begin(cx, session, operation);
        self.commit_arrived(cx);
    }

    /// Ends an insert, which has not begun to transfer its tensors.
    fn refuse_insert(&mut self, cx: &mut Cx<'_>, (session, operation): Holder, error: Error) {
        if self.end_insert((session, operation)) {
            self.tensors.forget(cx, session, operation);
            LookupMessage::Refused(error).send(cx.links, session, operation);
        }
    }

    /// Forgets an insert and frees its space; false if it has ended before.
    pub(super) fn end_insert(&mut self, (session, operation): Holder) -> bool {
        let client = self.clients.get_mut(&session);
        let insert = client.and_then(|client| client.inserts.remove(&operation));
        self.release((session, operation));
        insert.is_some()
    }

    /// Offers an entry to the select that leases it.
    fn offer(&mut self, cx: &mut Cx<'_>, holder: Holder, items: &Items) {
        let is_leased = self.change(|state| state.entries.is_consumed(holder).is_some());
        if is_leased != Ok(true) {
            // The client is lost, or has withdrawn the select: the entry has gone back.
            return;
        }
        let (session, operation) = holder;
        match self.tensors.write(cx, session, operation, items) {
            Ok(encoded) => {
                let tensors = encoded.into();
                LookupMessage::Offer { tensors }.send(cx.links, session, operation);
            }
            Err(error) => {
                self.tensors.release(cx, session, operation);
                self.release(holder);
                LookupMessage::Refused(error).send(cx.links, session, operation);
            }
        }
    }

    pub(super) fn commit_arrived(&mut self, cx: &mut Cx<'_>) {
        while let Some((session, operation, items)) = self.tensors.next_arrived() {
            let holder = (session, operation);
            let client = self.clients.get_mut(&session);
            let insert = client.and_then(|client| client.inserts.remove(&operation));
            if insert.is_none() {
                continue;
            }
            match items.and_then(|items| self.commit(holder, items)) {
                Ok(()) => LookupMessage::Inserted.send(cx.links, session, operation),
                Err(error) => {
                    self.release(holder);
                    LookupMessage::Refused(error).send(cx.links, session, operation);
                }
            }
        }
    }

    fn commit(&self, holder: Holder, items: Items) -> Result<()> {
        let now = clock::now();
        self.change(|state| {
            let num_bytes = items.num_bytes();
            state
                .entries
                .commit(holder, (items, num_bytes, 0), None, now);
        })
    }

    fn release(&self, holder: Holder) {
        let now = clock::now();
        let _ = self.change(|state| state.entries.release(holder, now));
    }
}

/// Why an insert that its client has cancelled is refused.
pub(super) fn late() -> Error {
    Error::Closed("its client has cancelled it, because it is late".to_owned())
}
