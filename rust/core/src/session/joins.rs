//! Further connections of sessions: dialled, joining, lost.

use std::net::TcpStream;

use super::bulk::BulkEnd;
use super::connection::Connection;
use super::session::{Session, SessionEvent};
use super::sessions::Sessions;
use super::{Links, Service};
use crate::error::Result;
use crate::ids::SessionKey;
use crate::net::framing::SessionFrame;
use crate::net::handshake::JoinRequest;
use crate::reactor::{ConnectFailure, Token};

impl Links {
    /// A session is established: the side that was dialled lets further connections join it, the other one may dial them.
    pub(super) fn allow_bulk(&mut self, key: SessionKey, is_on_host: bool) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        if !session.is_accepted {
            session.bulk.want(self.config.streams, is_on_host);
        } else if let Some(id) = session.bulk.session_id() {
            self.joinable.insert(id, key);
        }
    }

    /// A stream of so many bytes begins, in either direction: dials further connections where this side does, and some are
    /// missing.
    pub(crate) fn open_bulk(&mut self, key: SessionKey, num_bytes: u64) {
        let (now, timeout) = (self.now, self.config.timeouts.handshake);
        let Some(session) = self.sessions.get_mut(&key).filter(|it| it.is_up()) else {
            return;
        };
        let num_missing = session.bulk.num_missing(num_bytes, now);
        // The name of the peer may have several addresses, of other peers even.
        let link = session.link.as_ref().filter(|_| num_missing > 0);
        let Some(address) = link.and_then(|link| link.connection.peer()) else {
            return;
        };
        let tokens = self.next_session..self.next_session + num_missing as SessionKey;
        self.next_session = tokens.end;
        for token in tokens.clone() {
            session.bulk.dial(token, now + timeout);
            self.bulk.insert(token, key);
        }
        self.timers.set(key, session.next_deadline());
        for token in tokens {
            if let Err(error) = self.connector.connect(token, &address, now, timeout) {
                self.lose_bulk(token, &error.to_string(), false);
            }
        }
    }

    /// A further connection is connected, and asks to join, or could not be connected.
    pub(super) fn finish_bulk_connect(
        &mut self,
        token: Token,
        stream: std::result::Result<TcpStream, ConnectFailure>,
    ) {
        let asked = match stream {
            Ok(stream) => {
                let asked = self.ask_to_join(token, stream);
                asked.map_err(|error| error.to_string())
            }
            Err(failure) => Err(failure.to_string()),
        };
        if let Err(reason) = asked {
            self.lose_bulk(token, &reason, false);
        }
    }

    fn ask_to_join(&mut self, token: Token, stream: TcpStream) -> Result<()> {
        let key = self.bulk.get(&token);
        let Some(session) = key.and_then(|key| self.sessions.get_mut(key)) else {
            return Ok(());
        };
        let (is_sealed, peer) = (session.is_sealed(), &session.peer);
        let silence = self.config.timeouts.silence;
        let connection = Connection::new(stream, peer, &self.poller, token, silence)?;
        session.bulk.ask_to_join(token, connection, is_sealed, peer)
    }

    /// Closes a further connection; `STREAM_LOST` has the peer close it too. Parts on one that had joined may be lost:
    /// destinations ask for their streams again.
    fn lose_bulk(&mut self, token: Token, reason: &str, is_peer_told: bool) {
        let now = self.now;
        let Some(key) = self.bulk.remove(&token) else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let number = session.bulk.remove(token, now);
        let (peer, left) = (&session.peer, session.bulk.num_joined());
        tracing::info!("session.stream_lost peer={peer} left={left} {reason}");
        let Some(number) = number else {
            return;
        };
        self.note_lost_streams(key);
        if is_peer_told {
            self.send_frame(key, &SessionFrame::StreamLost(number));
        }
    }

    fn note_lost_streams(&mut self, key: SessionKey) {
        if !self.lost_streams.contains(&key) {
            self.lost_streams.push_back(key);
        }
    }

    /// The peer has closed the further connection of this number, on which it may have sent parts. Where this side has
    /// closed it too, its destinations know.
    pub(super) fn receive_stream_lost(&mut self, key: SessionKey, number: u32) {
        let Some(session) = self.sessions.get(&key) else {
            return;
        };
        let (token, is_known) = (
            session.bulk.of_number(number),
            session.bulk.has_ended(number),
        );
        if let Some(token) = token {
            self.lose_bulk(token, "the peer has lost it", false);
        }
        if !is_known {
            self.note_lost_streams(key);
        }
    }

    /// A session has ended, and with it its further connections.
    pub(super) fn forget_bulk(&mut self, session: &Session) {
        for token in session.bulk.tokens() {
            self.bulk.remove(&token);
        }
        if let Some(id) = session.bulk.session_id() {
            self.joinable.remove(&id);
        }
    }
}

impl<S: Service> Sessions<S> {
    /// Receives what has come on a further connection of a session.
    pub(super) fn receive_bulk(&mut self, token: Token, key: SessionKey) {
        let now = self.links.now();
        let Some(session) = self.links.sessions.get_mut(&key) else {
            return;
        };
        if session.is_muted {
            return;
        }
        let (ours, sinks) = (&self.links.config.identity, &self.links.sinks);
        let received = session.bulk.receive(token, (key, sinks), ours, now);
        if received.num_bytes > 0 {
            session.last_rx = now;
        }
        for part in received.parts {
            if let Err(error) = self.handle_session_event(key, SessionEvent::Part(part)) {
                return self.cut(key, error);
            }
        }
        match received.end {
            None => {}
            Some(BulkEnd::Lost(reason)) => {
                // A peer that leaves in order says so on the session's own connection.
                self.receive(key);
                if !self.links.has_failed(key) {
                    self.links.lose_bulk(token, &reason, true);
                }
            }
            Some(BulkEnd::Failed(error)) => {
                let session = self.links.sessions.get(&key);
                if let Some(error) = session.map(|session| session.name(error)) {
                    self.cut(key, error);
                }
            }
        }
    }

    /// Gives up further connections that are not made in time, or silent.
    pub(super) fn expire_bulk(&mut self, key: SessionKey) {
        let (now, silence) = (self.links.now(), self.links.config.timeouts.silence);
        while let Some(session) = self.links.sessions.get(&key)
            && let Some((token, reason)) = session.bulk.first_late(now, silence)
        {
            self.links.lose_bulk(token, &reason, true);
        }
    }

    /// Answers a peer that asks to join a session.
    pub(super) fn answer_join(&mut self, key: SessionKey, request: &JoinRequest) -> Result<()> {
        let owner = self.links.joinable.get(&request.session).copied();
        let session = owner.and_then(|owner| self.links.sessions.get(&owner));
        let session = session.filter(|session| !session.bulk.is_full());
        let secret = session.and_then(|session| {
            let secret = session.bulk.secret.clone()?;
            Some((secret, session.is_sealed()))
        });
        let secret = secret.as_ref().map(|(secret, sealed)| (secret, *sealed));
        match self.links.sessions.get_mut(&key) {
            Some(joining) => joining.join(owner.zip(secret), request),
            None => Ok(()),
        }
    }

    /// A connection has proved that it joins a session: it is one of that session from now on.
    pub(super) fn finish_join(&mut self, key: SessionKey) {
        let now = self.links.now();
        let Some(mut joining) = self.links.remove(key) else {
            return;
        };
        if let (Some((owner, number)), Some(link)) = (joining.joins, joining.link.take())
            && let Some(session) = self.links.sessions.get_mut(&owner)
            && !session.bulk.is_full()
        {
            session.bulk.add(key, number, link, now);
            self.links.timers.set(owner, session.next_deadline());
            self.links.bulk.insert(key, owner);
            // Frames that came with the end of its handshake.
            self.receive_bulk(key, owner);
        }
    }
}
