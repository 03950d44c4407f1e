//! Connecting to peers. Resolving a name blocks, so that each attempt has a thread of its own, which ends with the
//! reactor; only a resolver that does not answer keeps it longer.

use std::fmt;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::poller::{Poller, Token};
use crate::error::Result;
use crate::process::Thread;
use crate::sync::{eventfd, signal};
use crate::work::timespec;

/// The outcome of an attempt to connect.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) token: Token,
    pub(crate) stream: std::result::Result<TcpStream, ConnectFailure>,
}

/// Cause of a failed attempt to connect.
#[derive(Debug)]
pub(crate) enum ConnectFailure {
    /// No listener at the address, or a firewall refuses. A full backlog refuses no connection: the system repeats the
    /// attempt.
    Refused(String),
    /// The peer accepted the connection and ended it without a reason.
    Cut(String),
    /// The name has no address, the network is not reached, the time is over, ...
    Other(String),
}

impl fmt::Display for ConnectFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Refused(reason) | Self::Cut(reason) | Self::Other(reason)) = self;
        f.write_str(reason)
    }
}

/// Attempts to connect that are under way. Dropped, it ends their threads.
#[derive(Debug)]
pub(crate) struct Connector {
    poller: Arc<Poller>,
    sender: Sender<Connected>,
    receiver: Receiver<Connected>,
    /// Readable once the threads have to end.
    stopped: Arc<OwnedFd>,
}

impl Connector {
    pub(crate) fn new(poller: Arc<Poller>) -> Result<Self> {
        let (sender, receiver) = channel();
        Ok(Self {
            poller,
            sender,
            receiver,
            stopped: Arc::new(eventfd()?),
        })
    }

    /// Begins to connect; `timeout` counts from `begun`. The outcome wakes the reactor.
    ///
    /// # Errors
    /// `Exhausted`: the system gives no thread.
    pub(crate) fn connect(
        &self,
        token: Token,
        address: &str,
        begun: Instant,
        timeout: Duration,
    ) -> Result<()> {
        let (address, stopped) = (address.to_owned(), Arc::clone(&self.stopped));
        let (sender, poller) = (self.sender.clone(), Arc::clone(&self.poller));
        let attempt = move || {
            let stream = open(&address, begun, timeout, &stopped);
            let _ = sender.send(Connected { token, stream });
            poller.wake();
        };
        #[cfg(any(test, feature = "fuzzing"))]
        if super::manual::is_on() {
            attempt();
            return Ok(());
        }
        Thread::spawn("kvpipe-connect", attempt).map(drop)
    }

    /// The next attempt that has ended.
    pub(crate) fn next(&self) -> Option<Connected> {
        self.receiver.try_recv().ok()
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        signal(&self.stopped);
    }
}

/// Tries the addresses of `name` in turn, until one accepts, `timeout` has passed since `begun`, or `stop` is readable.
fn open(
    name: &str,
    begun: Instant,
    timeout: Duration,
    stop: &OwnedFd,
) -> std::result::Result<TcpStream, ConnectFailure> {
    use ConnectFailure::{Cut, Other, Refused};
    let deadline = begun + timeout;
    let resolved = name.to_socket_addrs();
    let candidates = resolved.map_err(|error| Other(error.to_string()))?;
    try_all(&candidates.collect::<Vec<_>>(), deadline, stop).map_err(|errno| match errno {
        None => Other("the name has no address".to_owned()),
        Some(Errno::TIMEDOUT) => Other(format!("no answer within {timeout:?}")),
        Some(error @ Errno::CONNREFUSED) => Refused(error.to_string()),
        Some(error @ (Errno::CONNRESET | Errno::CONNABORTED)) => Cut(error.to_string()),
        Some(error) => Other(error.to_string()),
    })
}

/// Each address has its share of the time that is left: one that is silent leaves some to the others. The last one's error
/// counts, if there is one.
fn try_all(
    candidates: &[SocketAddr],
    deadline: Instant,
    stop: &OwnedFd,
) -> std::result::Result<TcpStream, Option<Errno>> {
    let mut last = None;
    for (address, num_left) in candidates.iter().zip((1..=candidates.len() as u32).rev()) {
        let now = Instant::now();
        let share = deadline.saturating_duration_since(now) / num_left;
        match try_one(*address, now + share, stop) {
            Ok(stream) => return Ok(stream),
            Err(Errno::CANCELED) => return Err(Some(Errno::CANCELED)),
            Err(error) => last = Some(error),
        }
    }
    Err(last)
}

fn try_one(
    address: SocketAddr,
    deadline: Instant,
    stop: &OwnedFd,
) -> std::result::Result<TcpStream, Errno> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => return Ok(socket.into()),
        Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error),
    }
    loop {
        let left = timespec(deadline.saturating_duration_since(Instant::now()));
        let mut polled = [
            PollFd::new(&socket, PollFlags::OUT),
            PollFd::new(stop, PollFlags::IN),
        ];
        match rustix::event::poll(&mut polled, Some(&left)) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) if !polled[1].revents().is_empty() => return Err(Errno::CANCELED),
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    sockopt::socket_error(&socket)??;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(4);

    /// A listener that accepts nothing, with a full backlog: later connections are not answered.
    fn silent() -> (SocketAddr, TcpListener, Vec<OwnedFd>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let waits = |_| {
            let (family, stream) = (AddressFamily::INET, SocketType::STREAM);
            let socket = rustix::net::socket_with(family, stream, flags, None).unwrap();
            let _ = rustix::net::connect(&socket, &address);
            socket
        };
        let crowd = (0..4).map(waits).collect();
        (address, listener, crowd)
    }

    fn never() -> OwnedFd {
        eventfd().unwrap()
    }

    #[test]
    fn a_silent_address_leaves_time_for_the_next_one() {
        let (silent, _listener, _crowd) = silent();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let good = listener.local_addr().unwrap();
        let deadline = Instant::now() + TIMEOUT;
        let stream = try_all(&[silent, good], deadline, &never()).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), good);
        assert!(Instant::now() < deadline, "in its own share of the time");
    }

    #[test]
    fn a_reactor_that_ends_tries_no_other_address() {
        let (silent, _listener, _crowd) = silent();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stop = never();
        signal(&stop);
        let candidates = [silent, listener.local_addr().unwrap()];
        let tried = try_all(&candidates, Instant::now() + TIMEOUT, &stop);
        assert_eq!(tried.unwrap_err(), Some(Errno::CANCELED));
    }
}
