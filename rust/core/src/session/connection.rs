//! The TCP connection of a session: frames over a socket that never blocks.

use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;

use super::outbox::{Outbox, StreamPart, StreamTag};
use crate::error::{Error, Result};
use crate::net::record::Sealer;
use crate::reactor::{Poller, Token};
use crate::work::timespec;

/// Bytes in the kernel that have not left, up to which it takes more.
const UNSENT_LOW_WATER: u32 = 256 << 10;
/// Bytes up to which frames wait for others of the same event.
const QUEUED_CAP: usize = 64 << 10;
/// The congestion control of connections that stay on this host. BBR, the default of some hosts, paces packets with a timer,
/// and moves half as many bytes there. This one is in each kernel, allowed to all users, and needs no timer.
const ON_HOST_CONGESTION_CONTROL: &str = "reno";

/// Reason for which a connection cannot be used any more, without the peer's name.
type Reason = String;

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    poller: Arc<Poller>,
    token: Token,
    /// Events of it that the poller reports.
    interest: EventFlags,
    /// Frames and parts that the socket has not accepted.
    outbox: Outbox,
    /// A write failed. Bytes that the peer sent before can still be read; reading then reports the end.
    is_broken: bool,
}

impl Connection {
    /// Registers the connection with the poller, until it is dropped. The kernel gives up a peer that confirms nothing for
    /// as long as `silence`, also what a closed connection has left to send.
    ///
    /// # Errors
    /// `Connect`: the socket cannot be used. `Exhausted`: the poller refuses it.
    pub(super) fn new(
        stream: TcpStream,
        peer: &str,
        poller: &Arc<Poller>,
        token: Token,
        silence: Duration,
    ) -> Result<Self> {
        let unusable =
            |error| Error::Connect(format!("cannot use the connection to {peer}: {error}"));
        stream.set_nonblocking(true).map_err(unusable)?;
        stream.set_nodelay(true).map_err(unusable)?;
        set_unsent_low_water(&stream);
        let given_up_after = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX);
        // A kernel without it keeps unsent bytes for longer.
        let _ = sockopt::set_tcp_user_timeout(&stream, given_up_after);
        if is_on_host(&stream) {
            // Only slower without it.
            let _ = sockopt::set_tcp_congestion(&stream, ON_HOST_CONGESTION_CONTROL);
        }
        poller.add(&stream, token, EventFlags::IN)?;
        Ok(Self {
            stream,
            poller: Arc::clone(poller),
            token,
            interest: EventFlags::IN,
            outbox: Outbox::default(),
            is_broken: false,
        })
    }

    /// Bytes of frames and parts that the socket has not accepted.
    pub(super) fn num_unsent(&self) -> usize {
        self.outbox.len()
    }

    /// True if a write has failed.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// The address of the peer that the connection has reached.
    pub(super) fn peer(&self) -> Option<String> {
        self.stream.peer_addr().ok().map(|peer| peer.to_string())
    }

    /// True if both ends have loopback addresses.
    pub(super) fn is_loopback(&self) -> bool {
        ends(&self.stream).is_some_and(|ends| ends.iter().all(IpAddr::is_loopback))
    }

    /// Queues a frame, sealed where there is a sealer, for the next [`flush`](Self::flush), which sends all of them by one
    /// call. Returns true if that is due.
    ///
    /// # Errors
    /// The peer does not read, or the sealer seals no more.
    pub(super) fn queue(
        &mut self,
        frame: &[u8],
        sealer: Option<&mut Sealer>,
    ) -> std::result::Result<bool, Reason> {
        if self.is_broken {
            return Ok(false);
        }
        let is_appended = self.outbox.push(frame, sealer);
        if !is_appended.map_err(|error| error.to_string())? {
            return Err("it does not read what it is sent".to_owned());
        }
        Ok(self.outbox.len() >= QUEUED_CAP)
    }

    /// Sends a frame, sealed where there is a sealer. Bytes that the socket does not take now are sent by
    /// [`flush`](Self::flush).
    ///
    /// # Errors
    /// As of [`queue`](Self::queue).
    pub(super) fn send(
        &mut self,
        frame: &[u8],
        mut sealer: Option<&mut Sealer>,
    ) -> std::result::Result<(), Reason> {
        self.queue(frame, sealer.as_deref_mut())?;
        self.flush(sealer);
        Ok(())
    }

    /// Sends a part of a stream when the socket takes it.
    pub(super) fn send_part(&mut self, part: StreamPart, sealer: Option<&mut Sealer>) {
        if !self.is_broken {
            self.outbox.push_part(part);
            self.flush(sealer);
        }
    }

    /// Sends nothing more of the parts that `is_over` names.
    pub(super) fn abort_parts(&mut self, is_over: impl Fn(StreamTag) -> bool) {
        self.outbox.abort(is_over);
    }

    /// Sends the unsent bytes, as far as the socket takes them. The poller reports when it takes more.
    pub(super) fn flush(&mut self, sealer: Option<&mut Sealer>) {
        if !self.outbox.is_empty() && self.outbox.send(self.stream.as_fd(), sealer).is_err() {
            self.outbox.clear();
            self.is_broken = true;
            // The connection may still work: the memory to send from was released. The poller reports the end, here and at the peer.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        let interest = if self.outbox.is_empty() {
            EventFlags::IN
        } else {
            EventFlags::IN | EventFlags::OUT
        };
        if self.interest != interest {
            self.interest = interest;
            self.poller.modify(&self.stream, self.token, interest);
        }
    }

    /// Waits until the socket has taken everything, at most until `deadline`.
    pub(super) fn flush_until(&mut self, mut sealer: Option<&mut Sealer>, deadline: Instant) {
        loop {
            self.flush(sealer.as_deref_mut());
            let left = deadline.saturating_duration_since(Instant::now());
            if self.outbox.is_empty() || left.is_zero() {
                return;
            }
            let mut polled = [PollFd::new(&self.stream, PollFlags::OUT)];
            let _ = rustix::event::poll(&mut polled, Some(&timespec(left)));
        }
    }

    /// The socket, to receive from.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Sends no more.
    pub(super) fn shut_down(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// True if the peer has not shut its side down, as far as this host knows by now.
    pub(super) fn is_open_at_peer(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let _ = rustix::event::poll(&mut polled, Some(&timespec(Duration::ZERO)));
        polled[0].revents().is_empty()
    }
}

/// The addresses of this side and of the peer.
fn ends(stream: &TcpStream) -> Option<[IpAddr; 2]> {
    let ends = [stream.local_addr().ok()?, stream.peer_addr().ok()?];
    Some(ends.map(|end| end.ip().to_canonical()))
}

/// True if both ends are on this host: no packet leaves it.
fn is_on_host(stream: &TcpStream) -> bool {
    ends(stream).is_some_and(|[near, far]| near == far || near.is_loopback() && far.is_loopback())
}

/// Has the kernel take little more than it can send: what comes later does not wait behind megabytes.
fn set_unsent_low_water(stream: &TcpStream) {
    // A kernel without it takes more.
    let _ = kvpipe_ucx::socket::set_unsent_low_water(stream.as_fd(), UNSENT_LOW_WATER);
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.poller.remove(&self.stream);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use kvpipe_ucx::socket;

    use super::*;

    const SILENCE: Duration = Duration::from_secs(7);

    fn pair() -> (Connection, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let poller = Arc::new(Poller::new().unwrap());
        let connection = |stream| Connection::new(stream, "peer", &poller, 2, SILENCE).unwrap();
        (connection(near), connection(far))
    }

    #[test]
    fn a_peer_that_has_shut_down_is_noticed_even_before_its_bytes_are_read() {
        let (near, mut far) = pair();
        assert!(near.is_open_at_peer());
        far.send(b"bytes that are not read yet", None).unwrap();
        assert!(near.is_open_at_peer());
        far.shut_down();
        assert!(!near.is_open_at_peer());
    }

    #[test]
    fn packets_that_stay_on_the_host_are_not_paced() {
        let (near, far) = pair();
        for end in [near, far] {
            let used = sockopt::tcp_congestion(&end.stream).unwrap();
            assert_eq!(used, ON_HOST_CONGESTION_CONTROL);
        }
    }

    #[test]
    fn the_kernel_gives_up_a_peer_when_the_session_does() {
        let (near, _far) = pair();
        let given_up_after = sockopt::tcp_user_timeout(&near.stream).unwrap();
        assert_eq!(u128::from(given_up_after), SILENCE.as_millis());
    }

    #[test]
    fn the_poller_reports_a_socket_that_takes_more_while_something_waits_for_it() {
        let (mut near, far) = pair();
        while near.outbox.is_empty() {
            assert_eq!(near.interest, EventFlags::IN);
            near.send(&vec![0; 1 << 20], None).unwrap();
        }
        assert_eq!(near.interest, EventFlags::IN | EventFlags::OUT);
        let mut received = Vec::new();
        while !near.outbox.is_empty() {
            let _ = socket::receive(far.socket(), None, &mut received, 1 << 20);
            near.flush(None);
        }
        assert_eq!(near.interest, EventFlags::IN);
    }

    #[test]
    fn queued_frames_leave_by_one_flush_which_is_due_at_once_where_they_are_many() {
        let (mut near, far) = pair();
        let mut received = Vec::new();
        for frame in [b"one", b"two"] {
            assert_eq!(near.queue(frame, None), Ok(false));
        }
        let nothing = socket::receive(far.socket(), None, &mut received, 1 << 20);
        assert_eq!(nothing.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        near.flush(None);
        assert!(near.outbox.is_empty());
        assert!(far.stream.set_nonblocking(false).is_ok());
        socket::receive(far.socket(), None, &mut received, 1 << 20).unwrap();
        assert!(received.windows(3).any(|it| it == b"one"));
        assert!(received.windows(3).any(|it| it == b"two"));
        assert_eq!(near.queue(&vec![0; QUEUED_CAP], None), Ok(true));
    }

    #[test]
    fn a_connection_that_the_peer_has_dropped_is_not_open() {
        let (near, far) = pair();
        drop(far);
        assert!(!near.is_open_at_peer());
    }
}
