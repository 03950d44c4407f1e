//! The store against a model that follows its actions, for any events in any order.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::{LookupQuery, Store, StoreAction, Ticket};

const CAPACITY: u64 = 100;

/// An event of a store.
#[derive(Debug, Clone)]
enum StoreStep {
    Insert {
        tokens: Vec<i64>,
        num_bytes: u64,
    },
    Select {
        tokens: Option<Vec<i64>>,
    },
    /// The n-th of those that were granted, leased, waiting: what becomes of it.
    Commit(usize),
    Abandon(usize),
    Consume(usize),
    PutBack(usize),
    Cancel(usize),
    Later,
}

fn step() -> impl Strategy<Value = StoreStep> {
    let tokens = || proptest::collection::vec(0..2i64, 1..4);
    prop_oneof![
        (tokens(), 1..60u64)
            .prop_map(|(tokens, num_bytes)| StoreStep::Insert { tokens, num_bytes }),
        proptest::option::of(tokens()).prop_map(|tokens| StoreStep::Select { tokens }),
        (0..8usize).prop_map(StoreStep::Commit),
        (0..8usize).prop_map(StoreStep::Abandon),
        (0..8usize).prop_map(StoreStep::Consume),
        (0..8usize).prop_map(StoreStep::PutBack),
        (0..8usize).prop_map(StoreStep::Cancel),
        Just(StoreStep::Later),
    ]
}

/// Follows the actions of a store.
struct Model {
    /// Its operations wait as their own tickets.
    store: Store<Ticket, Ticket, Ticket>,
    num_tickets: u64,
    now: Instant,
    sizes: HashMap<Ticket, u64>,
    tokens: HashMap<Ticket, Vec<i64>>,
    waiting: Vec<Ticket>,
    granted: Vec<Ticket>,
    visible: BTreeSet<Ticket>,
    leased: Vec<Ticket>,
    selects: HashMap<Ticket, LookupQuery>,
    consumed: BTreeSet<Ticket>,
}

impl Model {
    fn new() -> Self {
        Self {
            store: Store::new(CAPACITY),
            num_tickets: 0,
            now: Instant::now(),
            sizes: HashMap::new(),
            tokens: HashMap::new(),
            waiting: Vec::new(),
            granted: Vec::new(),
            visible: BTreeSet::new(),
            leased: Vec::new(),
            selects: HashMap::new(),
            consumed: BTreeSet::new(),
        }
    }

    fn step(&mut self, step: StoreStep) {
        let deadline = Some(self.now + Duration::from_secs(3));
        match step {
            StoreStep::Insert { tokens, num_bytes } => {
                self.num_tickets += 1;
                let store = &mut self.store;
                let reserved = store.reserve(num_bytes, deadline, self.now, self.num_tickets);
                let ticket = reserved.unwrap();
                self.sizes.insert(ticket, num_bytes);
                self.tokens.insert(ticket, tokens);
                self.waiting.push(ticket);
            }
            StoreStep::Select { tokens } => {
                let query = tokens.map_or(LookupQuery::Any, LookupQuery::Tokens);
                self.num_tickets += 1;
                let store = &mut self.store;
                let select = store.select(query.clone(), deadline, self.now, self.num_tickets);
                self.selects.insert(select, query);
            }
            StoreStep::Commit(n) => {
                if let Some(ticket) = take(&mut self.granted, n) {
                    self.visible.insert(ticket);
                    let tokens = self.tokens[&ticket].as_slice().into();
                    self.store.commit(ticket, tokens, ticket);
                }
            }
            StoreStep::Abandon(n) => {
                if let Some(ticket) = take(&mut self.granted, n) {
                    self.store.release(ticket);
                }
            }
            StoreStep::Consume(n) => {
                if let Some(entry) = take(&mut self.leased, n) {
                    assert!(self.consumed.insert(entry), "{entry} was consumed twice");
                    self.store.settle(entry, true);
                }
            }
            StoreStep::PutBack(n) => {
                if let Some(entry) = take(&mut self.leased, n) {
                    self.visible.insert(entry);
                    self.store.release(entry);
                }
            }
            StoreStep::Cancel(n) => {
                let select = self.selects.keys().nth(n).copied();
                if let Some(select) = select {
                    self.selects.remove(&select);
                    assert!(self.store.cancel(select));
                }
            }
            StoreStep::Later => {
                self.now += Duration::from_secs(1);
                self.store.expire(self.now);
            }
        }
        self.follow();
        self.check();
    }

    fn follow(&mut self) {
        while let Some(action) = self.store.next_action() {
            match action {
                StoreAction::Insert(insert, Ok(ticket)) => {
                    assert_eq!(insert, ticket);
                    assert_eq!(self.waiting.remove(0), ticket, "out of turn");
                    self.granted.push(ticket);
                }
                StoreAction::Insert(insert, Err(_)) => {
                    self.waiting.retain(|waiting| *waiting != insert);
                }
                StoreAction::Select(select, found) => {
                    let query = self.selects.remove(&select).expect("it waited");
                    let Some((entry, content)) = found else {
                        continue;
                    };
                    assert!(query.matches(&self.tokens[&entry]));
                    assert!(self.visible.remove(&entry), "{entry} was not there");
                    assert_eq!(content, entry);
                    self.leased.push(entry);
                }
            }
        }
    }

    fn check(&self) {
        let sizes = |tickets: &mut dyn Iterator<Item = &Ticket>| -> u64 {
            tickets.map(|ticket| self.sizes[ticket]).sum()
        };
        let info = self.store.info();
        let num_bytes = sizes(&mut self.granted.iter().chain(&self.visible).chain(&self.leased));
        assert_eq!(info.num_bytes, Some(num_bytes));
        assert!(num_bytes <= CAPACITY);
        assert_eq!(info.num_entries, Some(self.visible.len()));
        assert_eq!(info.num_leased, Some(self.leased.len()));
        assert_eq!(self.store.reserved.len(), self.granted.len());
        assert_eq!(self.store.inserts.len(), self.waiting.len());
        assert_eq!(self.store.selects.len(), self.selects.len());
        for query in self.selects.values() {
            let matches = |entry: &&Ticket| query.matches(&self.tokens[*entry]);
            assert_eq!(
                self.visible.iter().find(matches),
                None,
                "nobody gave it to {query:?}"
            );
        }
        if let Some(first) = self.waiting.first() {
            assert!(
                self.sizes[first] > CAPACITY - num_bytes,
                "{first} waits in vain"
            );
        }
    }
}

fn take(tickets: &mut Vec<Ticket>, n: usize) -> Option<Ticket> {
    (n < tickets.len()).then(|| tickets.remove(n))
}

proptest! {
    #[test]
    fn entries_are_consumed_once_and_never_lost(steps in proptest::collection::vec(step(), 0..200)) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
        }
    }
}
