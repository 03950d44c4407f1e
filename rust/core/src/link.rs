//! One TCP connection of the bootstrap plane: length-prefixed frames, the handshake, then application frames and
//! heartbeats. The socket never blocks; the node's thread drives it.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::codec::{Reader, Writer};
use crate::error::{Error, Result};
use crate::handshake::{HANDSHAKE_FRAME_CAP, Handshake, SessionId, Step};
use crate::identity::Identity;

/// Largest frame of an authenticated peer.
const FRAME_CAP: usize = 16 << 20;
/// Most bytes that wait for a peer that does not read; more and it counts as lost.
const OUTBOX_CAP: usize = 64 << 20;

const HEARTBEAT: u8 = 32;
const APPLICATION: u8 = 33;
const GOODBYE: u8 = 34;

/// How long things may take on a link.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// From connect or accept to an established session.
    pub handshake: Duration,
    /// Between two heartbeats.
    pub heartbeat: Duration,
    /// Without any frame of the peer, it counts as lost.
    pub silence: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
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

/// What a link has to say to its node.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// The peer is known and may use the session; this side may not speak yet.
    Admitted(SessionId),
    /// The session is established.
    Ready,
    Frame(Vec<u8>),
}

#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    pub(crate) peer: String,
    pub(crate) is_accepted: bool,
    pub(crate) identity: Option<Box<Identity>>,
    phase: Phase,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    timing: Timing,
    opened: Instant,
    heard: Instant,
    beat: Instant,
}

impl Link {
    /// Takes over a connected stream. The connecting side sends its hello at once.
    pub(crate) fn new(
        stream: TcpStream,
        peer: String,
        is_accepted: bool,
        token: &[u8],
        timing: Timing,
        now: Instant,
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
        let mut link = Self {
            stream,
            peer,
            is_accepted,
            identity: None,
            phase: Phase::Handshake(Box::new(handshake)),
            inbox: Vec::new(),
            outbox: Vec::new(),
            timing,
            opened: now,
            heard: now,
            beat: now + timing.heartbeat,
        };
        if let Some(hello) = hello {
            link.send_raw(&hello)?;
        }
        Ok(link)
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

    /// Tells the peer that this side closes on purpose, as far as the socket takes it.
    pub(crate) fn say_goodbye(&mut self, reason: &str) {
        if self.is_up() {
            let _ = self.send_raw(&Writer::new(GOODBYE).str(reason).finish());
        }
    }

    fn send_raw(&mut self, frame: &[u8]) -> Result<()> {
        if self.outbox.len() + frame.len() > OUTBOX_CAP {
            return Err(Error::lost(&self.peer, "it does not read what it is sent"));
        }
        self.outbox
            .extend_from_slice(&(frame.len() as u32).to_le_bytes());
        self.outbox.extend_from_slice(frame);
        self.flush()
    }

    /// Writes what waits.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let mut sent = 0;
        while sent < self.outbox.len() {
            match self.stream.write(&self.outbox[sent..]) {
                Ok(0) => return Err(Error::lost(&self.peer, "connection closed")),
                Ok(n) => sent += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::lost(&self.peer, error)),
            }
        }
        self.outbox.drain(..sent);
        Ok(())
    }

    /// Reads what has come. The first value holds what came before the error, if there is one.
    pub(crate) fn receive(
        &mut self,
        ours: &Identity,
        now: Instant,
        mut accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
    ) -> (Vec<Incoming>, Option<Error>) {
        let ended = self.fill(now).err();
        let mut incoming = Vec::new();
        while let Some(frame) = self.next_frame() {
            let taken = frame.and_then(|frame| self.take(frame, ours, &mut accept, &mut incoming));
            if let Err(error) = taken {
                return (incoming, Some(error));
            }
        }
        (incoming, ended)
    }

    fn fill(&mut self, now: Instant) -> Result<()> {
        let mut chunk = [0; 64 << 10];
        // Bounded, so that one busy peer cannot keep the thread: epoll is level-triggered and comes back.
        for _ in 0..16 {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(Error::lost(&self.peer, "connection closed")),
                Ok(n) => {
                    self.inbox.extend_from_slice(&chunk[..n]);
                    self.heard = now;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::lost(&self.peer, error)),
            }
        }
        Ok(())
    }

    fn next_frame(&mut self) -> Option<Result<Vec<u8>>> {
        let length = self.inbox.first_chunk::<4>()?;
        let length = u32::from_le_bytes(*length) as usize;
        let cap = if self.is_up() {
            FRAME_CAP
        } else {
            HANDSHAKE_FRAME_CAP
        };
        if length > cap {
            return Some(Err(Error::protocol(format_args!(
                "{} announced a frame of {length} bytes, at most {cap} are allowed",
                self.peer
            ))));
        }
        let frame = self.inbox.get(4..4 + length)?.to_vec();
        self.inbox.drain(..4 + length);
        Some(Ok(frame))
    }

    fn take(
        &mut self,
        frame: Vec<u8>,
        ours: &Identity,
        accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
        incoming: &mut Vec<Incoming>,
    ) -> Result<()> {
        let Phase::Handshake(handshake) = &mut self.phase else {
            incoming.extend(self.take_up(&frame)?);
            return Ok(());
        };
        match handshake.frame(&frame, ours, accept)? {
            Step::Continue(frames) => frames.iter().try_for_each(|frame| self.send_raw(frame)),
            Step::Admitted {
                frames,
                peer,
                session,
                is_ready,
            } => {
                frames.iter().try_for_each(|frame| self.send_raw(frame))?;
                self.identity = Some(peer);
                incoming.push(Incoming::Admitted(session));
                if is_ready {
                    self.phase = Phase::Up;
                    incoming.push(Incoming::Ready);
                }
                Ok(())
            }
            Step::Ready => {
                self.phase = Phase::Up;
                incoming.push(Incoming::Ready);
                Ok(())
            }
            Step::Refuse(frame, error) => {
                self.send_raw(&frame)?;
                Err(error)
            }
        }
    }

    fn take_up(&self, frame: &[u8]) -> Result<Option<Incoming>> {
        match frame.first() {
            Some(&HEARTBEAT) => Ok(None),
            Some(&APPLICATION) => Ok(Some(Incoming::Frame(frame[1..].to_vec()))),
            Some(&GOODBYE) => {
                let reason = Reader::new(&frame[1..]).str(4096)?;
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
        if !self.is_up() {
            let deadline = self.opened + self.timing.handshake;
            if now >= deadline {
                let waited = self.timing.handshake;
                return Err(Error::Connect(format!(
                    "{} did not complete the handshake within {waited:?}",
                    self.peer
                )));
            }
            return Ok(deadline);
        }
        let deadline = self.heard + self.timing.silence;
        if now >= deadline {
            return Err(Error::lost(
                &self.peer,
                format_args!("silent for {:?}", self.timing.silence),
            ));
        }
        if now >= self.beat {
            self.beat = now + self.timing.heartbeat;
            self.send_raw(&[HEARTBEAT])?;
        }
        Ok(deadline.min(self.beat))
    }
}
