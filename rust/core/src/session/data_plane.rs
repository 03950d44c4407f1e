//! The data plane of a reactor: its UCX worker, the endpoint of each session, and messages that have not left.

use std::collections::HashMap;
use std::sync::Arc;

use kvpipe_ucx::{Buffer, EndpointId, Lane, MemoryKind, Status};

use super::ReactorContext;
use super::probe::{DataPaths, new_canary};
use super::stream_sinks::StreamSinks;
use crate::error::{Error, Result};
use crate::ids::{SessionId, SessionKey};
use crate::net::codec::Writer;
use crate::reactor::ended;
use crate::transport::{Context, DeviceCopy, Get, Memory, Payload, RemoteKey, UcxResult, Worker};

/// The first message of each side of a session. It carries nothing, counts as empty, and has UCX connect.
pub(super) const HELLO: u8 = 0;
/// Marks the token of a message; the rest is the session, of which strangers can have any number made, and its size.
const MESSAGE_TOKEN: u64 = 1 << 62;
/// Bits of a message's token that hold its size in KiB, which the cap bounds. 42 are left for the session.
const SIZE_BITS: u32 = 20;
const SIZE_MASK: u64 = (1 << SIZE_BITS) - 1;
/// Most KiB of messages that wait for a peer that does not read; with more it counts as lost. What peers may have
/// asked for and offered at once has 448 MiB: 4 reads and 8 writes of 4 Mi blocks, and the checksums of 4 more.
const UNSENT_CAP_KIB: usize = 512 << 10;
/// Initial capacity of a message's header; longer ones grow.
const HEADER_CAPACITY: usize = 64;

/// What of a session belongs to the data plane.
#[derive(Debug, Default)]
pub(super) struct SessionEndpoint {
    session_id: SessionId,
    /// Once the peer knows the session.
    pub(super) id: Option<EndpointId>,
    /// Whether our hello has left, and whether theirs has come.
    pub(super) is_hello_sent: bool,
    pub(super) is_hello_received: bool,
    /// How this side gets the peer's bytes, and the peer ours.
    pub(super) paths: DataPaths,
    /// Lanes that may reach CUDA memory.
    pub(super) lanes: Vec<Lane>,
    /// KiB of messages that have not left, each rounded up.
    pub(super) unsent_kib: usize,
}

impl SessionEndpoint {
    /// Whether the hellos of both sides have come through.
    pub(super) fn is_established(&self) -> bool {
        self.is_hello_sent && self.is_hello_received
    }
}

/// What the sessions of a reactor share of its data plane.
pub(super) struct DataPlane {
    pub(super) context: Arc<Context>,
    pub(super) worker: Worker,
    /// What peers read first.
    pub(super) canary: Arc<Memory>,
    /// Sessions whose messages are handled.
    pub(super) session_keys: HashMap<SessionId, SessionKey>,
    /// Endpoints that have not ended, also of sessions that are gone.
    pub(super) endpoints: HashMap<EndpointId, SessionKey>,
    sinks: StreamSinks,
}

fn message_token(session: SessionKey, size_kib: usize) -> u64 {
    MESSAGE_TOKEN | session << SIZE_BITS | size_kib as u64
}

/// The session of a message and its size in KiB. `None`: the token is an operation's of the service.
pub(super) fn message_of(token: u64) -> Option<(SessionKey, usize)> {
    let is_message = token & MESSAGE_TOKEN != 0;
    let (session, size_kib) = ((token ^ MESSAGE_TOKEN) >> SIZE_BITS, token & SIZE_MASK);
    is_message.then_some((session, size_kib as usize))
}

impl DataPlane {
    pub(super) fn new(context: Arc<Context>) -> Result<Self> {
        let (worker, sinks) = (context.worker()?, StreamSinks::default());
        #[expect(unsafe_code, reason = "UCX calls the placer while it progresses")]
        // SAFETY: the only sinks are destinations of streams, which copy into memory and have no worker.
        unsafe {
            worker.place_with(sinks.placer());
        }
        let canary = new_canary(&context)?;
        Ok(Self {
            context,
            worker,
            canary,
            session_keys: HashMap::new(),
            endpoints: HashMap::new(),
            sinks,
        })
    }

    /// What its maps hold.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![
            ("session keys", self.session_keys.len()),
            ("endpoints", self.endpoints.len()),
            ("stream sinks", self.sinks.len()),
        ]
    }

    /// Closes an endpoint by force. Its operations end with errors, each through its own completion.
    pub(super) fn close(&mut self, endpoint: &SessionEndpoint) {
        self.session_keys.remove(&endpoint.session_id);
        if let Some(id) = endpoint.id {
            self.worker.close(id);
        }
    }
}

const NO_ENDPOINT: Status = Status {
    code: -80,
    call: "endpoint",
};

/// The data plane of one session.
impl ReactorContext {
    /// The peer is known: takes messages with this id as the session's.
    pub(super) fn admit(&mut self, key: SessionKey, session_id: SessionId) {
        if let Some(data) = &mut self.data
            && let Some(session) = self.sessions.get_mut(&key)
        {
            data.session_keys.insert(session_id, key);
            session.endpoint = Some(SessionEndpoint {
                session_id,
                ..SessionEndpoint::default()
            });
        }
    }

    /// Both sides know the session, each by the other's token: connects to this worker of the peer, which would not
    /// understand our hello before. False without a data plane.
    #[expect(unsafe_code, reason = "UCX does not check what it parses")]
    pub(super) fn open_endpoint(&mut self, key: SessionKey, address: &[u8]) -> Result<bool> {
        let Some((data, endpoint)) = self.data_of(key) else {
            return Ok(false);
        };
        // SAFETY: the peer, which has the token, has described its worker so.
        let id = unsafe { data.worker.connect(address) }?;
        endpoint.id = Some(id);
        data.endpoints.insert(id, key);
        let hello = [&endpoint.session_id[..], &[HELLO]].concat();
        let token = message_token(key, 0);
        let posted = data.worker.am_send(id, hello, Payload::None, token);
        posted.map_err(|status| Error::Connect(format!("UCX cannot reach the peer: {status}")))?;
        Ok(true)
    }

    /// Takes no message of a session any more.
    pub(super) fn mute(&mut self, key: SessionKey) {
        if let Some((data, endpoint)) = self.data_of(key) {
            data.session_keys.remove(&endpoint.session_id);
        }
    }

    pub(super) fn data_of(
        &mut self,
        key: SessionKey,
    ) -> Option<(&mut DataPlane, &mut SessionEndpoint)> {
        let endpoint = self.sessions.get_mut(&key)?.endpoint.as_mut()?;
        Some((self.data.as_mut()?, endpoint))
    }

    pub(super) fn endpoint(&self, key: SessionKey) -> Option<&SessionEndpoint> {
        self.sessions.get(&key)?.endpoint.as_ref()
    }

    pub(super) fn endpoint_mut(&mut self, key: SessionKey) -> Option<&mut SessionEndpoint> {
        self.sessions.get_mut(&key)?.endpoint.as_mut()
    }

    /// Whether this side may send messages.
    pub(super) fn is_open(&self, key: SessionKey) -> bool {
        self.endpoint_id(key).is_ok()
    }

    fn endpoint_id(&self, key: SessionKey) -> UcxResult<EndpointId> {
        let id = self.endpoint(key).and_then(|endpoint| endpoint.id);
        id.ok_or(NO_ENDPOINT)
    }
}

/// Messages and remote memory, for services. An operation that cannot be posted fails its session; a posted read ends with
/// exactly one `done`.
impl ReactorContext {
    /// Starts the header of an active message on this session.
    pub(crate) fn header(&self, session: SessionKey, kind: u8) -> Writer {
        let endpoint = self.endpoint(session);
        let session_id = endpoint.map_or([0; 16], |endpoint| endpoint.session_id);
        Writer::with_capacity(HEADER_CAPACITY)
            .raw(&session_id)
            .u8(kind)
    }

    /// Sends an active message. Nobody waits for its end, so that the reactor bounds how much waits to leave.
    pub(crate) fn message(
        &mut self,
        session: SessionKey,
        header: Writer,
        payload: Payload,
    ) -> bool {
        let header = header.finish();
        let size_kib = (header.len() + payload.num_owned()).div_ceil(1 << 10);
        let unsent_kib = self
            .endpoint(session)
            .map_or(0, |endpoint| endpoint.unsent_kib);
        if unsent_kib + size_kib > UNSENT_CAP_KIB {
            self.fail(
                session,
                self.lost(session, "it does not read what it is sent"),
            );
            return false;
        }
        let token = message_token(session, size_kib);
        let is_posted = self.post(session, |worker, endpoint| {
            worker.am_send(endpoint, header, payload, token)
        });
        if is_posted && let Some(endpoint) = self.endpoint_mut(session) {
            endpoint.unsent_kib += size_kib;
        }
        is_posted
    }

    /// Reads remote memory.
    pub(crate) fn get(&mut self, session: SessionKey, get: Get<'_>) -> bool {
        // The peer may have its memory back already: what is read from now on verifies nothing.
        !self.has_failed(session)
            && self.post(session, |worker, endpoint| worker.get(endpoint, get))
    }

    /// Copies pieces of a peer's GPU memory that is mapped here. If not, `get` may still read them.
    pub(crate) fn copy(&self, session: SessionKey, copy: DeviceCopy<'_>) -> bool {
        let Some(data) = &self.data else { return false };
        let endpoint = self.endpoint_id(session);
        !self.has_failed(session)
            && endpoint.is_ok_and(|endpoint| data.worker.copy(endpoint, copy).is_ok())
    }

    /// Makes a peer's remote key usable on its endpoint, to read into memory of kind `local`.
    pub(crate) fn unpack_rkey(
        &mut self,
        session: SessionKey,
        packed: &[u8],
        local: MemoryKind,
    ) -> Result<RemoteKey> {
        let data = self.data.as_ref().ok_or_else(ended)?;
        let endpoint = self.endpoint_id(session)?;
        data.worker
            .unpack_rkey(endpoint, packed, local)
            .map_err(|status| match status {
                lost if lost.is_disconnect() => self.lost(session, lost),
                other => Error::protocol(format_args!("a remote key cannot be used: {other}")),
            })
    }

    /// The transport of the session's lane that reads from CUDA memory of a peer into CUDA memory of ours, if there is one.
    pub(crate) fn reaches(
        &self,
        session: SessionKey,
        to: &Memory,
        from: (u64, &RemoteKey),
    ) -> Option<String> {
        let lanes = self.endpoint(session).map_or(&[][..], |it| &it.lanes);
        let data = self.data.as_ref().filter(|_| !lanes.is_empty())?;
        data.worker.reaches(lanes, to, from).map(ToOwned::to_owned)
    }

    /// Registers memory, so that it can be read or sent from.
    pub(crate) fn register(&self, buffer: Buffer) -> Result<Arc<Memory>> {
        let data = self.data.as_ref().ok_or_else(ended)?;
        data.context.register(buffer)
    }

    /// UCX as `version (path)`, or `none`, for the log line of a session.
    pub(crate) fn ucx(&self) -> String {
        let data = self.data.as_ref();
        data.map_or_else(String::new, |data| data.context.describe())
    }

    pub(super) fn stream_sinks(&self) -> StreamSinks {
        let data = self.data.as_ref();
        data.map(|data| data.sinks.clone()).unwrap_or_default()
    }

    fn post(
        &mut self,
        session: SessionKey,
        operation: impl FnOnce(&Worker, EndpointId) -> UcxResult<()>,
    ) -> bool {
        let Some(data) = &self.data else { return false };
        let endpoint = self.endpoint_id(session);
        let posted = endpoint.and_then(|endpoint| operation(&data.worker, endpoint));
        if let Err(status) = posted {
            self.fail(session, self.lost(session, status));
        }
        posted.is_ok()
    }
}

#[cfg(test)]
mod tests;
