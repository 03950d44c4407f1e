//! Random operations on a store and on a naive model of it. The model is told what the store does, and says whether it may.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const KEYS: u8 = 4;
const CAPACITY: u64 = 100;
const CLIENTS: u64 = 3;

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
}

fn op() -> impl Strategy<Value = Op> {
    let (client, key, index) = (1..=CLIENTS, 0..KEYS, any::<usize>());
    prop_oneof![
        4 => (client.clone(), key.clone(), 1..60u64, 0..9u64).prop_map(
            |(client, key, num_bytes, timeout)| Op::Reserve { client, key, num_bytes, timeout }
        ),
        6 => (index, proptest::option::weighted(0.2, 1..20u64))
            .prop_map(|(index, ttl)| Op::Commit { index, ttl }),
        6 => (client.clone(), key.clone(), proptest::option::of(1..9u64), 0..9u64).prop_map(
            |(client, key, lease, timeout)| Op::Select { client, key, lease, timeout }
        ),
        6 => index.prop_map(|index| Op::Release { index }),
        2 => index.prop_map(|index| Op::Acknowledge { index }),
        1 => index.prop_map(|index| Op::Renew { index }),
        1 => index.prop_map(|index| Op::Corrupt { index }),
        1 => key.prop_map(|key| Op::Delete { key }),
        3 => (0..12u64).prop_map(|seconds| Op::Pass { seconds }),
        1 => client.prop_map(|client| Op::Lose { client }),
    ]
}

/// What an operation has, as its client knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Waits,
    Reserved(u64),
    /// The number of the value.
    Open(u64),
    Leased(u64),
}

/// What is known from the store's actions alone.
#[derive(Default)]
struct Model {
    held: HashMap<Holder, (u8, Held)>,
    /// Sizes of values that were committed, by their number; the keys of those that were acknowledged are gone.
    committed: HashMap<u64, (u8, u64)>,
    acknowledged: Vec<u64>,
    asked_bytes: HashMap<Holder, u64>,
}

impl Model {
    fn holders(&self) -> Vec<Holder> {
        let mut holders: Vec<_> = self.held.keys().copied().collect();
        holders.sort_unstable();
        holders
    }

    /// Takes note of an action, and checks that it is allowed.
    fn see(&mut self, action: &StoreAction<u64>, is_take: &HashMap<Holder, bool>) {
        match action {
            StoreAction::Reserved(holder) => {
                let key = self.held[holder].0;
                let others = self.held.values().filter(|(other, _)| *other == key);
                let is_reserved = others
                    .clone()
                    .any(|(_, held)| matches!(held, Held::Reserved(_)));
                assert!(!is_reserved, "two reservations of a key");
                self.held
                    .insert(*holder, (key, Held::Reserved(self.asked_bytes[holder])));
            }
            StoreAction::Occupied(holder)
            | StoreAction::Refused(holder, _)
            | StoreAction::Nothing(holder) => {
                assert_eq!(
                    self.held.remove(holder).map(|(_, held)| held),
                    Some(Held::Waits)
                );
            }
            StoreAction::Offered(holder, value) => {
                assert!(
                    !self.acknowledged.contains(value),
                    "delivered after its end"
                );
                let (key, held) = self.held[holder];
                assert_eq!(held, Held::Waits);
                assert_eq!(key, self.committed[value].0, "the value of another key");
                let has = |wanted: fn(u64) -> Held| {
                    self.held.values().any(|(_, held)| *held == wanted(*value))
                };
                assert!(!has(Held::Leased), "a leased value is another's");
                let held = if is_take[holder] {
                    assert!(!has(Held::Open), "an open value is leased");
                    Held::Leased(*value)
                } else {
                    Held::Open(*value)
                };
                self.held.insert(*holder, (key, held));
            }
            StoreAction::Expired(holder) => {
                let (_, held) = self.held.remove(holder).expect("known");
                assert!(matches!(held, Held::Reserved(_) | Held::Leased(_)));
            }
        }
    }

    /// Bytes that nothing can free.
    fn held_bytes(&self) -> u64 {
        let mut values = HashMap::new();
        let mut num_bytes = 0;
        for (_, held) in self.held.values() {
            match held {
                Held::Reserved(reserved) => num_bytes += reserved,
                Held::Open(value) | Held::Leased(value) => {
                    values.insert(value, self.committed[value].1);
                }
                Held::Waits => {}
            }
        }
        num_bytes + values.values().sum::<u64>()
    }
}

struct Run {
    state: State<u64>,
    model: Model,
    is_take: HashMap<Holder, bool>,
    now: Instant,
    last_number: u64,
}

impl Run {
    fn new() -> Self {
        let mut state = State::new(CAPACITY, RESERVATION);
        (1..=CLIENTS).for_each(|client| state.session_up(client));
        Self {
            state,
            model: Model::default(),
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
                self.state
                    .reserve(holder, &[key], num_bytes, deadline, self.now);
            }
            Op::Commit { index, ttl } => {
                let Some(holder) = self.pick(index) else {
                    return;
                };
                let value = self.number();
                let ttl = ttl.map(|ttl| SECOND * ttl as u32);
                let held = self.model.held[&holder];
                if let (key, Held::Reserved(num_bytes)) = held {
                    self.model.committed.insert(value, (key, num_bytes));
                    self.model.held.remove(&holder);
                    assert!(self.state.commit(holder, (value, 1, 0), ttl, self.now));
                } else {
                    assert!(!self.state.commit(holder, (value, 1, 0), ttl, self.now));
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
                let (lease, deadline) = (
                    lease.map(|it| SECOND * it as u32),
                    Some(self.seconds(timeout)),
                );
                self.state.select(holder, &[key], lease, deadline, self.now);
            }
            Op::Release { index } => {
                let Some(holder) = self.pick(index) else {
                    return;
                };
                self.model.held.remove(&holder);
                self.state.release(holder, self.now);
            }
            Op::Acknowledge { index } => {
                let Some(holder) = self.pick(index) else {
                    return;
                };
                let acknowledged = self.state.acknowledge(holder, self.now);
                let held = self.model.held[&holder].1;
                assert_eq!(acknowledged.is_ok(), matches!(held, Held::Leased(_)));
                if let Held::Leased(value) = held {
                    self.model.held.remove(&holder);
                    self.model.acknowledged.push(value);
                }
            }
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
                self.state.delete([&[key][..]].into_iter(), self.now);
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
        }
    }

    fn check(&mut self) {
        while let Some(action) = self.state.next_action() {
            self.model.see(&action, &self.is_take);
        }
        let info = self.state.info();
        assert!(info.num_bytes <= CAPACITY, "{info:?}");
        assert!(self.model.held_bytes() <= info.num_bytes, "{info:?}");
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
}

proptest! {
    #[test]
    fn a_store_keeps_its_promises_whatever_its_clients_do(ops in proptest::collection::vec(op(), 1..120)) {
        let mut run = Run::new();
        for op in ops {
            run.run(op);
            run.check();
        }
        // When all clients have gone, what is left is evictable.
        for client in 1..=CLIENTS {
            run.run(Op::Lose { client });
            run.check();
        }
        let holder = run.begin(1, KEYS);
        run.model.asked_bytes.insert(holder, CAPACITY);
        run.state.reserve(holder, &[KEYS], CAPACITY, Some(run.now), run.now);
        run.check();
        prop_assert_eq!(run.model.held[&holder].1, Held::Reserved(CAPACITY));
        run.run(Op::Release { index: 0 });
        let info = run.state.info();
        prop_assert_eq!((info.num_bytes, info.num_values), (0, 0));
        prop_assert!(run.state.sizes().iter().all(|(name, size)| *size == 0 || matches!(*name, "clients that may hold" | "deadlines of the store's state")));
    }
}
