//! The data path of a session is probed before the session is up: each side reads the canary that the other exposes, by
//! the path that the two have in common, and reports by which path it gets the other's bytes from then on.
//!
//! ```text
//! one host ──────────────────► process_vm_readv ──┐
//! flush ───► lanes ──RDMA──► a get of UCX ────────┼─canary is right─► RemoteRead
//!              └──none, unknown──► Stream ◄───────┴──canary is not
//! ```
//! A session whose reads are refused later streams from then on, and never reads again.

use std::sync::Arc;

use kvpipe_ucx::{Buffer, Lane, LanesError, MemoryKind, ProcessVmError, ProcessVmReader};

use super::Links;
use super::data_plane::DataPlane;
use crate::checksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::framing::SessionFrame;
use crate::net::identity::{Canary, Identity, random};
use crate::transport::{
    Context, DataPath, Get, Memory, RemoteKey, UcxResult, is_direct, reads_host,
};

/// Marks the token of a canary's read; the rest is the session.
const CANARY_TOKEN: u64 = 1 << 63;
/// The name of reads by `process_vm_readv`, which Linux calls cross-memory attach.
const CMA: &str = "cma";
/// The name of streams, which go over the connection of their session.
const TCP: &str = "tcp";

/// The session whose canary a token is of.
pub(super) fn canary_of(token: u64) -> Option<SessionKey> {
    (token & CANARY_TOKEN != 0).then_some(token ^ CANARY_TOKEN)
}

/// Data paths of both directions of a session.
#[derive(Debug, Default)]
pub(super) struct DataPaths {
    /// This side's; none until it is probed.
    ours: Option<DataPath>,
    /// The peer's; none until it reports it.
    theirs: Option<DataPath>,
    /// The transport of the latest bytes from or to a GPU; none before the first. The host's may come by another one.
    gpu_transport: Option<String>,
    /// A get of the canary that has not ended.
    canary: Option<CanaryRead>,
    /// Reads the peer's process, where the path is CMA.
    process: Option<Arc<ProcessVmReader>>,
    /// Reason for which this side streams what it could read, as the log has it; none if it reads, or has nothing to read by.
    reason: Option<String>,
}

/// A get of the peer's canary.
#[derive(Debug)]
struct CanaryRead {
    into: Arc<Memory>,
    checksum: u64,
    transport: String,
    _key: RemoteKey,
}

/// Memory for peers to read first.
pub(super) fn new_canary(context: &Context) -> Result<Arc<Memory>> {
    let bytes = random::<{ Canary::LEN }>()?;
    context.register(Buffer::from_vec(bytes.to_vec()))
}

fn checksum_of(buffer: &Buffer) -> Option<u64> {
    buffer.bytes(0, Canary::LEN).map(checksum::of_shared)
}

impl DataPlane {
    /// Place of the canary, for peers.
    pub(super) fn canary(&self) -> Result<Canary> {
        let buffer = self.canary.buffer();
        Ok(Canary {
            pid: std::process::id(),
            address: buffer.address() as u64,
            rkey: self.canary.pack_rkey()?,
            checksum: checksum_of(buffer).unwrap_or_default(),
        })
    }
}

/// Finds the process of a peer that exposes this canary.
fn find_process(canary: &Canary) -> std::result::Result<ProcessVmReader, ProcessVmError> {
    ProcessVmReader::find(canary.pid, canary.address, Canary::LEN, |read| {
        checksum::of_shared(read) == canary.checksum
    })
}

/// The probe of a path that is not known yet.
enum Probe {
    /// There is nothing to be read.
    Stream,
    /// The lanes are unknown, or the canary has not come right by a call of our own: this is why.
    Refused(String),
    /// `process_vm_readv` has read the canary.
    Process(ProcessVmReader),
    /// UCX is to read it over this transport.
    Get(String),
}

impl Probe {
    /// `reads_process` is true for a peer on this host whose process may be read.
    fn of(lanes: &[Lane], peer: &Identity, reads_process: bool) -> Self {
        let Some(canary) = &peer.canary else {
            return Self::Refused("the peer exposes no canary".to_owned());
        };
        let process = reads_process.then(|| find_process(canary));
        let device = lanes
            .iter()
            .find(|lane| reads_host(lane) && lane.transport != CMA);
        match (process, device) {
            (Some(Ok(process)), _) => Self::Process(process),
            (_, Some(lane)) => Self::Get(lane.transport.clone()),
            (Some(Err(error)), None) => Self::Refused(error.to_string()),
            (None, None) => Self::Stream,
        }
    }
}

/// Before a session is up.
impl Links {
    /// Probes how this side gets the peer's bytes. UCX, if it is used, has connected: before, it may still change the lanes.
    pub(super) fn probe(&mut self, key: SessionKey) {
        let Some(session) = self.sessions.get(&key) else {
            return;
        };
        let Some(peer) = session.establishing().cloned() else {
            return;
        };
        let Some((data, endpoint)) = self.data_of(key) else {
            return;
        };
        let lanes = match (&data.worker, endpoint.id) {
            (Some(worker), Some(id)) => worker.lanes(id),
            _ => Ok(Vec::new()),
        };
        self.probe_lanes(key, &peer, lanes);
    }

    /// Probes the path that these lanes allow.
    fn probe_lanes(
        &mut self,
        key: SessionKey,
        peer: &Identity,
        lanes: std::result::Result<Vec<Lane>, LanesError>,
    ) {
        let lanes = match lanes {
            Ok(lanes) => lanes,
            Err(LanesError::Unusable(status)) => {
                return self.lose_devices(key, &status.to_string());
            }
            Err(error) => {
                tracing::error!(
                    "session.lanes peer={} {error}; bytes are streamed: report this with the version of UCX, {}",
                    self.peer(key),
                    self.ucx()
                );
                Vec::new()
            }
        };
        let may_read = self
            .data
            .as_ref()
            .is_some_and(|data| data.context.reads_processes());
        let reads_process = may_read && peer.host == self.identity().host;
        let probe = Probe::of(&lanes, peer, reads_process);
        let Some(endpoint) = self.endpoint_mut(key) else {
            return;
        };
        endpoint.lanes = lanes.into_iter().filter(is_direct).collect();
        match probe {
            Probe::Stream => self.set_data_path(key, DataPath::Stream(TCP.to_owned())),
            Probe::Refused(reason) => self.switch_to_stream(key, &reason),
            Probe::Process(process) => {
                endpoint.paths.process = Some(Arc::new(process));
                self.set_data_path(key, DataPath::RemoteRead(CMA.to_owned()));
            }
            Probe::Get(transport) => {
                let canary = peer.canary.as_ref();
                let posted = canary.map(|canary| self.post_canary(key, canary, transport));
                if let Some(Err(error)) = posted {
                    self.switch_to_stream(key, &error.to_string());
                }
            }
        }
    }

    /// Has UCX read a peer's canary.
    fn post_canary(&mut self, key: SessionKey, canary: &Canary, transport: String) -> Result<()> {
        let into = self.register(Buffer::zeroed(Canary::LEN))?;
        let rkey = self.unpack_rkey(key, &canary.rkey, MemoryKind::Host)?;
        let get = Get {
            local: &into,
            offset: 0,
            len: Canary::LEN,
            remote: canary.address,
            key: &rkey,
            token: CANARY_TOKEN | key,
        };
        if self.get(key, get)
            && let Some(endpoint) = self.endpoint_mut(key)
        {
            endpoint.paths.canary = Some(CanaryRead {
                into,
                checksum: canary.checksum,
                transport,
                _key: rkey,
            });
        }
        Ok(())
    }

    /// A get of a peer's canary has ended.
    pub(super) fn finish_probe(&mut self, key: SessionKey, result: UcxResult<()>) {
        let endpoint = self.endpoint_mut(key);
        let Some(canary) = endpoint.and_then(|endpoint| endpoint.paths.canary.take()) else {
            return;
        };
        let transport = canary.transport;
        match result {
            Ok(()) if checksum_of(canary.into.buffer()) == Some(canary.checksum) => {
                self.set_data_path(key, DataPath::RemoteRead(transport));
            }
            Ok(()) => {
                // Nothing that these lanes read can be believed, neither of a GPU's memory.
                if let Some(endpoint) = self.endpoint_mut(key) {
                    endpoint.lanes.clear();
                }
                let reason = format!(
                    "its canary came with other bytes over {transport}: check the network cards and UCX, or set KVPIPE_DATA_PATH=tcp"
                );
                self.switch_to_stream(key, &reason);
            }
            Err(status) => {
                let reason = format!("its canary cannot be read over {transport}: {status}");
                if status.is_disconnect() {
                    self.lose_devices(key, &reason);
                } else {
                    self.switch_to_stream(key, &reason);
                }
            }
        }
    }

    /// UCX cannot use the session's endpoint any more: its reads end, each with an error, and the session goes on without
    /// devices.
    pub(crate) fn lose_devices(&mut self, key: SessionKey, reason: &str) {
        let Some((data, endpoint)) = self.data_of(key) else {
            return;
        };
        let (Some(worker), Some(id)) = (&data.worker, endpoint.id.take()) else {
            return;
        };
        worker.close(id);
        endpoint.lanes.clear();
        endpoint.paths.canary = None;
        let (is_probed, reads_process) = (
            endpoint.paths.ours.is_some(),
            endpoint.paths.process.is_some(),
        );
        let session = self.sessions.get(&key);
        let establishing = session.and_then(|session| session.establishing());
        match establishing.cloned().filter(|_| !is_probed) {
            Some(peer) => {
                tracing::warn!("session.devices_lost peer={} {reason}", self.peer(key));
                self.probe_lanes(key, &peer, Ok(Vec::new()));
            }
            None if reads_process => {}
            None => self.switch_to_stream(key, reason),
        }
    }

    /// True if the session's endpoint can be used.
    pub(crate) fn has_devices(&self, key: SessionKey) -> bool {
        self.endpoint(key)
            .is_some_and(|endpoint| endpoint.id.is_some())
    }

    /// The peer reports how it gets our bytes.
    ///
    /// # Errors
    /// The session has no data plane.
    pub(super) fn receive_data_path(&mut self, key: SessionKey, data_path: DataPath) -> Result<()> {
        let Some(endpoint) = self.endpoint_mut(key) else {
            return Err(Error::protocol("the data path of a session without one"));
        };
        let is_stream = matches!(data_path, DataPath::Stream(_));
        let before = endpoint.paths.theirs.replace(data_path);
        let by_device = |path: &DataPath| matches!(path, DataPath::RemoteRead(name) if name != CMA);
        if let Some(DataPath::RemoteRead(transport)) = before.filter(by_device)
            && is_stream
            && endpoint.paths.ours.as_ref().is_none_or(by_device)
        {
            // The two ends of a connection between devices fail together, but the device of this one may never notice.
            let reason = format!("the peer's reads over {transport} have failed");
            self.lose_devices(key, &reason);
        }
        self.note_changed_path(key);
        Ok(())
    }

    /// True if both sides know how they get each other's bytes.
    pub(super) fn is_probed(&self, key: SessionKey) -> bool {
        let paths = self.endpoint(key).map(|endpoint| &endpoint.paths);
        paths.is_some_and(|paths| paths.ours.is_some() && paths.theirs.is_some())
    }

    /// Sets how this side gets the peer's bytes, and reports it to the peer.
    pub(super) fn set_data_path(&mut self, key: SessionKey, data_path: DataPath) {
        let Some(endpoint) = self.endpoint_mut(key) else {
            return;
        };
        let frame = SessionFrame::DataPath {
            is_read: matches!(data_path, DataPath::RemoteRead(_)),
            transport: data_path.transport().to_owned(),
        };
        endpoint.paths.ours = Some(data_path);
        let sent = self
            .sessions
            .get_mut(&key)
            .map(|session| session.send(&frame));
        if let Some(Err(error)) = sent {
            self.fail(key, error);
        }
        self.note_changed_path(key);
    }

    fn note_changed_path(&mut self, key: SessionKey) {
        if self.is_up(key) {
            self.changed_paths.push_back(key);
        }
    }
}

/// Data paths, for services.
impl Links {
    /// This side's data path for the peer's bytes.
    pub(crate) fn data_path(&self, session: SessionKey) -> Option<DataPath> {
        self.endpoint(session)?.paths.ours.clone()
    }

    /// The peer's data path for our bytes.
    pub(crate) fn peer_data_path(&self, session: SessionKey) -> Option<DataPath> {
        self.endpoint(session)?.paths.theirs.clone()
    }

    /// The transport by which this side gets the peer's bytes: that of a GPU's once it has got some of those.
    pub(crate) fn shown_transport(&self, session: SessionKey) -> Option<String> {
        let paths = &self.endpoint(session)?.paths;
        let ours = paths.ours.as_ref().map(DataPath::transport);
        paths.gpu_transport.as_deref().or(ours).map(str::to_owned)
    }

    /// Bytes from or to a GPU come over this lane's transport, or as a stream.
    pub(crate) fn note_gpu_transport(&mut self, session: SessionKey, read_over: Option<String>) {
        let Some(endpoint) = self.endpoint_mut(session) else {
            return;
        };
        let paths = &mut endpoint.paths;
        let transport = Some(read_over.unwrap_or_else(|| TCP.to_owned()));
        if paths.gpu_transport != transport {
            paths.gpu_transport = transport;
            self.note_changed_path(session);
        }
    }

    /// Reader of the peer's process, where that is the data path.
    pub(crate) fn process(&self, session: SessionKey) -> Option<Arc<ProcessVmReader>> {
        self.endpoint(session)?.paths.process.clone()
    }

    /// Reason for a slower data path than possible on this side, and the remedy; none if the log has a reason.
    pub(crate) fn advice(&self, session: SessionKey) -> Option<&'static str> {
        let paths = &self.endpoint(session)?.paths;
        let data_path = paths.ours.as_ref().filter(|_| paths.reason.is_none())?;
        data_path.advice()
    }

    /// Reason for a slower path than possible of the bytes that `shown_transport` names, and the remedy, whether the log
    /// has it or not.
    pub(crate) fn slow_reason(&self, session: SessionKey) -> Option<String> {
        let paths = &self.endpoint(session)?.paths;
        match (paths.gpu_transport.as_deref(), &paths.ours) {
            (None, _) | (Some(TCP), Some(DataPath::Stream(_))) => {
                let reason = paths.reason.clone();
                reason.or_else(|| self.advice(session).map(str::to_owned))
            }
            (Some(TCP), Some(DataPath::RemoteRead(host))) => Some(format!(
                "bytes from or to a GPU are streamed, while {host} reads host memory: docs/gpu.md names what reads memory of GPUs"
            )),
            _ => None,
        }
    }

    /// This side may not read the peer's memory (any more): it gets all bytes as streams from now on. The log has the
    /// reason once a session.
    pub(crate) fn switch_to_stream(&mut self, session: SessionKey, reason: &str) {
        let Some(endpoint) = self.endpoint_mut(session) else {
            return;
        };
        let paths = &mut endpoint.paths;
        paths.process = None;
        if paths.reason.is_none() {
            paths.reason = Some(reason.to_owned());
            let peer = self.peer(session);
            tracing::warn!("session.stream peer={peer} transport={TCP} {reason}");
        }
        let stream = DataPath::Stream(TCP.to_owned());
        if self.data_path(session).as_ref() != Some(&stream) {
            self.set_data_path(session, stream);
        }
    }
}

#[cfg(test)]
mod tests;
