//! The data plane of a node: its worker, the endpoint of each session, and which road the bytes take.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvpipe_ucx::{Buffer, EndpointId, Lane, MemoryKind, Rest, Status};

use crate::codec::Writer;
use crate::error::{Error, Result};
use crate::handshake::SessionId;
use crate::node::{ENDED, Io, LinkId};
use crate::road::{Road, is_direct, reads_host};
use crate::stream::Landings;
use crate::transport::{Context, Get, Memory, Payload, RemoteKey, Worker};

/// The first message of each side of a session: it says nothing, and has UCX connect.
pub(crate) const HELLO: u8 = 0;
/// Marks the token of a hello; the rest is the link.
const HELLO_TOKEN: u64 = 1 << 63;
/// Marks the token of a message; the rest is the link, of which strangers can have any number made, and its size.
const MESSAGE_TOKEN: u64 = 1 << 62;
/// Bits of a message's token that hold its size in KiB, which the cap bounds. 42 are left for the link.
const SIZE_BITS: u32 = 20;
const SIZE_MASK: u64 = (1 << SIZE_BITS) - 1;
/// Most KiB of messages that wait for a peer that does not read; more and it counts as lost. What peers may have
/// asked for and offered at once has 448 MiB: 4 reads and 8 writes of 4 Mi blocks, and the checksums of 4 more.
const UNSENT_CAP_KIB: usize = 512 << 10;

/// Of the header of a message; longer ones grow.
const HEADER_LEN: usize = 64;

struct Peer {
    endpoint: Option<EndpointId>,
    session: SessionId,
    road: Road,
    /// Whether every lane that reads memory of the host is CMA's, whose reads are over when they are posted.
    reads_at_once: bool,
    /// Lanes that may reach CUDA memory.
    lanes: Vec<Lane>,
    /// KiB of messages that have not left, each rounded up.
    unsent: Cell<usize>,
    is_open: bool,
    /// Whether our hello has left, and theirs has come.
    greeted: Greeted,
}

/// What of the two hellos is done.
#[derive(Debug, Clone, Copy, Default)]
struct Greeted {
    ours: bool,
    theirs: bool,
}

pub(crate) struct DataPlane {
    context: Arc<Context>,
    pub(crate) worker: Worker,
    // Few, and looked up for every message.
    peers: BTreeMap<LinkId, Peer>,
    sessions: HashMap<SessionId, LinkId>,
    endpoints: HashMap<EndpointId, LinkId>,
    landings: Landings,
}

impl DataPlane {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self> {
        let (worker, landings) = (context.worker()?, Landings::default());
        worker.place_with(landings.placer());
        Ok(Self {
            context,
            worker,
            landings,
            peers: BTreeMap::new(),
            sessions: HashMap::new(),
            endpoints: HashMap::new(),
        })
    }

    /// Ends it; see [`Worker::end`].
    pub(crate) fn end(self, num_reads: Arc<AtomicUsize>) -> Option<Rest> {
        self.worker.end(num_reads)
    }

    /// Messages of this session are the link's from now on.
    pub(crate) fn admit(&mut self, link: LinkId, session: SessionId) {
        let peer = Peer {
            endpoint: None,
            session,
            road: Road::Messages(String::new()),
            reads_at_once: false,
            lanes: Vec::new(),
            unsent: Cell::default(),
            is_open: true,
            greeted: Greeted::default(),
        };
        self.peers.insert(link, peer);
        self.sessions.insert(session, link);
    }

    /// Connects to a peer that knows the session: it would not understand our hello before.
    pub(crate) fn open(&mut self, link: LinkId, address: &[u8]) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&link) else {
            return Ok(());
        };
        let endpoint = self.worker.connect(address)?;
        peer.endpoint = Some(endpoint);
        self.endpoints.insert(endpoint, link);
        let hello = [&peer.session[..], &[HELLO]].concat();
        let token = HELLO_TOKEN | link;
        let posted = self.worker.am_send(endpoint, hello, Payload::None, token);
        posted.map_err(|status| Error::Connect(format!("UCX cannot reach the peer: {status}")))
    }

    /// Whether a link's session is [`open`](Self::open).
    pub(crate) fn is_open(&self, link: LinkId) -> bool {
        self.endpoint(link).is_ok()
    }

    /// Takes no message of a link any more.
    pub(crate) fn mute(&mut self, link: LinkId) {
        if let Some(peer) = self.peers.get(&link) {
            self.sessions.remove(&peer.session);
        }
    }

    /// Closes a link's endpoint by force. Its operations end with errors, each through its own completion.
    pub(crate) fn close(&mut self, link: LinkId) {
        self.mute(link);
        let Some(peer) = self.peers.get_mut(&link) else {
            return;
        };
        if !std::mem::take(&mut peer.is_open) {
            return;
        }
        match peer.endpoint {
            Some(endpoint) => self.worker.close(endpoint),
            None => drop(self.peers.remove(&link)),
        }
    }

    /// The link whose hello ended with this token.
    pub(crate) fn hello_of(token: u64) -> Option<LinkId> {
        (token & HELLO_TOKEN != 0).then_some(token & !HELLO_TOKEN)
    }

    /// An operation has ended; whether it was a message.
    pub(crate) fn end_message(&self, token: u64) -> bool {
        let is_message = token & MESSAGE_TOKEN != 0;
        let (link, size) = ((token ^ MESSAGE_TOKEN) >> SIZE_BITS, token & SIZE_MASK);
        if let Some(peer) = self.peers.get(&link).filter(|_| is_message) {
            peer.unsent.set(peer.unsent.get() - size as usize);
        }
        is_message
    }

    /// Our hello has left; whether theirs has come too.
    pub(crate) fn hello_left(&mut self, link: LinkId) -> bool {
        self.greet(link, |greeted| greeted.ours = true)
    }

    /// Their hello has come; whether ours has left too.
    pub(crate) fn hello_came(&mut self, link: LinkId) -> bool {
        self.greet(link, |greeted| greeted.theirs = true)
    }

    fn greet(&mut self, link: LinkId, note: impl FnOnce(&mut Greeted)) -> bool {
        self.peers.get_mut(&link).is_some_and(|peer| {
            note(&mut peer.greeted);
            peer.greeted.ours && peer.greeted.theirs
        })
    }

    /// Chooses the road of a session whose endpoint is connected: before, UCX may still change its lanes.
    pub(crate) fn choose_road(&mut self, link: LinkId) {
        if let Some(peer) = self.peers.get_mut(&link)
            && let Some(endpoint) = peer.endpoint
        {
            let mut lanes = self.worker.lanes(endpoint);
            let mut reading = lanes.iter().filter(|lane| reads_host(lane));
            peer.reads_at_once = reading.all(|lane| lane.transport == "cma");
            peer.road = Road::choose(&lanes);
            lanes.retain(is_direct);
            peer.lanes = lanes;
        }
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

    fn endpoint(&self, link: LinkId) -> std::result::Result<EndpointId, Status> {
        let gone = Status {
            code: -80,
            call: "endpoint",
        };
        self.peers
            .get(&link)
            .filter(|peer| peer.is_open)
            .and_then(|peer| peer.endpoint)
            .ok_or(gone)
    }
}

/// The operations of the data plane. An operation that cannot be posted is reported to the service through the
/// link, which is then lost; a posted read ends with exactly one `done`.
impl Io {
    /// Starts the header of an active message on this session.
    pub fn header(&self, link: LinkId, kind: u8) -> Writer {
        let session = self
            .data
            .as_ref()
            .and_then(|data| data.peers.get(&link))
            .map_or([0; 16], |peer| peer.session);
        Writer::with_capacity(HEADER_LEN).raw(&session).u8(kind)
    }

    /// Sends an active message. Nobody waits for its end, so that the node bounds how much waits to leave.
    pub fn message(&mut self, link: LinkId, header: Writer, payload: Payload) -> bool {
        let header = header.finish();
        let size = (header.len() + payload.num_owned()).div_ceil(1 << 10);
        if self.unsent(link) + size > UNSENT_CAP_KIB {
            let error = Error::lost(&self.peer(link), "it does not read what it is sent");
            self.fail(link, error);
            return false;
        }
        let token = MESSAGE_TOKEN | link << SIZE_BITS | size as u64;
        self.post(link, |data| {
            let endpoint = data.endpoint(link)?;
            data.worker.am_send(endpoint, header, payload, token)?;
            if let Some(peer) = data.peers.get(&link) {
                peer.unsent.set(peer.unsent.get() + size);
            }
            Ok(())
        })
    }

    fn unsent(&self, link: LinkId) -> usize {
        let peers = self.data.as_ref().map(|data| &data.peers);
        let peer = peers.and_then(|peers| peers.get(&link));
        peer.map_or(0, |peer| peer.unsent.get())
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
        self.post(link, |data| data.worker.get(data.endpoint(link)?, get))
    }

    /// Makes a peer's remote key usable on its endpoint, to read into memory of kind `local`.
    pub fn unpack_rkey(
        &mut self,
        link: LinkId,
        packed: &[u8],
        local: MemoryKind,
    ) -> Result<RemoteKey> {
        let Some(data) = &self.data else {
            return Err(Error::Closed(ENDED.to_owned()));
        };
        let endpoint = data.endpoint(link)?;
        data.worker
            .unpack_rkey(endpoint, packed, local)
            .map_err(|status| match status {
                lost if lost.is_disconnect() => Error::lost(&self.peer(link), lost),
                other => Error::protocol(format_args!("a remote key cannot be used: {other}")),
            })
    }

    /// Whether a read from CUDA memory of a peer into CUDA memory of ours goes over one of the link's lanes.
    pub(crate) fn reaches(&self, link: LinkId, to: &Memory, from: (u64, &RemoteKey)) -> bool {
        let Some(data) = &self.data else { return false };
        let lanes = data.peers.get(&link).map_or(&[][..], |peer| &peer.lanes);
        !lanes.is_empty() && data.worker.reaches(lanes, to, from)
    }

    /// Registers memory, so that it can be read or sent from.
    pub fn register(&self, buffer: Buffer) -> Result<Arc<Memory>> {
        let Some(data) = &self.data else {
            return Err(Error::Closed(ENDED.to_owned()));
        };
        data.context.register(buffer)
    }

    /// How bytes move on this link.
    pub fn road(&self, link: LinkId) -> Option<Road> {
        self.data
            .as_ref()?
            .peers
            .get(&link)
            .map(|peer| peer.road.clone())
    }

    /// Whether a read on this link is over when it is posted, so that reads end in order.
    pub fn reads_at_once(&self, link: LinkId) -> bool {
        let peers = self.data.as_ref().map(|data| &data.peers);
        let peer = peers.and_then(|peers| peers.get(&link));
        peer.is_some_and(|peer| peer.reads_at_once)
    }

    /// Where the streams of this node land.
    pub(crate) fn landings(&self) -> Landings {
        let data = self.data.as_ref();
        data.map(|data| data.landings.clone()).unwrap_or_default()
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

#[cfg(test)]
mod tests;
