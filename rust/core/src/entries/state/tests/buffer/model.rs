//! A lookup buffer against a model that follows its actions, for any events in any order.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// An event of a buffer.
#[derive(Debug, Clone)]
enum BufferStep {
    Insert {
        tokens: Vec<i64>,
        num_bytes: u64,
    },
    Select {
        tokens: Option<Vec<i64>>,
    },
    /// The n-th of those that have their space, that lease an entry, that wait: what becomes of it.
    Commit(usize),
    Abandon(usize),
    Acknowledge(usize),
    GiveBack(usize),
    Cancel(usize),
    Later,
}

fn step() -> impl Strategy<Value = BufferStep> {
    let tokens = || proptest::collection::vec(0..2i64, 1..4);
    prop_oneof![
        (tokens(), 1..60u64)
            .prop_map(|(tokens, num_bytes)| BufferStep::Insert { tokens, num_bytes }),
        proptest::option::of(tokens()).prop_map(|tokens| BufferStep::Select { tokens }),
        (0..8usize).prop_map(BufferStep::Commit),
        (0..8usize).prop_map(BufferStep::Abandon),
        (0..8usize).prop_map(BufferStep::Acknowledge),
        (0..8usize).prop_map(BufferStep::GiveBack),
        (0..8usize).prop_map(BufferStep::Cancel),
        Just(BufferStep::Later),
    ]
}

/// Follows the actions of a buffer. Entries are named by their inserts.
struct Model {
    buffer: Buffer,
    sizes: BTreeMap<u64, u64>,
    keys: BTreeMap<u64, Key>,
    waiting: Vec<u64>,
    reserved: Vec<u64>,
    visible: BTreeSet<u64>,
    /// Entries by the selects that lease them.
    leased: BTreeMap<u64, u64>,
    selects: BTreeMap<u64, Query<Key>>,
    acknowledged: BTreeSet<u64>,
}

impl Model {
    fn new() -> Self {
        Self {
            buffer: Buffer::new(),
            sizes: BTreeMap::new(),
            keys: BTreeMap::new(),
            waiting: Vec::new(),
            reserved: Vec::new(),
            visible: BTreeSet::new(),
            leased: BTreeMap::new(),
            selects: BTreeMap::new(),
            acknowledged: BTreeSet::new(),
        }
    }

    fn step(&mut self, step: BufferStep) {
        let deadline = Some(self.buffer.now + 3 * SECOND);
        match step {
            BufferStep::Insert { tokens, num_bytes } => {
                let insert = self.buffer.reserve_until(&tokens, num_bytes, deadline);
                self.sizes.insert(insert, num_bytes);
                self.keys.insert(insert, key(&tokens));
                self.waiting.push(insert);
            }
            BufferStep::Select { tokens } => {
                let query = tokens.map_or(Query::Oldest, |it| Query::LongestPrefix(key(&it)));
                let select = self.buffer.select_until(&query, deadline);
                self.selects.insert(select, query);
            }
            BufferStep::Commit(n) => {
                if n < self.reserved.len() {
                    let insert = self.reserved.remove(n);
                    self.visible.insert(insert);
                    self.buffer.commit(insert);
                }
            }
            BufferStep::Abandon(n) => {
                if n < self.reserved.len() {
                    let insert = self.reserved.remove(n);
                    self.buffer.release(insert);
                }
            }
            BufferStep::Acknowledge(n) => {
                if let Some(select) = self.leased.keys().nth(n).copied() {
                    let entry = self.leased.remove(&select).unwrap();
                    assert!(self.acknowledged.insert(entry), "{entry} was had twice");
                    let (holder, now) = ((CLIENT, select), self.buffer.now);
                    assert_eq!(self.buffer.state.acknowledge(holder, now), Ok(false));
                }
            }
            BufferStep::GiveBack(n) => {
                if let Some(select) = self.leased.keys().nth(n).copied() {
                    self.visible.insert(self.leased.remove(&select).unwrap());
                    self.buffer.release(select);
                }
            }
            BufferStep::Cancel(n) => {
                if let Some(select) = self.selects.keys().nth(n).copied() {
                    self.selects.remove(&select);
                    assert!(self.buffer.is_waiting(select));
                    self.buffer.release(select);
                }
            }
            BufferStep::Later => {
                self.buffer.now += SECOND;
                self.buffer.state.expire(self.buffer.now);
            }
        }
        self.follow();
        self.check();
    }

    fn follow(&mut self) {
        for action in self.buffer.actions() {
            match action {
                EntryAction::Reserved((_, insert)) => {
                    assert_eq!(self.waiting.remove(0), insert, "out of turn");
                    self.reserved.push(insert);
                }
                EntryAction::Refused((_, insert), _) => {
                    self.waiting.retain(|waiting| *waiting != insert);
                }
                EntryAction::Nothing((_, select)) => {
                    self.selects.remove(&select).expect("it waited");
                }
                EntryAction::Offered((_, select), entry) => {
                    let query = self.selects.remove(&select).expect("it waited");
                    assert!(query.matches(&self.keys[&entry]));
                    assert!(self.visible.remove(&entry), "{entry} was not there");
                    self.leased.insert(select, entry);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn check(&self) {
        let sizes = |inserts: &mut dyn Iterator<Item = &u64>| -> u64 {
            inserts.map(|insert| self.sizes[insert]).sum()
        };
        let info = self.buffer.state.info();
        let held = self.reserved.iter().chain(&self.visible);
        let num_bytes = sizes(&mut held.chain(self.leased.values()));
        assert_eq!(info.num_bytes, num_bytes);
        assert!(num_bytes <= CAPACITY);
        let num_entries = self.visible.len() + self.leased.len();
        assert_eq!(info.num_values, num_entries as u64);
        assert_eq!(info.num_leased, self.leased.len() as u64);
        assert_eq!(info.num_reserved, self.reserved.len() as u64);
        let num_waiting = self.waiting.len() + self.selects.len();
        assert_eq!(info.num_waiting, num_waiting as u64);
        for query in self.selects.values() {
            let matches = |entry: &&u64| query.matches(&self.keys[*entry]);
            let missed = self.visible.iter().find(matches);
            assert_eq!(missed, None, "{query:?} waits in vain");
        }
        if let Some(first) = self.waiting.first() {
            assert!(
                self.sizes[first] > CAPACITY - num_bytes,
                "{first} waits in vain"
            );
        }
    }
}

proptest! {
    #[test]
    fn entries_are_delivered_once_and_never_lost(steps in proptest::collection::vec(step(), 0..200)) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
        }
    }
}
