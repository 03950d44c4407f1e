//! The data plane of a reactor: its worker, the endpoint of each session, and which data path the bytes take.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvpipe_ucx::{Buffer, EndpointId, Lane, MemoryKind, Reaper, Status};

use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::ids::SessionKey;
use crate::net::codec::Writer;
use crate::reactor::{ENDED, ReactorContext};
use crate::session::landings::Landings;
use crate::transport::{
    Context, DataPath, Get, Memory, Payload, RemoteKey, Worker, is_direct, reads_host,
};

/// The first message of each side of a session: it says nothing, and has UCX connect.
pub(crate) const HELLO: u8 = 0;
/// Marks the token of a hello; the rest is the session.
const HELLO_TOKEN: u64 = 1 << 63;
/// Marks the token of a message; the rest is the session, of which strangers can have any number made, and its size.
const MESSAGE_TOKEN: u64 = 1 << 62;
/// Bits of a message's token that hold its size in KiB, which the cap bounds. 42 are left for the session.
const SIZE_BITS: u32 = 20;
const SIZE_MASK: u64 = (1 << SIZE_BITS) - 1;
/// Most KiB of messages that wait for a peer that does not read; more and it counts as lost. What peers may have
/// asked for and offered at once has 448 MiB: 4 reads and 8 writes of 4 Mi blocks, and the checksums of 4 more.
const UNSENT_CAP_KIB: usize = 512 << 10;

/// Of the header of a message; longer ones grow.
const HEADER_LEN: usize = 64;

struct Peer {
    endpoint: Option<EndpointId>,
    session_id: SessionId,
    data_path: DataPath,
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
    peers: BTreeMap<SessionKey, Peer>,
    session_keys: HashMap<SessionId, SessionKey>,
    endpoints: HashMap<EndpointId, SessionKey>,
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
            session_keys: HashMap::new(),
            endpoints: HashMap::new(),
        })
    }

    /// Ends it; see [`Worker::end`].
    pub(crate) fn end(self, num_reads: Arc<AtomicUsize>) -> Option<Reaper> {
        self.worker.end(num_reads)
    }

    /// Messages of this session are the session's from now on.
    pub(crate) fn admit(&mut self, session: SessionKey, session_id: SessionId) {
        let peer = Peer {
            endpoint: None,
            session_id,
            data_path: DataPath::Stream(String::new()),
            reads_at_once: false,
            lanes: Vec::new(),
            unsent: Cell::default(),
            is_open: true,
            greeted: Greeted::default(),
        };
        self.peers.insert(session, peer);
        self.session_keys.insert(session_id, session);
    }

    /// Connects to a peer that knows the session: it would not understand our hello before.
    pub(crate) fn open(&mut self, session: SessionKey, address: &[u8]) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        let endpoint = self.worker.connect(address)?;
        peer.endpoint = Some(endpoint);
        self.endpoints.insert(endpoint, session);
        let hello = [&peer.session_id[..], &[HELLO]].concat();
        let token = HELLO_TOKEN | session;
        let posted = self.worker.am_send(endpoint, hello, Payload::None, token);
        posted.map_err(|status| Error::Connect(format!("UCX cannot reach the peer: {status}")))
    }

    /// Whether a session's session is [`open`](Self::open).
    pub(crate) fn is_open(&self, session: SessionKey) -> bool {
        self.endpoint(session).is_ok()
    }

    /// Takes no message of a session any more.
    pub(crate) fn mute(&mut self, session: SessionKey) {
        if let Some(peer) = self.peers.get(&session) {
            self.session_keys.remove(&peer.session_id);
        }
    }

    /// Closes a session's endpoint by force. Its operations end with errors, each through its own completion.
    pub(crate) fn close(&mut self, session: SessionKey) {
        self.mute(session);
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        if !std::mem::take(&mut peer.is_open) {
            return;
        }
        match peer.endpoint {
            Some(endpoint) => self.worker.close(endpoint),
            None => drop(self.peers.remove(&session)),
        }
    }

    /// The session whose hello ended with this token.
    pub(crate) fn hello_of(token: u64) -> Option<SessionKey> {
        (token & HELLO_TOKEN != 0).then_some(token & !HELLO_TOKEN)
    }

    /// An operation has ended; whether it was a message.
    pub(crate) fn end_message(&self, token: u64) -> bool {
        let is_message = token & MESSAGE_TOKEN != 0;
        let (session, size) = ((token ^ MESSAGE_TOKEN) >> SIZE_BITS, token & SIZE_MASK);
        if let Some(peer) = self.peers.get(&session).filter(|_| is_message) {
            peer.unsent.set(peer.unsent.get() - size as usize);
        }
        is_message
    }

    /// Our hello has left; whether theirs has come too.
    pub(crate) fn hello_left(&mut self, session: SessionKey) -> bool {
        self.greet(session, |greeted| greeted.ours = true)
    }

    /// Their hello has come; whether ours has left too.
    pub(crate) fn hello_came(&mut self, session: SessionKey) -> bool {
        self.greet(session, |greeted| greeted.theirs = true)
    }

    fn greet(&mut self, session: SessionKey, note: impl FnOnce(&mut Greeted)) -> bool {
        self.peers.get_mut(&session).is_some_and(|peer| {
            note(&mut peer.greeted);
            peer.greeted.ours && peer.greeted.theirs
        })
    }

    /// Chooses the data path of a session whose endpoint is connected: before, UCX may still change its lanes.
    pub(crate) fn choose_data_path(&mut self, session: SessionKey) {
        if let Some(peer) = self.peers.get_mut(&session)
            && let Some(endpoint) = peer.endpoint
        {
            let mut lanes = self.worker.lanes(endpoint);
            let mut reading = lanes.iter().filter(|lane| reads_host(lane));
            peer.reads_at_once = reading.all(|lane| lane.transport == "cma");
            peer.data_path = DataPath::choose(&lanes);
            lanes.retain(is_direct);
            peer.lanes = lanes;
        }
    }

    /// An endpoint has ended with all its operations.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        if let Some(session) = self.endpoints.remove(&endpoint) {
            self.peers.remove(&session);
        }
    }

    pub(crate) fn session_of(&self, endpoint: EndpointId) -> Option<SessionKey> {
        self.endpoints.get(&endpoint).copied()
    }

    pub(crate) fn key_of_session_id(&self, session_id: &SessionId) -> Option<SessionKey> {
        self.session_keys.get(session_id).copied()
    }

    fn endpoint(&self, session: SessionKey) -> std::result::Result<EndpointId, Status> {
        let gone = Status {
            code: -80,
            call: "endpoint",
        };
        self.peers
            .get(&session)
            .filter(|peer| peer.is_open)
            .and_then(|peer| peer.endpoint)
            .ok_or(gone)
    }
}

/// The operations of the data plane. An operation that cannot be posted is reported to the service through the
/// session, which is then lost; a posted read ends with exactly one `done`.
impl ReactorContext {
    /// Starts the header of an active message on this session.
    pub fn header(&self, session: SessionKey, kind: u8) -> Writer {
        let session_id = self
            .data
            .as_ref()
            .and_then(|data| data.peers.get(&session))
            .map_or([0; 16], |peer| peer.session_id);
        Writer::with_capacity(HEADER_LEN).raw(&session_id).u8(kind)
    }

    /// Sends an active message. Nobody waits for its end, so that the reactor bounds how much waits to leave.
    pub fn message(&mut self, session: SessionKey, header: Writer, payload: Payload) -> bool {
        let header = header.finish();
        let size = (header.len() + payload.num_owned()).div_ceil(1 << 10);
        if self.unsent(session) + size > UNSENT_CAP_KIB {
            let error = Error::lost(&self.peer(session), "it does not read what it is sent");
            self.fail(session, error);
            return false;
        }
        let token = MESSAGE_TOKEN | session << SIZE_BITS | size as u64;
        self.post(session, |data| {
            let endpoint = data.endpoint(session)?;
            data.worker.am_send(endpoint, header, payload, token)?;
            if let Some(peer) = data.peers.get(&session) {
                peer.unsent.set(peer.unsent.get() + size);
            }
            Ok(())
        })
    }

    fn unsent(&self, session: SessionKey) -> usize {
        let peers = self.data.as_ref().map(|data| &data.peers);
        let peer = peers.and_then(|peers| peers.get(&session));
        peer.map_or(0, |peer| peer.unsent.get())
    }

    /// Reads remote memory into `local`.
    #[expect(
        clippy::too_many_arguments,
        reason = "the two sides of a read, spelled out"
    )]
    pub fn get(
        &mut self,
        session: SessionKey,
        local: &Arc<Memory>,
        offset: usize,
        len: usize,
        remote: u64,
        key: &RemoteKey,
        token: u64,
    ) -> bool {
        // The peer may have its memory back already: what is read from now on proves nothing.
        if self.has_failed(session) {
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
        self.post(session, |data| {
            data.worker.get(data.endpoint(session)?, get)
        })
    }

    /// Makes a peer's remote key usable on its endpoint, to read into memory of kind `local`.
    pub fn unpack_rkey(
        &mut self,
        session: SessionKey,
        packed: &[u8],
        local: MemoryKind,
    ) -> Result<RemoteKey> {
        let Some(data) = &self.data else {
            return Err(Error::Closed(ENDED.to_owned()));
        };
        let endpoint = data.endpoint(session)?;
        data.worker
            .unpack_rkey(endpoint, packed, local)
            .map_err(|status| match status {
                lost if lost.is_disconnect() => Error::lost(&self.peer(session), lost),
                other => Error::protocol(format_args!("a remote key cannot be used: {other}")),
            })
    }

    /// Whether a read from CUDA memory of a peer into CUDA memory of ours goes over one of the session's lanes.
    pub(crate) fn reaches(
        &self,
        session: SessionKey,
        to: &Memory,
        from: (u64, &RemoteKey),
    ) -> bool {
        let Some(data) = &self.data else { return false };
        let lanes = data.peers.get(&session).map_or(&[][..], |peer| &peer.lanes);
        !lanes.is_empty() && data.worker.reaches(lanes, to, from)
    }

    /// Registers memory, so that it can be read or sent from.
    pub fn register(&self, buffer: Buffer) -> Result<Arc<Memory>> {
        let Some(data) = &self.data else {
            return Err(Error::Closed(ENDED.to_owned()));
        };
        data.context.register(buffer)
    }

    /// How bytes move on this session.
    pub fn data_path(&self, session: SessionKey) -> Option<DataPath> {
        self.data
            .as_ref()?
            .peers
            .get(&session)
            .map(|peer| peer.data_path.clone())
    }

    /// Whether a read on this session is over when it is posted, so that reads end in order.
    pub fn reads_at_once(&self, session: SessionKey) -> bool {
        let peers = self.data.as_ref().map(|data| &data.peers);
        let peer = peers.and_then(|peers| peers.get(&session));
        peer.is_some_and(|peer| peer.reads_at_once)
    }

    /// Where the streams of this reactor land.
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
        session: SessionKey,
        operation: impl FnOnce(&DataPlane) -> std::result::Result<(), Status>,
    ) -> bool {
        let Some(data) = &self.data else { return false };
        match operation(data) {
            Ok(()) => true,
            Err(status) => {
                let peer = self.peer(session);
                self.fail(session, Error::lost(&peer, status));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests;
