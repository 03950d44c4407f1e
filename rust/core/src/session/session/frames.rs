//! The frames that a session receives, until its connection ends.

use std::io::ErrorKind;
use std::time::Instant;

use super::super::inbox::{Inbox, READ_CAP, ReceivedPart, place};
use super::super::stream_sinks::StreamSinks;
use super::{Session, SessionState};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::framing::{FRAME_CAP, SessionFrame};
use crate::net::handshake::{HANDSHAKE_FRAME_CAP, Step};
use crate::net::identity::Identity;
use crate::transport::DataPath;

/// What received frames lead to.
#[derive(Debug)]
pub(in crate::session) enum SessionEvent {
    /// The session is [`Establishing`](SessionState::Establishing).
    Ready,
    /// How the peer gets our bytes.
    DataPath(DataPath),
    /// A message for the service.
    Message { header: Vec<u8>, payload: Vec<u8> },
    /// A part of a stream has come.
    Part(ReceivedPart),
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
        let mut inbox = std::mem::take(&mut self.inbox);
        let mut ended = Ok(());
        let handled = loop {
            let handled =
                self.handle_received(&mut inbox, (key, sinks), ours, &mut accept, &mut events);
            if handled.is_err() || budget == 0 {
                break handled;
            }
            let Some(connection) = &self.connection else {
                break handled;
            };
            match inbox.read(connection.socket()) {
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
        self.inbox = inbox;
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
        loop {
            let cap = if self.is_ready() {
                FRAME_CAP
            } else {
                HANDSHAKE_FRAME_CAP
            };
            // A sealed part is opened whole before any of it is used.
            if self.is_ready()
                && self.records.is_none()
                && let Some(part) = inbox.next_part(key, sinks).map_err(|it| self.name(it))?
            {
                events.push(SessionEvent::Part(part));
                continue;
            }
            match inbox.next_frame(cap).map_err(|error| self.name(error))? {
                Some(frame) => {
                    self.handle_frame(frame, (key, sinks), ours, &mut *accept, events)?;
                }
                None => return Ok(()),
            }
        }
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

    fn handle_session_frame(
        &mut self,
        frame: &mut [u8],
        (key, sinks): (SessionKey, &StreamSinks),
    ) -> Result<Option<SessionEvent>> {
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
            SessionFrame::Goodbye(reason) => {
                Err(Error::lost(&self.peer, format_args!("it closed: {reason}")))
            }
        }
    }
}
