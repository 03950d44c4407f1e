//! The interface of services to sessions: connect, send, close. Its part of the data plane is in `data_plane.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt::Display;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use super::ReactorConfig;
use super::connection::Connection;
use super::data_plane::DataPlane;
use super::handshake_places::HandshakePlaces;
use super::outbox::{StreamPart, StreamTag};
use super::session::Session;
use super::stream_sinks::StreamSinks;
use super::timeouts::SessionTimeouts;
use crate::clock;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Writer;
use crate::net::framing::SessionFrame;
use crate::net::handshake::HANDSHAKE_FRAME_CAP;
use crate::net::identity::Identity;
use crate::net::record::TAG_LEN;
use crate::net::secret::SessionId;
use crate::reactor::{ConnectFailure, Connector, PendingReads, Poller, Timers, Token};
use crate::transport::Context;

/// The key of a session is its token as well; those below are the listener's and the reactor's.
const FIRST_SESSION: SessionKey = 16;
/// Most sessions that are gone whose peers are remembered.
const ENDED_CAP: usize = 256;
/// Initial capacity of a message's header; longer ones grow.
const HEADER_CAPACITY: usize = 64;
/// Bytes that the welcome adds to an identity: type, tag.
const WELCOME_OVERHEAD: usize = 1 + TAG_LEN;

/// The sessions of a reactor, as its service sees them.
pub(crate) struct Links {
    pub(super) now: Instant,
    pub(super) config: ReactorConfig,
    pub(super) poller: Arc<Poller>,
    pub(super) connector: Connector,
    // Few, and looked up for every message.
    pub(super) sessions: BTreeMap<SessionKey, Session>,
    pub(super) places: HandshakePlaces,
    pub(super) timers: Timers<SessionKey>,
    /// Sessions whose failure is not reported, in the order in which they failed.
    pub(super) failed: VecDeque<SessionKey>,
    /// Established sessions whose data path has changed, which their service does not know yet.
    pub(super) changed_paths: VecDeque<SessionKey>,
    /// The peers of the latest sessions that have ended: an operation may end after its session.
    ended_peers: VecDeque<(SessionKey, String)>,
    pub(super) data: Option<DataPlane>,
    pub(super) sinks: StreamSinks,
    /// The sessions of further connections, by the tokens of these.
    pub(super) bulk: HashMap<Token, SessionKey>,
    /// Sessions that have lost a further connection, which their service does not know yet.
    pub(super) lost_streams: VecDeque<SessionKey>,
    /// The sessions that further connections may join.
    pub(super) joinable: HashMap<SessionId, SessionKey>,
    /// Sessions whose messages of the present event have not been sent.
    to_flush: BTreeSet<SessionKey>,
    pending_reads: PendingReads,
    pub(super) next_session: SessionKey,
    next_token: u64,
}

impl Links {
    pub(super) fn new(
        mut config: ReactorConfig,
        context: Option<Arc<Context>>,
        poller: Arc<Poller>,
        pending_reads: PendingReads,
    ) -> Result<Self> {
        let data = context.map(DataPlane::new).transpose()?;
        if let Some(data) = &data {
            if let Some(worker) = &data.worker {
                config.identity.ucx_address = worker.address()?;
            }
            config.identity.canary = Some(data.canary()?);
        }
        check_identity(&config.identity)?;
        Ok(Self {
            now: clock::now(),
            config,
            connector: Connector::new(Arc::clone(&poller))?,
            poller,
            sessions: BTreeMap::new(),
            places: HandshakePlaces::default(),
            timers: Timers::default(),
            failed: VecDeque::new(),
            changed_paths: VecDeque::new(),
            ended_peers: VecDeque::new(),
            data,
            sinks: StreamSinks::default(),
            bulk: HashMap::new(),
            lost_streams: VecDeque::new(),
            joinable: HashMap::new(),
            to_flush: BTreeSet::new(),
            pending_reads,
            next_session: FIRST_SESSION,
            next_token: 0,
        })
    }

    /// The time of this round.
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// Identity of this side.
    pub(crate) fn identity(&self) -> &Identity {
        &self.config.identity
    }

    /// Deadlines of sessions.
    pub(crate) fn timeouts(&self) -> SessionTimeouts {
        self.config.timeouts
    }

    /// A number that has not been used on this reactor, for an operation or a transfer.
    pub(crate) fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    /// Begins to connect; `session_up` or `session_down` follows.
    pub(crate) fn connect(&mut self, address: &str) -> SessionKey {
        let timeouts = self.config.timeouts;
        let key = self.add(Session::new(address.to_owned(), false, self.now, timeouts));
        self.attempt(key);
        key
    }

    /// Begins an attempt to connect a session.
    pub(super) fn attempt(&mut self, key: SessionKey) {
        let Some(session) = self.sessions.get(&key) else {
            return;
        };
        let (begun, timeout) = (session.begun, self.config.timeouts.handshake);
        if let Err(error) = self.connector.connect(key, &session.peer, begun, timeout) {
            self.fail(key, error);
        }
    }

    /// An attempt to connect has failed: ends the session, or has the next attempt follow after a pause.
    pub(super) fn attempt_failed(&mut self, key: SessionKey, failure: &ConnectFailure) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        match session.attempt_failed(self.now, failure) {
            Ok(()) => self.timers.set(key, session.next_deadline()),
            Err(error) => self.fail(key, error),
        }
    }

    /// Starts the header of a message.
    pub(crate) fn header(kind: u8) -> Writer {
        Writer::with_capacity(HEADER_CAPACITY).u8(kind)
    }

    /// Sends a message over an established session, with all others of the same event; false if there is none. A session that
    /// cannot take it is lost, which `session_down` reports.
    pub(crate) fn message(&mut self, session: SessionKey, header: Writer, payload: &[u8]) -> bool {
        let header = &header.finish()[..];
        #[cfg(test)]
        let (header, payload) = &super::wire::pass(header, payload);
        self.send_frame(session, &SessionFrame::Message { header, payload })
    }

    /// Sends a message that is a header only.
    pub(crate) fn send(&mut self, session: SessionKey, header: &[u8]) {
        self.send_frame(
            session,
            &SessionFrame::Message {
                header,
                payload: &[],
            },
        );
    }

    /// Sends a part of a stream over an established session, straight from its memory; false if there is none.
    pub(crate) fn stream(&mut self, session: SessionKey, part: StreamPart) -> bool {
        #[cfg(test)]
        let part = part.tapped();
        let session = self.sessions.get_mut(&session).filter(|it| it.is_up());
        session.map(|session| session.send_part(part)).is_some()
    }

    /// Sends nothing more of the parts that `is_over` names: their memory may have other bytes from now on. The one that is
    /// being sent ends as aborted.
    pub(crate) fn abort_stream(
        &mut self,
        session: SessionKey,
        is_over: impl Fn(StreamTag) -> bool,
    ) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.abort_parts(is_over);
        }
    }

    /// Asks the peer of an established session for a heartbeat.
    pub(crate) fn ping(&mut self, session: SessionKey) {
        self.send_frame(session, &SessionFrame::Ping);
    }

    pub(super) fn send_frame(&mut self, key: SessionKey, frame: &SessionFrame<'_>) -> bool {
        let Some(session) = self.sessions.get_mut(&key).filter(|it| it.is_up()) else {
            return false;
        };
        let sent = session.queue(frame);
        self.to_flush.insert(key);
        let is_sent = sent.is_ok();
        if let Err(error) = sent {
            self.fail(key, error);
        }
        is_sent
    }

    /// Sends the messages of an event that has been handled, those of a session by one call.
    pub(super) fn flush(&mut self) {
        while let Some(key) = self.to_flush.pop_first() {
            if let Some(session) = self.sessions.get_mut(&key) {
                session.flush();
            }
        }
    }

    /// True if the frames of a session are sealed: what comes on it is what the peer sent.
    pub(crate) fn is_sealed(&self, session: SessionKey) -> bool {
        self.sessions.get(&session).is_some_and(Session::is_sealed)
    }

    /// Time of the last bytes of the peer over its connection.
    pub(crate) fn last_rx(&self, session: SessionKey) -> Option<Instant> {
        let session = self.sessions.get(&session)?;
        session.link.is_some().then_some(session.last_rx)
    }

    /// Closes a session on purpose; `session_down` follows with this reason on both sides.
    pub(crate) fn close(&mut self, session: SessionKey, reason: &str) {
        self.fail(session, Error::Closed(reason.to_owned()));
    }

    /// Ends a session with an error; `session_down` follows. Of several errors of a session the first counts.
    pub(crate) fn fail(&mut self, session: SessionKey, error: Error) {
        let unfailed = |session: &&mut Session| session.failure.is_none();
        if let Some(failing) = self.sessions.get_mut(&session).filter(unfailed) {
            failing.failure = Some(error);
            self.failed.push_back(session);
        }
    }

    /// True if a session's end is about to be reported.
    pub(crate) fn has_failed(&self, session: SessionKey) -> bool {
        let session = self.sessions.get(&session);
        session.is_some_and(|session| session.failure.is_some())
    }

    /// Checks that the peer still exposes its memory, when what is in it has come, which else verifies nothing.
    pub(crate) fn check_still_exposed(&self, session: SessionKey) -> Result<()> {
        let connection = self.sessions.get(&session);
        if connection.is_some_and(Session::is_open_at_peer) {
            return Ok(());
        }
        let reason = "it closed before what it exposed had come";
        Err(self.lost(session, reason))
    }

    /// Reads that UCX has not ended although the data plane has.
    pub(crate) fn pending_reads(&self) -> &PendingReads {
        &self.pending_reads
    }

    /// The error of what the reactor's end has ended: `reason`, and whether memory may still be written to.
    pub(crate) fn closed(&self, reason: &str) -> Error {
        self.pending_reads.closed(reason)
    }

    /// The address of a session's peer, also before it is connected, and when the session is gone.
    pub(crate) fn peer(&self, session: SessionKey) -> String {
        let known = self.sessions.get(&session).map(|session| &session.peer);
        let ended = || {
            let mut ended = self.ended_peers.iter();
            ended.find(|(key, _)| *key == session).map(|(_, peer)| peer)
        };
        let peer = known.or_else(ended);
        peer.map_or_else(|| "unknown".to_owned(), Clone::clone)
    }

    /// The error of a session whose peer is lost.
    pub(super) fn lost(&self, session: SessionKey, reason: impl Display) -> Error {
        Error::lost(&self.peer(session), reason)
    }

    /// True if a session is established.
    pub(crate) fn is_up(&self, session: SessionKey) -> bool {
        self.sessions.get(&session).is_some_and(Session::is_up)
    }

    fn add(&mut self, session: Session) -> SessionKey {
        let key = self.next_session;
        self.next_session += 1;
        self.timers.set(key, session.next_deadline());
        self.sessions.insert(key, session);
        key
    }

    /// Adds the session of a peer that has connected.
    pub(super) fn add_accepted(&mut self, stream: TcpStream, peer: String) -> Result<SessionKey> {
        let key = self.add(Session::new(peer, true, self.now, self.config.timeouts));
        self.places.add(key, self.now);
        let started = self.start_handshake(key, stream);
        if started.is_err() {
            self.remove(key);
        }
        started.map(|()| key)
    }

    /// Begins the handshake on a session whose connection is there.
    pub(super) fn start_handshake(&mut self, key: SessionKey, stream: TcpStream) -> Result<()> {
        let Some(session) = self.sessions.get_mut(&key) else {
            return Ok(());
        };
        let config = &self.config;
        let silence = config.timeouts.silence;
        let connection = Connection::new(stream, &session.peer, &self.poller, key, silence)?;
        let host = &config.identity.host;
        session.start_handshake(connection, &config.secrets, config.encryption, host)
    }

    /// Removes a session that has ended.
    pub(super) fn remove(&mut self, key: SessionKey) -> Option<Session> {
        let session = self.sessions.remove(&key)?;
        self.timers.cancel(key);
        self.places.remove(key);
        self.forget_bulk(&session);
        if session.is_up() || !session.is_accepted {
            self.ended_peers.push_back((key, session.peer.clone()));
            if self.ended_peers.len() > ENDED_CAP {
                self.ended_peers.pop_front();
            }
        }
        Some(session)
    }
}

#[cfg(test)]
impl Links {
    /// Sizes of its maps and queues.
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let links = self.sessions.values().filter_map(|it| it.link.as_ref());
        let connections = links.map(|link| &link.connection);
        let mut sizes = vec![
            ("sessions", self.sessions.len()),
            (
                "unsent bytes",
                connections.map(Connection::num_unsent).sum(),
            ),
            ("handshakes", self.places.len()),
            ("timers", self.timers.len()),
            ("failed sessions", self.failed.len()),
            ("changed data paths", self.changed_paths.len()),
            ("ended peers", self.ended_peers.len()),
            ("stream sinks", self.sinks.len()),
            ("further connections", self.bulk.len()),
            ("joinable sessions", self.joinable.len()),
            ("lost streams", self.lost_streams.len()),
        ];
        if let Some(data) = &self.data {
            sizes.extend(data.sizes());
        }
        sizes
    }
}

/// Refuses an identity that does not fit into the frames of a handshake.
fn check_identity(identity: &Identity) -> Result<()> {
    let len = identity.write(Writer::default()).finish().len();
    if len + WELCOME_OVERHEAD > HANDSHAKE_FRAME_CAP {
        return Err(Error::Config(format!(
            "engine id and fingerprint have {len} bytes together, at most {} are possible",
            HANDSHAKE_FRAME_CAP - WELCOME_OVERHEAD
        )));
    }
    Ok(())
}

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Links")
            .field("sessions", &self.sessions.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
