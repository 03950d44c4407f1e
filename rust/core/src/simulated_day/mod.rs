//! A day of simulated time. Sessions, loads, handoffs, entries and tensors come and go, some of them in disorder, and every
//! hour the entries in the maps and queues of the actors that stay are counted.

mod agents;
mod control;
mod pipes;
mod stores;
mod visitors;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use agents::Agents;
use control::Ports;
use pipes::Pipes;
use stores::Stores;
use visitors::Visitors;

use crate::clock::{self, advance};
use crate::reactor::manual::{Round, Sizes};
use crate::session::SessionTimeouts;
use crate::transport::{MemoryPath, Transport};

const TOKEN: &[u8] = b"token";
const HOUR: Duration = Duration::from_secs(3600);
/// Between two steps: less than the silence after which the peer of a session counts as lost.
const STEP: Duration = Duration::from_secs(9);
/// Ten minutes: all time-outs pass.
const STEPS_OF_REST: u64 = 67;
const TIMEOUTS: SessionTimeouts = SessionTimeouts {
    handshake: Duration::from_secs(10),
    waits_for_listener: false,
    heartbeat: Duration::from_secs(10),
    silence: Duration::from_secs(40),
};
/// Of so many steps about one is slow.
const STEPS_BETWEEN_SLOW: u64 = 40;
/// More than is on its way at once: it is not there when [`LATE`] has passed.
const MANY_BYTES: usize = 5 << 20;
const LATE: Duration = Duration::from_secs(2);
/// More rounds than anything takes.
const ROUNDS: usize = 100_000;

/// Largest sizes of maps and queues at rest: those of sessions that stay, and of bounded histories. All others are
/// empty.
const LEFT: [(&str, usize); 22] = [
    ("sessions", 1),
    ("timers", 66),
    ("ended peers", 256),
    ("endpoints", 1),
    // And its two slices.
    ("regions", 3),
    ("divisions of peers", 1),
    ("agent peers", 1),
    ("agent addresses", 1),
    ("shared peers", 1),
    ("joinable sessions", 1),
    ("transfer peers", 1),
    ("sources", 3),
    ("ended handoffs", 4096),
    ("closed handoffs", 4096),
    ("results", 4096),
    ("reasons of checks", 1),
    ("control addresses", 1),
    ("addresses of control sessions", 1),
    ("clients", 1),
    ("tensor sessions", 1),
    ("servers", 1),
    ("clients that may hold", 1),
];

/// Maps and queues that are empty between any two rounds: a round empties them, or more bytes are needed to fill them.
const EMPTY_BETWEEN_ROUNDS: [&str; 21] = [
    "actions of the store's state",
    "agent logs",
    "arrived entries",
    "changed data paths",
    "changed handoffs",
    "commands",
    "completions",
    "control messages",
    "ended reads",
    "failed sessions",
    "further connections",
    "handoffs ended by callers",
    "late transfers",
    "lost streams",
    "lookup commands",
    "peers to note",
    "releasing regions",
    "scheduled transfers",
    "store actions",
    "undelivered peers",
    "unsent bytes",
];

/// Maps and queues that fill on a GPU only. With the driver that stands in for CUDA, `tests/fake_cuda/late_digests.py` sees
/// that launches end: regions close.
const ON_A_GPU: [&str; 2] = ["digests", "shifts of digests"];

fn transport(rng: &mut Rng) -> Transport {
    Transport::Memory(if rng.one_of(2) == 0 {
        MemoryPath::RemoteRead
    } else {
        MemoryPath::Stream
    })
}

/// Numbers that look random and are the same in each run.
struct Rng(u64);

impl Rng {
    fn one_of(&mut self, count: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % count
    }

    fn id(&mut self) -> [u8; 16] {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.one_of(u64::MAX).to_le_bytes());
        id
    }
}

struct Day {
    rng: Rng,
    pairs: [Agents; 2],
    ports: Ports,
    pipes: Pipes,
    stores: Stores,
    visitors: Visitors,
    /// Names of the maps and queues that have been empty so far.
    unused: BTreeSet<&'static str>,
}

impl Day {
    fn new() -> Self {
        clock::stop();
        let mut day = Self {
            rng: Rng(0x9e37_79b9_7f4a_7c15),
            pairs: [Agents::streams(), Agents::remote_reads()],
            ports: Ports::new(),
            pipes: Pipes::new(),
            stores: Stores::new(),
            visitors: Visitors::new(),
            unused: BTreeSet::new(),
        };
        let sizes = day.sizes().into_iter().flat_map(|(_, sizes)| sizes);
        let names = sizes.map(|(name, _)| name);
        day.unused = names
            .filter(|name| !EMPTY_BETWEEN_ROUNDS.contains(name) && !ON_A_GPU.contains(name))
            .collect();
        day.settle();
        day
    }

    /// Runs all reactors until they are idle in three rounds in a row: a message may arrive a moment after it was sent.
    fn settle(&mut self) {
        let mut num_quiet = 0;
        for _ in 0..ROUNDS {
            num_quiet = if self.round() { 0 } else { num_quiet + 1 };
            self.note_used();
            if num_quiet == 3 {
                return;
            }
        }
        panic!("the reactors do not become idle");
    }

    /// One round of each; whether any has more to do.
    fn round(&self) -> bool {
        let [streams, remote_reads] = &self.pairs;
        let rounds = [
            streams.round(),
            remote_reads.round(),
            self.ports.round(),
            self.pipes.round(),
            self.stores.round(),
            self.visitors.round(),
        ];
        rounds.contains(&true)
    }

    /// Something happens, and a few seconds pass.
    fn step(&mut self) {
        let rng = &mut self.rng;
        let agents = &mut self.pairs[rng.one_of(2) as usize];
        match rng.one_of(5) {
            0 => agents.act(rng),
            1 => self.ports.act(rng),
            2 => self.visitors.come(rng, agents, &self.ports),
            3 => self.pipes.act(rng),
            _ => {
                agents.act(rng);
                self.ports.act(rng);
            }
        }
        if rng.one_of(3) == 0 {
            self.stores.act(rng);
        }
        self.settle();
        for agents in &mut self.pairs {
            agents.go_on(&mut self.rng);
        }
        self.visitors.go_on(&mut self.rng);
        self.settle();
        if self.rng.one_of(STEPS_BETWEEN_SLOW) == 0 {
            self.slow_step();
        }
        self.visitors.leave(&mut self.rng);
        self.pass();
    }

    /// Much is under way while time passes: some of it is late, or cancelled.
    fn slow_step(&mut self) {
        let rng = &mut self.rng;
        let agents = &mut self.pairs[rng.one_of(2) as usize];
        agents.begin_large(rng);
        self.stores.begin_large();
        match rng.one_of(2) {
            0 => self.pipes.begin_large(),
            _ => self.visitors.begin_large(rng),
        }
        for _ in 0..self.rng.one_of(12) {
            self.round();
            self.note_used();
            advance(LATE / 2);
        }
        for agents in &mut self.pairs {
            agents.cancel_large(&mut self.rng);
        }
        self.settle();
    }

    fn pass(&mut self) {
        self.settle();
        for agents in &mut self.pairs {
            agents.drain();
        }
        self.ports.drain();
        advance(STEP);
        self.settle();
    }

    /// Owners end what they own; the rest has its deadlines.
    fn rest(&mut self) {
        for agents in &mut self.pairs {
            agents.end_all();
        }
        self.ports.end_all();
        self.pipes.end_all();
        self.stores.end_all();
        for _ in 0..STEPS_OF_REST {
            self.visitors.leave_all();
            self.pass();
        }
    }

    fn sizes(&self) -> Vec<(&'static str, Sizes)> {
        let mut sizes: Vec<_> = self.pairs.iter().flat_map(Agents::sizes).collect();
        sizes.extend(self.ports.sizes());
        sizes.extend(self.pipes.sizes());
        sizes.extend(self.stores.sizes());
        sizes.extend(self.visitors.sizes());
        sizes
    }

    fn note_used(&mut self) {
        if self.unused.is_empty() {
            return;
        }
        for (name, size) in self.sizes().into_iter().flat_map(|(_, sizes)| sizes) {
            if size > 0 {
                self.unused.remove(name);
            }
        }
    }

    fn check(&self, hour: u32) {
        let left = BTreeMap::from(LEFT);
        for (owner, sizes) in self.sizes() {
            assert!(!sizes.is_empty(), "the {owner} has ended");
            for (name, size) in sizes {
                let most = left.get(name).copied().unwrap_or_default();
                assert!(size <= most, "hour {hour}: {size} {name} of the {owner}");
            }
        }
    }
}

/// Lets so many hours pass, and checks after each that nothing is left which should not be.
fn passed(hours: u32) -> Day {
    let mut day = Day::new();
    for hour in 0..hours {
        for _ in 0..HOUR.as_secs() / STEP.as_secs() - STEPS_OF_REST {
            day.step();
        }
        day.rest();
        day.check(hour);
    }
    day
}

#[test]
fn no_map_or_queue_grows_in_three_hours_of_sessions_that_come_and_go() {
    passed(3);
}

#[test]
#[ignore = "slow: a minute where the code is not optimised"]
fn no_map_or_queue_grows_in_a_day_of_sessions_that_come_and_go() {
    let day = passed(24);
    day.pairs.iter().for_each(Agents::check);
    day.ports.check();
    day.pipes.check();
    assert!(day.unused.is_empty(), "the day leaves out {:?}", day.unused);
}

#[test]
fn the_pages_say_of_each_map_and_queue_what_bounds_it() {
    let page = concat!(
        include_str!("../../../../docs/internals/reactor.md"),
        include_str!("../../../../docs/internals/store.md")
    );
    let day = Day::new();
    for (owner, sizes) in day.sizes() {
        for (name, _) in sizes {
            let row = format!("| {name} |");
            assert!(page.contains(&row), "{name} of the {owner}");
        }
    }
}

fn is_busy(round: Round) -> bool {
    round == Round::Busy
}
