//! The frames that a session receives, until its connection ends.

use std::time::Instant;

use super::{Session, SessionState};
use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::net::framing::{FRAME_CAP, SessionFrame};
use crate::net::handshake::{HANDSHAKE_FRAME_CAP, Step};
use crate::net::identity::Identity;
use crate::transport::DataPath;

/// What received frames lead to.
#[derive(Debug)]
pub(in crate::session) enum SessionEvent {
    /// The peer is known and may use the session with this id.
    Admitted(SessionId),
    /// The session is [`Establishing`](SessionState::Establishing).
    Ready,
    /// How the peer gets our bytes.
    DataPath(DataPath),
    /// A message for the service.
    Frame(Vec<u8>),
}

/// How a session has ended.
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
        ours: &Identity,
        now: Instant,
        mut accept: impl FnMut(&Identity) -> std::result::Result<(), String>,
    ) -> (Vec<SessionEvent>, Option<SessionEnd>) {
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
        let handled = handled.and_then(|()| self.answer_ping());
        let ended = match (handled, ended) {
            (Err(error), _) => Some(SessionEnd::Failed(error)),
            (Ok(()), Err(reason)) => Some(self.end_of_connection(reason)),
            (Ok(()), Ok(())) => None,
        };
        (events, ended)
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
    fn name(&self, error: Error) -> Error {
        match error {
            Error::Protocol(text) => Error::Protocol(format!("{text}, from {}", self.peer)),
            other => other,
        }
    }

    fn handle_frame(
        &mut self,
        frame: &mut [u8],
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
            let established = SessionState::Establishing(peer);
            let handshaking = std::mem::replace(&mut self.state, established);
            if let SessionState::Handshaking(handshake) = handshaking {
                self.records = handshake.into_records();
            }
            events.push(SessionEvent::Ready);
        }
        Ok(())
    }

    fn handle_session_frame(&mut self, frame: &mut [u8]) -> Result<Option<SessionEvent>> {
        let opened = match &mut self.records {
            Some(records) => records.opener.open(frame),
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
            SessionFrame::Application(message) => Ok(Some(SessionEvent::Frame(message.to_vec()))),
            SessionFrame::Goodbye(reason) => {
                Err(Error::lost(&self.peer, format_args!("it closed: {reason}")))
            }
        }
    }
}
