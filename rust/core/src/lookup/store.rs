//! The state of a lookup buffer: entries, reservations, leases, and who waits. Pure: events in, actions out; no threads,
//! no clock, and no bytes, which are the content's.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use super::Query;
use super::index::Index;
use crate::earliest::Earliest;
use crate::error::{Error, Result};

/// Names an insert, the entry that it becomes, or a select. They grow, so that they tell the age.
pub(crate) type Ticket = u64;

/// What is to be done outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action<C> {
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
    tokens: Box<[i64]>,
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
    query: Query,
    deadline: Option<Instant>,
}

/// How much there is of what.
#[expect(clippy::struct_field_names, reason = "counts are named num_*")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
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
    actions: VecDeque<Action<C>>,
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
            self.actions.push_back(Action::Grant(first.ticket));
            self.inserts.pop_front();
        }
    }

    /// Makes an entry visible whose bytes are all here. Unknown tickets are those of a cleared store.
    pub(super) fn commit(&mut self, ticket: Ticket, tokens: Box<[i64]>, content: C) {
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
    fn show(&mut self, ticket: Ticket, entry: Entry<C>) {
        let waiting = self
            .selects
            .iter()
            .find(|(_, waiting)| waiting.query.takes(&entry.tokens));
        if let Some(select) = waiting.map(|(select, _)| *select) {
            self.selects.remove(&select);
            return self.lease(select, ticket, entry);
        }
        self.index.insert(&entry.tokens, ticket);
        self.entries.insert(ticket, entry);
    }

    fn lease(&mut self, select: Ticket, ticket: Ticket, entry: Entry<C>) {
        self.actions.push_back(Action::Deliver {
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
        query: Query,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Ticket {
        let select = self.ticket();
        let found = match &query {
            Query::Any => self.entries.keys().next().copied(),
            Query::Tokens(tokens) => self.index.find(tokens),
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
        let mut is_kept = |deadline: Option<Instant>, action: Action<C>| {
            let is_late = deadline.is_some_and(|at| at <= now);
            if is_late {
                actions.push_back(action);
            } else {
                deadlines.add(deadline);
            }
            !is_late
        };
        self.inserts
            .retain(|waiting| is_kept(waiting.deadline, Action::Full(waiting.ticket)));
        self.selects
            .retain(|select, waiting| is_kept(waiting.deadline, Action::Nothing(*select)));
        self.grant();
    }

    /// When to call [`expire`](Self::expire).
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.at()
    }

    /// The next thing to do.
    pub(super) fn next_action(&mut self) -> Option<Action<C>> {
        self.actions.pop_front()
    }

    /// How much there is of what.
    pub(super) fn counts(&self) -> Counts {
        Counts {
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
mod tests {
    use std::time::Duration;

    use super::*;

    const CAPACITY: u64 = 100;

    fn store() -> Store<char> {
        Store::new(CAPACITY)
    }

    fn actions(store: &mut Store<char>) -> Vec<Action<char>> {
        std::iter::from_fn(|| store.next_action()).collect()
    }

    fn reserve(store: &mut Store<char>, num_bytes: u64) -> Ticket {
        store.reserve(num_bytes, None, Instant::now()).unwrap()
    }

    fn insert(store: &mut Store<char>, tokens: &[i64], content: char) -> Ticket {
        let ticket = reserve(store, 10);
        store.commit(ticket, tokens.into(), content);
        ticket
    }

    fn select(store: &mut Store<char>, tokens: &[i64]) -> Ticket {
        store.select(Query::Tokens(tokens.into()), None, Instant::now())
    }

    fn deliver(select: Ticket, entry: Ticket, content: char) -> Action<char> {
        Action::Deliver {
            select,
            entry,
            content,
        }
    }

    #[test]
    fn an_entry_is_invisible_until_it_is_committed() {
        let mut store = store();
        let entry = reserve(&mut store, 10);
        assert_eq!(actions(&mut store), [Action::Grant(entry)]);
        let waiting = select(&mut store, &[1]);
        assert_eq!(actions(&mut store), []);
        store.commit(entry, [1, 2].into(), 'a');
        assert_eq!(actions(&mut store), [deliver(waiting, entry, 'a')]);
    }

    #[test]
    fn a_commit_wakes_the_select_that_has_waited_longest() {
        let mut store = store();
        let other = select(&mut store, &[9]);
        let (first, second) = (select(&mut store, &[1]), select(&mut store, &[1]));
        let a = insert(&mut store, &[1], 'a');
        let b = insert(&mut store, &[1], 'b');
        let expected = [
            Action::Grant(a),
            deliver(first, a, 'a'),
            Action::Grant(b),
            deliver(second, b, 'b'),
        ];
        assert_eq!(actions(&mut store), expected);
        assert!(store.cancel(other) && !store.cancel(first));
    }

    #[test]
    fn any_takes_the_oldest() {
        let mut store = store();
        let a = insert(&mut store, &[5], 'a');
        insert(&mut store, &[1], 'b');
        actions(&mut store);
        let any = store.select(Query::Any, None, Instant::now());
        assert_eq!(actions(&mut store), [deliver(any, a, 'a')]);
    }

    #[test]
    fn an_entry_that_is_put_back_keeps_its_age() {
        let mut store = store();
        let a = insert(&mut store, &[1], 'a');
        insert(&mut store, &[1], 'b');
        select(&mut store, &[1]);
        store.put_back(a);
        actions(&mut store);
        let again = select(&mut store, &[1]);
        assert_eq!(actions(&mut store), [deliver(again, a, 'a')]);
    }

    #[test]
    fn an_entry_that_is_put_back_goes_to_who_waits() {
        let mut store = store();
        let a = insert(&mut store, &[1], 'a');
        select(&mut store, &[1]);
        let waiting = select(&mut store, &[1]);
        actions(&mut store);
        store.put_back(a);
        assert_eq!(actions(&mut store), [deliver(waiting, a, 'a')]);
    }

    #[test]
    fn a_leased_entry_takes_its_bytes_until_it_is_dropped() {
        let mut store = store();
        let large = reserve(&mut store, CAPACITY);
        store.commit(large, [1].into(), 'a');
        select(&mut store, &[1]);
        actions(&mut store);
        let waiting = reserve(&mut store, 1);
        assert_eq!(actions(&mut store), []);
        store.drop_entry(large);
        assert_eq!(actions(&mut store), [Action::Grant(waiting)]);
    }

    #[test]
    fn inserts_are_granted_in_the_order_of_their_calls() {
        let mut store = store();
        let first = reserve(&mut store, CAPACITY);
        let (large, small) = (reserve(&mut store, 60), reserve(&mut store, 1));
        actions(&mut store);
        assert!(store.abandon(first));
        let expected = [Action::Grant(large), Action::Grant(small)];
        assert_eq!(actions(&mut store), expected);
    }

    #[test]
    fn an_insert_that_is_given_up_lets_the_next_one_in() {
        let mut store = store();
        reserve(&mut store, 50);
        let (large, small) = (reserve(&mut store, 60), reserve(&mut store, 50));
        actions(&mut store);
        assert!(store.abandon(large));
        assert_eq!(actions(&mut store), [Action::Grant(small)]);
    }

    #[test]
    fn an_entry_that_can_never_fit_is_refused_with_both_numbers() {
        let refused = store().reserve(CAPACITY + 1, None, Instant::now());
        let text = refused.unwrap_err().to_string();
        assert!(
            text.contains("101 bytes") && text.contains("100 bytes"),
            "{text}"
        );
    }

    #[test]
    fn what_waits_ends_at_its_deadline_and_leaves_nothing() {
        let mut store = store();
        let (now, at) = (Instant::now(), Instant::now() + Duration::from_secs(1));
        reserve(&mut store, CAPACITY);
        let late = store.reserve(10, Some(at), now).unwrap();
        let select = store.select(Query::Any, Some(at), now);
        actions(&mut store);
        store.expire(now);
        assert_eq!(actions(&mut store), []);
        assert_eq!(store.next_deadline(), Some(at));
        store.expire(at);
        let expected = [Action::Full(late), Action::Nothing(select)];
        assert_eq!(actions(&mut store), expected);
        let counts = store.counts();
        assert_eq!(
            (counts.num_waiting_inserts, counts.num_waiting_selects),
            (0, 0)
        );
        assert_eq!(store.next_deadline(), None);
    }

    #[test]
    fn a_deadline_that_has_come_asks_once() {
        let mut store = store();
        let now = Instant::now();
        let nothing = store.select(Query::Any, Some(now), now);
        assert_eq!(actions(&mut store), [Action::Nothing(nothing)]);
        insert(&mut store, &[1], 'a');
        let full = store.reserve(CAPACITY, Some(now), now).unwrap();
        assert_eq!(actions(&mut store).last(), Some(&Action::Full(full)));
    }
}
