//! The control plane: the schedulers of prefill and decode instances agree on handoffs, and the proxy queries them. Each
//! engine has one authenticated TCP port for it, without UCX.

mod checks;
mod consumer;
mod deferred_queries;
pub(crate) mod messages;
mod producer;
mod queries;
mod service;

use std::net::SocketAddr;
use std::time::Duration;

use crate::clock;
use crate::error::{FailureCause, Result};
use crate::events::Events;
use crate::ids::{HandoffId, Incarnation};
use crate::net::address::listen_address;
use crate::net::encryption::Encryption;
use crate::net::identity::{Identity, SessionKind};
use crate::net::secret::{Secrets, Tokens};
use crate::reactor::Reactor;
use crate::session::{ReactorConfig, SessionTimeouts, Streams};
use crate::trace::Trace;
use crate::work::Work;

use queries::PendingQuery;
use service::{ControlCommand, ControlService};

pub use checks::AllowedHosts;

/// A worker of a producer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rank {
    /// The address of its agent.
    pub address: String,
    /// The incarnation of its agent.
    pub incarnation: Incarnation,
}

/// A consumer's input for loading a handoff.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    /// Hash of the prompt's token ids, which the consumer compares with its own.
    pub prompt_hash: [u8; 32],
    /// Number of prompt tokens whose KV will be leased.
    pub num_tokens: u32,
    /// Name and content of the `LoRA` adapter that computes them; empty without one.
    pub adapter: String,
    /// The producer's workers, by pipeline-parallel rank, then by tensor-parallel rank.
    pub ranks: Vec<Rank>,
    /// For each stage of its pipeline, the number of layers of each KV cache group; empty if each worker has all layers.
    pub stages: Vec<Vec<u32>>,
}

/// State that decode needs besides the KV, once prefill has finished.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SequenceState {
    /// Token ids that prefill sampled.
    pub output_ids: Vec<u32>,
    /// Reason for the end of prefill: `length` or `stop`.
    pub finish_reason: String,
    /// Prompt tokens that prefill found in its prefix cache.
    pub num_cached_tokens: u32,
    /// Hash of the parameters that prefill sampled with, which the consumer compares with its own.
    pub sampling_hash: [u8; 32],
}

/// Update of a producer to the consumers that watch a handoff.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandoffUpdate {
    /// The request is scheduled: what to compare and where to read.
    Opened(Opening),
    /// Prefill has finished: what to continue from.
    Finished(SequenceState),
    /// The producer has withdrawn the handoff for this reason, which voids what it announced. No more updates follow.
    Ended(String),
}

impl HandoffUpdate {
    /// `opened`, `finished` or `ended`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Opened(_) => "opened",
            Self::Finished(_) => "finished",
            Self::Ended(_) => "ended",
        }
    }
}

/// An event of the control plane, for the scheduler role that drains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlEvent {
    /// Producer: no consumer will read these blocks any more.
    Released {
        /// The handoff.
        handoff: HandoffId,
        /// The reason.
        reason: String,
    },
    /// Consumer: the producer reports on a watched handoff.
    Updated {
        /// The handoff.
        handoff: HandoffId,
        /// The report.
        update: HandoffUpdate,
    },
    /// Consumer: the producer of a watched handoff is lost or late; no more events follow.
    Lost {
        /// The handoff.
        handoff: HandoffId,
        /// The reason.
        reason: String,
        /// The kind of it.
        cause: FailureCause,
    },
    /// One line for the log.
    Log(String),
}

/// The reply to a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlReply {
    /// The engine, as a JSON document of its own.
    Description(String),
    /// The end of a handoff, as a JSON document of the engine's; `None` if the handoff is unknown.
    Result(Option<String>),
    /// True if the engine knows the handoff that is released or whose progress is reported.
    Known(bool),
    /// The event that ends a subscription, or a wait for a consumer.
    Moment(Moment),
    /// Reason for which the engine cannot use the producer; empty if it can.
    Checked(String),
}

/// An event of a handoff at its producer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Moment {
    /// The predicted end of prefill is so far away.
    Due(Duration),
    /// Prefill has ended; its predicted end is so far away, if there was a prediction.
    Finished(Option<Duration>),
    /// A consumer watches the handoff.
    Watched,
    /// The handoff has ended without that event, for this reason.
    Ended(String),
}

/// A query to another engine's control port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlQuery {
    /// Asks for the engine's description.
    Describe,
    /// Releases the blocks of a handoff.
    Release(HandoffId),
    /// Asks how a handoff ended.
    Result(HandoffId),
    /// Asks when a handoff's prefill ends. The one reply follows when the predicted end is no further away than `lead`,
    /// or when prefill has finished or will not.
    Subscribe {
        /// The handoff.
        handoff: HandoffId,
        /// Time between the reply and the end, in whole microseconds.
        lead: Duration,
    },
    /// Reports when a prefill ends: a producer's worker knows that by its layers.
    Progress {
        /// The handoff.
        handoff: HandoffId,
        /// Time from now, in whole microseconds.
        remaining: Duration,
    },
    /// Asks whether a consumer has come. The one reply follows when one watches the handoff, or when none will.
    Watched(HandoffId),
    /// Asks a consumer whether it can connect to the control port of this producer, which compares tokens and
    /// fingerprints.
    Check(String),
}

impl ControlQuery {
    fn is_answered_by(&self, reply: &ControlReply) -> bool {
        match self {
            Self::Describe => matches!(reply, ControlReply::Description(_)),
            Self::Result(_) => matches!(reply, ControlReply::Result(_)),
            Self::Release(_) | Self::Progress { .. } => matches!(reply, ControlReply::Known(_)),
            Self::Subscribe { .. } | Self::Watched(_) => matches!(reply, ControlReply::Moment(_)),
            Self::Check(_) => matches!(reply, ControlReply::Checked(_)),
        }
    }
}

/// Time-outs of the control plane.
#[derive(Debug, Clone, Copy)]
pub struct ControlTimeouts {
    /// Those of sessions.
    pub session: SessionTimeouts,
    /// Lease of finished blocks without a consumer.
    pub lease: Duration,
    /// Timeout of a watch or a deferred query for an unknown handoff.
    pub open: Duration,
    /// Timeout of a consumer for its handoff while the producer lives.
    pub handoff: Duration,
}

/// One engine's control port, or (without `listen`) a client of other ports. Any thread may call.
#[derive(Debug)]
pub struct Control {
    reactor: Reactor<ControlCommand>,
    events: Events<ControlEvent>,
}

impl Control {
    /// Starts the control plane.
    pub fn new<'a>(
        listen: Option<&str>,
        token: impl Into<Tokens<'a>>,
        engine_id: &str,
        fingerprint: Vec<(String, String)>,
        timeouts: ControlTimeouts,
    ) -> Result<Self> {
        let token = token.into();
        let address = listen
            .map(|listen| listen_address(listen, token))
            .transpose()?;
        let config = ReactorConfig {
            listen: address,
            secrets: Secrets::new(token),
            encryption: Encryption::of_environment()?,
            streams: Streams::default(),
            identity: Identity::new(SessionKind::Control, engine_id, fingerprint)?,
            transport: None,
            timeouts: timeouts.session,
            busy_poll: Duration::ZERO,
        };
        let events = Events::default();
        let in_thread = events.clone();
        let reactor =
            crate::session::spawn(config, move || ControlService::new(in_thread, timeouts))?;
        Ok(Self { reactor, events })
    }

    /// Runs one round of a reactor without a thread.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn round(&self) -> crate::reactor::manual::Round {
        self.reactor.round()
    }

    /// Sizes of the maps and queues of a reactor without a thread.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        self.reactor.sizes()
    }

    /// The address that others connect to.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.address()
    }

    /// Sets the reply to [`ControlQuery::Describe`].
    pub fn describe_as(&self, json: String) -> Result<()> {
        self.reactor.send(ControlCommand::Describe(json))
    }

    /// Consumer: answers [`ControlQuery::Check`] for producers on these hosts from now on; before, every check is refused.
    pub fn allow_checks(&self, hosts: AllowedHosts) -> Result<()> {
        self.reactor.send(ControlCommand::AllowChecks(hosts))
    }

    /// Producer: the request of this handoff has arrived and waits to be scheduled. Until `open` or `withdraw`, its
    /// consumers wait too; watches of other handoffs end after [`ControlTimeouts::open`].
    pub fn expect(&self, handoff: HandoffId) -> Result<()> {
        self.reactor.send(ControlCommand::Expect(handoff))
    }

    /// Producer: the request of this handoff is scheduled.
    pub fn open(&self, handoff: HandoffId, opening: Opening) -> Result<()> {
        self.reactor.send(ControlCommand::Open(handoff, opening))
    }

    /// Producer: prefill is predicted to end after `remaining`. Ignored unless it is under way.
    pub fn progress(&self, handoff: HandoffId, remaining: Duration) -> Result<()> {
        let ends_at = clock::now() + remaining;
        self.reactor
            .send(ControlCommand::Progress { handoff, ends_at })
    }

    /// Producer: prefill has finished. The blocks stay leased until a consumer acknowledges them, they are released, or the
    /// lease ends.
    pub fn finish(&self, handoff: HandoffId, state: SequenceState) -> Result<()> {
        self.reactor.send(ControlCommand::Finish(handoff, state))
    }

    /// Producer: the request was aborted or preempted. Its consumers get the reason.
    pub fn withdraw(&self, handoff: HandoffId, reason: &str) -> Result<()> {
        self.reactor.send(ControlCommand::Withdraw {
            handoff,
            reason: reason.to_owned(),
        })
    }

    /// Consumer: watches a handoff at its producer.
    pub fn watch(&self, handoff: HandoffId, producer: &str) -> Result<()> {
        self.reactor.send(ControlCommand::Watch {
            handoff,
            producer: producer.to_owned(),
        })
    }

    /// Consumer: ends the watch. If the blocks were acknowledged, the producer ends the handoff at once, although
    /// others may watch. Else it ends the handoff when the last watch has ended and its prefill has finished.
    pub fn unwatch(&self, handoff: HandoffId, is_acknowledged: bool) -> Result<()> {
        self.reactor.send(ControlCommand::Unwatch {
            handoff,
            is_acknowledged,
        })
    }

    /// Sets the reply to [`ControlQuery::Result`].
    pub fn set_result(&self, handoff: HandoffId, json: String) -> Result<()> {
        self.reactor.send(ControlCommand::SetResult(handoff, json))
    }

    /// Queries another engine; the work ends with its JSON.
    pub fn query(
        &self,
        address: &str,
        query: ControlQuery,
        timeout: Duration,
    ) -> Result<Work<ControlReply>> {
        let (done, completer) = self.reactor.work();
        let query = PendingQuery {
            address: address.to_owned(),
            query,
            deadline: clock::now() + timeout,
            completer,
        };
        self.reactor.send(ControlCommand::Query(query))?;
        Ok(done)
    }

    /// Traces handoffs from now on.
    pub fn trace_to(&self, trace: Trace) -> Result<()> {
        self.reactor.send(ControlCommand::Trace(trace))
    }

    /// Returns the events since the last call.
    pub fn drain(&self) -> Vec<ControlEvent> {
        self.events.drain()
    }

    /// Blocks until there have been events since the last call; false once the control plane is closed. Some may be drained by
    /// then.
    pub fn wait(&self) -> bool {
        self.events.wait()
    }

    /// Closes the control port and its sessions.
    pub fn close(&self) {
        self.reactor.stop();
        self.events.close();
    }
}
