//! An agent that also moves handoffs, as callers see it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::event_waiter::{DeviceEvent, EventWaiter};
use super::load_request::{LoadCounts, LoadFailure, LoadRequest};
use super::ready::{ReadyBlocks, check_positions};
use super::service::{HandoffCommand, HandoffCommandKind, HandoffService};
use crate::agent::{Agent, Region};
use crate::error::{Error, Result};
use crate::events::Events;
use crate::ids::{HandoffId, RegionId};
use crate::integrity::Integrity;
use crate::net::address::listen_address;
use crate::net::encryption::Encryption;
use crate::net::identity::{Identity, SessionKind};
use crate::net::secret::{Secrets, Tokens};
use crate::reactor::default_busy_poll;
use crate::session::{ReactorConfig, SessionTimeouts, Streams};
use crate::sync::lock;
use crate::trace::Trace;
use crate::transport::Transport;

/// What happened on the reactor's thread, for whoever drains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Every block of a load is here and verified; the sequence state is not, as far as this thread knows.
    BlocksVerified(LoadReport),
    /// A load is complete: every block is here and verified. The producer has been sent ACK.
    LoadCompleted(LoadReport),
    /// A load is over and incomplete; nothing writes into its blocks any more.
    LoadFailed(LoadReport, LoadFailure),
    /// A consumer has everything of a handoff that is leased here.
    Acknowledged {
        /// The handoff.
        handoff: HandoffId,
    },
    /// One line for people.
    Log(String),
}

/// The facts of a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadReport {
    /// Its handoff.
    pub handoff: HandoffId,
    /// Its counters.
    pub counts: LoadCounts,
    /// The transport of its session; empty if no session is left.
    pub transport: String,
    /// Time since the load began.
    pub elapsed: Duration,
}

/// What the reactor's thread and callers share.
#[derive(Debug, Default)]
pub(super) struct HandoffShared {
    pub(super) events: Events<Event>,
    /// How many ends of a handoff callers have marked and the reactor's thread has not processed.
    ended: Mutex<HashMap<HandoffId, usize>>,
    pub(super) num_leased: AtomicUsize,
    /// Sessions in which this side reads its peer's memory, and sessions in which it gets streams.
    pub(super) num_sessions: Mutex<(usize, usize)>,
}

impl HandoffShared {
    /// A caller ends a handoff: its blocks may change when this returns.
    pub(super) fn mark_ended(&self, handoff: HandoffId) {
        *lock(&self.ended).entry(handoff).or_default() += 1;
    }

    /// The producer knows of one of these ends.
    pub(super) fn end_processed(&self, handoff: HandoffId) {
        if let Entry::Occupied(mut ends) = lock(&self.ended).entry(handoff) {
            *ends.get_mut() -= 1;
            if *ends.get() == 0 {
                ends.remove();
            }
        }
    }

    pub(super) fn log_line(&self, text: String) {
        self.events.push_minor(Event::Log(text));
    }

    #[cfg(test)]
    pub(super) fn num_ended(&self) -> usize {
        lock(&self.ended).len()
    }

    /// Whether a caller has ended a handoff whose end the producer does not know of.
    pub(super) fn has_ended(&self, handoff: &HandoffId) -> bool {
        lock(&self.ended).contains_key(handoff)
    }
}

/// What a [`HandoffAgent`] starts with.
pub struct AgentConfig<'a> {
    /// `host:port`, or `host:first-last` for the first free port of a range; of port 0 the system chooses one.
    pub listen: &'a str,
    /// The tokens that its peers know too.
    pub token: Tokens<'a>,
    /// How blocks get to and from its peers.
    pub transport: Transport,
    /// Its engine, which its peers name in errors.
    pub engine_id: &'a str,
    /// What its peers have to have alike: names and values.
    pub fingerprint: Vec<(String, String)>,
    /// Its deadlines.
    pub timeouts: SessionTimeouts,
    /// The integrity of its handoffs; with `None` it has none. The blocks that it reads and writes have checksums, unless
    /// this is `None`.
    pub integrity: Integrity,
}

impl<'a> AgentConfig<'a> {
    /// The defaults: without a name and a fingerprint.
    pub fn new(listen: &'a str, token: impl Into<Tokens<'a>>, transport: Transport) -> Self {
        Self {
            listen,
            token: token.into(),
            transport,
            engine_id: "",
            fingerprint: Vec::new(),
            timeouts: SessionTimeouts::default(),
            integrity: Integrity::default(),
        }
    }
}

/// An [`Agent`] and the handoffs that it produces and consumes; any thread may call.
#[derive(Debug)]
pub struct HandoffAgent {
    /// Closed before the agent is.
    events: EventWaiter,
    /// The number of the next load that waits for an event.
    next_gate: AtomicU64,
    agent: Agent<HandoffCommand>,
    pub(super) shared: Arc<HandoffShared>,
}

impl HandoffAgent {
    /// Starts an agent.
    pub fn new(config: AgentConfig<'_>) -> Result<Self> {
        let integrity = config.integrity;
        let address = listen_address(config.listen, config.token)?;
        let config = ReactorConfig {
            listen: Some(address),
            secrets: Secrets::new(config.token),
            encryption: Encryption::of_environment()?,
            streams: Streams::of_environment()?,
            identity: Identity::new(SessionKind::Agent, config.engine_id, config.fingerprint)?,
            transport: Some(config.transport),
            timeouts: config.timeouts,
            busy_poll: default_busy_poll(),
        };
        let shared = Arc::new(HandoffShared::default());
        let in_thread = Arc::clone(&shared);
        let mut agent = Agent::start(config, move |core| {
            HandoffService::new(core, in_thread, integrity)
        })?;
        agent.is_checksummed = integrity != Integrity::None;
        Ok(Self {
            events: EventWaiter::new(),
            next_gate: AtomicU64::new(0),
            agent,
            shared,
        })
    }

    fn check_integrity(&self) -> Result<()> {
        if self.agent.is_checksummed {
            return Ok(());
        }
        let text = "integrity=none: a handoff is always verified; set auto, checksum or validate";
        Err(Error::Config(text.to_owned()))
    }

    fn send(&self, command: HandoffCommandKind) -> Result<()> {
        self.agent.reactor.send(HandoffCommand(command))
    }

    /// Producer: what a step makes ready is ready in these regions, each of which is named once for a step.
    ///
    /// # Errors
    /// A region is another agent's, or was closed; the agent has no handoffs.
    pub fn mark_ready(&self, ready: &ReadyBlocks, regions: &[Region]) -> Result<()> {
        let regions = self.checked(regions)?;
        self.send(HandoffCommandKind::MarkReady(ready.clone(), regions))
    }

    /// As [`mark_ready`](Self::mark_ready), once an event and those of earlier calls are completed. Does not wait. Should the
    /// event fail, the handoffs end with the reason.
    ///
    /// # Errors
    /// As `mark_ready`.
    pub fn mark_ready_after(
        &self,
        event: Arc<dyn DeviceEvent>,
        ready: &ReadyBlocks,
        regions: &[Region],
    ) -> Result<()> {
        self.events.check()?;
        let (ready, regions) = (ready.clone(), self.checked(regions)?);
        let (queue, shared) = (self.agent.reactor.command_queue(), Arc::clone(&self.shared));
        let send = move |command| drop(queue.send(HandoffCommand(command)));
        let then = move |completed: std::result::Result<(), String>| {
            let Err(reason) = completed else {
                return send(HandoffCommandKind::MarkReady(ready, regions));
            };
            let reason = format!("the device did not complete what computes the blocks: {reason}");
            shared.log_line(format!("event.failed {reason}"));
            for handoff in ready.handoffs() {
                shared.mark_ended(handoff);
                let reason = reason.clone();
                send(HandoffCommandKind::End { handoff, reason });
            }
        };
        self.events.after(event, Box::new(then));
        Ok(())
    }

    fn checked(&self, regions: &[Region]) -> Result<Vec<RegionId>> {
        self.check_integrity()?;
        for region in regions {
            region.check(self.incarnation())?;
        }
        Ok(regions.iter().map(Region::id).collect())
    }

    /// Producer: the blocks of a handoff may change from now on.
    ///
    /// Marked before this returns: a checksum that is being computed over blocks that change meanwhile is discarded, and a
    /// consumer that asks whether the grant holds is answered that it does not.
    pub fn end(&self, handoff: HandoffId, reason: &str) -> Result<()> {
        self.shared.mark_ended(handoff);
        self.send(HandoffCommandKind::End {
            handoff,
            reason: reason.to_owned(),
        })
    }

    /// Consumer: begins to load; `LoadCompleted` or `LoadFailed` follows exactly once. A handoff that is being loaded is
    /// refused, with a `Log` event.
    pub fn load(&self, request: LoadRequest) -> Result<()> {
        self.begin_load(request, None)
    }

    /// As [`load`](Self::load), and nothing is written into its blocks before an event and those of earlier calls are
    /// completed. Does not wait. Should the event fail, the load fails with the reason.
    ///
    /// # Errors
    /// As `load`.
    pub fn load_after(&self, event: Arc<dyn DeviceEvent>, request: LoadRequest) -> Result<()> {
        self.events.check()?;
        let (handoff, queue) = (request.handoff, self.agent.reactor.command_queue());
        let gate = self.next_gate.fetch_add(1, Ordering::Relaxed);
        self.begin_load(request, Some(gate))?;
        let then = move |completed| {
            let command = HandoffCommandKind::OpenGate {
                handoff,
                gate,
                completed,
            };
            drop(queue.send(HandoffCommand(command)));
        };
        self.events.after(event, Box::new(then));
        Ok(())
    }

    fn begin_load(&self, request: LoadRequest, gate: Option<u64>) -> Result<()> {
        self.check_integrity()?;
        check_positions(request.first, request.block_ids.len())?;
        self.send(HandoffCommandKind::Load(request, gate))
    }

    /// Consumer: the sequence state of a handoff is here.
    pub fn commit(&self, handoff: HandoffId) -> Result<()> {
        self.send(HandoffCommandKind::Commit { handoff })
    }

    /// Consumer: ends a load; `LoadFailed` follows once nothing writes into its blocks any more. With `is_withdrawn`
    /// every block counts as missing, because the producer has withdrawn it or nobody uses it, and the producer is not asked.
    pub fn cancel(&self, handoff: HandoffId, reason: &str, is_withdrawn: bool) -> Result<()> {
        self.send(HandoffCommandKind::Cancel {
            handoff,
            reason: reason.to_owned(),
            is_withdrawn,
        })
    }

    /// Traces handoffs from now on.
    pub fn trace_to(&self, trace: Trace) -> Result<()> {
        self.send(HandoffCommandKind::Trace(trace))
    }

    /// What has happened since the last call.
    pub fn drain(&self) -> Vec<Event> {
        self.shared.events.drain()
    }

    /// Ends the agent, as [`Agent::close`]. What waits for events of a device is forgotten first.
    pub fn close(&self) {
        self.events.close();
        self.agent.close();
    }

    /// Number of handoffs whose blocks are leased.
    pub fn num_leased(&self) -> usize {
        self.shared.num_leased.load(Ordering::Relaxed)
    }

    /// Number of sessions in which this side reads its peer's memory, and of those in which it gets streams.
    pub fn num_sessions(&self) -> (usize, usize) {
        *lock(&self.shared.num_sessions)
    }
}

impl Deref for HandoffAgent {
    type Target = Agent<HandoffCommand>;

    fn deref(&self) -> &Self::Target {
        &self.agent
    }
}

#[cfg(test)]
mod event_tests;
#[cfg(test)]
mod late_tests;
#[cfg(test)]
mod tests;
