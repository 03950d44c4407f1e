//! The control plane: handoffs between the schedulers of prefill and decode instances, and the proxy's queries.
//! One authenticated TCP port per engine, no UCX.

mod consumer;
mod deferred_queries;
pub(crate) mod messages;
mod producer;
mod service;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::events::Events;
use crate::ids::HandoffId;
use crate::net::address::listen_address;
use crate::net::identity::{Identity, Incarnation, SessionKind};
use crate::reactor::{Reactor, ReactorConfig};
use crate::session::connection::SessionTimeouts;
use crate::trace::Trace;
use crate::work::Work;

use service::{ControlCommand, ControlService};

/// A worker of a producer: where its agent listens, and its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rank {
    /// The address of its agent.
    pub address: String,
    /// The agent's life.
    pub incarnation: Incarnation,
}

/// What a consumer needs to know to load a handoff.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    /// Hash of the prompt's token ids, which the consumer compares with its own.
    pub prompt_hash: [u8; 32],
    /// Number of prompt tokens whose KV will be leased.
    pub num_tokens: u32,
    /// Of the producer's blocks; a new one voids everything of the old.
    pub epoch: u32,
    /// The producer's workers, by tensor-parallel rank.
    pub ranks: Vec<Rank>,
}

/// What decode needs besides the KV, once prefill has finished.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SequenceState {
    /// Token ids that prefill sampled.
    pub output_ids: Vec<u32>,
    /// Why prefill finished: `length` or `stop`.
    pub finish_reason: String,
    /// Prompt tokens that prefill found in its prefix cache.
    pub num_cached_tokens: u32,
}

/// What happened on the control plane, for the scheduler role that drains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlEvent {
    /// Producer: nobody will read these blocks (any more).
    Released {
        /// Which handoff.
        handoff: HandoffId,
        /// Why.
        reason: String,
    },
    /// Consumer: the producer has scheduled the request.
    Opened {
        /// Which handoff.
        handoff: HandoffId,
        /// What to compare and where to read.
        opening: Opening,
    },
    /// Consumer: the producer has finished.
    Finished {
        /// Which handoff.
        handoff: HandoffId,
        /// What to continue from.
        state: SequenceState,
    },
    /// Consumer: nothing (more) will come of this handoff.
    Ended {
        /// Which handoff.
        handoff: HandoffId,
        /// Why.
        reason: String,
        /// Whether its producer says so, and what it announced does not stand any more: else it is lost or late.
        is_withdrawn: bool,
    },
    /// One line for people.
    Log(String),
}

/// A query to another engine's control port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlQuery {
    /// Who are you? Answered with JSON.
    Describe,
    /// Give the blocks of a handoff back. Answered with `true` when the handoff was known.
    Release(HandoffId),
    /// How did a handoff end? Answered with JSON, `null` when it is not known.
    Result(HandoffId),
    /// When does a handoff's prefill end? Answered once, with JSON, when the predicted end is no further away than
    /// `lead`, or when it has finished or will not.
    Subscribe {
        /// Which handoff.
        handoff: HandoffId,
        /// How long before the end to be told; whole microseconds count.
        lead: Duration,
    },
    /// Not a query: a worker of this producer knows by its layers when a prefill will end. Answered with `true` when
    /// the handoff is open.
    Progress {
        /// Which handoff.
        handoff: HandoffId,
        /// From now; whole microseconds count.
        remaining: Duration,
    },
    /// Has a consumer come? Answered once, with JSON, when one watches the handoff, or when none will.
    Watched(HandoffId),
}

/// How long things may take on the control plane.
#[derive(Debug, Clone, Copy)]
pub struct ControlTimeouts {
    /// Deadlines of sessions.
    pub timeouts: SessionTimeouts,
    /// How long finished blocks wait for a first consumer.
    pub lease: Duration,
    /// How long a watch or a deferred query waits for a handoff that is not open.
    pub open: Duration,
    /// How long a consumer waits for its handoff as long as the producer lives.
    pub handoff: Duration,
}

/// One engine's control port, or (without `listen`) somebody who asks others'. Any thread may call.
#[derive(Debug)]
pub struct Control {
    reactor: Reactor<ControlCommand>,
    events: Events<ControlEvent>,
}

impl Control {
    /// Starts the control plane.
    pub fn new(
        listen: Option<&str>,
        token: &[u8],
        engine_id: &str,
        fingerprint: Vec<(String, String)>,
        timeouts: ControlTimeouts,
    ) -> Result<Self> {
        let address = listen
            .map(|listen| listen_address(listen, token))
            .transpose()?;
        let config = ReactorConfig {
            listen: address,
            token: token.to_vec(),
            identity: Identity::new(SessionKind::Control, engine_id, fingerprint)?,
            transport: None,
            local: address.map_or(IpAddr::from(Ipv4Addr::LOCALHOST), |address| address.ip()),
            timeouts: timeouts.timeouts,
            busy_poll: Duration::ZERO,
        };
        let events = Events::default();
        let in_thread = events.clone();
        let reactor = Reactor::spawn(config, move || ControlService::new(in_thread, timeouts))?;
        Ok(Self { reactor, events })
    }

    /// Runs one round of a reactor without a thread.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn round(&self) -> crate::reactor::manual::Round {
        self.reactor.round()
    }

    /// Where others connect.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.address()
    }

    /// Sets the JSON with which `Describe` is answered.
    pub fn describe_as(&self, json: String) -> Result<()> {
        self.reactor.send(ControlCommand::Describe { json })
    }

    /// Producer: a request of this handoff has come and waits to be scheduled. Its consumers wait with it; others'
    /// watches end after [`ControlTimeouts::open`]. Ends with `open` or `withdraw`.
    pub fn expect(&self, handoff: HandoffId) -> Result<()> {
        self.reactor.send(ControlCommand::Expect { handoff })
    }

    /// Producer: a request of this handoff is scheduled.
    pub fn open(&self, handoff: HandoffId, opening: Opening) -> Result<()> {
        self.reactor.send(ControlCommand::Open { handoff, opening })
    }

    /// Producer: its prefill is predicted to end when `remaining` has passed. Counts while it is open.
    pub fn progress(&self, handoff: HandoffId, remaining: Duration) -> Result<()> {
        let ends_at = Instant::now() + remaining;
        self.reactor
            .send(ControlCommand::Progress { handoff, ends_at })
    }

    /// Producer: it has finished; its blocks are leased until they are taken, released, or the lease ends.
    pub fn finish(&self, handoff: HandoffId, state: SequenceState) -> Result<()> {
        self.reactor.send(ControlCommand::Finish { handoff, state })
    }

    /// Producer: it was aborted or preempted; consumers are told.
    pub fn withdraw(&self, handoff: HandoffId, reason: &str) -> Result<()> {
        self.reactor.send(ControlCommand::Withdraw {
            handoff,
            reason: reason.to_owned(),
        })
    }

    /// Consumer: begins to watch a handoff at its producer.
    pub fn watch(&self, handoff: HandoffId, producer: &str) -> Result<()> {
        self.reactor.send(ControlCommand::Watch {
            handoff,
            producer: producer.to_owned(),
        })
    }

    /// Consumer: ends the watch. Not taken: the producer may free the blocks.
    pub fn unwatch(&self, handoff: HandoffId, is_acknowledged: bool) -> Result<()> {
        self.reactor.send(ControlCommand::Unwatch {
            handoff,
            is_acknowledged,
        })
    }

    /// Keeps the JSON with which `Result` is answered.
    pub fn set_result(&self, handoff: HandoffId, json: String) -> Result<()> {
        self.reactor
            .send(ControlCommand::SetResult { handoff, json })
    }

    /// Asks another engine; the work ends with JSON.
    pub fn query(
        &self,
        address: &str,
        query: ControlQuery,
        timeout: Duration,
    ) -> Result<Work<String>> {
        let (done, completer) = self.reactor.work();
        let deadline = Instant::now() + timeout;
        self.reactor.send(ControlCommand::Query {
            address: address.to_owned(),
            query,
            deadline,
            completer,
        })?;
        Ok(done)
    }

    /// Traces handoffs from now on.
    pub fn trace_to(&self, trace: Trace) -> Result<()> {
        self.reactor.send(ControlCommand::Trace(trace))
    }

    /// What has happened since the last call.
    pub fn drain(&self) -> Vec<ControlEvent> {
        self.events.drain()
    }

    /// Ends the control plane; peers are told.
    pub fn close(&self) {
        self.reactor.stop();
    }
}
