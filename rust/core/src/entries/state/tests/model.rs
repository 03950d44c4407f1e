//! Random operations on a store with a disk, with or without a quota, and on a naive model of it. The model receives what the store does, and says
//! whether it may.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use proptest::prelude::*;

use super::super::KeptEntry;
use super::super::memory::NAMESPACE_BYTES;
use super::*;

const KEYS: u8 = 4;
const CAPACITY: u64 = 100;
/// Of each of the two namespaces.
const QUOTA: u64 = 60;
const CLIENTS: u64 = 3;
/// Two of all entries.
const DISK_CAPACITY: u64 = 16 << 10;

/// Even numbers are of one namespace, odd ones of another.
fn key(number: u8) -> [u8; NAMESPACE_BYTES + 1] {
    let mut key = [number % 2; NAMESPACE_BYTES + 1];
    key[NAMESPACE_BYTES] = number;
    key
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Reserve {
        client: u64,
        key: u8,
        num_bytes: u64,
        timeout: u64,
    },
    Commit {
        index: usize,
        ttl: Option<u64>,
    },
    Select {
        client: u64,
        key: u8,
        lease: Option<u64>,
        timeout: u64,
    },
    Release {
        index: usize,
    },
    Acknowledge {
        index: usize,
    },
    Renew {
        index: usize,
    },
    Corrupt {
        index: usize,
    },
    Delete {
        key: u8,
    },
    Pass {
        seconds: u64,
    },
    Lose {
        client: u64,
    },
    /// The disk ends its oldest save.
    Save(Save),
    /// The disk ends its oldest load.
    Load(Load),
    /// The server is killed, and another starts with its disk.
    Restart,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Save {
    Kept,
    Failed,
    /// It failed at its very end.
    FailedButKept,
}

#[derive(Debug, Clone, Copy)]
enum Load {
    Good,
    Changed,
    Failed,
}

fn op() -> impl Strategy<Value = Op> {
    let (client, key, index) = (1..=CLIENTS, 0..KEYS, any::<usize>());
    prop_oneof![
        8 => (client.clone(), key.clone(), 1..60u64, 0..9u64).prop_map(
            |(client, key, num_bytes, timeout)| Op::Reserve { client, key, num_bytes, timeout }
        ),
        12 => (index, proptest::option::weighted(0.2, 1..20u64))
            .prop_map(|(index, ttl)| Op::Commit { index, ttl }),
        12 => (client.clone(), key.clone(), proptest::option::of(1..9u64), 0..9u64).prop_map(
            |(client, key, lease, timeout)| Op::Select { client, key, lease, timeout }
        ),
        12 => index.prop_map(|index| Op::Release { index }),
        4 => index.prop_map(|index| Op::Acknowledge { index }),
        2 => index.prop_map(|index| Op::Renew { index }),
        2 => index.prop_map(|index| Op::Corrupt { index }),
        3 => key.prop_map(|key| Op::Delete { key }),
        6 => (0..12u64).prop_map(|seconds| Op::Pass { seconds }),
        2 => client.prop_map(|client| Op::Lose { client }),
        10 => Just(Op::Save(Save::Kept)),
        1 => Just(Op::Save(Save::Failed)),
        1 => Just(Op::Save(Save::FailedButKept)),
        10 => Just(Op::Load(Load::Good)),
        1 => Just(Op::Load(Load::Changed)),
        1 => Just(Op::Load(Load::Failed)),
        2 => Just(Op::Restart),
    ]
}

/// State of an operation, as its client knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Waits,
    Reserved(u64),
    /// The number of the entry.
    Open(u64),
    Leased(u64),
}

/// A disk that carries out its jobs in order, and late.
#[derive(Default)]
struct ModelDisk {
    writes: VecDeque<Write>,
    loads: VecDeque<EntryId>,
    /// Keys and entries by their numbers.
    kept: BTreeMap<EntryId, (Key, u64)>,
}

#[derive(Clone)]
enum Write {
    Save(EntryId, Key, u64),
    Erase(EntryId),
}

/// State that follows from the store's actions alone.
#[derive(Default)]
struct Model {
    held: HashMap<Holder, (u8, Held)>,
    /// Keys and sizes of entries that were committed, by their number.
    committed: HashMap<u64, (u8, u64)>,
    acknowledged: Vec<u64>,
    /// Keys whose entry was acknowledged or deleted, and not committed anew.
    absent: BTreeSet<u8>,
    disk: ModelDisk,
    asked_bytes: HashMap<Holder, u64>,
    quota: Option<u64>,
}

impl Model {
    fn holders(&self) -> Vec<Holder> {
        let mut holders: Vec<_> = self.held.keys().copied().collect();
        holders.sort_unstable();
        holders
    }

    /// Takes note of an action, and checks that it is allowed.
    fn see(&mut self, action: &EntryAction<u64>, is_take: &HashMap<Holder, bool>) {
        match action {
            EntryAction::Reserved(holder) => {
                let key = self.held[holder].0;
                let others = self.held.values().filter(|(other, _)| *other == key);
                let is_reserved = others
                    .clone()
                    .any(|(_, held)| matches!(held, Held::Reserved(_)));
                assert!(!is_reserved, "two reservations of a key");
                self.held
                    .insert(*holder, (key, Held::Reserved(self.asked_bytes[holder])));
                if let Some(quota) = self.quota {
                    assert!(self.held_bytes(|other| other % 2 == key % 2) <= quota);
                }
            }
            EntryAction::Occupied(holder)
            | EntryAction::Refused(holder, _)
            | EntryAction::Nothing(holder) => {
                assert_eq!(
                    self.held.remove(holder).map(|(_, held)| held),
                    Some(Held::Waits)
                );
            }
            EntryAction::Offered(holder, entry) => {
                assert!(
                    !self.acknowledged.contains(entry),
                    "delivered after its end"
                );
                let (key, held) = self.held[holder];
                assert_eq!(held, Held::Waits);
                assert_eq!(key, self.committed[entry].0, "the value of another key");
                let has = |wanted: fn(u64) -> Held| {
                    self.held.values().any(|(_, held)| *held == wanted(*entry))
                };
                assert!(!has(Held::Leased), "a leased value is another's");
                let held = if is_take[holder] {
                    assert!(!has(Held::Open), "an open value is leased");
                    Held::Leased(*entry)
                } else {
                    Held::Open(*entry)
                };
                self.held.insert(*holder, (key, held));
            }
            EntryAction::Expired(holder) => {
                let (_, held) = self.held.remove(holder).expect("known");
                assert!(matches!(held, Held::Reserved(_) | Held::Leased(_)));
            }
            EntryAction::Save(id, key, entry) => {
                let save = Write::Save(*id, Key::clone(key), *entry);
                self.disk.writes.push_back(save);
            }
            EntryAction::Erase(id) => self.disk.writes.push_back(Write::Erase(*id)),
            EntryAction::Load(id, _) => self.disk.loads.push_back(*id),
        }
    }

    /// Bytes that nothing can free.
    fn held_bytes(&self, is_of: impl Fn(u8) -> bool) -> u64 {
        let mut entries = HashMap::new();
        let mut num_bytes = 0;
        let held = self.held.values().filter(|(key, _)| is_of(*key));
        for (_, held) in held {
            match held {
                Held::Reserved(reserved) => num_bytes += reserved,
                Held::Open(entry) | Held::Leased(entry) => {
                    entries.insert(entry, self.committed[entry].1);
                }
                Held::Waits => {}
            }
        }
        num_bytes + entries.values().sum::<u64>()
    }
}

struct Run {
    state: Entries<u64>,
    model: Model,
    is_take: HashMap<Holder, bool>,
    now: Instant,
    last_number: u64,
}

impl Run {
    fn new(quota: Option<u64>) -> Self {
        let mut state = Entries::of_store(CAPACITY, quota, RESERVATION);
        state.add_disk(DISK_CAPACITY, Vec::new(), Instant::now());
        (1..=CLIENTS).for_each(|client| state.session_up(client));
        Self {
            state,
            model: Model {
                quota,
                ..Model::default()
            },
            is_take: HashMap::new(),
            now: Instant::now(),
            last_number: 0,
        }
    }

    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// One of those that hold something.
    fn pick(&self, index: usize) -> Option<Holder> {
        let holders = self.model.holders();
        (!holders.is_empty()).then(|| holders[index % holders.len()])
    }

    fn begin(&mut self, client: u64, key: u8) -> Holder {
        let holder = (client, self.number());
        self.model.held.insert(holder, (key, Held::Waits));
        holder
    }

    fn seconds(&self, seconds: u64) -> Instant {
        self.now + SECOND * seconds as u32
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Reserve {
                client,
                key,
                num_bytes,
                timeout,
            } => {
                let holder = self.begin(client, key);
                self.model.asked_bytes.insert(holder, num_bytes);
                let deadline = Some(self.seconds(timeout));
                self.state.reserve(
                    holder,
                    Key::from(self::key(key)),
                    num_bytes,
                    deadline,
                    self.now,
                );
            }
            Op::Commit { index, ttl } => {
                let Some(holder) = self.pick(index) else {
                    return;
                };
                let entry = self.number();
                let ttl = ttl.map(|ttl| SECOND * ttl as u32);
                let held = self.model.held[&holder];
                if let (key, Held::Reserved(num_bytes)) = held {
                    self.model.committed.insert(entry, (key, num_bytes));
                    self.model.absent.remove(&key);
                    self.model.held.remove(&holder);
                    assert!(self.state.commit(holder, (entry, 1, 0), ttl, self.now));
                } else {
                    assert!(!self.state.commit(holder, (entry, 1, 0), ttl, self.now));
                }
            }
            Op::Select {
                client,
                key,
                lease,
                timeout,
            } => {
                let holder = self.begin(client, key);
                self.is_take.insert(holder, lease.is_some());
                let lease = lease.map(|it| Access::Lease(Some(SECOND * it as u32)));
                let (access, deadline) = (lease.unwrap_or(Access::Open), self.seconds(timeout));
                let query = Query::Exact(Key::from(self::key(key)));
                self.state
                    .select(holder, query, access, Some(deadline), self.now);
            }
            Op::Release { index } => {
                let Some(holder) = self.pick(index) else {
                    return;
                };
                self.model.held.remove(&holder);
                self.state.release(holder, self.now);
            }
            Op::Acknowledge { index } => self.acknowledge(index),
            Op::Renew { index } => {
                let Some(holder) = self.pick(index) else {
                    return;
                };
                let renewed = self.state.renew(holder, SECOND * 5, self.now);
                let is_leased = matches!(self.model.held[&holder].1, Held::Leased(_));
                assert_eq!(renewed.is_ok(), is_leased);
            }
            Op::Corrupt { index } => {
                let Some(holder) = self.pick(index) else {
                    return;
                };
                let held = self.model.held[&holder].1;
                let holds = matches!(held, Held::Leased(_) | Held::Open(_));
                assert_eq!(self.state.corrupt(holder).is_ok(), holds);
            }
            Op::Delete { key } => {
                let keys = [self::key(key)];
                let keys = keys.iter().map(|key| &key[..]);
                let (num_deleted, is_on_disk) = self.state.delete(keys, self.now);
                if num_deleted == 1 {
                    self.answer_erased(key, is_on_disk);
                }
            }
            Op::Pass { seconds } => {
                self.now += SECOND * seconds as u32;
                self.state.expire(self.now);
            }
            Op::Lose { client } => {
                self.model.held.retain(|holder, _| holder.0 != client);
                self.state.session_down(client, self.now);
                self.state.session_up(client);
            }
            Op::Save(outcome) => self.end_save(outcome),
            Op::Load(outcome) => self.end_load(outcome),
            Op::Restart => self.restart(),
        }
    }

    fn acknowledge(&mut self, index: usize) {
        let Some(holder) = self.pick(index) else {
            return;
        };
        let acknowledged = self.state.acknowledge(holder, self.now);
        let held = self.model.held[&holder].1;
        assert_eq!(acknowledged.is_ok(), matches!(held, Held::Leased(_)));
        if let Held::Leased(entry) = held {
            self.model.held.remove(&holder);
            self.model.acknowledged.push(entry);
            let key = self.model.committed[&entry].0;
            self.answer_erased(key, acknowledged == Ok(true));
            let mut committed = self.model.committed.iter();
            if committed.any(|(number, (of, _))| *number > entry && *of == key) {
                // It was found to be corrupt, and has a successor.
                self.model.absent.remove(&key);
            }
        }
    }

    /// Repeats the server's steps before it answers that an entry is deleted.
    fn answer_erased(&mut self, key: u8, is_on_disk: bool) {
        self.check();
        while is_on_disk && !self.model.disk.writes.is_empty() {
            self.run(Op::Save(Save::Kept));
        }
        self.model.absent.insert(key);
    }

    /// The disk does what it was told up to the end of a save.
    fn end_save(&mut self, outcome: Save) {
        let disk = &mut self.model.disk;
        while let Some(write) = disk.writes.pop_front() {
            match write {
                Write::Erase(id) => {
                    disk.kept.remove(&id);
                    self.state.erased(id);
                }
                Write::Save(id, key, entry) => {
                    if outcome != Save::Failed {
                        disk.kept.insert(id, (key, entry));
                    }
                    if outcome != Save::Kept {
                        disk.writes.push_front(Write::Erase(id));
                    }
                    self.state.saved(id, outcome == Save::Kept, self.now);
                    return self.check();
                }
            }
        }
    }

    fn end_load(&mut self, outcome: Load) {
        let Some(id) = self.model.disk.loads.pop_front() else {
            return;
        };
        let (key, entry) = self.model.disk.kept.get(&id).expect("not on disk").clone();
        let outcome = match outcome {
            Load::Good => Ok(entry),
            Load::Changed => Err(Error::Corrupt(String::new())),
            Load::Failed => Err(Error::Unavailable(String::new())),
        };
        let is_changed = matches!(outcome, Err(Error::Corrupt(_)));
        let is_good = outcome.is_ok();
        self.state.loaded(id, outcome, self.now);
        assert!(is_good || self.state.exists(&key) != is_changed);
    }

    fn restart(&mut self) {
        let disk = &mut self.model.disk;
        disk.writes.clear();
        disk.loads.clear();
        let kept = disk.kept.iter().map(|(id, (key, entry))| KeptEntry {
            id: *id,
            key: Key::clone(key),
            num_bytes: 1,
            num_record: 0,
            footprint: self.model.committed[entry].1,
        });
        let kept = kept.collect();
        self.model.held.clear();
        self.state = Entries::of_store(CAPACITY, self.model.quota, RESERVATION);
        self.state.add_disk(DISK_CAPACITY, kept, self.now);
        for key in &self.model.absent {
            assert!(!self.state.exists(&self::key(*key)), "it has come back");
        }
        (1..=CLIENTS).for_each(|client| self.state.session_up(client));
    }

    fn check(&mut self) {
        while let Some(action) = self.state.next_action() {
            self.model.see(&action, &self.is_take);
        }
        let info = self.state.info();
        assert!(info.num_bytes <= CAPACITY, "{info:?}");
        assert!(info.num_disk_bytes <= DISK_CAPACITY, "{info:?}");
        assert!(
            self.model.held_bytes(|_| true) <= info.num_bytes,
            "{info:?}"
        );
        self.check_quota(info.num_bytes);
        let count = |is: fn(&Held) -> bool| {
            let held = self.model.held.values().filter(|(_, held)| is(held));
            held.count() as u64
        };
        assert_eq!(info.num_waiting, count(|held| *held == Held::Waits));
        assert_eq!(
            info.num_reserved,
            count(|held| matches!(held, Held::Reserved(_)))
        );
        assert_eq!(
            info.num_leased,
            count(|held| matches!(held, Held::Leased(_)))
        );
        let num_listed = self.state.list(b"", 0).0.len();
        assert_eq!(info.num_values, num_listed as u64);
    }

    /// Only held entries may exceed a quota, and one entry that was held.
    fn check_quota(&self, num_bytes: u64) {
        let Some(quota) = self.model.quota else {
            return;
        };
        let mut sum = 0;
        for number in 0..2 {
            let (bytes, held, newest) = self.state.memory.of_namespace(&key(number));
            let newest = newest.map_or(0, |id| self.state.by_id[&id].footprint);
            assert!(
                bytes <= quota.max(held + newest),
                "{bytes} bytes, {held} held"
            );
            assert!(self.model.held_bytes(|key| key % 2 == number) <= held);
            sum += bytes;
        }
        assert_eq!(sum, num_bytes);
    }
}

proptest! {
    #[test]
    fn a_store_keeps_its_promises_whatever_its_clients_do(
        quota in proptest::option::of(Just(QUOTA)), ops in proptest::collection::vec(op(), 1..120)
    ) {
        let mut run = Run::new(quota);
        for op in ops {
            run.run(op);
            run.check();
        }
        // After all clients have ended and the disk is idle, the rest is evictable.
        for client in 1..=CLIENTS {
            run.run(Op::Lose { client });
            run.check();
        }
        while !run.model.disk.writes.is_empty() || !run.model.disk.loads.is_empty() {
            run.run(Op::Save(Save::Kept));
            run.run(Op::Load(Load::Good));
            run.check();
        }
        // One for each namespace.
        for key in KEYS..KEYS + 2 {
            run.run(Op::Reserve { client: 1, key, num_bytes: CAPACITY / 2, timeout: 0 });
            run.check();
        }
        let held: Vec<_> = run.model.held.values().map(|(_, held)| *held).collect();
        prop_assert_eq!(held, [Held::Reserved(CAPACITY / 2); 2]);
        for _ in 0..2 {
            run.run(Op::Release { index: 0 });
        }
        let info = run.state.info();
        prop_assert_eq!((info.num_bytes, info.num_values), (0, info.num_disk_values));
        prop_assert_eq!(info.num_disk_values, run.model.disk.kept.len() as u64);
        let keys: Vec<_> = run.model.disk.kept.values().map(|(key, _)| Key::clone(key)).collect();
        run.state.delete(keys.iter().map(|key| &key[..]), run.now);
        run.check();
        run.run(Op::Save(Save::Kept));
        prop_assert_eq!(run.model.disk.kept.len(), 0);
        let info = run.state.info();
        prop_assert_eq!((info.num_values, info.num_disk_values, info.num_disk_bytes), (0, 0, 0));
        prop_assert!(run.state.sizes().iter().all(|(name, size)| *size == 0 || matches!(*name, "clients that may hold" | "deadlines of entries" | "values to be saved")));
    }
}
