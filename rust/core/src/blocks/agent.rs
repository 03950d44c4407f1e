//! An agent: its reactor, and its state that other threads see.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::agent_core::{AgentCore, BlocksCommand};
use super::handoff::{EventWaiter, HandoffCommand, HandoffService, HandoffShared};
use super::shared::SharedAgentState;
use crate::error::Result;
use crate::ids::Incarnation;
use crate::integrity::Integrity;
use crate::net::identity::{Identity, SessionKind};
use crate::net::secret::Tokens;
use crate::reactor::Reactor;
use crate::session::{ReactorConfig, SessionTimeouts};
use crate::transfer::host::spawn;
use crate::transport::Transport;

/// Settings of an [`Agent`].
pub struct AgentConfig<'a> {
    /// `host:port`, or `host:first-last` for the first free port of a range; of port 0 the system chooses one.
    pub listen: &'a str,
    /// The tokens that its peers know too.
    pub token: Tokens<'a>,
    /// Transport of blocks to and from its peers.
    pub transport: Transport,
    /// Its engine, which its peers name in errors.
    pub engine_id: &'a str,
    /// Names and values that its peers must have, too.
    pub fingerprint: Vec<(String, String)>,
    /// Its deadlines.
    pub timeouts: SessionTimeouts,
    /// The integrity of its handoffs; with `None` it has none. The blocks that it reads and writes have checksums, unless
    /// this is `None`.
    pub integrity: Integrity,
    /// Time that the producer of a load waits for its first block.
    pub first_block_timeout: Duration,
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
            first_block_timeout: Duration::from_secs(300),
        }
    }
}

/// Requests of users of an agent.
#[derive(Debug)]
pub(crate) enum AgentCommand {
    Blocks(BlocksCommand),
    Handoff(HandoffCommand),
}

/// One end of block transfers and handoffs; any thread may call.
#[derive(Debug)]
pub struct Agent {
    /// Closed before the reactor is.
    pub(super) events: EventWaiter,
    /// The number of the next load that waits for an event.
    pub(super) next_gate: AtomicU64,
    pub(super) reactor: Reactor<AgentCommand>,
    pub(super) incarnation: Incarnation,
    pub(super) shared: Arc<SharedAgentState>,
    pub(super) handoffs: Arc<HandoffShared>,
    /// That of its configuration.
    pub(super) integrity: Integrity,
}

impl Agent {
    /// Starts an agent.
    ///
    /// # Errors
    /// The address cannot be bound (`Config`), UCX is missing (`Unavailable`).
    pub fn new(config: AgentConfig<'_>) -> Result<Self> {
        let (integrity, first_block_timeout) = (config.integrity, config.first_block_timeout);
        let identity = Identity::new(SessionKind::Agent, config.engine_id, config.fingerprint)?;
        let timeouts = config.timeouts;
        let config =
            ReactorConfig::listening(config.listen, config.token, identity, config.transport)?;
        let config = ReactorConfig { timeouts, ..config };
        let incarnation = config.identity.incarnation;
        let shared = Arc::new(SharedAgentState::new()?);
        let handoffs = Arc::new(HandoffShared::default());
        let in_thread = (Arc::clone(&shared), Arc::clone(&handoffs));
        let reactor = spawn(config, move || {
            let (core, handoffs) = (AgentCore::new(in_thread.0), in_thread.1);
            HandoffService::new(core, handoffs, integrity, first_block_timeout)
        })?;
        // This is the first time.
        let _ = handoffs.commands.set(reactor.command_handle());
        Ok(Self {
            events: EventWaiter::new(),
            next_gate: AtomicU64::new(0),
            reactor,
            incarnation,
            shared,
            handoffs,
            integrity,
        })
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

    /// Address that peers connect to.
    pub fn address(&self) -> Option<SocketAddr> {
        self.reactor.address()
    }

    /// The incarnation of this agent.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Ends the agent: what waits for events of a device is forgotten, its sessions are closed, its thread ends. See
    /// [`check_reads_ended`](Self::check_reads_ended).
    pub fn close(&self) {
        self.events.close();
        self.reactor.stop();
    }

    /// Checks that no read of an agent that was closed is in flight: UCX may take longer to end reads than `close`
    /// waits for them.
    ///
    /// # Errors
    /// `Timeout` says how many reads have not ended. Their memory is kept until they have.
    pub fn check_reads_ended(&self) -> Result<()> {
        self.reactor.pending_reads().check()
    }
}
