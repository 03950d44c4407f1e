//! What a service may do with its reactor: connect, send, close. The data plane's part is in `data.rs`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use rustix::event::{EventfdFlags, epoll};

use super::pending_reads::PendingReads;
use super::{ReactorConfig, SessionKey, connect, signal};
use crate::error::{Error, Result};
use crate::net::codec::Writer;
use crate::net::handshake::HANDSHAKE_FRAME_CAP;
use crate::net::identity::Identity;
use crate::session::connection::{Connection, SessionTimeouts};
use crate::session::data_plane::DataPlane;
use crate::transport::Context;

pub(super) const WAKE: u64 = 0;
pub(super) const LISTENER: u64 = 1;
pub(super) const UCX: u64 = 2;
const FIRST_SESSION: u64 = 16;
/// Links that are gone whose peers are remembered.
const GONE_CAP: usize = 256;

/// What the welcome adds to an identity: type, HMAC, session id.
const WELCOME_OVERHEAD: usize = 1 + 32 + 16;

/// What a service may do.
pub struct ReactorContext {
    /// The time of this round.
    pub now: Instant,
    pub(super) config: ReactorConfig,
    pub(super) epoll: Arc<OwnedFd>,
    pub(super) wake: Arc<OwnedFd>,
    /// Readable when the reactor has stopped: threads that connect end then.
    stopped: Arc<OwnedFd>,
    pub(super) listener: Option<TcpListener>,
    pub(super) sessions: HashMap<SessionKey, Connection>,
    /// Probe for, without a stream yet: to whom, and until when.
    pub(super) connecting: HashMap<SessionKey, (String, Instant)>,
    /// To whom the latest sessions were that are gone: what was under way may end after its session.
    gone: BTreeMap<SessionKey, String>,
    next_link: SessionKey,
    pub(super) connected: (Sender<Connected>, Receiver<Connected>),
    pub(crate) data: Option<DataPlane>,
    pub(super) failed: VecDeque<(SessionKey, Error)>,
    /// Reads that UCX has not ended although the data plane has.
    pub(crate) pending_reads: PendingReads,
    next_token: u64,
}

/// The outcome of an attempt to connect.
pub(super) struct Connected {
    pub(super) session: SessionKey,
    pub(super) peer: String,
    pub(super) begun: Instant,
    pub(super) stream: std::result::Result<TcpStream, String>,
}

impl ReactorContext {
    pub(super) fn new(
        mut config: ReactorConfig,
        listener: Option<TcpListener>,
        context: Option<Arc<Context>>,
        wake: Arc<OwnedFd>,
    ) -> Result<Self> {
        let no_epoll = |error| Error::Exhausted(format!("no epoll: {error}"));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(no_epoll)?;
        let stopped = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(no_epoll)?;
        watch(&epoll, wake.as_fd(), WAKE, false).map_err(no_epoll)?;
        if let Some(listener) = &listener {
            watch(&epoll, listener.as_fd(), LISTENER, false).map_err(no_epoll)?;
        }
        let data = context.map(DataPlane::new).transpose()?;
        if let Some(data) = &data {
            watch(&epoll, data.worker.event_fd(), UCX, false).map_err(no_epoll)?;
            config.identity.ucx_address = data.worker.address()?;
        }
        let said = config.identity.write(Writer::default()).finish().len();
        if said + WELCOME_OVERHEAD > HANDSHAKE_FRAME_CAP {
            return Err(Error::Config(format!(
                "engine id and fingerprint have {said} bytes assert_send, at most {} are possible",
                HANDSHAKE_FRAME_CAP - WELCOME_OVERHEAD
            )));
        }
        Ok(Self {
            now: Instant::now(),
            config,
            epoll: Arc::new(epoll),
            wake,
            stopped: Arc::new(stopped),
            listener,
            sessions: HashMap::new(),
            connecting: HashMap::new(),
            gone: BTreeMap::new(),
            next_link: FIRST_SESSION,
            connected: channel(),
            data,
            failed: VecDeque::new(),
            pending_reads: PendingReads::default(),
            next_token: 0,
        })
    }

    /// Who this side is.
    pub fn identity(&self) -> &Identity {
        &self.config.identity
    }

    /// Deadlines of sessions.
    pub fn timeouts(&self) -> SessionTimeouts {
        self.config.timeouts
    }

    /// A number that has not been used on this reactor, for an operation or a transfer.
    pub fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    /// Begins to connect; `session_up` or `session_down` follows.
    pub fn connect(&mut self, address: &str) -> SessionKey {
        let session = self.new_session();
        let SessionTimeouts {
            handshake, begun, ..
        } = self.config.timeouts;
        let (peer, begun) = (address.to_owned(), begun.unwrap_or(self.now));
        self.connecting
            .insert(session, (peer.clone(), begun + handshake));
        let (sender, wake) = (self.connected.0.clone(), Arc::clone(&self.wake));
        let stopped = Arc::clone(&self.stopped);
        let attempt = move || {
            let stream = connect::open(&peer, begun, handshake, &stopped);
            let _ = sender.send(Connected {
                session,
                peer,
                begun,
                stream,
            });
            signal(&wake);
        };
        #[cfg(any(test, feature = "fuzzing"))]
        if super::manual::is_on() {
            attempt();
            return session;
        }
        let spawned = std::thread::Builder::new()
            .name("kvpipe-connect".to_owned())
            .spawn(attempt);
        if let Err(error) = spawned {
            self.fail(session, Error::Exhausted(format!("no thread: {error}")));
        }
        session
    }

    /// Ends attempts whose thread has not come back in time, as when the resolver hangs; tells when to come back.
    pub(super) fn expire_connecting(&mut self) -> Option<Instant> {
        for (session, (peer, until)) in &self.connecting {
            if *until <= self.now {
                let waited = self.config.timeouts.handshake;
                let text = format!("cannot reach {peer}: no answer within {waited:?}");
                self.failed.push_back((*session, Error::Connect(text)));
            }
        }
        self.connecting.values().map(|(_, until)| *until).min()
    }

    /// Sends an application frame over an established session; over another it goes nowhere. A session that cannot take
    /// it is lost, which `session_down` tells.
    pub fn send(&mut self, session: SessionKey, frame: &[u8]) {
        let Some(connection) = self.sessions.get_mut(&session) else {
            return;
        };
        if !connection.is_announced {
            return;
        }
        match connection.send(frame) {
            Ok(()) => self.watch_writes(session),
            Err(error) => self.fail(session, error),
        }
    }

    /// Asks the peer of an established session for a sign of life.
    pub(crate) fn ping(&mut self, session: SessionKey) {
        let Some(connection) = self.sessions.get_mut(&session) else {
            return;
        };
        match connection.ping() {
            Ok(()) => self.watch_writes(session),
            Err(error) => self.fail(session, error),
        }
    }

    /// When something of the peer came last over its connection.
    pub(crate) fn last_rx(&self, session: SessionKey) -> Option<Instant> {
        self.sessions.get(&session).map(|session| session.last_rx)
    }

    /// Closes a session on purpose; `session_down` follows with this reason on both sides.
    pub fn close(&mut self, session: SessionKey, reason: &str) {
        self.fail(session, Error::Closed(reason.to_owned()));
    }

    /// Ends a session with an error; `session_down` follows. Of several errors of a session the first counts.
    pub fn fail(&mut self, session: SessionKey, error: Error) {
        self.failed.push_back((session, error));
    }

    /// Whether a session's end is about to be reported.
    pub(crate) fn has_failed(&self, session: SessionKey) -> bool {
        self.failed.iter().any(|(failed, _)| *failed == session)
    }

    /// Whether the peer still exposes its memory: asked when what is in it has come, which else verifies nothing.
    pub(crate) fn check_still_exposed(&self, session: SessionKey) -> Result<()> {
        if self
            .sessions
            .get(&session)
            .is_some_and(Connection::is_held_by_peer)
        {
            return Ok(());
        }
        let reason = "it closed before what it exposed had come";
        Err(Error::lost(&self.peer(session), reason))
    }

    /// The error of what the reactor's end has ended: `reason`, and what is to be known of memory that was read into.
    pub(crate) fn closed(&self, reason: &str) -> Error {
        self.pending_reads.closed(reason)
    }

    /// The address of a session's peer, also before the session is made, and when it is gone.
    pub fn peer(&self, session: SessionKey) -> String {
        let linked = self.sessions.get(&session).map(|session| &session.peer);
        let connecting = || self.connecting.get(&session).map(|(peer, _)| peer);
        let peer = linked
            .or_else(connecting)
            .or_else(|| self.gone.get(&session));
        peer.map_or_else(|| "unknown".to_owned(), Clone::clone)
    }

    /// The connection of a session, which is gone with it.
    pub(super) fn remove_session(&mut self, session: SessionKey) -> Option<Connection> {
        let connection = self.sessions.remove(&session)?;
        if connection.is_announced || !connection.is_accepted {
            self.remember(session, connection.peer.clone());
        }
        Some(connection)
    }

    /// Ends the attempt to make a session; whether there was one.
    pub(super) fn end_attempt(&mut self, session: SessionKey) -> bool {
        let attempt = self.connecting.remove(&session);
        attempt
            .map(|(peer, _)| self.remember(session, peer))
            .is_some()
    }

    fn remember(&mut self, session: SessionKey, peer: String) {
        self.gone.insert(session, peer);
        if self.gone.len() > GONE_CAP {
            self.gone.pop_first();
        }
    }

    /// Whether a session is established on this session.
    pub fn is_up(&self, session: SessionKey) -> bool {
        self.sessions
            .get(&session)
            .is_some_and(|session| session.is_announced)
    }

    pub(super) fn new_session(&mut self) -> SessionKey {
        self.next_link += 1;
        self.next_link - 1
    }

    pub(super) fn watch_writes(&mut self, session: SessionKey) {
        let Some(connection) = self.sessions.get(&session) else {
            return;
        };
        let (data, flags) = (
            epoll::EventData::new_u64(session),
            flags(connection.wants_write()),
        );
        let _ = epoll::modify(&self.epoll, connection.fd(), data, flags);
    }

    /// Wakes while UCX's descriptor is readable, or only when it becomes so.
    pub(super) fn watch_worker(&self, only_changes: bool) {
        let Some(data) = &self.data else {
            return;
        };
        let flags = if only_changes {
            epoll::EventFlags::IN | epoll::EventFlags::ET
        } else {
            epoll::EventFlags::IN
        };
        let key = epoll::EventData::new_u64(UCX);
        let _ = epoll::modify(&self.epoll, data.worker.event_fd(), key, flags);
    }

    /// Takes connections, or leaves them in the backlog: the listener would otherwise be reported as readable again
    /// and again.
    pub(super) fn listen(&self, is_listening: bool) {
        let Some(listener) = &self.listener else {
            return;
        };
        let flags = if is_listening {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        let data = epoll::EventData::new_u64(LISTENER);
        let _ = epoll::modify(&self.epoll, listener, data, flags);
    }

    pub(super) fn add(
        &mut self,
        session: SessionKey,
        stream: TcpStream,
        peer: String,
        is_accepted: bool,
        begun: Instant,
    ) -> Result<()> {
        let (token, timeouts) = (&self.config.token, self.config.timeouts);
        let connection = Connection::new(stream, peer, is_accepted, token, timeouts, begun)?;
        watch(
            &self.epoll,
            connection.fd(),
            session,
            connection.wants_write(),
        )
        .map_err(|error| Error::Exhausted(format!("epoll: {error}")))?;
        self.sessions.insert(session, connection);
        Ok(())
    }
}

impl Drop for ReactorContext {
    fn drop(&mut self) {
        signal(&self.stopped);
    }
}

impl std::fmt::Debug for ReactorContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReactorContext")
            .field("sessions", &self.sessions.len())
            .finish_non_exhaustive()
    }
}

fn flags(wants_write: bool) -> epoll::EventFlags {
    if wants_write {
        epoll::EventFlags::IN | epoll::EventFlags::OUT
    } else {
        epoll::EventFlags::IN
    }
}

fn watch(
    epoll: &OwnedFd,
    fd: BorrowedFd<'_>,
    key: u64,
    wants_write: bool,
) -> rustix::io::Result<()> {
    epoll::add(
        epoll,
        fd,
        epoll::EventData::new_u64(key),
        flags(wants_write),
    )
}

#[cfg(test)]
mod tests;
