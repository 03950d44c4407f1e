//! An agent that also moves handoffs, as callers see it.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::consumer::LoadCounts;
use super::ready::{ReadyBlocks, check_positions};
use super::service::{HandoffCommand, HandoffCommandKind, HandoffService};
use crate::agent::{Agent, AgentConfig, Region};
use crate::error::Result;
use crate::events::Events;
use crate::ids::HandoffId;
use crate::ids::Incarnation;
use crate::session::SessionTimeouts;
use crate::trace::Trace;
use crate::transport::Transport;

/// What happened on the blocks' thread, for whoever drains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Every block of a load is here and verified; the sequence state is not, as far as this thread knows.
    BlocksVerified {
        /// Which.
        handoff: HandoffId,
        /// In numbers.
        counts: LoadCounts,
        /// By which transport.
        transport: String,
        /// From the start of the load to its last block.
        elapsed: Duration,
    },
    /// A load is complete: every block is here and verified. The producer has been told.
    LoadCompleted {
        /// Which.
        handoff: HandoffId,
        /// In numbers.
        counts: LoadCounts,
        /// By which transport.
        transport: String,
        /// From the start of the load to its end.
        elapsed: Duration,
    },
    /// A load is over and incomplete; nothing writes into its blocks any more.
    LoadFailed {
        /// Which.
        handoff: HandoffId,
        /// In numbers.
        counts: LoadCounts,
        /// By which transport; empty if no session is left.
        transport: String,
        /// From the start of the load to its end.
        elapsed: Duration,
        /// Indices into the `block_ids` of the load.
        missing: Vec<u32>,
        /// Why.
        reason: String,
    },
    /// A consumer has everything of a handoff that is leased here.
    Acknowledged {
        /// Which.
        handoff: HandoffId,
    },
    /// One line for people.
    Log(String),
}

/// Handoffs that were ended, as marked by the thread that ends them and not later by the one that is told.
#[derive(Debug, Clone, Default)]
pub(super) struct EndedHandoffs(Arc<Mutex<HashSet<HandoffId>>>);

impl EndedHandoffs {
    fn get(&self) -> MutexGuard<'_, HashSet<HandoffId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, handoff: HandoffId) {
        self.get().insert(handoff);
    }

    /// The end has been processed: from now on the producer machine remembers it.
    pub(super) fn unmark(&self, handoff: &HandoffId) {
        self.get().remove(handoff);
    }

    pub(super) fn is_marked(&self, handoff: &HandoffId) -> bool {
        self.get().contains(handoff)
    }
}

/// What a worker loads of a handoff.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    /// Which handoff.
    pub handoff: HandoffId,
    /// Where the producer's worker listens.
    pub producer: String,
    /// The producer's life, as its scheduler named it.
    pub incarnation: Incarnation,
    /// The epoch of its blocks.
    pub epoch: u32,
    /// Position of the first wanted block in the prompt.
    pub first: u32,
    /// Destination ids, one a position.
    pub block_ids: Vec<u32>,
    /// Whether the sequence state is here already.
    pub is_committed: bool,
}

/// An [`Agent`] and the handoffs that it produces and consumes; any thread may call.
#[derive(Debug)]
pub struct HandoffAgent {
    agent: Agent<HandoffCommand>,
    events: Events<Event>,
    ended: EndedHandoffs,
    num_leased: Arc<AtomicUsize>,
}

impl HandoffAgent {
    /// Starts an agent.
    pub fn new(
        listen: &str,
        token: &[u8],
        transport: Transport,
        engine_id: &str,
        fingerprint: Vec<(String, String)>,
        timeouts: SessionTimeouts,
    ) -> Result<Self> {
        let config = AgentConfig {
            listen,
            token,
            transport,
            engine_id,
            fingerprint,
            timeouts,
        };
        let (events, ended) = (Events::default(), EndedHandoffs::default());
        let num_leased = Arc::new(AtomicUsize::new(0));
        let (in_thread, marks, leased) = (events.clone(), ended.clone(), Arc::clone(&num_leased));
        let agent = Agent::start(config, move |core| {
            HandoffService::new(core, in_thread, marks, leased)
        })?;
        Ok(Self {
            agent,
            events,
            ended,
            num_leased,
        })
    }

    /// The same without checksums of the blocks that it reads and writes. Handoffs have them all the same.
    #[must_use]
    pub fn without_checksums(mut self) -> Self {
        self.agent.disable_checksums();
        self
    }

    fn send(&self, command: HandoffCommandKind) -> Result<()> {
        self.agent.reactor.send(HandoffCommand(command))
    }

    /// Producer: what a step makes ready is ready in these regions, each of which is named once for a step.
    ///
    /// # Errors
    /// A region is another agent's, or was closed.
    pub fn mark_ready(&self, ready: &ReadyBlocks, regions: &[Region]) -> Result<()> {
        for region in regions {
            region.check(self.incarnation())?;
        }
        let regions = regions.iter().map(Region::id).collect();
        self.send(HandoffCommandKind::MarkReady(ready.clone(), regions))
    }

    /// Producer: the blocks of a handoff may change from now on.
    ///
    /// Marked before this returns: a checksum that is being computed over blocks that change meanwhile is discarded.
    pub fn end(&self, handoff: HandoffId, reason: &str) -> Result<()> {
        self.ended.mark(handoff);
        self.send(HandoffCommandKind::End {
            handoff,
            reason: reason.to_owned(),
        })
    }

    /// Consumer: begins to load; `LoadCompleted` or `LoadFailed` follows exactly once. A handoff that is being loaded is
    /// refused, with a `Log` event.
    pub fn load(&self, request: LoadRequest) -> Result<()> {
        check_positions(request.first, request.block_ids.len())?;
        self.send(HandoffCommandKind::Load(request))
    }

    /// Consumer: the sequence state of a handoff is here.
    pub fn commit(&self, handoff: HandoffId) -> Result<()> {
        self.send(HandoffCommandKind::Commit { handoff })
    }

    /// Consumer: ends a load; `LoadFailed` follows once nothing writes into its blocks any more. With `is_withdrawn` the
    /// producer has withdrawn its blocks, and every block counts as missing.
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
        self.events.drain()
    }

    /// Number of handoffs whose blocks are leased.
    pub fn num_leased(&self) -> usize {
        self.num_leased.load(Ordering::Relaxed)
    }
}

impl Deref for HandoffAgent {
    type Target = Agent<HandoffCommand>;

    fn deref(&self) -> &Self::Target {
        &self.agent
    }
}

#[cfg(test)]
mod tests;
