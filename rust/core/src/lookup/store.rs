//! The store of a lookup buffer: entries, reservations, leases, and the inserts and selects that wait. A pure state machine:
//! events in, actions out; no threads, no clock, and no bytes, which belong to the content.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::index::Index;
use super::{LookupInfo, LookupQuery};
use crate::error::{Error, Result};
use crate::reactor::Timers;

/// Names an insert, the entry that it becomes, or a select. Tickets grow, so they order entries by age.
pub(crate) type Ticket = u64;

/// An action that the caller has to do. `C` is the content of an entry; `I` and `S` are waiters for an insert or a select.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StoreAction<C, I, S> {
    /// The insert has its space: move its bytes, then call [`Store::commit`] or [`Store::release`]. Or it got none in time,
    /// and the store has forgotten it.
    Insert(I, Result<Ticket>),
    /// The select gets this entry, which is leased until [`Store::settle`]. Or there was none in
    /// time, and the store has forgotten the select.
    Select(S, Option<(Ticket, C)>),
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
    insert: I,
}

#[derive(Debug)]
struct WaitingSelect<S> {
    query: LookupQuery,
    select: S,
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
    /// Of the inserts and selects that wait.
    deadlines: Timers<Ticket>,
    actions: VecDeque<StoreAction<C, I, S>>,
    num_inserted: u64,
    /// The server counts an entry when its client has it, before [`settle`](Self::settle).
    pub(super) num_consumed: u64,
    is_closed: bool,
}

impl<C: Clone, I, S> Store<C, I, S> {
    /// Sizes of its maps and queues.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("entries", self.entries.len()),
            ("leased entries", self.leased.len()),
            ("reserved entries", self.reserved.len()),
            ("waiting inserts", self.inserts.len()),
            ("waiting selects", self.selects.len()),
            ("deadlines of the store", self.deadlines.len()),
            ("store actions", self.actions.len()),
        ]
    }

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
            deadlines: Timers::default(),
            actions: VecDeque::new(),
            num_inserted: 0,
            num_consumed: 0,
            is_closed: false,
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// Requests space for an entry; [`StoreAction::Insert`] follows.
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
            insert,
        });
        self.set_deadline(ticket, deadline);
        self.grant();
        self.expire(now);
        Ok(ticket)
    }

    /// Reserves space for waiting inserts, in order.
    fn grant(&mut self) {
        while let Some(first) = self.inserts.front()
            && first.num_bytes <= self.capacity_bytes - self.num_bytes
            && let Some(first) = self.inserts.pop_front()
        {
            self.deadlines.cancel(first.ticket);
            self.num_bytes += first.num_bytes;
            self.reserved.insert(first.ticket, first.num_bytes);
            let granted = StoreAction::Insert(first.insert, Ok(first.ticket));
            self.actions.push_back(granted);
        }
    }

    /// Makes a granted entry visible.
    pub(super) fn commit(&mut self, ticket: Ticket, tokens: Arc<[i64]>, content: C) {
        if let Some(num_bytes) = self.reserved.remove(&ticket) {
            self.num_inserted += 1;
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
        if let Some(waiting) = first.and_then(|select| self.remove_select(select)) {
            return self.lease(waiting.select, ticket, entry);
        }
        entry.tokens = self.index.insert(entry.tokens, ticket);
        self.entries.insert(ticket, entry);
    }

    fn lease(&mut self, select: S, ticket: Ticket, entry: Entry<C>) {
        let found = Some((ticket, entry.content.clone()));
        self.actions.push_back(StoreAction::Select(select, found));
        self.leased.insert(ticket, entry);
    }

    /// Requests an entry; [`StoreAction::Select`] follows.
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
        self.selects.insert(ticket, WaitingSelect { query, select });
        self.set_deadline(ticket, deadline);
        self.expire(now);
        ticket
    }

    fn set_deadline(&mut self, ticket: Ticket, deadline: Option<Instant>) {
        if let Some(deadline) = deadline {
            self.deadlines.set(ticket, deadline);
        }
    }

    fn remove_insert(&mut self, ticket: Ticket) -> Option<WaitingInsert<I>> {
        self.deadlines.cancel(ticket);
        let at = self
            .inserts
            .binary_search_by_key(&ticket, |waiting| waiting.ticket);
        self.inserts.remove(at.ok()?)
    }

    fn remove_select(&mut self, ticket: Ticket) -> Option<WaitingSelect<S>> {
        self.deadlines.cancel(ticket);
        self.selects.remove(&ticket)
    }

    /// Forgets an insert or a select that waits; whether there was one.
    pub(super) fn cancel(&mut self, ticket: Ticket) -> bool {
        if self.remove_insert(ticket).is_some() {
            self.grant();
            return true;
        }
        self.remove_select(ticket).is_some()
    }

    /// Forgets what waits under this ticket, frees the space of a granted insert, or returns a leased entry to its old place.
    pub(super) fn release(&mut self, ticket: Ticket) {
        if let Some(num_bytes) = self.reserved.remove(&ticket) {
            self.free(num_bytes);
        } else if let Some(entry) = self.leased.remove(&ticket) {
            self.show(ticket, entry);
        } else {
            self.cancel(ticket);
        }
    }

    /// Ends a lease: the consumer keeps the entry, or it goes back to its old place.
    pub(super) fn settle(&mut self, ticket: Ticket, is_consumed: bool) {
        if !is_consumed {
            self.release(ticket);
        } else if let Some(entry) = self.leased.remove(&ticket) {
            self.num_consumed += 1;
            self.free(entry.num_bytes);
        }
    }

    fn free(&mut self, num_bytes: u64) {
        self.num_bytes -= num_bytes;
        self.grant();
    }

    /// Ends inserts and selects whose deadline has passed.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(ticket) = self.deadlines.pop_expired(now) {
            if let Some(late) = self.remove_insert(ticket) {
                let full = Error::Exhausted(format!(
                    "no place for {} bytes in time: {} of {} are taken; nothing was inserted, the buffer is usable",
                    late.num_bytes, self.num_bytes, self.capacity_bytes
                ));
                let refused = StoreAction::Insert(late.insert, Err(full));
                self.actions.push_back(refused);
                self.grant();
            } else if let Some(late) = self.remove_select(ticket) {
                self.actions
                    .push_back(StoreAction::Select(late.select, None));
            }
        }
    }

    /// When to call [`expire`](Self::expire).
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        self.deadlines.next()
    }

    pub(super) fn next_action(&mut self) -> Option<StoreAction<C, I, S>> {
        self.actions.pop_front()
    }

    /// Drops everything, and returns the inserts and selects that waited.
    pub(super) fn close(&mut self) -> (Vec<I>, Vec<S>) {
        let closed = Self {
            num_inserted: self.num_inserted,
            num_consumed: self.num_consumed,
            is_closed: true,
            ..Self::new(self.capacity_bytes)
        };
        let dropped = std::mem::replace(self, closed);
        let inserts = dropped.inserts.into_iter().map(|waiting| waiting.insert);
        let selects = dropped.selects.into_values().map(|waiting| waiting.select);
        (inserts.collect(), selects.collect())
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn info(&self) -> LookupInfo {
        LookupInfo {
            state: if self.is_closed { "closed" } else { "open" },
            num_inserted: self.num_inserted,
            num_consumed: self.num_consumed,
            num_waiting: self.inserts.len() + self.selects.len(),
            num_entries: Some(self.entries.len()),
            num_leased: Some(self.leased.len()),
            num_bytes: Some(self.num_bytes),
            capacity_bytes: Some(self.capacity_bytes),
            transport: String::new(),
        }
    }
}

#[cfg(test)]
mod tests;
