//! One session, from the attempt to connect until it has failed.
//!
//! ```text
//! Connecting ──TCP──► Handshaking ──both know the session──► Establishing ──UCX hellos, probes──► Up
//! ```
//! Without a data plane, Establishing ends at once. A failure is noted beside the state, because frames that came before
//! it still count; once it is reported, the session is removed.

use std::time::{Duration, Instant};

use super::connection::Connection;
use super::data_plane::SessionEndpoint;
use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::net::framing::{FRAME_CAP, FrameReader, SessionFrame};
use crate::net::handshake::{HANDSHAKE_FRAME_CAP, Handshake, Step};
use crate::net::identity::Identity;
use crate::reactor::Route;
use crate::transport::DataPath;

/// How long things may take on a session.
#[derive(Debug, Clone, Copy)]
pub struct SessionTimeouts {
    /// From connect or accept to an established session, and from there to the first message of the peer's service.
    pub handshake: Duration,
    /// Since when `handshake` counts on a side that connects; `None`: since it connects.
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

impl SessionTimeouts {
    /// Those of the sessions along a route: connecting has what resolving has left of the route's timeout.
    pub(crate) fn along(route: &Route) -> Self {
        Self {
            handshake: route.timeout,
            begun: Some(route.begun),
            ..Self::default()
        }
    }
}

#[derive(Debug)]
pub(super) enum SessionState {
    /// A thread resolves the address and connects, or a connection was accepted just now.
    Connecting,
    /// TCP is connected; both sides prove the token and say who they are. At the end of it the peer may use the session,
    /// but this side may not, because the peer does not know the session yet.
    Handshaking(Box<Handshake>),
    /// Both sides know the session; their UCX hellos are under way, then their probes of the data path.
    Establishing(Box<Identity>),
    /// The service knows the session.
    Up,
}

/// What received frames lead to.
#[derive(Debug)]
pub(super) enum SessionEvent {
    /// The peer is known and may use the session with this id.
    Admitted(SessionId),
    /// The session is [`Establishing`](SessionState::Establishing).
    Ready,
    /// How the peer gets our bytes.
    DataPath(DataPath),
    /// A message for the service.
    Frame(Vec<u8>),
}

#[derive(Debug)]
pub(super) struct Session {
    /// The peer's address.
    pub(super) peer: String,
    pub(super) is_accepted: bool,
    pub(super) state: SessionState,
    /// The first error; it is reported soon.
    pub(super) failure: Option<Error>,
    /// Its part of the data plane, once the peer is known.
    pub(super) endpoint: Option<SessionEndpoint>,
    /// None while it is connecting.
    pub(super) connection: Option<Connection>,
    received: FrameReader,
    timeouts: SessionTimeouts,
    begun: Instant,
    /// When bytes of the peer came last.
    pub(super) last_rx: Instant,
    next_heartbeat: Instant,
    /// A PING of the peer that is not answered yet.
    is_pinged: bool,
}

impl Session {
    /// A session without a connection; the handshake's time counts from `begun`.
    pub(super) fn new(
        peer: String,
        is_accepted: bool,
        begun: Instant,
        timeouts: SessionTimeouts,
    ) -> Self {
        Self {
            peer,
            is_accepted,
            state: SessionState::Connecting,
            failure: None,
            endpoint: None,
            connection: None,
            received: FrameReader::default(),
            timeouts,
            begun,
            last_rx: begun,
            next_heartbeat: begun + timeouts.heartbeat,
            is_pinged: false,
        }
    }

    /// TCP is connected: begins the handshake.
    pub(super) fn start_handshake(&mut self, connection: Connection, token: &[u8]) -> Result<()> {
        self.connection = Some(connection);
        let (handshake, hello) = if self.is_accepted {
            (Handshake::server(token, &self.peer)?, None)
        } else {
            let (handshake, hello) = Handshake::client(token, &self.peer)?;
            (handshake, Some(hello))
        };
        self.state = SessionState::Handshaking(Box::new(handshake));
        hello.map_or(Ok(()), |hello| self.send_raw(&hello))
    }

    /// Whether the service knows the session.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, SessionState::Up)
    }

    /// Whether the handshake is over.
    fn is_ready(&self) -> bool {
        matches!(self.state, SessionState::Establishing(_)) || self.is_up()
    }

    /// The session is established: the identity of its peer, the first time only.
    pub(super) fn finish(&mut self) -> Option<Box<Identity>> {
        if !matches!(self.state, SessionState::Establishing(_)) {
            return None;
        }
        match std::mem::replace(&mut self.state, SessionState::Up) {
            SessionState::Establishing(peer) => Some(peer),
            _ => None,
        }
    }

    /// Sends a frame of an established session.
    pub(super) fn send(&mut self, frame: &SessionFrame<'_>) -> Result<()> {
        self.send_raw(&frame.encode())
    }

    fn send_raw(&mut self, frame: &[u8]) -> Result<()> {
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        let peer = &self.peer;
        connection
            .send(frame)
            .map_err(|reason| Error::lost(peer, reason))
    }

    /// Tells the peer why this side closes, as far as the socket takes it, and sends no more.
    pub(super) fn say_goodbye(&mut self, reason: &str) {
        if self.is_ready() {
            let _ = self.send(&SessionFrame::Goodbye(reason.to_owned()));
        }
        if let Some(connection) = &self.connection {
            connection.shut_down();
        }
    }

    /// Whether the peer has not ended the session, as far as this host knows by now. A peer that withdraws memory which
    /// this side may be reading ends the session first: a read that ended before this is true has read what was meant.
    pub(super) fn is_open_at_peer(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(Connection::is_open_at_peer)
    }

    /// Sends what waits and reads what has come; the events that it leads to, and how the session has ended, if it has. Events that came before
    /// the end count.
    pub(super) fn receive(
        &mut self,
        ours: &Identity,
        now: Instant,
        mut accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
    ) -> (Vec<SessionEvent>, Option<Error>) {
        let mut events = Vec::new();
        let Some(connection) = &mut self.connection else {
            return (events, None);
        };
        connection.flush();
        let mut received = std::mem::take(&mut self.received);
        let (has_read, ended) = connection.fill(received.buffer());
        if has_read {
            self.last_rx = now;
        }
        let handled = loop {
            let cap = if self.is_ready() {
                FRAME_CAP
            } else {
                HANDSHAKE_FRAME_CAP
            };
            let event = match received.next(cap) {
                Ok(Some(frame)) => self.handle_frame(frame, ours, &mut accept, &mut events),
                Ok(None) => break Ok(()),
                Err(error) => Err(self.name(error)),
            };
            if event.is_err() {
                break event;
            }
        };
        self.received = received;
        let ended = handled
            .and_then(|()| ended.map_err(|reason| Error::lost(&self.peer, reason)))
            .and_then(|()| self.answer_ping());
        (events, ended.err())
    }

    fn answer_ping(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_pinged) {
            self.send(&SessionFrame::Heartbeat)?;
        }
        Ok(())
    }

    /// The error with the name of the peer.
    fn name(&self, error: Error) -> Error {
        match error {
            Error::Protocol(text) => Error::Protocol(format!("{text}, from {}", self.peer)),
            other => other,
        }
    }

    fn handle_frame(
        &mut self,
        frame: &[u8],
        ours: &Identity,
        accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
        events: &mut Vec<SessionEvent>,
    ) -> Result<()> {
        let SessionState::Handshaking(handshake) = &mut self.state else {
            events.extend(self.handle_session_frame(frame)?);
            return Ok(());
        };
        let ready = match handshake.frame(frame, ours, accept)? {
            Step::Continue(frame) => {
                self.send_raw(&frame)?;
                None
            }
            Step::Admitted {
                frame,
                session_id,
                peer,
            } => {
                self.send_raw(&frame)?;
                events.push(SessionEvent::Admitted(session_id));
                peer
            }
            Step::Ready(peer) => Some(peer),
            Step::Refuse(frame, error) => {
                self.send_raw(&frame)?;
                return Err(error);
            }
        };
        if let Some(peer) = ready {
            self.state = SessionState::Establishing(peer);
            events.push(SessionEvent::Ready);
        }
        Ok(())
    }

    fn handle_session_frame(&mut self, frame: &[u8]) -> Result<Option<SessionEvent>> {
        match SessionFrame::decode(frame).map_err(|error| self.name(error))? {
            SessionFrame::Heartbeat => Ok(None),
            SessionFrame::Ping => {
                self.is_pinged = true;
                Ok(None)
            }
            SessionFrame::DataPath { is_read, transport } => {
                let data_path = if is_read {
                    DataPath::RemoteRead(transport)
                } else {
                    DataPath::Stream(transport)
                };
                Ok(Some(SessionEvent::DataPath(data_path)))
            }
            SessionFrame::Application(message) => Ok(Some(SessionEvent::Frame(message.to_vec()))),
            SessionFrame::Goodbye(reason) => {
                Err(Error::lost(&self.peer, format_args!("it closed: {reason}")))
            }
        }
    }

    /// When to [`expire`](Self::expire) next; earlier than needed where bytes have come since.
    pub(super) fn next_deadline(&self) -> Instant {
        let established_by = self.begun + self.timeouts.handshake;
        let alive_by = self.last_rx + self.timeouts.silence;
        match self.state {
            SessionState::Up => alive_by.min(self.next_heartbeat),
            SessionState::Establishing(_) => established_by.min(alive_by).min(self.next_heartbeat),
            _ => established_by,
        }
    }

    /// Sends a heartbeat when it is time.
    ///
    /// # Errors
    /// The peer has been silent for too long, or the session takes too long to be established.
    pub(super) fn expire(&mut self, now: Instant) -> Result<()> {
        if !self.is_up() && now >= self.begun + self.timeouts.handshake {
            return Err(self.not_established());
        }
        if !self.is_ready() {
            return Ok(());
        }
        if now >= self.last_rx + self.timeouts.silence {
            let silent = format_args!("silent for {:?}", self.timeouts.silence).to_string();
            return Err(Error::lost(&self.peer, silent));
        }
        if now >= self.next_heartbeat {
            self.next_heartbeat = now + self.timeouts.heartbeat;
            self.send(&SessionFrame::Heartbeat)?;
        }
        Ok(())
    }

    fn not_established(&self) -> Error {
        let (peer, waited) = (&self.peer, self.timeouts.handshake);
        Error::Connect(match self.state {
            SessionState::Connecting => {
                format!("cannot reach {peer}: no answer within {waited:?}")
            }
            SessionState::Establishing(_) => format!(
                "the UCX of {peer} was not reached within {waited:?}, although its bootstrap port was; can the hosts reach each other's UCX ports?"
            ),
            _ => format!("{peer} did not complete the handshake within {waited:?}"),
        })
    }
}
