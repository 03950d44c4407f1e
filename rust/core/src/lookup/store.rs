//! The store of a lookup buffer: entries, reservations, leases, and the inserts and selects that wait. A pure state machine:
//! events in, actions out; no threads, no clock, and no bytes, which belong to the content.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::LookupQuery;
use super::index::Index;
use crate::earliest::Earliest;
use crate::error::{Error, Result};

/// Names an insert, the entry that it becomes, or a select. Tickets grow, so they order entries by age.
pub(crate) type Ticket = u64;

/// What the caller has to do. `C` is the content of an entry; `I` and `S` are whoever waits for an insert or a select.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StoreAction<C, I, S> {
    /// The insert has its space: move its bytes, then call [`Store::commit`] or [`Store::abandon`].
    Grant { ticket: Ticket, insert: I },
    /// The insert of so many bytes got no space in time. The store has forgotten it.
    Full { num_bytes: u64, insert: I },
    /// The select gets an entry, which is leased until [`Store::consume`] or [`Store::put_back`].
    Deliver {
        entry: Ticket,
        content: C,
        select: S,
    },
    /// The select found no entry in time. The store has forgotten it.
    Miss { select: S },
}

#[derive(Debug)]
struct Entry<C> {
    tokens: Arc<[i64]>,
    num_bytes: u64,
    content: C,
}

#[derive(Debug)]
struct WaitingInsert<I> {
    ticket: Ticket,
    num_bytes: u64,
    deadline: Option<Instant>,
    insert: I,
}

#[derive(Debug)]
struct WaitingSelect<S> {
    query: LookupQuery,
    deadline: Option<Instant>,
    select: S,
}

#[expect(clippy::struct_field_names, reason = "counts are named num_*")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StoreCounts {
    pub(super) num_entries: usize,
    pub(super) num_leased: usize,
    pub(super) num_reserved: usize,
    pub(super) num_waiting_inserts: usize,
    pub(super) num_waiting_selects: usize,
    pub(super) num_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Store<C, I, S> {
    capacity_bytes: u64,
    /// Bytes of all entries, leased ones included, and of reservations.
    num_bytes: u64,
    next_ticket: Ticket,
    /// Visible entries, oldest first.
    entries: BTreeMap<Ticket, Entry<C>>,
    index: Index,
    /// Entries on their way to a consumer; they keep their age.
    leased: HashMap<Ticket, Entry<C>>,
    /// Bytes of granted inserts that are not committed.
    reserved: HashMap<Ticket, u64>,
    /// In the order of their calls: small inserts never overtake a large one.
    inserts: VecDeque<WaitingInsert<I>>,
    selects: BTreeMap<Ticket, WaitingSelect<S>>,
    deadlines: Earliest,
    actions: VecDeque<StoreAction<C, I, S>>,
}

impl<C: Clone, I, S> Store<C, I, S> {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            num_bytes: 0,
            next_ticket: 0,
            entries: BTreeMap::new(),
            index: Index::default(),
            leased: HashMap::new(),
            reserved: HashMap::new(),
            inserts: VecDeque::new(),
            selects: BTreeMap::new(),
            deadlines: Earliest::default(),
            actions: VecDeque::new(),
        }
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// Requests space for an entry; `Grant` or `Full` follows.
    ///
    /// # Errors
    /// `Config`: the entry is larger than the capacity.
    pub(super) fn reserve(
        &mut self,
        num_bytes: u64,
        deadline: Option<Instant>,
        now: Instant,
        insert: I,
    ) -> Result<Ticket> {
        if num_bytes > self.capacity_bytes {
            return Err(Error::Config(format!(
                "an entry of {num_bytes} bytes can never be inserted: the buffer's capacity is {} bytes",
                self.capacity_bytes
            )));
        }
        let ticket = self.ticket();
        self.inserts.push_back(WaitingInsert {
            ticket,
            num_bytes,
            deadline,
            insert,
        });
        self.grant();
        if !self.inserts.is_empty() {
            self.deadlines.add(deadline);
            self.expire(now);
        }
        Ok(ticket)
    }

    /// Reserves space for waiting inserts, in order.
    fn grant(&mut self) {
        let free = |store: &Self| store.capacity_bytes - store.num_bytes;
        while self
            .inserts
            .front()
            .is_some_and(|first| first.num_bytes <= free(self))
            && let Some(first) = self.inserts.pop_front()
        {
            let (ticket, insert) = (first.ticket, first.insert);
            self.num_bytes += first.num_bytes;
            self.reserved.insert(ticket, first.num_bytes);
            self.actions
                .push_back(StoreAction::Grant { ticket, insert });
        }
    }

    /// Makes a granted entry visible. An unknown ticket is one of a store before [`clear`](Self::clear).
    pub(super) fn commit(&mut self, ticket: Ticket, tokens: Arc<[i64]>, content: C) {
        if let Some(num_bytes) = self.reserved.remove(&ticket) {
            let entry = Entry {
                tokens,
                num_bytes,
                content,
            };
            self.show(ticket, entry);
        }
    }

    /// Gives an entry to the first select that waits for it, or keeps it for later ones.
    fn show(&mut self, ticket: Ticket, mut entry: Entry<C>) {
        let mut selects = self.selects.iter();
        let waiting = selects.find(|(_, waiting)| waiting.query.matches(&entry.tokens));
        let first = waiting.map(|(select, _)| *select);
        if let Some(waiting) = first.and_then(|select| self.selects.remove(&select)) {
            return self.lease(waiting.select, ticket, entry);
        }
        entry.tokens = self.index.insert(entry.tokens, ticket);
        self.entries.insert(ticket, entry);
    }

    fn lease(&mut self, select: S, ticket: Ticket, entry: Entry<C>) {
        self.actions.push_back(StoreAction::Deliver {
            entry: ticket,
            content: entry.content.clone(),
            select,
        });
        self.leased.insert(ticket, entry);
    }

    /// Frees the space of a granted insert that will not be committed.
    pub(super) fn abandon(&mut self, ticket: Ticket) {
        if let Some(num_bytes) = self.reserved.remove(&ticket) {
            self.free(num_bytes);
        }
    }

    /// Requests an entry; `Deliver` or `Miss` follows.
    pub(super) fn select(
        &mut self,
        query: LookupQuery,
        deadline: Option<Instant>,
        now: Instant,
        select: S,
    ) -> Ticket {
        let ticket = self.ticket();
        let found = match &query {
            LookupQuery::Any => self.entries.keys().next().copied(),
            LookupQuery::Tokens(tokens) => self.index.find(tokens),
        };
        if let Some((found, entry)) =
            found.and_then(|found| Some((found, self.entries.remove(&found)?)))
        {
            self.index.remove(&entry.tokens, found);
            self.lease(select, found, entry);
            return ticket;
        }
        let waiting = WaitingSelect {
            query,
            deadline,
            select,
        };
        self.selects.insert(ticket, waiting);
        self.deadlines.add(deadline);
        self.expire(now);
        ticket
    }

    /// Forgets an insert or a select that waits; whether there was one.
    pub(super) fn cancel(&mut self, ticket: Ticket) -> bool {
        if self.selects.remove(&ticket).is_some() {
            return true;
        }
        let before = self.inserts.len();
        self.inserts.retain(|waiting| waiting.ticket != ticket);
        let is_cancelled = self.inserts.len() < before;
        self.grant();
        is_cancelled
    }

    /// Drops a leased entry that its consumer keeps.
    pub(super) fn consume(&mut self, entry: Ticket) {
        if let Some(entry) = self.leased.remove(&entry) {
            self.free(entry.num_bytes);
        }
    }

    /// Returns a leased entry to its old place.
    pub(super) fn put_back(&mut self, ticket: Ticket) {
        if let Some(entry) = self.leased.remove(&ticket) {
            self.show(ticket, entry);
        }
    }

    fn free(&mut self, num_bytes: u64) {
        self.num_bytes -= num_bytes;
        self.grant();
    }

    /// Ends inserts and selects whose deadline has passed.
    pub(super) fn expire(&mut self, now: Instant) {
        if !self.deadlines.take_if_past(now) {
            return;
        }
        let is_late = |deadline: Option<Instant>| deadline.is_some_and(|at| at <= now);
        let (late, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut self.inserts)
            .into_iter()
            .partition(|waiting| is_late(waiting.deadline));
        self.inserts = kept;
        let full = late.into_iter().map(|waiting| StoreAction::Full {
            num_bytes: waiting.num_bytes,
            insert: waiting.insert,
        });
        self.actions.extend(full);
        let late = self.selects.iter();
        let late = late.filter(|(_, waiting)| is_late(waiting.deadline));
        for ticket in late.map(|(ticket, _)| *ticket).collect::<Vec<_>>() {
            if let Some(WaitingSelect { select, .. }) = self.selects.remove(&ticket) {
                self.actions.push_back(StoreAction::Miss { select });
            }
        }
        for waiting in &self.inserts {
            self.deadlines.add(waiting.deadline);
        }
        for waiting in self.selects.values() {
            self.deadlines.add(waiting.deadline);
        }
        self.grant();
    }

    /// When to call [`expire`](Self::expire).
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.at()
    }

    pub(super) fn next_action(&mut self) -> Option<StoreAction<C, I, S>> {
        self.actions.pop_front()
    }

    /// Drops everything, and returns the inserts and selects that waited.
    pub(super) fn clear(&mut self) -> (Vec<I>, Vec<S>) {
        let cleared = std::mem::replace(self, Self::new(self.capacity_bytes));
        let inserts = cleared.inserts.into_iter().map(|waiting| waiting.insert);
        let selects = cleared.selects.into_values().map(|waiting| waiting.select);
        (inserts.collect(), selects.collect())
    }

    pub(super) fn counts(&self) -> StoreCounts {
        StoreCounts {
            num_entries: self.entries.len(),
            num_leased: self.leased.len(),
            num_reserved: self.reserved.len(),
            num_waiting_inserts: self.inserts.len(),
            num_waiting_selects: self.selects.len(),
            num_bytes: self.num_bytes,
        }
    }
}

#[cfg(test)]
mod tests;
