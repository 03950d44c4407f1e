//! One TCP connection of the bootstrap plane: length-prefixed frames, the handshake, then application frames and
//! heartbeats. The socket never blocks; the reactor's thread drives it.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::net::codec::{Reader, Writer};
use crate::net::handshake::{HANDSHAKE_FRAME_CAP, Handshake, Step};
use crate::net::identity::Identity;
use crate::work::timespec;

/// Largest frame of an authenticated peer.
const FRAME_CAP: usize = 16 << 20;
/// Most bytes that wait for a peer that does not read; more and it counts as lost.
const OUTBOX_CAP: usize = 64 << 20;
/// Bytes read at once, so that one busy peer cannot keep the thread: epoll is level-triggered and comes back.
const READ_CAP: usize = 1 << 20;
/// Longest reason in a goodbye.
const REASON_CAP: usize = 4096;

const HEARTBEAT: u8 = 32;
const APPLICATION: u8 = 33;
const GOODBYE: u8 = 34;
const PING: u8 = 35;

/// How long things may take on a session.
#[derive(Debug, Clone, Copy)]
pub struct SessionTimeouts {
    /// From connect or accept to an established session, and from there to what the peer says first of itself.
    pub handshake: Duration,
    /// Since when the time of `handshake` runs for a side that connects; `None`: since it connects.
    pub begun: Option<Instant>,
    /// Between two heartbeats.
    pub heartbeat: Duration,
    /// Without any frame of the peer, it counts as lost.
    pub silence: Duration,
}

impl Default for SessionTimeouts {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            begun: None,
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(10),
        }
    }
}

#[derive(Debug)]
enum Phase {
    Handshake(Box<Handshake>),
    Up,
}

/// What a session has to say to its reactor.
#[derive(Debug)]
pub(crate) enum ConnectionEvent {
    /// The peer is known and may use the session; this side may not speak yet.
    Admitted(SessionId),
    /// The session is established.
    Ready,
    Frame(Vec<u8>),
}

#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    pub(crate) peer: String,
    pub(crate) is_accepted: bool,
    /// Who the peer is, until the service has been told.
    pub(crate) identity: Option<Box<Identity>>,
    /// Whether the service has been told that the session is established.
    pub(crate) is_announced: bool,
    phase: Phase,
    inbox: Vec<u8>,
    outbox: VecDeque<u8>,
    /// A write failed. What the peer said before can still be read; reading then tells of the end.
    is_broken: bool,
    timeouts: SessionTimeouts,
    opened: Instant,
    /// When something of the peer came last.
    pub(crate) last_rx: Instant,
    /// How often the peer has asked for a heartbeat since the last one.
    num_pings: u32,
    beat: Instant,
}

impl Connection {
    /// Takes over a connected stream. The connecting side sends its hello at once. The handshake's time counts from
    /// `begun`.
    pub(crate) fn new(
        stream: TcpStream,
        peer: String,
        is_accepted: bool,
        token: &[u8],
        timeouts: SessionTimeouts,
        begun: Instant,
    ) -> Result<Self> {
        let unusable =
            |error| Error::Connect(format!("cannot use the connection to {peer}: {error}"));
        stream.set_nonblocking(true).map_err(unusable)?;
        stream.set_nodelay(true).map_err(unusable)?;
        let (handshake, hello) = if is_accepted {
            (Handshake::server(token, &peer)?, None)
        } else {
            let (handshake, hello) = Handshake::client(token, &peer)?;
            (handshake, Some(hello))
        };
        let mut session = Self {
            stream,
            peer,
            is_accepted,
            identity: None,
            is_announced: false,
            phase: Phase::Handshake(Box::new(handshake)),
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            is_broken: false,
            timeouts,
            opened: begun,
            last_rx: begun,
            num_pings: 0,
            beat: begun + timeouts.heartbeat,
        };
        if let Some(hello) = hello {
            session.send_raw(&hello)?;
        }
        Ok(session)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up)
    }

    pub(crate) fn wants_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends an application frame; what the socket does not take now waits.
    pub(crate) fn send(&mut self, frame: &[u8]) -> Result<()> {
        self.send_raw(&Writer::new(APPLICATION).raw(frame).finish())
    }

    /// Asks the peer for a heartbeat now.
    pub(crate) fn ping(&mut self) -> Result<()> {
        self.send_raw(&[PING])
    }

    /// Tells the peer why this side closes, as far as the socket takes it, and that nothing follows.
    pub(crate) fn end(&mut self, reason: &str) {
        if self.is_up() {
            let _ = self.send_raw(&Writer::new(GOODBYE).text(reason, REASON_CAP).finish());
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Whether the peer holds on to the session, as far as its socket says by now. A peer that gives up memory that this
    /// side may be reading [`end`](Self::end)s the session first: a read that was over before is of what was meant.
    pub(crate) fn is_held_by_peer(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let _ = rustix::event::poll(&mut polled, Some(&timespec(Duration::ZERO)));
        polled[0].revents().is_empty()
    }

    fn send_raw(&mut self, frame: &[u8]) -> Result<()> {
        if self.is_broken {
            return Ok(());
        }
        if self.outbox.len() + frame.len() > OUTBOX_CAP {
            return Err(Error::lost(&self.peer, "it does not read what it is sent"));
        }
        self.outbox.extend((frame.len() as u32).to_le_bytes());
        self.outbox.extend(frame);
        self.flush();
        Ok(())
    }

    /// Writes what waits.
    pub(crate) fn flush(&mut self) {
        while !self.outbox.is_empty() {
            match self.stream.write(self.outbox.as_slices().0) {
                Ok(n) if n > 0 => {
                    self.outbox.drain(..n);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => {
                    self.outbox.clear();
                    self.is_broken = true;
                }
            }
        }
    }

    /// Reads what has come. The first value holds what came before the error, if there is one.
    pub(crate) fn receive(
        &mut self,
        ours: &Identity,
        now: Instant,
        mut accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
    ) -> (Vec<ConnectionEvent>, Option<Error>) {
        let ended = self.fill(now).err();
        let mut incoming = Vec::new();
        let mut inbox = std::mem::take(&mut self.inbox);
        let mut rest = &inbox[..];
        loop {
            let taken = match self.split_frame(rest) {
                Ok(Some((frame, after))) => {
                    rest = after;
                    self.take(frame, ours, &mut accept, &mut incoming)
                }
                Ok(None) => break,
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                return (incoming, Some(error));
            }
        }
        let taken = inbox.len() - rest.len();
        inbox.drain(..taken);
        self.inbox = inbox;
        if std::mem::take(&mut self.num_pings) > 0
            && let Err(error) = self.send_raw(&[HEARTBEAT])
        {
            return (incoming, Some(ended.unwrap_or(error)));
        }
        (incoming, ended)
    }

    fn fill(&mut self, now: Instant) -> Result<()> {
        let before = self.inbox.len();
        let read = (&self.stream)
            .take(READ_CAP as u64)
            .read_to_end(&mut self.inbox);
        if self.inbox.len() > before {
            self.last_rx = now;
        }
        match read {
            Ok(READ_CAP) => Ok(()),
            Ok(_) => Err(Error::lost(&self.peer, "connection closed")),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(Error::lost(&self.peer, error)),
        }
    }

    /// The next frame and what follows it, once it is here whole.
    fn split_frame<'a>(&self, inbox: &'a [u8]) -> Result<Option<(&'a [u8], &'a [u8])>> {
        let Some((length, rest)) = inbox.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        let cap = if self.is_up() {
            FRAME_CAP
        } else {
            HANDSHAKE_FRAME_CAP
        };
        if length > cap {
            return Err(Error::protocol(format_args!(
                "{} announced a frame of {length} bytes, at most {cap} are allowed",
                self.peer
            )));
        }
        Ok(rest.split_at_checked(length))
    }

    fn take(
        &mut self,
        frame: &[u8],
        ours: &Identity,
        accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
        incoming: &mut Vec<ConnectionEvent>,
    ) -> Result<()> {
        let Phase::Handshake(handshake) = &mut self.phase else {
            incoming.extend(self.take_up(frame)?);
            return Ok(());
        };
        match handshake.frame(frame, ours, accept)? {
            Step::Continue(frames) => frames.iter().try_for_each(|frame| self.send_raw(frame)),
            Step::Admitted {
                frames,
                peer,
                session_id,
                is_ready,
            } => {
                frames.iter().try_for_each(|frame| self.send_raw(frame))?;
                self.identity = Some(peer);
                incoming.push(ConnectionEvent::Admitted(session_id));
                if is_ready {
                    self.phase = Phase::Up;
                    incoming.push(ConnectionEvent::Ready);
                }
                Ok(())
            }
            Step::Ready => {
                self.phase = Phase::Up;
                incoming.push(ConnectionEvent::Ready);
                Ok(())
            }
            Step::Refuse(frame, error) => {
                self.send_raw(&frame)?;
                Err(error)
            }
        }
    }

    fn take_up(&mut self, frame: &[u8]) -> Result<Option<ConnectionEvent>> {
        match frame.first() {
            Some(&HEARTBEAT) => Ok(None),
            Some(&PING) => {
                self.num_pings = self.num_pings.saturating_add(1);
                Ok(None)
            }
            Some(&APPLICATION) => Ok(Some(ConnectionEvent::Frame(frame[1..].to_vec()))),
            Some(&GOODBYE) => {
                let reason = Reader::new(&frame[1..]).str(REASON_CAP)?;
                Err(Error::lost(&self.peer, format_args!("it closed: {reason}")))
            }
            other => Err(Error::protocol(format_args!(
                "{} sent frame {other:?}",
                self.peer
            ))),
        }
    }

    /// Sends a heartbeat when it is time, and tells when to come back.
    ///
    /// # Errors
    /// The peer has been silent for too long, or the handshake takes too long.
    pub(crate) fn tick(&mut self, now: Instant) -> Result<Instant> {
        let established_by = self.opened + self.timeouts.handshake;
        if !self.is_announced && now >= established_by {
            return Err(self.not_established());
        }
        if !self.is_up() {
            return Ok(established_by);
        }
        let deadline = self.last_rx + self.timeouts.silence;
        if now >= deadline {
            return Err(Error::lost(
                &self.peer,
                format_args!("silent for {:?}", self.timeouts.silence),
            ));
        }
        if now >= self.beat {
            self.beat = now + self.timeouts.heartbeat;
            self.send_raw(&[HEARTBEAT])?;
        }
        let next = deadline.min(self.beat);
        Ok(if self.is_announced {
            next
        } else {
            next.min(established_by)
        })
    }

    fn not_established(&self) -> Error {
        let (peer, waited) = (&self.peer, self.timeouts.handshake);
        Error::Connect(if self.is_up() {
            format!(
                "the UCX of {peer} was not reached within {waited:?}, although its bootstrap port was; can the hosts reach each other's UCX ports?"
            )
        } else {
            format!("{peer} did not complete the handshake within {waited:?}")
        })
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
        let session = |stream| {
            let (timeouts, now) = (SessionTimeouts::default(), Instant::now());
            Connection::new(stream, "peer".to_owned(), true, b"", timeouts, now).unwrap()
        };
        (session(near), session(far))
    }

    #[test]
    fn a_peer_that_has_ended_the_link_holds_nothing_even_before_it_is_read() {
        let (near, mut far) = pair();
        assert!(near.is_held_by_peer());
        far.send(b"something that nobody has read yet").unwrap();
        assert!(near.is_held_by_peer());
        far.end("enough");
        assert!(!near.is_held_by_peer());
    }

    #[test]
    fn a_link_that_is_gone_is_not_held() {
        let (near, far) = pair();
        drop(far);
        assert!(!near.is_held_by_peer());
    }
}
