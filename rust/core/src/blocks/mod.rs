//! Blocks between processes: registered regions, reads of a peer's blocks into our own, and handoffs on top.

mod api;
mod ends;
mod handoffs;
mod inbox;
mod loads;
pub(crate) mod messages;
mod metadata;
mod notices;
mod notify;
mod offers;
mod peer;
mod peers;
mod plan;
mod process_vm;
mod ready;
mod regions;
mod serve;
mod service;
mod transfer;
mod transfers;
mod turns;
mod verifier;

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::events::Events;
use crate::handoff::HandoffId;
use crate::handoff::consumer::LoadCounts;
use crate::net::address::listen_address;
use crate::net::identity::{Identity, Incarnation, SessionKind};
use crate::reactor::{Reactor, ReactorConfig, SessionKey, default_busy_poll};
use crate::session::connection::SessionTimeouts;
use crate::trace::Trace;
use crate::transport::Transport;

pub use inbox::Notification;
pub use metadata::Metadata;
pub use notices::TAG_CAP;
pub use peer::{Peer, RegionInfo, Stats};
pub use plan::{Options, Plan, Region};
pub use ready::{ReadyBlocks, ReadyRange};

use inbox::Inbox;
use messages::BLOCKS_CAP;
use peer::Counters;
use service::{Blocks, Command};

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

/// What the agent's thread shows to others.
#[derive(Debug)]
struct SharedState {
    peers: Mutex<BTreeMap<SessionKey, Peer>>,
    counters: Counters,
    inbox: Inbox,
    num_regions: AtomicUsize,
    num_leased: AtomicUsize,
}

/// Handoffs that were ended, as marked by the thread that ends them and not later by the one that is told.
#[derive(Debug, Clone, Default)]
struct Ended(Arc<Mutex<HashSet<HandoffId>>>);

impl Ended {
    fn get(&self) -> MutexGuard<'_, HashSet<HandoffId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, handoff: HandoffId) {
        self.get().insert(handoff);
    }

    /// The end has been processed: from now on the producer machine remembers it.
    fn unmark(&self, handoff: &HandoffId) {
        self.get().remove(handoff);
    }

    fn is_marked(&self, handoff: &HandoffId) -> bool {
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

/// One end of block transfers; any thread may call.
#[derive(Debug)]
pub struct Agent {
    reactor: Reactor<Command>,
    events: Events<Event>,
    incarnation: Incarnation,
    shared: Arc<SharedState>,
    ended: Ended,
    is_checksummed: bool,
}

impl Agent {
    /// Starts an agent.
    pub fn new(
        listen: &str,
        token: &[u8],
        transport: Transport,
        engine_id: &str,
        fingerprint: Vec<(String, String)>,
        timeouts: SessionTimeouts,
    ) -> Result<Self> {
        let address = listen_address(listen, token)?;
        let identity = Identity::new(SessionKind::Agent, engine_id, fingerprint)?;
        let incarnation = identity.incarnation;
        let config = ReactorConfig {
            listen: Some(address),
            token: token.to_vec(),
            identity,
            transport: Some(transport),
            local: address.ip(),
            timeouts,
            busy_poll: default_busy_poll(),
        };
        let (events, ended) = (Events::default(), Ended::default());
        let shared = Arc::new(SharedState {
            peers: Mutex::default(),
            counters: Counters::default(),
            inbox: Inbox::new()?,
            num_regions: AtomicUsize::new(0),
            num_leased: AtomicUsize::new(0),
        });
        let (in_thread, shown, marks) = (events.clone(), Arc::clone(&shared), ended.clone());
        let reactor = Reactor::spawn(config, || Blocks::new(in_thread, shown, marks))?;
        Ok(Self {
            reactor,
            events,
            incarnation,
            shared,
            ended,
            is_checksummed: true,
        })
    }

    /// The same without checksums of the blocks that it reads and writes. Handoffs have them all the same.
    #[must_use]
    pub fn without_checksums(mut self) -> Self {
        self.is_checksummed = false;
        self
    }

    /// Runs one round of a reactor without a thread.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn round(&self) -> crate::reactor::manual::Round {
        self.reactor.round()
    }

    /// Where peers connect.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.address()
    }

    /// This life of the agent.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Producer: what a step makes ready is ready in these regions, each of which is named once for a step.
    ///
    /// # Errors
    /// A region is another agent's, or was closed.
    pub fn mark_ready(&self, ready: &ReadyBlocks, regions: &[Region]) -> Result<()> {
        for region in regions {
            region.check(self.incarnation)?;
        }
        let regions = regions.iter().map(Region::id).collect();
        self.reactor
            .send(Command::MarkReady(ready.clone(), regions))
    }

    /// Producer: the blocks of a handoff may change from now on.
    ///
    /// Marked before this returns: a checksum that is being computed over blocks that change meanwhile is discarded.
    pub fn end(&self, handoff: HandoffId, reason: &str) -> Result<()> {
        self.ended.mark(handoff);
        self.reactor.send(Command::End {
            handoff,
            reason: reason.to_owned(),
        })
    }

    /// Consumer: begins to load; `Loaded` or `Failed` follows exactly once. A handoff that is being loaded is refused: `Log`
    /// says so.
    pub fn load(&self, request: LoadRequest) -> Result<()> {
        check_positions(request.first, request.block_ids.len())?;
        self.reactor.send(Command::Load(request))
    }

    /// Consumer: the sequence state of a handoff is here.
    pub fn commit(&self, handoff: HandoffId) -> Result<()> {
        self.reactor.send(Command::Commit { handoff })
    }

    /// Consumer: ends a load; `Failed` follows once nothing writes into its blocks any more. `is_withdrawn`: the producer
    /// has taken back what it had announced, so that every block is missing.
    pub fn cancel(&self, handoff: HandoffId, reason: &str, is_withdrawn: bool) -> Result<()> {
        self.reactor.send(Command::Cancel {
            handoff,
            reason: reason.to_owned(),
            is_withdrawn,
        })
    }

    /// Traces handoffs from now on.
    pub fn trace_to(&self, trace: Trace) -> Result<()> {
        self.reactor.send(Command::Trace(trace))
    }

    /// What has happened since the last call.
    pub fn drain(&self) -> Vec<Event> {
        self.events.drain()
    }

    /// Number of handoffs whose blocks are leased.
    pub fn num_leased(&self) -> usize {
        self.shared.num_leased.load(Ordering::Relaxed)
    }

    /// Ends the agent: peers are told, its thread ends. See [`check_reads_ended`](Self::check_reads_ended).
    pub fn close(&self) {
        self.reactor.stop();
    }

    /// Whether nothing is read into the memory of an agent that was closed: UCX may take longer to end reads than `close`
    /// waits for them.
    ///
    /// # Errors
    /// `Timeout` says how many reads have not ended. Their memory is kept until they have.
    pub fn check_reads_ended(&self) -> Result<()> {
        self.reactor.pending_reads().check()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.reactor.stop();
    }
}

fn check_positions(first: u32, len: usize) -> Result<()> {
    let end = u32::try_from(len)
        .ok()
        .and_then(|len| first.checked_add(len));
    if end.is_none() || len > BLOCKS_CAP {
        return Err(Error::Config(format!(
            "{len} blocks from position {first} on: at most {BLOCKS_CAP} are possible, and positions have 32 bits"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
