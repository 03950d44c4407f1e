//! The data plane of a node: its worker, the endpoint of each session, and which road the bytes take.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::{Buffer, EndpointId, Lane, Status};

use crate::codec::Writer;
use crate::error::{Error, Result};
use crate::handshake::SessionId;
use crate::node::{Io, LinkId};
use crate::transport::{Context, Get, Memory, Payload, RemoteKey, Worker};

/// How bytes get to where they belong. Whoever owns the destination writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Road {
    /// The destination's side reads the source's memory; names the transport (`cma`, `rc_mlx5`, …).
    Get(String),
    /// The source sends messages that the destination's own code places: TCP, where UCX checks no remote key.
    Messages(String),
}

impl Road {
    /// The transport that carries the bytes.
    pub fn transport(&self) -> &str {
        match self {
            Self::Get(name) | Self::Messages(name) => name,
        }
    }

    fn choose(lanes: &[Lane]) -> Self {
        let is_direct = |lane: &&Lane| {
            lane.is_rma && !["tcp", "self", "posix", "sysv"].contains(&lane.transport.as_str())
        };
        if let Some(lane) = lanes.iter().find(is_direct) {
            return Self::Get(lane.transport.clone());
        }
        let message = lanes.iter().find(|lane| lane.is_am).or(lanes.first());
        Self::Messages(message.map_or_else(|| "unknown".to_owned(), |lane| lane.transport.clone()))
    }
}

/// The first message of each side of a session: it says nothing, and has UCX connect.
pub(crate) const HELLO: u8 = 0;
/// Marks the token of a hello; the rest is the link.
const HELLO_TOKEN: u64 = 1 << 63;
/// How long the closing of an endpoint waits for its hello.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);

struct Peer {
    endpoint: EndpointId,
    session: SessionId,
    road: Road,
    is_open: bool,
    /// Whether the hello has left, or never will. Closing an endpoint by force before that crashes UCX (1.22, seen in a
    /// third of 40 tries) when the peer is gone: `ucp_ep_discard_lanes` finds a TCP endpoint that is freed already.
    is_connected: bool,
    /// Closed as far as others see; when UCX is told at the latest.
    close_at: Option<Instant>,
}

pub(crate) struct DataPlane {
    context: Context,
    pub(crate) worker: Worker,
    peers: HashMap<LinkId, Peer>,
    sessions: HashMap<SessionId, LinkId>,
    endpoints: HashMap<EndpointId, LinkId>,
}

impl DataPlane {
    pub(crate) fn new(context: Context) -> Result<Self> {
        let worker = context.worker()?;
        Ok(Self {
            context,
            worker,
            peers: HashMap::new(),
            sessions: HashMap::new(),
            endpoints: HashMap::new(),
        })
    }

    pub(crate) fn open(&mut self, link: LinkId, session: SessionId, address: &[u8]) -> Result<()> {
        let endpoint = self.worker.connect(address)?;
        let road = Road::choose(&self.worker.lanes(endpoint));
        let hello = [&session[..], &[HELLO]].concat();
        let posted = self
            .worker
            .am_send(endpoint, hello, Payload::None, HELLO_TOKEN | link);
        let peer = Peer {
            endpoint,
            session,
            road,
            is_open: true,
            is_connected: posted.is_err(),
            close_at: None,
        };
        self.peers.insert(link, peer);
        self.sessions.insert(session, link);
        self.endpoints.insert(endpoint, link);
        Ok(())
    }

    /// Takes no message of a link any more.
    pub(crate) fn mute(&mut self, link: LinkId) {
        if let Some(peer) = self.peers.get(&link) {
            self.sessions.remove(&peer.session);
        }
    }

    /// Closes a link's endpoint by force. Its operations end with errors, each through its own completion.
    pub(crate) fn close(&mut self, link: LinkId, now: Instant) {
        self.mute(link);
        let Some(peer) = self.peers.get_mut(&link) else {
            return;
        };
        if !std::mem::take(&mut peer.is_open) {
            return;
        }
        if peer.is_connected {
            self.worker.close(peer.endpoint);
        } else {
            peer.close_at = Some(now + CLOSE_WITHIN);
        }
    }

    /// The link whose hello ended with this token.
    pub(crate) fn hello_of(token: u64) -> Option<LinkId> {
        (token & HELLO_TOKEN != 0).then_some(token & !HELLO_TOKEN)
    }

    /// An endpoint is connected or has failed: it can be closed.
    pub(crate) fn connected(&mut self, link: LinkId) {
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.is_connected = true;
            if peer.close_at.take().is_some() {
                self.worker.close(peer.endpoint);
            }
        }
    }

    /// Closes the endpoints whose hello has not left in time, and tells when to come back.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Instant> {
        for peer in self.peers.values_mut() {
            if peer.close_at.take_if(|at| *at <= now).is_some() {
                self.worker.close(peer.endpoint);
            }
        }
        self.peers.values().filter_map(|peer| peer.close_at).min()
    }

    /// An endpoint has ended with all its operations.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        if let Some(link) = self.endpoints.remove(&endpoint) {
            self.peers.remove(&link);
        }
    }

    pub(crate) fn link_of(&self, endpoint: EndpointId) -> Option<LinkId> {
        self.endpoints.get(&endpoint).copied()
    }

    pub(crate) fn link_of_session(&self, session: &SessionId) -> Option<LinkId> {
        self.sessions.get(session).copied()
    }

    fn peer(&self, link: LinkId) -> std::result::Result<&Peer, Status> {
        let gone = Status {
            code: -80,
            call: "endpoint",
        };
        self.peers
            .get(&link)
            .filter(|peer| peer.is_open)
            .ok_or(gone)
    }
}

/// The operations of the data plane. An operation that cannot be posted is reported to the service through the
/// link, which is then lost; a posted one ends with exactly one `done` unless its token is 0.
impl Io {
    /// Starts the header of an active message on this session.
    pub fn header(&self, link: LinkId, kind: u8) -> Writer {
        let session = self
            .data
            .as_ref()
            .and_then(|data| data.peers.get(&link))
            .map_or([0; 16], |peer| peer.session);
        Writer::default().raw(&session).u8(kind)
    }

    /// Sends an active message. Token 0: nobody waits for its end.
    pub fn message(&mut self, link: LinkId, header: Writer, payload: Payload, token: u64) -> bool {
        self.post(link, |data| {
            data.worker
                .am_send(data.peer(link)?.endpoint, header.finish(), payload, token)
        })
    }

    /// Reads remote memory into `local`.
    #[expect(
        clippy::too_many_arguments,
        reason = "the two sides of a read, spelled out"
    )]
    pub fn get(
        &mut self,
        link: LinkId,
        local: &Arc<Memory>,
        offset: usize,
        len: usize,
        remote: u64,
        key: &RemoteKey,
        token: u64,
    ) -> bool {
        // The peer may have its memory back already: what is read from now on proves nothing.
        if self.has_failed(link) {
            return false;
        }
        let get = Get {
            local,
            offset,
            len,
            remote,
            key,
            token,
        };
        self.post(link, |data| data.worker.get(data.peer(link)?.endpoint, get))
    }

    /// Makes a peer's remote key usable on its endpoint.
    pub fn unpack_rkey(&mut self, link: LinkId, packed: &[u8]) -> Result<RemoteKey> {
        let Some(data) = &self.data else {
            return Err(Error::Closed("no data plane".to_owned()));
        };
        let peer = data.peer(link)?;
        data.worker
            .unpack_rkey(peer.endpoint, packed)
            .map_err(|status| match status {
                lost if lost.is_disconnect() => Error::lost(&self.peer(link), lost),
                other => Error::protocol(format_args!("a remote key cannot be used: {other}")),
            })
    }

    /// Registers memory, so that it can be read or sent from.
    pub fn register(&self, buffer: Buffer) -> Result<Arc<Memory>> {
        let Some(data) = &self.data else {
            return Err(Error::Closed("no data plane".to_owned()));
        };
        data.context
            .register(buffer)
            .map_err(|status| Error::Unavailable(format!("cannot register memory: {status}")))
    }

    /// How bytes move on this link.
    pub fn road(&self, link: LinkId) -> Option<Road> {
        self.data
            .as_ref()?
            .peers
            .get(&link)
            .map(|peer| peer.road.clone())
    }

    /// UCX as `version (path)`, or `none`, for the log line of a session.
    pub fn ucx(&self) -> String {
        let data = self.data.as_ref();
        data.map_or_else(String::new, |data| data.context.describe())
    }

    fn post(
        &mut self,
        link: LinkId,
        operation: impl FnOnce(&DataPlane) -> std::result::Result<(), Status>,
    ) -> bool {
        let Some(data) = &self.data else { return false };
        match operation(data) {
            Ok(()) => true,
            Err(status) => {
                let peer = self.peer(link);
                self.fail(link, Error::lost(&peer, status));
                false
            }
        }
    }
}
