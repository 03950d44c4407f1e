//! UCX as a transport: how its context is made, and what it is called with.

use std::net::IpAddr;
use std::sync::Arc;

use kvpipe_ucx::{Config, Context, EndpointId, Library, Search, Worker};

use super::{Answer, FOREIGN, Get, Memory, Payload, RemoteKey};
use crate::error::{Error, Result};

/// Loads UCX and makes a context whose devices follow `local`.
pub(super) fn context(search: &Search, local: IpAddr) -> Result<Arc<Context>> {
    let library = Library::load(search)?;
    let mut config = Config::new();
    if let Some(devices) = devices(local) {
        config.pin("NET_DEVICES", &devices);
    }
    Context::new(library, &config)
        .map_err(|status| Error::Unavailable(format!("UCX cannot start on {local}: {status}")))
}

pub(super) fn describe(context: &Context) -> String {
    let library = context.library();
    let (major, minor, patch) = library.version();
    format!("{major}.{minor}.{patch} ({})", library.path().display())
}

fn registered(memory: &Memory) -> Answer<&Arc<kvpipe_ucx::Memory>> {
    match memory {
        Memory::Ucx(memory) => Ok(memory),
        Memory::Twin(_) => Err(FOREIGN),
    }
}

pub(super) fn payload(payload: Payload) -> Answer<kvpipe_ucx::Payload> {
    Ok(match payload {
        Payload::None => kvpipe_ucx::Payload::None,
        Payload::Bytes(bytes) => kvpipe_ucx::Payload::Bytes(bytes),
        Payload::Memory {
            memory,
            offset,
            len,
        } => kvpipe_ucx::Payload::Memory {
            memory: Arc::clone(registered(&memory)?),
            offset,
            len,
        },
    })
}

pub(super) fn get(worker: &Worker, endpoint: EndpointId, get: Get<'_>) -> Answer<()> {
    let RemoteKey::Ucx(key) = get.key else {
        return Err(FOREIGN);
    };
    let local = registered(get.local)?;
    worker.get(
        endpoint, local, get.offset, get.len, get.remote, key, get.token,
    )
}

/// The UCX devices that belong to a local address: `lo` for loopback, else its interface and the RDMA devices.
/// Unknown (or every address): no restriction.
fn devices(local: IpAddr) -> Option<String> {
    if local.is_loopback() {
        return Some("lo".to_owned());
    }
    let interfaces = if_addrs::get_if_addrs().ok()?;
    let mut devices = vec![
        interfaces
            .iter()
            .find(|interface| interface.ip() == local)?
            .name
            .clone(),
    ];
    let rdma = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .flatten();
    devices.extend(rdma.map(|device| format!("{}:1", device.file_name().to_string_lossy())));
    Some(devices.join(","))
}
