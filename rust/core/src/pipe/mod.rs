//! Pipe: a single-direction FIFO of tensors between two processes. The receiving end listens, the sending end
//! connects. Small tensors travel inside their message; large ones are offered, and the receiver fetches them
//! into their destination by the data path of the session.

mod arrivals;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod posted;
mod receiver;
mod receiving;
mod sender;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvpipe_ucx::Buffer;

use crate::error::{Error, Result};
use crate::net::address::{Route, check_address, listen_address};
use crate::net::codec::{Reader, Writer};
use crate::net::identity::{Identity, SessionKind};
use crate::reactor::{Reactor, ReactorConfig, ReactorContext, SessionKey};
use crate::session::connection::SessionTimeouts;
use crate::transfer::advice::advice;
use crate::transport::Transport;
use crate::work::{Then, Work};

pub use receiver::Received;

/// Largest tensor that travels inside its message. Above it, one copy costs more than one more round trip.
const EAGER_CAP: usize = 32 << 10;
/// Messages that may be sent before the receiver has taken the first of them.
const MESSAGES_IN_FLIGHT: usize = 64;
/// Longest text of a dtype, structured ones included.
const DTYPE_CAP: usize = 4096;
/// Most dimensions of a tensor.
const DIMENSIONS_CAP: usize = 64;

// Besides those of `crate::fetch`.
const EAGER: u8 = 1;
const OFFER: u8 = 2;
const TAKEN: u8 = 6;
const WITHDRAW: u8 = 7;
const WITHDRAWN: u8 = 8;
const CORRUPT: u8 = 10;

/// What is sent besides the bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// What the sender handed in: 0 nothing (`None`), 1 torch, 2 numpy.
    pub family: u8,
    /// The element type, spelled as the family spells it.
    pub dtype: String,
    /// The shape.
    pub shape: Vec<u64>,
}

impl Meta {
    pub(crate) fn write(&self, writer: Writer) -> Writer {
        writer
            .u8(self.family)
            .str(&self.dtype)
            .list(&self.shape, |w, n| w.u64(*n))
    }

    /// Bytes of its parts of any length.
    pub(crate) fn num_bytes(&self) -> u64 {
        (self.dtype.len() + size_of_val(self.shape.as_slice())) as u64
    }

    /// What no receiver would take is refused here.
    pub(crate) fn check(&self) -> Result<()> {
        if self.dtype.len() > DTYPE_CAP || self.shape.len() > DIMENSIONS_CAP {
            return Err(Error::Config(format!(
                "a tensor of {} dimensions, its dtype spelled in {} bytes: at most {DIMENSIONS_CAP} and {DTYPE_CAP} are possible",
                self.shape.len(),
                self.dtype.len()
            )));
        }
        Ok(())
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            family: reader.u8()?,
            dtype: reader.str(DTYPE_CAP)?,
            shape: reader.list(DIMENSIONS_CAP, Reader::u64)?,
        })
    }
}

/// When an operation gives up.
#[derive(Debug, Clone, Copy, Default)]
pub struct Deadline {
    /// Until then the two sides must have met; afterwards the operation is withdrawn and the pipe stays usable.
    pub meet_by: Option<Instant>,
    /// Until then it must be done; afterwards the pipe is closed.
    pub done_by: Option<Instant>,
}

impl Deadline {
    /// `None` waits, zero polls (what is there already is fetched to its end), else both bounds are the same.
    pub fn after(timeout: Option<Duration>) -> Self {
        let at = timeout.map(|timeout| Instant::now() + timeout);
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
    /// Why its data path is slower than it need be, and what to do; empty otherwise.
    pub advice: &'static str,
    /// Tensors sent or received, completed.
    pub num_tensors: u64,
    /// Their bytes.
    pub num_bytes: u64,
    /// Operations that are not done.
    pub in_flight: usize,
}

#[derive(Debug, Clone, Default)]
struct Shared(Arc<Mutex<PipeInfo>>);

impl Shared {
    /// The two ends have met.
    fn open(&self, cx: &ReactorContext, session: SessionKey, peer: &Identity) {
        let mut info = self.get();
        info.state = "open";
        info.peer = cx.peer(session);
        if let Some(data_path) = cx.data_path(session) {
            data_path.transport().clone_into(&mut info.transport);
            info.advice = advice(&data_path, peer.host == cx.identity().host).unwrap_or_default();
        }
    }

    fn get(&self) -> MutexGuard<'_, PipeInfo> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
enum End {
    Sender(Reactor<sender::Command>),
    Receiver(Reactor<receiver::Command>),
}

/// One end of a pipe. Any thread may call; operations take their place in the order of the calls.
#[derive(Debug)]
pub struct Pipe {
    end: End,
    shared: Shared,
}

fn config(
    listen: Option<SocketAddr>,
    local: IpAddr,
    token: &[u8],
    transport: Transport,
    busy_poll: Duration,
) -> Result<ReactorConfig> {
    Ok(ReactorConfig {
        listen,
        token: token.to_vec(),
        identity: Identity::new(SessionKind::Pipe, "", Vec::new())?,
        transport: Some(transport),
        local,
        timeouts: SessionTimeouts::default(),
        busy_poll,
    })
}

impl Pipe {
    /// Opens the receiving end and returns at once; a sender may connect later. Its thread looks for more for
    /// `busy_poll` before it sleeps.
    pub fn listen(
        address: &str,
        token: &[u8],
        transport: Transport,
        busy_poll: Duration,
    ) -> Result<Self> {
        let address = listen_address(address, token)?;
        let shared = Shared::default();
        shared.get().state = "connecting";
        let in_thread = shared.clone();
        let config = config(Some(address), address.ip(), token, transport, busy_poll)?;
        let reactor = Reactor::spawn(config, || receiver::Receiver::new(in_thread))?;
        Ok(Self {
            end: End::Receiver(reactor),
            shared,
        })
    }

    /// Looks for the way to a receiver, for [`connect_along`](Self::connect_along).
    pub fn route(address: &str, timeout: Duration) -> Result<Route> {
        check_address(address)?;
        Route::to(vec![address.to_owned()], timeout)
    }

    /// As [`connect_along`](Self::connect_along), for callers that look for no signals while the name is resolved.
    pub fn connect(
        address: &str,
        token: &[u8],
        transport: Transport,
        is_checksummed: bool,
        busy_poll: Duration,
        timeout: Duration,
    ) -> Result<(Self, Work<()>)> {
        let route = Self::route(address, timeout)?;
        while !route.wait()? {}
        Self::connect_along(&route, token, transport, is_checksummed, busy_poll)
    }

    /// Opens the sending end; the work is done once the receiver has accepted it. With `is_checksummed`, the receiver
    /// compares what it gets with checksums.
    pub fn connect_along(
        route: &Route,
        token: &[u8],
        transport: Transport,
        is_checksummed: bool,
        busy_poll: Duration,
    ) -> Result<(Self, Work<()>)> {
        let address = route.addresses().join(",");
        let shared = Shared::default();
        {
            let mut info = shared.get();
            info.state = "connecting";
            info.peer.clone_from(&address);
        }
        let mut config = config(None, route.local()?, token, transport, busy_poll)?;
        config.timeouts = route.timeouts();
        let in_thread = shared.clone();
        let reactor = Reactor::spawn(config, move || {
            sender::Sender::new(in_thread, is_checksummed)
        })?;
        let (connected, completer) = reactor.work();
        reactor.send(sender::Command::Connect { address, completer })?;
        Ok((
            Self {
                end: End::Sender(reactor),
                shared,
            },
            connected,
        ))
    }

    /// Queues a tensor for sending; the work is done when its memory may be changed.
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
        let send = sender::Command::Send {
            meta,
            buffer,
            deadline,
            completer,
        };
        reactor.hand(send, then)?;
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
        let receive = receiver::Command::Receive {
            out,
            deadline,
            completer,
        };
        reactor.hand(receive, then)?;
        Ok(done)
    }

    /// Takes a receive back that has not met a tensor, so that it takes none. One that has, goes on.
    pub fn withdraw(&self, receive: &Work<Arc<Received>>) -> Result<()> {
        match &self.end {
            End::Sender(_) => Ok(()),
            End::Receiver(reactor) => reactor.send(receiver::Command::Withdraw(receive.clone())),
        }
    }

    /// Ends the pipe in order. Of a sender: done once everything has been taken.
    pub fn close(&self, deadline: Deadline) -> Result<Option<Work<()>>> {
        match &self.end {
            End::Sender(reactor) => {
                let (done, completer) = reactor.work();
                reactor.send(sender::Command::Close {
                    deadline,
                    completer,
                })?;
                Ok(Some(done))
            }
            End::Receiver(reactor) => {
                reactor.stop();
                self.shared.get().state = "closed";
                Ok(None)
            }
        }
    }

    /// Stops the thread; everything under way ends.
    pub fn stop(&self) {
        match &self.end {
            End::Sender(reactor) => reactor.stop(),
            End::Receiver(reactor) => reactor.stop(),
        }
        self.shared.get().state = "closed";
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_description_is_read_as_written(family: u8, dtype in ".{0,64}", shape in proptest::collection::vec(any::<u64>(), 0..8)) {
            let meta = Meta { family, dtype, shape };
            let message = meta.write(Writer::default()).finish();
            prop_assert_eq!(Meta::read(&mut Reader::new(&message)).unwrap(), meta);
        }

        #[test]
        fn any_bytes_give_a_description_or_an_error(message: Vec<u8>) {
            let _ = Meta::read(&mut Reader::new(&message));
        }
    }

    #[test]
    fn a_description_that_no_receiver_takes_is_refused() {
        let of = |dimensions, spelled| Meta {
            family: 2,
            dtype: "x".repeat(spelled),
            shape: vec![1; dimensions],
        };
        assert!(of(DIMENSIONS_CAP, DTYPE_CAP).check().is_ok());
        assert!(of(DIMENSIONS_CAP + 1, 1).check().is_err());
        assert!(of(1, DTYPE_CAP + 1).check().is_err());
    }
}
