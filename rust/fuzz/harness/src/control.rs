//! A control port against a peer that holds the token: another scheduler, or a proxy.

use std::time::Duration;

use kvpipe_core::control::{
    Control, ControlEvent, ControlQuery, ControlReply, ControlTimeouts, HandoffUpdate, Opening,
    Rank, SequenceState,
};
use kvpipe_core::fuzzing::{Round, without_threads};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::session::SessionTimeouts;
use kvpipe_core::work::Work;

use crate::hostile::{Hostile, TOKEN};
use crate::script::{Victim, read, run_session};

const TIMEOUT: Duration = Duration::from_secs(600);
/// The handoffs that both sides know.
pub(crate) const HANDOFFS: [[u8; 16]; 2] = [[1; 16], [2; 16]];

pub(crate) fn opening() -> Opening {
    Opening {
        prompt_hash: [3; 32],
        num_tokens: 5,
        adapter: "adapter 0a1b".to_owned(),
        ranks: vec![Rank {
            address: "127.0.0.1:1".to_owned(),
            incarnation: [4; 16],
        }],
        stages: vec![vec![2, 0], vec![1, 3]],
    }
}

pub(crate) fn sequence_state() -> SequenceState {
    SequenceState {
        output_ids: vec![6],
        finish_reason: "length".to_owned(),
        num_cached_tokens: 0,
        sampling_hash: [4; 32],
    }
}

/// Calls of the control port's user.
pub(crate) mod user {
    pub(crate) const EXPECT: u8 = 0;
    pub(crate) const OPEN: u8 = 1;
    pub(crate) const FINISH: u8 = 2;
    pub(crate) const WITHDRAW: u8 = 3;
    pub(crate) const UNWATCH: u8 = 4;
    pub(crate) const SET_RESULT: u8 = 5;
    pub(crate) const WATCH: u8 = 6;
    pub(crate) const RELEASE: u8 = 7;
    pub(crate) const DESCRIBE: u8 = 8;
    pub(crate) const PROGRESS: u8 = 9;
    pub(crate) const SUBSCRIBE: u8 = 10;
    pub(crate) const QUERY_PROGRESS: u8 = 11;
    pub(crate) const QUERY_WATCHED: u8 = 12;
    pub(crate) const COUNT: u8 = QUERY_WATCHED + 1;
}

struct Side {
    control: Control,
    /// The peer's; empty if the peer connects.
    address: String,
    asked: Vec<Work<ControlReply>>,
    num_ended: [usize; 2],
    num_watches: [usize; 2],
}

impl Side {
    fn query(&mut self, query: ControlQuery) {
        if !self.address.is_empty() {
            let asked = self.control.query(&self.address, query, TIMEOUT);
            self.asked.extend(asked);
        }
    }

    fn watch(&mut self, index: usize) {
        if !self.address.is_empty() {
            let watched = self.control.watch(HANDOFFS[index], &self.address);
            self.num_watches[index] += usize::from(watched.is_ok());
        }
    }

    fn drain(&mut self) {
        for event in self.control.drain() {
            let (ControlEvent::Lost { handoff, .. }
            | ControlEvent::Updated {
                handoff,
                update: HandoffUpdate::Ended(_),
            }) = event
            else {
                continue;
            };
            if let Some(index) = HANDOFFS.iter().position(|other| *other == handoff) {
                self.num_ended[index] += 1;
            }
        }
    }
}

impl Victim for Side {
    fn round(&self) -> Round {
        self.control.round()
    }

    fn act(&mut self, what: u8, argument: u8) {
        let index = usize::from(argument & 1);
        let handoff = HANDOFFS[index];
        let control = &self.control;
        let result = match what % user::COUNT {
            user::EXPECT => control.expect(handoff),
            user::OPEN => control.open(handoff, opening()),
            user::FINISH => control.finish(handoff, sequence_state()),
            user::WITHDRAW => control.withdraw(handoff, "aborted"),
            user::UNWATCH => control.unwatch(handoff, argument & 2 != 0),
            user::SET_RESULT => control.set_result(handoff, "{}".to_owned()),
            user::WATCH => {
                self.watch(index);
                Ok(())
            }
            user::RELEASE => {
                self.query(ControlQuery::Release(handoff));
                Ok(())
            }
            user::DESCRIBE => {
                self.query(ControlQuery::Describe);
                Ok(())
            }
            user::PROGRESS => control.progress(handoff, Duration::from_millis(u64::from(argument))),
            user::SUBSCRIBE => {
                let lead = Duration::from_millis(u64::from(argument));
                self.query(ControlQuery::Subscribe { handoff, lead });
                Ok(())
            }
            user::QUERY_PROGRESS => {
                let remaining = Duration::from_millis(u64::from(argument));
                self.query(ControlQuery::Progress { handoff, remaining });
                Ok(())
            }
            _ => {
                self.query(ControlQuery::Watched(handoff));
                Ok(())
            }
        };
        assert!(result.is_ok());
        self.drain();
    }

    fn close(&mut self) {
        self.control.close();
    }

    fn check(&mut self) {
        self.drain();
        assert!(self.asked.iter().all(Work::is_completed), "a query");
        for (ended, watches) in self.num_ended.iter().zip(self.num_watches) {
            assert!(*ended <= watches, "a watch that ended twice");
        }
    }
}

/// A control port that listens, or that asks.
///
/// # Panics
/// The control port breaks a promise.
pub(crate) fn control(bytes: &[u8]) {
    let (flags, steps) = read(bytes);
    let timeouts = ControlTimeouts {
        session: SessionTimeouts::default(),
        lease: TIMEOUT,
        open: TIMEOUT,
        handoff: TIMEOUT,
    };
    let listen = Some("127.0.0.1:0");
    let control = without_threads(|| Control::new(listen, TOKEN, "engine", Vec::new(), timeouts));
    let control = control.expect("control");
    let (hostile, address) = if flags.is_server() {
        Hostile::listen(SessionKind::Control, None)
    } else {
        let hostile = Hostile::connect(SessionKind::Control, None, control.address());
        (hostile, String::new())
    };
    let mut side = Side {
        control,
        address,
        asked: Vec::new(),
        num_ended: [0; 2],
        num_watches: [0; 2],
    };
    side.query(ControlQuery::Describe);
    run_session(side, hostile, flags, steps);
}
