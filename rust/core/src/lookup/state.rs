//! What the lock of a lookup buffer guards: the store, the counters, and the work that only the server's thread may do.

use std::collections::VecDeque;
use std::sync::Arc;

use super::copying::EntryCopy;
use super::operation::Selected;
use super::store::{Store, StoreAction, Ticket};
use super::{Items, LookupInfo};
use crate::error::Error;
use crate::ids::SessionKey;
use crate::work::Completer;

/// An operation of a client: its session and the client's number.
pub(super) type ClientOperation = (SessionKey, u64);

/// An insert of this process.
pub(super) struct LocalInsert {
    pub(super) tokens: Arc<[i64]>,
    pub(super) items: Items,
    pub(super) completer: Completer<()>,
}

/// Who waits for an insert.
pub(super) enum Inserter {
    Local(LocalInsert),
    Client(ClientOperation),
}

/// Who waits for a select.
pub(super) enum Selector {
    Local(Completer<Selected>),
    Client(ClientOperation),
}

/// What the server has to do for a client's operation.
pub(super) enum ClientAction {
    /// The insert has its space: fetch its tensors.
    Grant(Ticket),
    /// The insert got no space in time.
    Full(Error),
    /// The select gets an entry, which is leased.
    Deliver(Ticket, Items),
    /// The select found no entry in time.
    Miss,
}

/// The thread that changes the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChangedBy {
    /// A thread that may copy at once.
    Caller,
    /// The server's thread, which has heartbeats to send and other clients to serve.
    Server,
}

/// What follows from a change, and is done without the lock.
pub(super) enum FollowUp {
    Copy(EntryCopy),
    Refuse(Completer<()>, Error),
    Deliver(Completer<Selected>, Ticket, Items),
    Miss(Completer<Selected>),
}

pub(super) struct BufferState {
    pub(super) store: Store<Items, Inserter, Selector>,
    /// Until the server's thread drains them.
    pub(super) client_actions: VecDeque<(ClientOperation, ClientAction)>,
    /// Inserts of this process to which the server's thread has given space. It copies them by slices.
    granted: VecDeque<EntryCopy>,
    num_inserted: u64,
    pub(super) num_consumed: u64,
    pub(super) is_closed: bool,
}

impl BufferState {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self {
            store: Store::new(capacity_bytes),
            client_actions: VecDeque::new(),
            granted: VecDeque::new(),
            num_inserted: 0,
            num_consumed: 0,
            is_closed: false,
        }
    }

    pub(super) fn info(&self) -> LookupInfo {
        let counts = self.store.counts();
        LookupInfo {
            state: if self.is_closed { "closed" } else { "open" },
            num_inserted: self.num_inserted,
            num_consumed: self.num_consumed,
            num_waiting: counts.num_waiting_inserts + counts.num_waiting_selects,
            num_entries: Some(counts.num_entries),
            num_leased: Some(counts.num_leased),
            num_bytes: Some(counts.num_bytes),
            capacity_bytes: Some(self.store.capacity_bytes()),
            transport: String::new(),
        }
    }

    /// Drops all entries, and returns the completers of operations in this process.
    pub(super) fn close(&mut self) -> (Vec<Completer<()>>, Vec<Completer<Selected>>) {
        self.is_closed = true;
        self.client_actions.clear();
        let (inserts, selects) = self.store.clear();
        let waiting = inserts.into_iter().filter_map(|insert| match insert {
            Inserter::Local(insert) => Some(insert.completer),
            Inserter::Client(_) => None,
        });
        let granted = self.granted.drain(..).map(|copy| copy.insert.completer);
        let selects = selects.into_iter().filter_map(|select| match select {
            Selector::Local(completer) => Some(completer),
            Selector::Client(_) => None,
        });
        (waiting.chain(granted).collect(), selects.collect())
    }

    /// Divides the store's actions into those for clients and those for this process.
    pub(super) fn follow_ups(&mut self, by: ChangedBy) -> Vec<FollowUp> {
        let mut follow_ups = Vec::new();
        while let Some(action) = self.store.next_action() {
            match action {
                StoreAction::Grant { ticket, insert } => match insert {
                    Inserter::Local(insert) => {
                        let copy = EntryCopy::new(ticket, insert);
                        match by {
                            ChangedBy::Caller => follow_ups.push(FollowUp::Copy(copy)),
                            ChangedBy::Server => self.granted.push_back(copy),
                        }
                    }
                    Inserter::Client(client) => self.add(client, ClientAction::Grant(ticket)),
                },
                StoreAction::Full { num_bytes, insert } => {
                    let full = self.full(num_bytes);
                    match insert {
                        Inserter::Local(insert) => {
                            follow_ups.push(FollowUp::Refuse(insert.completer, full));
                        }
                        Inserter::Client(client) => self.add(client, ClientAction::Full(full)),
                    }
                }
                StoreAction::Deliver {
                    entry,
                    content,
                    select,
                } => match select {
                    Selector::Local(completer) => {
                        follow_ups.push(FollowUp::Deliver(completer, entry, content));
                    }
                    Selector::Client(client) => {
                        self.add(client, ClientAction::Deliver(entry, content));
                    }
                },
                StoreAction::Miss { select } => match select {
                    Selector::Local(completer) => follow_ups.push(FollowUp::Miss(completer)),
                    Selector::Client(client) => self.add(client, ClientAction::Miss),
                },
            }
        }
        follow_ups
    }

    fn add(&mut self, client: ClientOperation, action: ClientAction) {
        self.client_actions.push_back((client, action));
    }

    fn full(&self, num_bytes: u64) -> Error {
        Error::Exhausted(format!(
            "no place for {num_bytes} bytes in time: {} of {} are taken; nothing was inserted, the buffer is usable",
            self.store.counts().num_bytes,
            self.store.capacity_bytes()
        ))
    }

    /// Whether there is work that only the server's thread does.
    pub(super) fn needs_server(&self) -> bool {
        !(self.client_actions.is_empty() && self.granted.is_empty())
    }

    /// The next insert for the server's thread to copy.
    pub(super) fn next_granted(&mut self) -> Option<EntryCopy> {
        self.granted.pop_front()
    }

    pub(super) fn commit(&mut self, ticket: Ticket, tokens: Arc<[i64]>, items: Items) {
        self.num_inserted += 1;
        self.store.commit(ticket, tokens, items);
    }

    /// Ends an operation of this process that has not met its other side, and whose insert is not being copied: its
    /// completer is dropped, which completes it as closed.
    pub(super) fn withdraw(&mut self, ticket: Ticket) {
        let mut granted = self.granted.iter();
        if let Some(at) = granted.position(|copy| copy.ticket == ticket) {
            self.granted.remove(at);
            self.store.abandon(ticket);
        } else {
            self.store.cancel(ticket);
        }
    }

    /// Forgets a client's operation that waits, or its insert that is not committed.
    pub(super) fn forget(&mut self, ticket: Ticket) {
        if !self.store.cancel(ticket) {
            self.store.abandon(ticket);
        }
    }

    /// Ends a lease: the consumer keeps the entry, or it goes back to its old place.
    pub(super) fn settle(&mut self, entry: Ticket, is_consumed: bool) {
        if is_consumed {
            self.num_consumed += 1;
            self.store.consume(entry);
        } else {
            self.store.put_back(entry);
        }
    }
}
