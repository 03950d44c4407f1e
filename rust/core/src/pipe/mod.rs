//! Pipe: a single-direction FIFO of tensors between two processes. The receiving end listens, the sending end
//! connects. A small tensor travels inside its message. A large one is offered, and the receiver transfers it into its
//! destination by the data path of the session.

mod incoming;
mod large_receive;
mod messages;
mod posted;
mod receiver;
mod sender;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvpipe_ucx::Buffer;

use crate::clock;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::integrity::Integrity;
use crate::net::address::check_address;
use crate::net::identity::{Identity, SessionKind};
use crate::net::secret::Tokens;
use crate::reactor::Reactor;
use crate::session::{Links, ReactorConfig};
use crate::sync::lock;
use crate::tensor::{Meta, Received};
use crate::transfer::host::spawn;
use crate::transport::Transport;
use crate::work::{Then, Work};
use incoming::PendingReceive;
use posted::QueuedSend;
use receiver::{Receiver, ReceiverCommand};
use sender::{ClosingCaller, Sender, SenderCommand};

/// Largest tensor that travels inside its message. Above this size a copy costs more than a round trip.
const EAGER_CAP: usize = 32 << 10;
/// Tensors that the sender may post before the receiver acknowledges the first of them.
const MESSAGES_IN_FLIGHT: usize = 64;

/// Most large tensors that are transferred at once.
const TRANSFERS_IN_FLIGHT: usize = 8;

/// Time limits of an operation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Deadline {
    /// The send and its receive must have met by then. Otherwise the operation is withdrawn and the pipe stays usable.
    pub meet_by: Option<Instant>,
    /// The operation must be done by then. Otherwise the tensor is lost on both sides, and the pipe stays usable.
    pub done_by: Option<Instant>,
}

impl Deadline {
    /// `None` waits without end. Zero polls: a tensor that is already here is received to its end. Else both bounds are equal.
    pub fn after(timeout: Option<Duration>) -> Self {
        let at = timeout.map(|timeout| clock::now() + timeout);
        Self {
            meet_by: at,
            done_by: at.filter(|_| timeout != Some(Duration::ZERO)),
        }
    }
}

/// Counters and state of a pipe.
#[derive(Debug, Clone, Default)]
pub struct PipeInfo {
    /// `connecting`, `open` or `closed`.
    pub state: &'static str,
    /// The peer's address, once known.
    pub peer: String,
    /// The transport that carries large tensors, once known.
    pub transport: String,
    /// Reason for a slower data path than possible, and the remedy; empty otherwise.
    pub advice: &'static str,
    /// Tensors sent or received, completed.
    pub num_tensors: u64,
    /// Their bytes.
    pub num_bytes: u64,
    /// Operations that are not done.
    pub in_flight: usize,
}

#[derive(Debug, Clone)]
struct SharedInfo(Arc<Mutex<PipeInfo>>);

impl SharedInfo {
    fn connecting(peer: String) -> Self {
        let info = PipeInfo {
            state: "connecting",
            peer,
            ..PipeInfo::default()
        };
        Self(Arc::new(Mutex::new(info)))
    }

    /// Both ends are connected.
    fn open(&self, links: &Links, session: SessionKey) {
        let mut info = self.get();
        info.state = "open";
        info.peer = links.peer(session);
        info.advice = links.advice(session).unwrap_or_default();
    }

    /// Sets the transport of large tensors, once it is known.
    fn set_transport(&self, transport: Option<String>) {
        if let Some(transport) = transport {
            self.get().transport = transport;
        }
    }

    fn get(&self) -> MutexGuard<'_, PipeInfo> {
        lock(&self.0)
    }
}

#[derive(Debug)]
enum End {
    Sender(Reactor<SenderCommand>),
    Receiver(Reactor<ReceiverCommand>),
}

/// One end of a pipe. Any thread may call; operations are queued in the order of the calls.
#[derive(Debug)]
pub struct Pipe {
    end: End,
    shared: SharedInfo,
}

fn identity() -> Result<Identity> {
    Identity::new(SessionKind::Pipe, "", Vec::new())
}

impl Pipe {
    /// Opens the receiving end and returns at once; a sender may connect later. Its reactor polls for `busy_poll` before
    /// it sleeps.
    pub fn listen<'a>(
        address: &str,
        token: impl Into<Tokens<'a>>,
        transport: Transport,
        busy_poll: Duration,
    ) -> Result<Self> {
        let config = ReactorConfig::listening(address, token, identity()?, transport)?;
        let config = ReactorConfig {
            busy_poll,
            ..config
        };
        let shared = SharedInfo::connecting(String::new());
        let in_reactor = shared.clone();
        let reactor = spawn(config, || Receiver::new(in_reactor))?;
        let end = End::Receiver(reactor);
        Ok(Self { end, shared })
    }

    /// Opens the sending end; the work is done once the receiver has accepted it, within `timeout`. The receiver verifies
    /// tensors as `integrity` says.
    pub fn connect(
        address: &str,
        token: &[u8],
        transport: Transport,
        integrity: Integrity,
        busy_poll: Duration,
        timeout: Duration,
    ) -> Result<(Self, Work<()>)> {
        check_address(address)?;
        let address = address.to_owned();
        let shared = SharedInfo::connecting(address.clone());
        let config = ReactorConfig::connecting(token, identity()?, transport, timeout)?;
        let config = ReactorConfig {
            busy_poll,
            ..config
        };
        let in_reactor = shared.clone();
        let reactor = spawn(config, move || Sender::new(in_reactor, integrity))?;
        let (connected, completer) = reactor.work();
        reactor.send(SenderCommand::Connect { address, completer })?;
        let end = End::Sender(reactor);
        Ok((Self { end, shared }, connected))
    }

    /// Queues a tensor for sending; its memory may be changed when the work is settled.
    pub fn send(
        &self,
        meta: Meta,
        buffer: Buffer,
        deadline: Deadline,
        then: Then,
    ) -> Result<Work<()>> {
        let End::Sender(reactor) = &self.end else {
            return Err(Error::Config(
                "this is the receiving end of the pipe; it cannot send".to_owned(),
            ));
        };
        meta.check()?;
        let (done, completer) = reactor.work();
        let send = QueuedSend {
            meta,
            buffer,
            meet_by: deadline.meet_by,
            completer,
        };
        reactor.send_and(SenderCommand::Send(send), then)?;
        Ok(done)
    }

    /// Queues a receive. With `out`, the next tensor must match its dtype and shape, else nothing is consumed.
    pub fn receive(
        &self,
        out: Option<(Meta, Buffer)>,
        deadline: Deadline,
        then: Then,
    ) -> Result<Work<Arc<Received>>> {
        let End::Receiver(reactor) = &self.end else {
            return Err(Error::Config(
                "this is the sending end of the pipe; it cannot receive".to_owned(),
            ));
        };
        let (done, completer) = reactor.work();
        let receive = PendingReceive {
            out,
            deadline,
            completer,
        };
        reactor.send_and(ReceiverCommand::Receive(receive), then)?;
        Ok(done)
    }

    /// Withdraws a receive that has not met a tensor. One that has met a tensor goes on.
    pub fn withdraw(&self, receive: &Work<Arc<Received>>) -> Result<()> {
        if let End::Receiver(reactor) = &self.end {
            reactor.send(ReceiverCommand::Withdraw(receive.clone()))?;
        }
        Ok(())
    }

    /// Ends the pipe in order. The work of a sender is done once the receiver has acknowledged everything.
    pub fn close(&self, deadline: Deadline) -> Result<Option<Work<()>>> {
        let End::Sender(reactor) = &self.end else {
            self.stop();
            return Ok(None);
        };
        let (done, completer) = reactor.work();
        reactor.send(SenderCommand::Close(ClosingCaller {
            deadline: deadline.meet_by,
            completer,
        }))?;
        Ok(Some(done))
    }

    /// Checks that no read of a pipe that was stopped is in flight into memory of receives: UCX may take longer to end reads than
    /// [`stop`](Self::stop) waits for them.
    ///
    /// # Errors
    /// `Timeout` says how many reads have not ended. Their memory is kept until they have.
    pub fn check_reads_ended(&self) -> Result<()> {
        match &self.end {
            End::Sender(reactor) => reactor.pending_reads().check(),
            End::Receiver(reactor) => reactor.pending_reads().check(),
        }
    }

    /// Stops the reactor; all operations end. See [`check_reads_ended`](Self::check_reads_ended).
    pub fn stop(&self) {
        match &self.end {
            End::Sender(reactor) => reactor.stop(),
            End::Receiver(reactor) => reactor.stop(),
        }
        self.shared.get().state = "closed";
    }

    /// Runs one round of a reactor without a thread.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn round(&self) -> crate::reactor::manual::Round {
        match &self.end {
            End::Sender(reactor) => reactor.round(),
            End::Receiver(reactor) => reactor.round(),
        }
    }

    /// Sizes of the maps and queues of a reactor without a thread.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        match &self.end {
            End::Sender(reactor) => reactor.sizes(),
            End::Receiver(reactor) => reactor.sizes(),
        }
    }

    /// The address a sender connects to; `None` at the sending end.
    pub fn address(&self) -> Option<SocketAddr> {
        match &self.end {
            End::Sender(_) => None,
            End::Receiver(reactor) => reactor.address(),
        }
    }

    /// Counters and state.
    pub fn info(&self) -> PipeInfo {
        self.shared.get().clone()
    }
}

#[cfg(test)]
mod tests;
