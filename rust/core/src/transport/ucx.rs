//! UCX as a transport: makes its context, and converts operands.

use std::net::IpAddr;
use std::sync::Arc;

use kvpipe_ucx::{Config, Context, EndpointId, Library, Search, Worker};

use super::devices::devices;
use super::{FOREIGN, Get, Memory, Payload, RemoteKey, UcxResult};
use crate::error::{Error, Result};

/// Loads UCX and makes a context with the devices of this local address.
pub(super) fn context(search: &Search, local: IpAddr) -> Result<Arc<Context>> {
    let library = Library::load(search)?;
    let mut config = Config::new();
    if !local.is_unspecified() {
        config.pin("NET_DEVICES", &devices(local)?);
    }
    Context::new(library, &config)
        .map_err(|status| Error::Unavailable(format!("UCX cannot start on {local}: {status}")))
}

pub(super) fn describe(context: &Context) -> String {
    let library = context.library();
    let (major, minor, patch) = library.version();
    format!("{major}.{minor}.{patch} ({})", library.path().display())
}

fn registered(memory: &Memory) -> UcxResult<&Arc<kvpipe_ucx::Memory>> {
    match memory {
        Memory::Ucx(memory) => Ok(memory),
        Memory::Twin(_) => Err(FOREIGN),
    }
}

pub(super) fn payload(payload: Payload) -> UcxResult<kvpipe_ucx::Payload> {
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

pub(super) fn get(worker: &Worker, endpoint: EndpointId, get: Get<'_>) -> UcxResult<()> {
    let RemoteKey::Ucx(key) = get.key else {
        return Err(FOREIGN);
    };
    let local = registered(get.local)?;
    let get = kvpipe_ucx::Get {
        local,
        offset: get.offset,
        len: get.len,
        remote: get.remote,
        rkey: key,
        token: get.token,
    };
    worker.get(endpoint, get)
}
