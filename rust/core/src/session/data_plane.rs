//! The data plane of a reactor: its UCX worker, and the endpoint of each session.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::{Buffer, EndpointId, Lane, MemoryKind, Status};

use super::Links;
use super::probe::{DataPaths, new_canary};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::reactor::ended;
use crate::transport::{Context, DeviceCopy, Get, Memory, RemoteKey, UcxResult, Worker};

/// Marks the token of the flush that has UCX connect; the rest is the session.
const CONNECT_TOKEN: u64 = 1 << 62;

/// Shortest time without the end of a read after which a device counts as failed. A device waits a second or more before it
/// sends again what was lost (`UCX_RC_TIMEOUT`).
const LEAST_STANDSTILL: Duration = Duration::from_secs(10);

/// The part of a session that belongs to the data plane.
#[derive(Debug, Default)]
pub(super) struct SessionEndpoint {
    /// Once the peer knows the session, if both sides have a worker and their devices have a way to each other.
    pub(super) id: Option<EndpointId>,
    /// Data paths of both directions.
    pub(super) paths: DataPaths,
    /// Lanes that may reach CUDA memory.
    pub(super) lanes: Vec<Lane>,
    /// While operations are in flight: how many had ended at the last look, and since when no other has.
    standstill: Option<(u64, Instant)>,
}

/// The data plane that the sessions of a reactor share.
pub(super) struct DataPlane {
    pub(super) context: Arc<Context>,
    /// Reads by devices.
    pub(super) worker: Option<Worker>,
    /// Memory that peers read first.
    pub(super) canary: Arc<Memory>,
    /// Endpoints that have not ended, also of sessions that are gone.
    pub(super) endpoints: HashMap<EndpointId, SessionKey>,
}

/// The session whose endpoint has connected by the operation of a token.
pub(super) fn connected_by(token: u64) -> Option<SessionKey> {
    (token & CONNECT_TOKEN != 0).then_some(token ^ CONNECT_TOKEN)
}

impl DataPlane {
    pub(super) fn new(context: Arc<Context>) -> Result<Self> {
        let worker = context.worker()?;
        let canary = new_canary(&context)?;
        Ok(Self {
            context,
            worker,
            canary,
            endpoints: HashMap::new(),
        })
    }

    /// Sizes of its maps.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> crate::reactor::manual::Sizes {
        vec![("endpoints", self.endpoints.len())]
    }

    /// Closes an endpoint by force. Its operations end with errors, each through its own completion.
    pub(super) fn close(&self, endpoint: &SessionEndpoint) {
        if let (Some(id), Some(worker)) = (endpoint.id, &self.worker) {
            worker.close(id);
        }
    }
}

const NO_ENDPOINT: Status = Status {
    code: -80,
    call: "endpoint",
};

/// The data plane of one session.
impl Links {
    /// Both sides know the session, each by the other's token: connects to this worker of the peer. False if one of the two
    /// has no worker, or their devices have no way to each other.
    #[expect(unsafe_code, reason = "UCX does not check what it parses")]
    pub(super) fn open_endpoint(&mut self, key: SessionKey, address: &[u8]) -> bool {
        let Some((data, endpoint)) = self.data_of(key) else {
            return false;
        };
        let Some(worker) = data.worker.as_ref().filter(|_| !address.is_empty()) else {
            return false;
        };
        // SAFETY: the peer, which has the token, has described its worker so.
        let connected = unsafe { worker.connect(address) };
        let flushed = connected.and_then(|id| {
            endpoint.id = Some(id);
            data.endpoints.insert(id, key);
            worker.flush(id, CONNECT_TOKEN | key)
        });
        let Err(status) = flushed else {
            return true;
        };
        if let Some(id) = endpoint.id.take() {
            worker.close(id);
        }
        let peer = self.peer(key);
        tracing::info!("session.no_devices peer={peer} UCX does not reach it: {status}");
        false
    }

    /// True if reads of a session are in flight, and none has ended for as long as a peer may be silent. A device that waits
    /// for its link may never give up, as may one whose peer has closed its end.
    pub(super) fn stands_still(&mut self, key: SessionKey) -> bool {
        let (now, limit) = (self.now, self.timeouts().silence.max(LEAST_STANDSTILL));
        // Before, connecting has its own limit.
        if self.data_path(key).is_none() {
            return false;
        }
        let Some((data, endpoint)) = self.data_of(key) else {
            return false;
        };
        let worker = data.worker.as_ref();
        let progress = endpoint.id.and_then(|id| worker?.progress_of(id));
        let Some(progress) = progress.filter(|progress| progress.in_flight > 0) else {
            endpoint.standstill = None;
            return false;
        };
        match endpoint.standstill {
            Some((ended, since)) if ended == progress.ended => now >= since + limit,
            _ => {
                endpoint.standstill = Some((progress.ended, now));
                false
            }
        }
    }

    /// Handles no message of a session any more.
    pub(super) fn mute(&mut self, key: SessionKey) {
        if let Some(session) = self.sessions.get_mut(&key) {
            session.is_muted = true;
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

    pub(super) fn worker(&self) -> Option<&Worker> {
        self.data.as_ref()?.worker.as_ref()
    }

    fn endpoint_id(&self, key: SessionKey) -> UcxResult<EndpointId> {
        let id = self.endpoint(key).and_then(|endpoint| endpoint.id);
        id.ok_or(NO_ENDPOINT)
    }
}

/// Remote memory, for services. A session whose endpoint cannot take an operation goes on without it; a posted read ends with
/// exactly one `done`.
impl Links {
    /// Reads remote memory.
    pub(crate) fn get(&mut self, session: SessionKey, get: Get<'_>) -> bool {
        // The peer may have its memory back already: what is read from now on verifies nothing.
        !self.has_failed(session)
            && self.post(session, |worker, endpoint| worker.get(endpoint, get))
    }

    /// Copies pieces of a peer's GPU memory that is mapped here. If not, `get` may still read them.
    pub(crate) fn copy(&self, session: SessionKey, copy: DeviceCopy<'_>) -> bool {
        let Some(worker) = self.worker() else {
            return false;
        };
        let endpoint = self.endpoint_id(session);
        !self.has_failed(session)
            && endpoint.is_ok_and(|endpoint| worker.copy(endpoint, copy).is_ok())
    }

    /// Makes a peer's remote key usable on its endpoint, to read into memory of kind `local`.
    pub(crate) fn unpack_rkey(
        &mut self,
        session: SessionKey,
        packed: &[u8],
        local: MemoryKind,
    ) -> Result<RemoteKey> {
        let worker = self.worker().ok_or_else(ended)?;
        let endpoint = self.endpoint_id(session)?;
        let unpacked = worker.unpack_rkey(endpoint, packed, local);
        if let Err(lost) = &unpacked
            && lost.is_disconnect()
        {
            self.lose_devices(session, &lost.to_string());
        }
        unpacked.map_err(|status| {
            Error::protocol(format_args!("a remote key cannot be used: {status}"))
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
        let worker = self.worker().filter(|_| !lanes.is_empty())?;
        worker.reaches(lanes, to, from).map(ToOwned::to_owned)
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

    fn post(
        &mut self,
        session: SessionKey,
        operation: impl FnOnce(&Worker, EndpointId) -> UcxResult<()>,
    ) -> bool {
        let Some(worker) = self.worker() else {
            return false;
        };
        let endpoint = self.endpoint_id(session);
        let posted = endpoint.and_then(|endpoint| operation(worker, endpoint));
        if let Err(status) = posted {
            self.lose_devices(session, &status.to_string());
        }
        posted.is_ok()
    }
}

#[cfg(test)]
pub(crate) mod tests;
