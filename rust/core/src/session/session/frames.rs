//! The frames that a session receives, until its connection ends.

use std::io::ErrorKind;
use std::time::Instant;

use super::super::inbox::{Inbox, READ_CAP, ReceivedPart, place};
use super::super::link::Link;
use super::super::stream_sinks::StreamSinks;
use super::{Session, SessionState};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::framing::{FRAME_CAP, SessionFrame};
use crate::net::handshake::{HANDSHAKE_FRAME_CAP, JoinRequest, Step};
use crate::net::identity::Identity;
use crate::net::secret::JoinSecret;
use crate::transport::DataPath;

/// Events that received frames lead to.
#[derive(Debug)]
pub(in crate::session) enum SessionEvent {
    /// The session is [`Establishing`](SessionState::Establishing).
    Ready,
    /// The peer's data path for our bytes.
    DataPath(DataPath),
    /// A message for the service.
    Message { header: Vec<u8>, payload: Vec<u8> },
    /// A part of a stream has come.
    Part(ReceivedPart),
    /// The peer asks to join a session by this connection.
    AskedToJoin(JoinRequest),
    /// The connection has joined that session.
    Joined,
    /// The peer has lost the further connection of this number.
    StreamLost(u32),
}

/// End of a session.
#[derive(Debug)]
pub(in crate::session) enum SessionEnd {
    /// It has failed.
    Failed(Error),
    /// The connection of this attempt ended in the handshake, and the peer gave no reason.
    Cut(String),
}

impl Session {
    /// Sends what waits and reads what has come. Returns the events that this leads to, and how the session has ended, if it
    /// has. Events that came before the end count.
    pub(in crate::session) fn receive(
        &mut self,
        (key, sinks): (SessionKey, &StreamSinks),
        ours: &Identity,
        now: Instant,
        mut accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
    ) -> (Vec<SessionEvent>, Option<SessionEnd>) {
        let mut events = Vec::new();
        self.flush();
        if self.is_muted {
            return (events, None);
        }
        let mut budget = READ_CAP;
        let Some(link) = &mut self.link else {
            return (events, None);
        };
        let mut inbox = std::mem::take(&mut link.inbox);
        let mut ended = Ok(());
        let handled = loop {
            let handled =
                self.handle_received(&mut inbox, (key, sinks), ours, &mut accept, &mut events);
            if handled.is_err() || budget == 0 {
                break handled;
            }
            let Some(link) = self.link.as_ref().filter(|_| !self.has_joined()) else {
                break handled;
            };
            match inbox.read(link.connection.socket()) {
                Ok(0) => {
                    ended = Err("connection closed".to_owned());
                    break handled;
                }
                Ok(len) => {
                    self.last_rx = now;
                    budget = budget.saturating_sub(len);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break handled,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    ended = Err(error.to_string());
                    break handled;
                }
            }
        };
        inbox.note_advance(now);
        if let Some(link) = &mut self.link {
            link.inbox = inbox;
        }
        let handled = handled.and_then(|()| self.answer_ping());
        let ended = match (handled, ended) {
            (Err(error), _) => Some(SessionEnd::Failed(error)),
            (Ok(()), Err(reason)) => Some(self.end_of_connection(reason)),
            (Ok(()), Ok(())) => None,
        };
        (events, ended)
    }

    /// Handles what has come.
    fn handle_received(
        &mut self,
        inbox: &mut Inbox,
        (key, sinks): (SessionKey, &StreamSinks),
        ours: &Identity,
        accept: &mut impl FnMut(&Identity) -> std::result::Result<(), String>,
        events: &mut Vec<SessionEvent>,
    ) -> Result<()> {
        while !self.has_joined() {
            let cap = if self.is_ready() {
                FRAME_CAP
            } else {
                HANDSHAKE_FRAME_CAP
            };
            // A sealed part is opened whole before any of it is used.
            if self.is_ready()
                && !self.is_sealed()
                && let Some(part) = inbox.next_part(key, sinks).map_err(|it| self.name(it))?
            {
                events.push(SessionEvent::Part(part));
                continue;
            }
            match inbox.next_frame(cap).map_err(|error| self.name(error))? {
                Some(frame) => {
                    self.handle_frame(frame, (key, sinks), ours, &mut *accept, events)?;
                }
                None => break,
            }
        }
        Ok(())
    }

    /// Goes on with a peer that has asked to join a session with this secret, whose frames may be sealed; refuses it if there
    /// is none.
    pub(in crate::session) fn join(
        &mut self,
        session: Option<(SessionKey, (&JoinSecret, bool))>,
        request: &JoinRequest,
    ) -> Result<()> {
        let SessionState::Handshaking(handshake) = &mut self.state else {
            return Ok(());
        };
        self.joins = session.map(|(key, _)| (key, request.number));
        match handshake.join(session.map(|(_, secret)| secret), request)? {
            Step::Refuse(frame, error) => {
                self.send_raw(&frame)?;
                Err(error)
            }
            Step::Continue(frame) => self.send_raw(&frame),
            _ => Ok(()),
        }
    }

    fn has_joined(&self) -> bool {
        matches!(self.state, SessionState::Joined)
    }

    fn end_of_connection(&self, reason: String) -> SessionEnd {
        if matches!(self.state, SessionState::Handshaking(_)) && !self.is_accepted {
            return SessionEnd::Cut(reason);
        }
        SessionEnd::Failed(Error::lost(&self.peer, reason))
    }

    fn answer_ping(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_pinged) {
            self.send(&SessionFrame::Heartbeat)?;
        }
        Ok(())
    }

    /// The error with the name of the peer.
    pub(in crate::session) fn name(&self, error: Error) -> Error {
        match error {
            Error::Protocol(text) => Error::Protocol(format!("{text}, from {}", self.peer)),
            other => other,
        }
    }

    fn handle_frame(
        &mut self,
        frame: &mut [u8],
        (key, sinks): (SessionKey, &StreamSinks),
        ours: &Identity,
        accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
        events: &mut Vec<SessionEvent>,
    ) -> Result<()> {
        let SessionState::Handshaking(handshake) = &mut self.state else {
            events.extend(self.handle_session_frame(frame, (key, sinks))?);
            return Ok(());
        };
        let ready = match handshake.frame(frame, ours, accept)? {
            Step::Continue(frame) => {
                self.send_raw(&frame)?;
                None
            }
            Step::Admitted { frame, peer } => {
                self.send_raw(&frame)?;
                peer
            }
            Step::Ready(peer) => Some(peer),
            Step::Refuse(frame, error) => {
                self.send_raw(&frame)?;
                return Err(error);
            }
            Step::AskedToJoin(request) => {
                events.push(SessionEvent::AskedToJoin(request));
                None
            }
            Step::Joined(_) => {
                self.end_handshake(SessionState::Joined);
                events.push(SessionEvent::Joined);
                None
            }
        };
        if let Some(peer) = ready {
            self.end_handshake(SessionState::Establishing(peer));
            events.push(SessionEvent::Ready);
        }
        Ok(())
    }

    /// The keys of the handshake are those of the connection from now on.
    fn end_handshake(&mut self, next: SessionState) {
        let handshaking = std::mem::replace(&mut self.state, next);
        if let (SessionState::Handshaking(handshake), Some(link)) = (handshaking, &mut self.link) {
            self.bulk.secret = handshake.join_secret();
            link.records = handshake.into_records();
        }
    }

    fn handle_session_frame(
        &mut self,
        frame: &mut [u8],
        (key, sinks): (SessionKey, &StreamSinks),
    ) -> Result<Option<SessionEvent>> {
        let opened = match self.link.as_mut().and_then(Link::opener) {
            Some(opener) => opener.open(frame),
            None => Ok(&*frame),
        };
        match opened
            .and_then(SessionFrame::decode)
            .map_err(|error| self.name(error))?
        {
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
            SessionFrame::Message { header, payload } => Ok(Some(SessionEvent::Message {
                header: header.to_vec(),
                payload: payload.to_vec(),
            })),
            SessionFrame::Stream {
                header,
                payload,
                is_aborted,
            } => {
                let placed = place(sinks, key, header, payload);
                placed.map_err(|error| self.name(error))?;
                Ok(Some(SessionEvent::Part(ReceivedPart {
                    header: header.to_vec(),
                    num_bytes: payload.len(),
                    is_aborted,
                })))
            }
            SessionFrame::StreamLost(number) => Ok(Some(SessionEvent::StreamLost(number))),
            SessionFrame::Goodbye(reason) => {
                Err(Error::lost(&self.peer, format_args!("it closed: {reason}")))
            }
        }
    }
}
