//! What the lock of a buffer guards: the store, who waits in this process, and what is to be done once it is let go.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::copying::EntryCopy;
use super::operation::Selected;
use super::store::{Store, StoreAction, Ticket};
use super::{Items, LookupInfo};
use crate::error::{Error, Result};
use crate::work::Completer;

/// An insert of this process.
pub(super) struct LocalInsert {
    pub(super) tokens: Arc<[i64]>,
    pub(super) items: Items,
    pub(super) completer: Completer<()>,
}

/// Who waits in this process.
pub(super) enum Waiting {
    Insert(LocalInsert),
    Select(Completer<Selected>),
}

/// All that the lock guards.
pub(super) struct BufferState {
    pub(super) store: Store<Items>,
    capacity_bytes: u64,
    pub(super) waiting: HashMap<Ticket, Waiting>,
    /// Actions for others' clients, until the server's thread fetches them.
    pub(super) outbox: VecDeque<StoreAction<Items>>,
    /// Inserts of this process whose place the server's thread has made: it copies them in turns. Those that do not wait
    /// any more are of no meaning.
    granted: VecDeque<Ticket>,
    num_inserted: u64,
    pub(super) num_consumed: u64,
    pub(super) is_closed: bool,
}

/// Who changes the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// A thread that may copy at once.
    Caller,
    /// The server's thread, which has heartbeats and other clients to see to.
    Server,
}

/// What is done without the lock.
pub(super) enum Effect {
    Copy(EntryCopy),
    Inserted(Completer<()>, Result<()>),
    Selected(Completer<Selected>, Result<Option<(Ticket, Items)>>),
}

impl Waiting {
    pub(super) fn end(self, error: Error) {
        match self {
            Self::Insert(insert) => insert.completer.complete(Err(error)),
            Self::Select(completer) => completer.complete(Err(error)),
        }
    }
}

impl BufferState {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self {
            store: Store::new(capacity_bytes),
            capacity_bytes,
            waiting: HashMap::new(),
            outbox: VecDeque::new(),
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
            capacity_bytes: Some(self.capacity_bytes),
            transport: String::new(),
        }
    }

    /// Drops all entries; returns who waits still.
    pub(super) fn close(&mut self) -> impl Iterator<Item = Waiting> + use<> {
        self.is_closed = true;
        self.outbox.clear();
        self.granted.clear();
        self.store = Store::new(0);
        std::mem::take(&mut self.waiting).into_values()
    }

    /// Sorts the store's actions by who does them.
    pub(super) fn effects(&mut self, by: By) -> Vec<Effect> {
        let mut effects = Vec::new();
        while let Some(action) = self.store.next_action() {
            if let (By::Server, StoreAction::Grant(ticket)) = (by, &action)
                && self.waiting.contains_key(ticket)
            {
                self.granted.push_back(*ticket);
                continue;
            }
            match self.effect(action) {
                Ok(effect) => effects.push(effect),
                Err(action) => self.outbox.push_back(action),
            }
        }
        effects
    }

    fn effect(
        &mut self,
        action: StoreAction<Items>,
    ) -> std::result::Result<Effect, StoreAction<Items>> {
        let (StoreAction::Grant(ticket)
        | StoreAction::Full(ticket)
        | StoreAction::Nothing(ticket)
        | StoreAction::Deliver { select: ticket, .. }) = &action;
        let Some(waiting) = self.waiting.remove(ticket) else {
            return Err(action);
        };
        Ok(match (waiting, action) {
            (Waiting::Insert(insert), StoreAction::Grant(ticket)) => {
                Effect::Copy(EntryCopy::new(ticket, insert))
            }
            (Waiting::Insert(insert), _) => {
                let full = self.full(insert.items.entry_bytes(&insert.tokens));
                Effect::Inserted(insert.completer, Err(full))
            }
            (Waiting::Select(completer), StoreAction::Deliver { entry, content, .. }) => {
                Effect::Selected(completer, Ok(Some((entry, content))))
            }
            (Waiting::Select(completer), _) => Effect::Selected(completer, Ok(None)),
        })
    }

    /// Whether there is something that only the server's thread does.
    pub(super) fn needs_server(&self) -> bool {
        !(self.outbox.is_empty() && self.granted.is_empty())
    }

    /// The next insert for the server's thread to copy.
    pub(super) fn next_granted(&mut self) -> Option<EntryCopy> {
        while let Some(ticket) = self.granted.pop_front() {
            if let Some(Waiting::Insert(insert)) = self.waiting.remove(&ticket) {
                return Some(EntryCopy::new(ticket, insert));
            }
        }
        None
    }

    pub(super) fn commit(&mut self, ticket: Ticket, tokens: Arc<[i64]>, items: Items) {
        self.num_inserted += 1;
        self.store.commit(ticket, tokens, items);
    }

    /// Forgets who waits, who then ends as closed.
    pub(super) fn withdraw(&mut self, ticket: Ticket) {
        if self.waiting.remove(&ticket).is_some() {
            self.forget(ticket);
        }
    }

    pub(super) fn forget(&mut self, ticket: Ticket) {
        if !self.store.cancel(ticket) {
            self.store.abandon(ticket);
        }
    }

    pub(super) fn settle(&mut self, entry: Ticket, is_consumed: bool) {
        if is_consumed {
            self.num_consumed += 1;
            self.store.drop_entry(entry);
        } else {
            self.store.put_back(entry);
        }
    }

    pub(super) fn full(&self, num_bytes: u64) -> Error {
        Error::Exhausted(format!(
            "no place for {num_bytes} bytes in time: {} of {} are taken; nothing was inserted, the buffer is usable",
            self.store.counts().num_bytes,
            self.capacity_bytes
        ))
    }
}
