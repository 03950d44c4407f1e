//! Answers to clients: an insert has its space or is visible; a select has its entry, or there is none.

use super::super::Items;
use super::super::messages::LookupMessage;
use super::super::shared::ClientOperation;
use super::super::store::{StoreAction, Ticket};
use super::LookupServer;
use super::session::{ClientInsert, ClientSelect, ClientSession};
use crate::error::{Error, Result};
use crate::transfer::Cx;

impl LookupServer {
    /// Does what the shared state has for clients.
    pub(super) fn answer_clients(&mut self, cx: &mut Cx<'_>) {
        for action in self.shared.drain_client_actions() {
            match action {
                StoreAction::Insert(client, granted) => self.answer_insert(cx, client, granted),
                StoreAction::Select(client, found) => self.answer_select(cx, client, found),
            }
        }
    }

    /// An insert has its space: fetches its tensors. Or it got none in time.
    fn answer_insert(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): ClientOperation,
        granted: Result<Ticket>,
    ) {
        let client = self.clients.get_mut(&session);
        // Otherwise the client is lost or has withdrawn the insert, which has released its ticket.
        let Some(client) = client.filter(|client| client.inserts.contains_key(&operation)) else {
            return;
        };
        let is_cancelled = (client.inserts.get(&operation)).is_some_and(|it| it.is_cancelled);
        match granted {
            Ok(ticket) if is_cancelled => {
                client.inserts.remove(&operation);
                self.tensors.forget(cx, session, operation);
                self.release(ticket);
                LookupMessage::Refused(late()).send(cx.links, session, operation);
            }
            Ok(_) => {
                self.tensors.begin(cx, session, operation);
                self.commit_arrived(cx);
            }
            Err(full) => {
                client.inserts.remove(&operation);
                self.tensors.forget(cx, session, operation);
                LookupMessage::Refused(full).send(cx.links, session, operation);
            }
        }
    }

    /// A select gets an entry, or there was none in time.
    fn answer_select(
        &mut self,
        cx: &mut Cx<'_>,
        (session, operation): ClientOperation,
        found: Option<(Ticket, Items)>,
    ) {
        let client = self.clients.get_mut(&session);
        let client = client.filter(|client| client.selects.contains_key(&operation));
        match (client, found) {
            (Some(client), None) => {
                client.selects.remove(&operation);
                LookupMessage::Nothing.send(cx.links, session, operation);
            }
            (Some(client), Some((entry, items))) => {
                let tensors = &mut self.tensors;
                match tensors.write(cx, session, operation, &items) {
                    Ok(encoded) => {
                        client
                            .selects
                            .insert(operation, ClientSelect::Leased(entry));
                        let tensors = encoded.into();
                        LookupMessage::Offer { tensors }.send(cx.links, session, operation);
                    }
                    Err(error) => {
                        tensors.release(cx, session, operation);
                        client.selects.remove(&operation);
                        self.release(entry);
                        LookupMessage::Refused(error).send(cx.links, session, operation);
                    }
                }
            }
            // The client is lost, or has withdrawn the select.
            (None, Some((entry, _))) => self.release(entry),
            (None, None) => {}
        }
    }

    pub(super) fn commit_arrived(&mut self, cx: &mut Cx<'_>) {
        while let Some((session, operation, items)) = self.tensors.next_arrived() {
            let client = self.clients.get_mut(&session);
            let insert = client.and_then(|client| client.inserts.remove(&operation));
            let Some(ClientInsert { ticket, tokens, .. }) = insert else {
                continue;
            };
            let commit = |items| self.change(|state| state.store.commit(ticket, tokens, items));
            match items.and_then(commit) {
                Ok(()) => LookupMessage::Inserted.send(cx.links, session, operation),
                Err(error) => {
                    self.release(ticket);
                    LookupMessage::Refused(error).send(cx.links, session, operation);
                }
            }
        }
    }

    pub(super) fn release(&self, ticket: Ticket) {
        let _ = self.change(|state| state.store.release(ticket));
    }

    /// Ends the operations of a lost client.
    pub(super) fn end_client(&mut self, client: ClientSession) {
        for insert in client.inserts.into_values() {
            self.release(insert.ticket);
        }
        for select in client.selects.into_values() {
            self.end_select(select, true);
        }
    }

    /// Ends a select; with `keeps_consumed` the client keeps an entry that it has consumed.
    pub(super) fn end_select(&self, select: ClientSelect, keeps_consumed: bool) {
        match select {
            ClientSelect::Waiting { ticket, .. } | ClientSelect::Leased(ticket) => {
                self.release(ticket);
            }
            ClientSelect::Consumed(entry) => {
                let _ = self.change(|state| {
                    state.store.num_consumed -= 1;
                    state.store.settle(entry, keeps_consumed);
                });
            }
        }
    }
}

/// Why an insert that its client has cancelled is refused.
pub(super) fn late() -> Error {
    Error::Closed("its client has cancelled it, because it is late".to_owned())
}
