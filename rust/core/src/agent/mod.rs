//! Blocks between processes: registered regions, reads of a peer's blocks into our own, writes, and notifications.

mod agent_core;
mod api;
mod inbox;
pub(crate) mod messages;
mod metadata;
mod notices;
mod notify;
mod offers;
mod peer;
pub(crate) mod peers;
mod plan;
mod reads;
pub(crate) mod regions;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::Result;
use crate::ids::{Incarnation, SessionKey};
use crate::reactor::Reactor;
use crate::session::ReactorConfig;
use crate::sync::lock;
use crate::transfer::TransferService;
use crate::transfer::host::spawn;

pub use agent_core::AgentCommand;
pub use inbox::Notification;
pub use metadata::Metadata;
pub use notices::TAG_CAP;
pub use peer::{Peer, Regions, Stats};
pub use plan::{Options, Plan, Region};

pub(crate) use agent_core::{AgentCore, TRANSFERS_IN_FLIGHT};
pub(crate) use messages::reason;
pub(crate) use plan::region_gone;
pub(crate) use reads::{BlockTransfer, outcome_of};
pub(crate) use regions::{grant, revoke};

use inbox::Inbox;
use peer::Counters;

/// What the reactor's thread shows to others.
#[derive(Debug)]
struct SharedState {
    peers: Mutex<BTreeMap<SessionKey, Peer>>,
    counters: Counters,
    inbox: Inbox,
    num_regions: AtomicUsize,
}

impl SharedState {
    fn peers(&self) -> MutexGuard<'_, BTreeMap<SessionKey, Peer>> {
        lock(&self.peers)
    }
}

/// One end of block transfers; any thread may call. `C` is the command of the service that runs it.
#[derive(Debug)]
pub struct Agent<C> {
    pub(crate) reactor: Reactor<C>,
    incarnation: Incarnation,
    shared: Arc<SharedState>,
    /// Whether the blocks that it reads and writes have checksums.
    pub(crate) is_checksummed: bool,
}

impl<C: Send + 'static> Agent<C> {
    /// Starts an agent whose core is run by the service that `make` makes of it.
    pub(crate) fn start<S>(
        config: ReactorConfig,
        make: impl FnOnce(AgentCore) -> S + Send + 'static,
    ) -> Result<Self>
    where
        S: TransferService<Command = C> + 'static,
    {
        let incarnation = config.identity.incarnation;
        let shared = Arc::new(SharedState {
            peers: Mutex::default(),
            counters: Counters::default(),
            inbox: Inbox::new()?,
            num_regions: AtomicUsize::new(0),
        });
        let in_thread = Arc::clone(&shared);
        let reactor = spawn(config, || make(AgentCore::new(in_thread)))?;
        Ok(Self {
            reactor,
            incarnation,
            shared,
            is_checksummed: true,
        })
    }

    /// Runs one round of a reactor without a thread.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn round(&self) -> crate::reactor::manual::Round {
        self.reactor.round()
    }

    /// What the maps and queues of a reactor without a thread hold.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        self.reactor.sizes()
    }

    /// Where peers connect.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.address()
    }

    /// The incarnation of this agent.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Ends the agent: its sessions are closed, its thread ends. See [`check_reads_ended`](Self::check_reads_ended).
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
