//! One session, from the attempt to connect until it has failed.
//!
//! ```text
//! Connecting ──TCP──► Handshaking ──both know the session──► Establishing ──UCX connects, probes──► Up
//!     ▲                    │ cut
//!     └───── BackingOff ◄──┘
//! ```
//! A connection that is cut in its handshake is made again, because a peer with many handshakes ends the oldest. A
//! connection without a listener fails at once, unless the caller waits for the peer to listen.
//! Without a data plane, Establishing ends at once. A failure is noted beside the state, because frames that came before
//! it still count; once it is reported, the session is removed.

mod frames;

use std::time::{Duration, Instant};

use super::attempts::Attempts;
use super::bulk::Bulk;
use super::connection::Connection;
use super::data_plane::SessionEndpoint;
use super::link::Link;
use super::outbox::{StreamPart, StreamTag};
use super::timeouts::SessionTimeouts;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::address::short_token;
use crate::net::encryption::{Encryption, EncryptionOffer};
use crate::net::framing::SessionFrame;
use crate::net::handshake::{Handshake, HandshakeProgress};
use crate::net::identity::Identity;
use crate::net::secret::Secrets;
use crate::reactor::ConnectFailure;

pub(super) use frames::{SessionEnd, SessionEvent};

/// The time of devices that are left to connect once the peer has reported that it goes without.
const DEVICES_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) enum SessionState {
    /// A thread resolves the address and connects, or a connection was accepted just now.
    Connecting,
    /// The last attempt to connect has failed; the next one begins at this time.
    BackingOff(Instant),
    /// TCP is connected; both sides prove the token, agree on encryption and say who they are. At the end of it the peer may use the session,
    /// but this side may not, because the peer does not know the session yet.
    Handshaking(Box<Handshake>),
    /// Both sides know the session; UCX connects, where both have it, then the data path is probed.
    Establishing(Box<Identity>),
    /// The service knows the session.
    Up,
    /// This was no session, but a further connection of another one, which takes it over.
    Joined,
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
    pub(super) link: Option<Link>,
    /// Its further connections.
    pub(super) bulk: Bulk,
    /// The session that the peer of this connection may join, and under which number.
    pub(super) joins: Option<(SessionKey, u32)>,
    attempts: Attempts,
    timeouts: SessionTimeouts,
    /// Since when the handshake's time counts.
    pub(super) begun: Instant,
    /// Time of the last bytes of the peer.
    pub(super) last_rx: Instant,
    next_heartbeat: Instant,
    /// Until when it waits for devices to connect; none if it does not, or not any more.
    devices_by: Option<Instant>,
    /// A PING of the peer that is not answered yet.
    is_pinged: bool,
    /// The peer broke the protocol: nothing more of it is handled.
    pub(super) is_muted: bool,
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
            link: None,
            bulk: Bulk::default(),
            joins: None,
            attempts: Attempts::default(),
            timeouts,
            begun,
            last_rx: begun,
            next_heartbeat: begun + timeouts.heartbeat,
            devices_by: None,
            is_pinged: false,
            is_muted: false,
        }
    }

    /// TCP is connected: begins the handshake.
    ///
    /// # Errors
    /// `Config`: the token is too short for a peer on another host. `Exhausted`: the system gives no random bytes.
    pub(super) fn start_handshake(
        &mut self,
        connection: Connection,
        secrets: &Secrets,
        encryption: Encryption,
        host: &str,
    ) -> Result<()> {
        let ours = EncryptionOffer {
            encryption,
            is_loopback: connection.is_loopback(),
            host: host.to_owned(),
        };
        let (handshake, hello) = if self.is_accepted {
            (Handshake::server(secrets, ours, &self.peer), None)
        } else {
            if secrets.is_guessable() && !ours.is_loopback {
                return Err(Error::Config(short_token(format_args!(
                    "connecting to {}",
                    self.peer
                ))));
            }
            let (handshake, hello) = Handshake::client(secrets, ours, &self.peer)?;
            (handshake, Some(hello))
        };
        self.link = Some(Link::new(connection));
        self.state = SessionState::Handshaking(Box::new(handshake));
        hello.map_or(Ok(()), |hello| self.send_raw(&hello))
    }

    /// An attempt to connect has failed: prepares the next one.
    ///
    /// # Errors
    /// Another one is useless, or would come too late.
    pub(super) fn attempt_failed(&mut self, now: Instant, failure: &ConnectFailure) -> Result<()> {
        let may_succeed = match failure {
            ConnectFailure::Cut(_) => true,
            ConnectFailure::Refused(_) => self.timeouts.waits_for_listener,
            ConnectFailure::Other(_) => false,
        };
        let next = now + self.attempts.fail(failure.to_string());
        if !may_succeed || next >= self.established_by() {
            return Err(self.unreachable());
        }
        self.link = None;
        self.state = SessionState::BackingOff(next);
        Ok(())
    }

    /// True if it is time for the next attempt to connect, which then begins.
    pub(super) fn begins_attempt(&mut self, now: Instant) -> bool {
        let is_due = matches!(self.state, SessionState::BackingOff(next) if next <= now);
        if is_due {
            self.state = SessionState::Connecting;
        }
        is_due
    }

    /// Devices begin to connect. They have half of the handshake's time that is left: a network that drops their packets is
    /// noticed after minutes.
    pub(super) fn wait_for_devices(&mut self, now: Instant) {
        let left = self.established_by().saturating_duration_since(now);
        self.devices_by = Some(now + left / 2);
    }

    /// The peer goes without devices: those of this side have little time left, because the peer's time for the session may
    /// be shorter.
    pub(super) fn hurry_devices(&mut self, now: Instant) {
        self.devices_by = self.devices_by.map(|at| at.min(now + DEVICES_GRACE));
    }

    /// True, once, when it is time to go on without devices.
    pub(super) fn gives_devices_up(&mut self, now: Instant) -> bool {
        self.devices_by.take_if(|at| *at <= now).is_some()
    }

    /// Progress of the handshake of an accepted peer.
    pub(super) fn handshake_progress(&self) -> HandshakeProgress {
        match &self.state {
            SessionState::Handshaking(handshake) => handshake.progress(),
            _ => HandshakeProgress::Proved,
        }
    }

    /// True if its frames are sealed.
    pub(super) fn is_sealed(&self) -> bool {
        let link = self.link.as_ref();
        link.is_some_and(|link| link.records.is_some())
    }

    /// True if the service knows the session.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, SessionState::Up)
    }

    /// True if the handshake is over.
    fn is_ready(&self) -> bool {
        matches!(self.state, SessionState::Establishing(_)) || self.is_up()
    }

    /// The peer, while the session's data path is probed.
    pub(super) fn establishing(&self) -> Option<&Identity> {
        match &self.state {
            SessionState::Establishing(peer) => Some(peer),
            _ => None,
        }
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

    /// Queues a frame of an established session for the next [`flush`](Self::flush), or sends it with those that wait, if
    /// they are many.
    pub(super) fn queue(&mut self, frame: &SessionFrame<'_>) -> Result<()> {
        let Some(link) = &mut self.link else {
            return Ok(());
        };
        let peer = &self.peer;
        let queued = link.queue(&frame.encode());
        if queued.map_err(|reason| Error::lost(peer, reason))? {
            link.flush();
        }
        Ok(())
    }

    /// Sends a frame of an established session.
    pub(super) fn send(&mut self, frame: &SessionFrame<'_>) -> Result<()> {
        self.send_raw(&frame.encode())
    }

    /// Sends a frame; one of the handshake is sealed already where it has to be.
    fn send_raw(&mut self, frame: &[u8]) -> Result<()> {
        let Some(link) = &mut self.link else {
            return Ok(());
        };
        let peer = &self.peer;
        link.send(frame).map_err(|reason| Error::lost(peer, reason))
    }

    /// Sends a part of a stream when a connection takes it: the session's own, unless there are others.
    pub(super) fn send_part(&mut self, part: StreamPart) {
        if let Some(link) = self.bulk.least_unsent().or(self.link.as_mut()) {
            link.send_part(part);
        }
    }

    /// Sends nothing more of the parts that `is_over` names: their memory may have other bytes from now on.
    pub(super) fn abort_parts(&mut self, is_over: impl Fn(StreamTag) -> bool) {
        for link in self.link.iter_mut().chain(self.bulk.links()) {
            link.abort_parts(&is_over);
        }
    }

    /// Sends what waits on the session's own connection, as far as that takes it.
    pub(super) fn flush(&mut self) {
        if let Some(link) = &mut self.link {
            link.flush();
        }
    }

    /// Waits until the connection has taken everything but parts of streams, at most until `deadline`.
    pub(super) fn flush_until(&mut self, deadline: Instant) {
        self.abort_parts(|_| true);
        if let Some(link) = &mut self.link {
            link.flush_until(deadline);
        }
    }

    /// Tells the peer why this side closes, as far as the socket takes it, and sends no more.
    pub(super) fn say_goodbye(&mut self, reason: &str) {
        self.abort_parts(|_| true);
        if self.is_ready() {
            let _ = self.send(&SessionFrame::Goodbye(reason.to_owned()));
        }
        if let Some(link) = &self.link {
            link.connection.shut_down();
        }
    }

    /// True if the peer has not ended the session, as far as this host knows by now. A peer that withdraws memory which
    /// this side may be reading ends the session first: a read that ended before this is true has read what was meant.
    pub(super) fn is_open_at_peer(&self) -> bool {
        let link = self.link.as_ref();
        link.is_some_and(|link| link.connection.is_open_at_peer())
    }

    /// Time of the next call of [`expire`](Self::expire); earlier than needed if bytes have come since.
    pub(super) fn next_deadline(&self) -> Instant {
        let established_by = self.established_by();
        let alive_by = self.alive_since() + self.timeouts.silence;
        match self.state {
            SessionState::Up => {
                let due = alive_by.min(self.next_heartbeat);
                let bulk = self.bulk.next_deadline(self.timeouts.silence);
                bulk.map_or(due, |at| at.min(due))
            }
            SessionState::Establishing(_) => {
                let devices_by = self.devices_by.unwrap_or(established_by);
                let due = established_by.min(alive_by).min(self.next_heartbeat);
                due.min(devices_by)
            }
            SessionState::BackingOff(next) => established_by.min(next),
            SessionState::Connecting | SessionState::Handshaking(_) | SessionState::Joined => {
                established_by
            }
        }
    }

    fn alive_since(&self) -> Instant {
        let link = self.link.as_ref();
        link.map_or(self.last_rx, |link| link.inbox.alive_since(self.last_rx))
    }

    fn established_by(&self) -> Instant {
        self.begun + self.timeouts.handshake
    }

    /// Sends a heartbeat when it is time.
    ///
    /// # Errors
    /// The peer has been silent for too long, or the session takes too long to be established.
    pub(super) fn expire(&mut self, now: Instant) -> Result<()> {
        if !self.is_up() && now >= self.established_by() {
            return Err(self.not_established());
        }
        if !self.is_ready() {
            return Ok(());
        }
        let silence = self.timeouts.silence;
        if now >= self.last_rx + silence {
            let silent = format_args!("silent for {silence:?}").to_string();
            return Err(Error::lost(&self.peer, silent));
        }
        if now >= self.alive_since() + silence {
            let stuck = format_args!("a frame did not come whole within {silence:?}").to_string();
            return Err(Error::lost(&self.peer, stuck));
        }
        if now >= self.next_heartbeat {
            self.next_heartbeat = now + self.timeouts.heartbeat;
            self.send(&SessionFrame::Heartbeat)?;
            self.bulk.send_heartbeats();
        }
        Ok(())
    }

    fn not_established(&self) -> Error {
        let (peer, waited, history) =
            (&self.peer, self.timeouts.handshake, self.attempts.history());
        Error::Connect(match self.state {
            SessionState::BackingOff(_) => return self.unreachable(),
            SessionState::Connecting => {
                format!("cannot reach {peer}: no answer within {waited:?}{history}")
            }
            SessionState::Establishing(_) => format!(
                "{peer} did not establish the session within {waited:?}, although it had accepted it; is it stopped?"
            ),
            _ => format!("{peer} did not complete the handshake within {waited:?}{history}"),
        })
    }

    fn unreachable(&self) -> Error {
        Error::Connect(format!(
            "cannot reach {}: {}; is a kvpipe peer listening there?",
            self.peer,
            self.attempts.failure()
        ))
    }
}
