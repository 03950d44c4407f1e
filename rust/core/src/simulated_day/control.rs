//! A prefill's and a decode's control port, which stay: handoffs, leases, queries.

use std::net::TcpListener;
use std::time::Duration;

use super::{Rng, TIMEOUTS, TOKEN, is_busy};
use crate::control::{
    AllowedHosts, Control, ControlEvent, ControlQuery, ControlTimeouts, Opening, Rank,
    SequenceState,
};
use crate::ids::HandoffId;
use crate::reactor::manual::{Sizes, without_threads};

const SECOND: Duration = Duration::from_secs(1);

pub(super) fn port(token: &[u8]) -> Control {
    let timeouts = ControlTimeouts {
        session: TIMEOUTS,
        lease: 30 * SECOND,
        open: 30 * SECOND,
        handoff: 300 * SECOND,
    };
    let start = || Control::new(Some("127.0.0.1:0"), token, "", Vec::new(), timeouts);
    without_threads(start).expect("control port")
}

fn opening() -> Opening {
    Opening {
        prompt_hash: [0; 32],
        num_tokens: 4,
        adapter: String::new(),
        ranks: vec![Rank {
            address: "127.0.0.1:1".to_owned(),
            incarnation: [0; 16],
        }],
        stages: Vec::new(),
    }
}

pub(super) struct Ports {
    pub(super) prefill: Control,
    pub(super) decode: Control,
    /// It accepts connections, and never answers.
    silent: TcpListener,
    /// Handoffs that the prefill's scheduler has to end.
    open: Vec<HandoffId>,
    num_released: usize,
    num_lost: usize,
}

impl Ports {
    pub(super) fn new() -> Self {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
        silent.set_nonblocking(true).expect("a socket");
        Self {
            prefill: port(TOKEN),
            decode: port(TOKEN),
            silent,
            open: Vec::new(),
            num_released: 0,
            num_lost: 0,
        }
    }

    pub(super) fn address(&self) -> String {
        self.prefill.address().expect("it listens").to_string()
    }

    pub(super) fn round(&self) -> bool {
        [self.prefill.round(), self.decode.round()]
            .map(is_busy)
            .contains(&true)
    }

    /// A handoff that watchers may find open.
    pub(super) fn open(&self) -> Option<HandoffId> {
        self.open.last().copied()
    }

    /// A router asks the prefill whether it can use a producer that says nothing.
    fn check_producer(&self) {
        while self.silent.accept().is_ok() {}
        let allowed = self.prefill.allow_checks(AllowedHosts::default());
        allowed.expect("it runs");
        let producer = self.silent.local_addr().expect("it listens");
        self.query(ControlQuery::Check(producer.to_string()));
    }

    fn query(&self, query: ControlQuery) {
        // The reply is dropped.
        let asked = self.decode.query(&self.address(), query, 60 * SECOND);
        drop(asked.expect("it runs"));
    }

    pub(super) fn act(&mut self, rng: &mut Rng) {
        let (handoff, there) = (rng.id(), self.address());
        let (prefill, decode) = (&self.prefill, &self.decode);
        let lead = Duration::from_secs(rng.one_of(4));
        let done = match rng.one_of(14) {
            0 | 1 => decode
                .watch(handoff, &there)
                .and_then(|()| prefill.expect(handoff))
                .and_then(|()| prefill.open(handoff, opening()))
                .and_then(|()| prefill.finish(handoff, SequenceState::default())),
            // It has no watcher: its lease ends.
            2 => prefill
                .open(handoff, opening())
                .and_then(|()| prefill.finish(handoff, SequenceState::default())),
            // It is never opened, or never finished.
            3 => decode.watch(handoff, &there),
            4 => {
                self.open.push(handoff);
                prefill
                    .open(handoff, opening())
                    .and_then(|()| decode.watch(handoff, &there))
            }
            5 => {
                self.open.push(handoff);
                prefill
                    .expect(handoff)
                    .and_then(|()| decode.watch(handoff, &there))
            }
            6 => decode.watch(handoff, "127.0.0.1:1"),
            7 => decode
                .watch(handoff, &there)
                .and_then(|()| decode.unwatch(handoff, false)),
            8 => prefill.withdraw(handoff, "aborted"),
            9 => {
                self.query(ControlQuery::Result(handoff));
                prefill.set_result(handoff, "{}".to_owned())
            }
            10 => {
                let known = self.open().unwrap_or(handoff);
                self.query(ControlQuery::Subscribe { handoff, lead });
                self.query(ControlQuery::Subscribe {
                    handoff: known,
                    lead,
                });
                self.query(ControlQuery::Watched(handoff));
                prefill.progress(known, 2 * SECOND)
            }
            11 => {
                self.query(ControlQuery::Describe);
                self.query(ControlQuery::Release(handoff));
                prefill.describe_as("{}".to_owned())
            }
            12 => {
                self.check_producer();
                Ok(())
            }
            _ => decode
                .query("127.0.0.1:1", ControlQuery::Describe, SECOND)
                .map(drop),
        };
        done.expect("it runs");
    }

    /// The schedulers react to what has happened.
    pub(super) fn drain(&mut self) {
        for event in self.prefill.drain() {
            self.num_released += usize::from(matches!(event, ControlEvent::Released { .. }));
        }
        for event in self.decode.drain() {
            match event {
                ControlEvent::Updated { handoff, update } if update.name() == "finished" => {
                    self.decode.unwatch(handoff, true).expect("it runs");
                }
                ControlEvent::Lost { .. } => self.num_lost += 1,
                _ => {}
            }
        }
    }

    pub(super) fn end_all(&mut self) {
        for handoff in std::mem::take(&mut self.open) {
            let withdrawn = self.prefill.withdraw(handoff, "over");
            withdrawn.expect("it runs");
        }
    }

    pub(super) fn sizes(&self) -> Vec<(&'static str, Sizes)> {
        vec![
            ("prefill's control port", self.prefill.sizes()),
            ("decode's control port", self.decode.sizes()),
        ]
    }

    pub(super) fn check(&self) {
        assert!(self.num_released > 500 && self.num_lost > 100);
    }
}
