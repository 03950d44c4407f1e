//! The state of a lookup buffer: entries, reservations, leases, and who waits. Pure: events in, actions out; no threads,
//! no clock, and no bytes, which are the content's.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::LookupQuery;
use super::index::Index;
use crate::earliest::Earliest;
use crate::error::{Error, Result};

/// Names an insert, the entry that it becomes, or a select. They grow, so that they tell the age.
pub(crate) type Ticket = u64;

/// What is to be done outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StoreAction<C> {
    /// The bytes of an insert have their place: move them, then [`Store::commit`] or [`Store::abandon`].
    Grant(Ticket),
    /// An insert found no place in time; it is forgotten.
    Full(Ticket),
    /// A select has an entry, which is leased until [`Store::drop_entry`] or [`Store::put_back`].
    Deliver {
        select: Ticket,
        entry: Ticket,
        content: C,
    },
    /// A select found nothing in time; it is forgotten.
    Nothing(Ticket),
}

#[derive(Debug)]
struct Entry<C> {
    tokens: Arc<[i64]>,
    num_bytes: u64,
    content: C,
}

#[derive(Debug)]
struct WaitingInsert {
    ticket: Ticket,
    num_bytes: u64,
    deadline: Option<Instant>,
}

#[derive(Debug)]
struct WaitingSelect {
    query: LookupQuery,
    deadline: Option<Instant>,
}

/// How much there is of what.
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
pub(super) struct Store<C> {
    capacity_bytes: u64,
    /// Of entries, leased ones included, and of reservations.
    num_bytes: u64,
    next_ticket: Ticket,
    /// Visible, oldest first.
    entries: BTreeMap<Ticket, Entry<C>>,
    index: Index,
    /// On their way to a consumer; they keep their place.
    leased: HashMap<Ticket, Entry<C>>,
    /// Granted, not committed.
    reserved: HashMap<Ticket, u64>,
    /// In the order of their calls: a large one is not overtaken for ever by small ones.
    inserts: VecDeque<WaitingInsert>,
    selects: BTreeMap<Ticket, WaitingSelect>,
    deadlines: Earliest,
    actions: VecDeque<StoreAction<C>>,
}

impl<C: Clone> Store<C> {
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

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// Asks for the place of an entry; `Grant` or `Full` follows.
    ///
    /// # Errors
    /// `Config`: it could never have a place.
    pub(super) fn reserve(
        &mut self,
        num_bytes: u64,
        deadline: Option<Instant>,
        now: Instant,
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
        });
        self.grant();
        if self
            .inserts
            .back()
            .is_some_and(|last| last.ticket == ticket)
        {
            self.deadlines.add(deadline);
            self.expire(now);
        }
        Ok(ticket)
    }

    /// Gives those who wait their place, in order.
    fn grant(&mut self) {
        while let Some(first) = self.inserts.front() {
            if first.num_bytes > self.capacity_bytes - self.num_bytes {
                return;
            }
            self.num_bytes += first.num_bytes;
            self.reserved.insert(first.ticket, first.num_bytes);
            self.actions.push_back(StoreAction::Grant(first.ticket));
            self.inserts.pop_front();
        }
    }

    /// Makes an entry visible whose bytes are all here. Unknown tickets are those of a cleared store.
    pub(super) fn commit(&mut self, ticket: Ticket, tokens: Arc<[i64]>, content: C) {
        if let Some(num_bytes) = self.reserved.remove(&ticket) {
            self.show(
                ticket,
                Entry {
                    tokens,
                    num_bytes,
                    content,
                },
            );
        }
    }

    /// Gives an entry to the first select that waits for it, else to those to come.
    fn show(&mut self, ticket: Ticket, mut entry: Entry<C>) {
        let waiting = self
            .selects
            .iter()
            .find(|(_, waiting)| waiting.query.takes(&entry.tokens));
        if let Some(select) = waiting.map(|(select, _)| *select) {
            self.selects.remove(&select);
            return self.lease(select, ticket, entry);
        }
        entry.tokens = self.index.insert(entry.tokens, ticket);
        self.entries.insert(ticket, entry);
    }

    fn lease(&mut self, select: Ticket, ticket: Ticket, entry: Entry<C>) {
        self.actions.push_back(StoreAction::Deliver {
            select,
            entry: ticket,
            content: entry.content.clone(),
        });
        self.leased.insert(ticket, entry);
    }

    /// Forgets an insert that is not committed; whether there was one.
    pub(super) fn abandon(&mut self, ticket: Ticket) -> bool {
        if let Some(num_bytes) = self.reserved.remove(&ticket) {
            self.free(num_bytes);
            return true;
        }
        let before = self.inserts.len();
        self.inserts.retain(|waiting| waiting.ticket != ticket);
        self.grant();
        self.inserts.len() < before
    }

    /// Asks for an entry; `Deliver` or `Nothing` follows.
    pub(super) fn select(
        &mut self,
        query: LookupQuery,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Ticket {
        let select = self.ticket();
        let found = match &query {
            LookupQuery::Any => self.entries.keys().next().copied(),
            LookupQuery::Tokens(tokens) => self.index.find(tokens),
        };
        if let Some((ticket, entry)) =
            found.and_then(|ticket| Some((ticket, self.entries.remove(&ticket)?)))
        {
            self.index.remove(&entry.tokens, ticket);
            self.lease(select, ticket, entry);
            return select;
        }
        self.selects
            .insert(select, WaitingSelect { query, deadline });
        self.deadlines.add(deadline);
        self.expire(now);
        select
    }

    /// Forgets a select that waits; whether it did.
    pub(super) fn cancel(&mut self, select: Ticket) -> bool {
        self.selects.remove(&select).is_some()
    }

    /// A leased entry has reached its consumer.
    pub(super) fn drop_entry(&mut self, entry: Ticket) {
        if let Some(entry) = self.leased.remove(&entry) {
            self.free(entry.num_bytes);
        }
    }

    /// A leased entry has not reached its consumer: it takes its old place.
    pub(super) fn put_back(&mut self, ticket: Ticket) {
        if let Some(entry) = self.leased.remove(&ticket) {
            self.show(ticket, entry);
        }
    }

    fn free(&mut self, num_bytes: u64) {
        self.num_bytes -= num_bytes;
        self.grant();
    }

    /// Ends what has waited for too long.
    pub(super) fn expire(&mut self, now: Instant) {
        if !self.deadlines.take_if_past(now) {
            return;
        }
        let (actions, deadlines) = (&mut self.actions, &mut self.deadlines);
        let mut is_kept = |deadline: Option<Instant>, action: StoreAction<C>| {
            let is_late = deadline.is_some_and(|at| at <= now);
            if is_late {
                actions.push_back(action);
            } else {
                deadlines.add(deadline);
            }
            !is_late
        };
        self.inserts
            .retain(|waiting| is_kept(waiting.deadline, StoreAction::Full(waiting.ticket)));
        self.selects
            .retain(|select, waiting| is_kept(waiting.deadline, StoreAction::Nothing(*select)));
        self.grant();
    }

    /// When to call [`expire`](Self::expire).
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.at()
    }

    /// The next thing to do.
    pub(super) fn next_action(&mut self) -> Option<StoreAction<C>> {
        self.actions.pop_front()
    }

    /// How much there is of what.
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
