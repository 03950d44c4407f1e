//! A day of simulated time. Sessions, loads, handoffs, entries and tensors come and go, some of them in disorder, and every
//! hour the entries in the maps and queues of the actors that stay are counted.

mod agents;
mod control;
mod visitors;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use agents::Agents;
use control::Ports;
use visitors::Visitors;

use crate::clock::advance;
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
    begun: None,
    waits_for_listener: false,
    heartbeat: Duration::from_secs(10),
    silence: Duration::from_secs(40),
};
/// More rounds than anything takes.
const ROUNDS: usize = 100_000;

/// What may be left when nothing is under way: of sessions that stay, and what is kept up to a bound. Of all else nothing is.
const LEFT: [(&str, usize); 16] = [
    ("sessions", 1),
    ("timers", 66),
    ("ended peers", 256),
    ("session keys", 1),
    ("endpoints", 1),
    ("regions", 1),
    ("agent peers", 1),
    ("agent addresses", 1),
    ("shared peers", 1),
    ("transfer peers", 1),
    ("sources", 1),
    ("ended handoffs", 4096),
    ("closed handoffs", 4096),
    ("results", 4096),
    ("control addresses", 1),
    ("addresses of control sessions", 1),
];

/// What no count between two rounds has found anything in: a round empties it, or more bytes are needed to fill it.
const EMPTY_BETWEEN_ROUNDS: [&str; 17] = [
    "agent logs",
    "arrived entries",
    "cancelled transfers",
    "changed handoffs",
    "completions",
    "control messages",
    "ended reads",
    "failed sessions",
    "handoffs ended by callers",
    "late transfers",
    "outgoing streams",
    "peers to note",
    "releasing regions",
    "scheduled transfers",
    "store actions",
    "undelivered peers",
    "waiting selects",
];

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
    agents: Agents,
    ports: Ports,
    visitors: Visitors,
    /// What has held something at any time.
    used: BTreeSet<&'static str>,
}

impl Day {
    fn new() -> Self {
        let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
        let mut day = Self {
            agents: Agents::new(&mut rng),
            ports: Ports::new(),
            visitors: Visitors::new(),
            used: BTreeSet::new(),
            rng,
        };
        day.settle();
        day
    }

    /// Runs all reactors until none has anything to do. What one has sent, another may see a moment later.
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
        let rounds = [
            self.agents.round(),
            self.ports.round(),
            self.visitors.round(),
        ];
        rounds.contains(&true)
    }

    /// Something happens, and a few seconds pass.
    fn step(&mut self) {
        match self.rng.one_of(4) {
            0 => self.agents.act(&mut self.rng),
            1 => self.ports.act(&mut self.rng),
            2 => self
                .visitors
                .come(&mut self.rng, &mut self.agents, &self.ports),
            _ => {
                self.agents.act(&mut self.rng);
                self.ports.act(&mut self.rng);
            }
        }
        self.settle();
        self.agents.go_on(&mut self.rng);
        self.visitors.go_on(&mut self.rng);
        self.settle();
        self.visitors.leave(&mut self.rng);
        self.pass();
    }

    fn pass(&mut self) {
        self.settle();
        self.agents.drain();
        self.ports.drain();
        advance(STEP);
        self.settle();
    }

    /// Owners end what they own; the rest has its deadlines.
    fn rest(&mut self) {
        self.agents.end_all();
        self.ports.end_all();
        self.visitors.leave_all();
        for _ in 0..STEPS_OF_REST {
            self.pass();
        }
    }

    fn sizes(&self) -> Vec<(&'static str, Sizes)> {
        let mut sizes = self.agents.sizes();
        sizes.extend(self.ports.sizes());
        sizes.extend(self.visitors.sizes());
        sizes
    }

    fn note_used(&mut self) {
        let sizes = self.sizes().into_iter().flat_map(|(_, sizes)| sizes);
        let used = sizes.filter(|(_, size)| *size > 0).map(|(name, _)| name);
        self.used.extend(used);
    }

    fn check_used(&self) {
        let sizes = self.sizes().into_iter().flat_map(|(_, sizes)| sizes);
        let names: BTreeSet<_> = sizes.map(|(name, _)| name).collect();
        let unused = names.difference(&self.used);
        let left_out: Vec<_> = unused
            .filter(|name| !EMPTY_BETWEEN_ROUNDS.contains(*name))
            .collect();
        assert!(left_out.is_empty(), "the day leaves out {left_out:?}");
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

#[test]
fn no_map_or_queue_grows_in_a_day_of_sessions_that_come_and_go() {
    let mut day = Day::new();
    for hour in 0..24 {
        for _ in 0..HOUR.as_secs() / STEP.as_secs() - STEPS_OF_REST {
            day.step();
        }
        day.rest();
        day.check(hour);
    }
    day.agents.check();
    day.ports.check();
    day.check_used();
}

#[test]
fn the_page_on_reactors_says_of_each_map_and_queue_what_bounds_it() {
    let page = include_str!("../../../../docs/internals/reactor.md");
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
