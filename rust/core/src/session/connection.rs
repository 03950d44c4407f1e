//! The TCP connection of a session: frames over a socket that never blocks.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags};

use crate::error::{Error, Result};
use crate::net::framing::SendBuffer;
use crate::net::record::Sealer;
use crate::reactor::{Poller, Token};
use crate::work::timespec;

/// Bytes read at once, so that one busy peer cannot keep the thread: epoll is level-triggered and reports the rest.
const READ_CAP: usize = 1 << 20;

/// Why a connection can be used no more, without the peer's name.
type Reason = String;

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    poller: Arc<Poller>,
    token: Token,
    /// What the poller reports of it.
    interest: EventFlags,
    /// Frames that the socket has not accepted.
    unsent: SendBuffer,
    /// A write failed. What the peer sent before can still be read; reading then reports the end.
    is_broken: bool,
}

impl Connection {
    /// Registers the connection with the poller, until it is dropped.
    ///
    /// # Errors
    /// `Connect`: the socket cannot be used. `Exhausted`: the poller refuses it.
    pub(super) fn new(
        stream: TcpStream,
        peer: &str,
        poller: &Arc<Poller>,
        token: Token,
    ) -> Result<Self> {
        let unusable =
            |error| Error::Connect(format!("cannot use the connection to {peer}: {error}"));
        stream.set_nonblocking(true).map_err(unusable)?;
        stream.set_nodelay(true).map_err(unusable)?;
        poller.add(&stream, token, EventFlags::IN)?;
        Ok(Self {
            stream,
            poller: Arc::clone(poller),
            token,
            interest: EventFlags::IN,
            unsent: SendBuffer::default(),
            is_broken: false,
        })
    }

    /// How many bytes of frames the socket has not accepted.
    #[cfg(test)]
    pub(super) fn num_unsent(&self) -> usize {
        self.unsent.unsent().len()
    }

    /// True if both ends have loopback addresses.
    pub(super) fn is_loopback(&self) -> bool {
        let ends = [self.stream.local_addr(), self.stream.peer_addr()];
        ends.iter().all(|end| {
            end.as_ref()
                .is_ok_and(|end| end.ip().to_canonical().is_loopback())
        })
    }

    /// Sends a frame, sealed where there is a sealer; what the socket does not take now is sent by [`flush`](Self::flush).
    pub(super) fn send(
        &mut self,
        frame: &[u8],
        sealer: Option<&mut Sealer>,
    ) -> std::result::Result<(), Reason> {
        if !self.is_broken {
            let is_appended = self.unsent.append(frame, sealer);
            if !is_appended.map_err(|error| error.to_string())? {
                return Err("it does not read what it is sent".to_owned());
            }
            self.flush();
        }
        Ok(())
    }

    /// Sends what waits, as far as the socket takes it. The poller reports when it takes more.
    pub(super) fn flush(&mut self) {
        while !self.unsent.unsent().is_empty() {
            match self.stream.write(self.unsent.unsent()) {
                Ok(len) if len > 0 => self.unsent.consume(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => {
                    self.unsent.clear();
                    self.is_broken = true;
                }
            }
        }
        let interest = if self.unsent.unsent().is_empty() {
            EventFlags::IN
        } else {
            EventFlags::IN | EventFlags::OUT
        };
        if self.interest != interest {
            self.interest = interest;
            self.poller.modify(&self.stream, self.token, interest);
        }
    }

    /// Reads what has come into `buffer`; whether that was anything, and how the connection has ended, if it has.
    pub(super) fn fill(&self, buffer: &mut Vec<u8>) -> (bool, std::result::Result<(), Reason>) {
        let before = buffer.len();
        let read = (&self.stream).take(READ_CAP as u64).read_to_end(buffer);
        let ended = match read {
            Ok(READ_CAP) => Ok(()),
            Ok(_) => Err("connection closed".to_owned()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        (buffer.len() > before, ended)
    }

    /// Sends no more.
    pub(super) fn shut_down(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Whether the peer has not shut its side down, as far as this host knows by now.
    pub(super) fn is_open_at_peer(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let _ = rustix::event::poll(&mut polled, Some(&timespec(Duration::ZERO)));
        polled[0].revents().is_empty()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.poller.remove(&self.stream);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Connection, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let poller = Arc::new(Poller::new().unwrap());
        let connection = |stream| Connection::new(stream, "peer", &poller, 2).unwrap();
        (connection(near), connection(far))
    }

    #[test]
    fn a_peer_that_has_shut_down_is_noticed_even_before_its_bytes_are_read() {
        let (near, mut far) = pair();
        assert!(near.is_open_at_peer());
        far.send(b"something that nobody has read yet", None)
            .unwrap();
        assert!(near.is_open_at_peer());
        far.shut_down();
        assert!(!near.is_open_at_peer());
    }

    #[test]
    fn the_poller_reports_a_socket_that_takes_more_while_something_waits_for_it() {
        let (mut near, far) = pair();
        while near.unsent.unsent().is_empty() {
            assert_eq!(near.interest, EventFlags::IN);
            near.send(&vec![0; 1 << 20], None).unwrap();
        }
        assert_eq!(near.interest, EventFlags::IN | EventFlags::OUT);
        let mut received = Vec::new();
        while !near.unsent.unsent().is_empty() {
            let _ = far.fill(&mut received);
            near.flush();
        }
        assert_eq!(near.interest, EventFlags::IN);
    }

    #[test]
    fn a_connection_that_the_peer_has_dropped_is_not_open() {
        let (near, far) = pair();
        drop(far);
        assert!(!near.is_open_at_peer());
    }
}
