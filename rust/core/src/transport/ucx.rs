//! UCX for reads of device memory, and reads by devices: makes its context, and converts operands.

use std::sync::Arc;

use kvpipe_ucx::{Config, Context, EndpointId, Library, Search, Worker};

use super::devices::devices;
use super::{DeviceCopy, FOREIGN, Get, Memory, RemoteKey, UcxResult};
use crate::error::{Error, Result};

/// UCX's setting for its transports.
const TRANSPORTS: &str = "UCX_TLS";
/// Transports that are not used. kvpipe reads processes of this host itself; and a host that reaches UCX's TCP port reads and
/// writes the memory of this process.
const UNWANTED: [&str; 2] = ["cma", "tcp"];

/// The transports for UCX, of those that the user allows; none if nothing is left.
fn transports(users: Option<&str>) -> Option<String> {
    let users = users.map_or("all", str::trim);
    if users == "all" {
        return Some(format!("^{}", UNWANTED.join(",")));
    }
    if let Some(excluded) = users.strip_prefix('^') {
        return Some(format!("^{excluded},{}", UNWANTED.join(",")));
    }
    let names = users.split(',').map(str::trim);
    let left: Vec<_> = names
        .filter(|name| !(name.is_empty() || UNWANTED.contains(name)))
        .collect();
    (!left.is_empty()).then(|| left.join(","))
}

/// Loads UCX and makes a context. None if the user allows no transport, or no device.
pub(super) fn context(search: &Search, has_cuda: bool) -> Result<Option<Arc<Context>>> {
    let users = std::env::var(TRANSPORTS).ok();
    let Some(transports) = transports(users.as_deref()) else {
        tracing::info!("ucx.unused {TRANSPORTS} names no transport that kvpipe uses");
        return Ok(None);
    };
    let devices = devices()?;
    if devices.is_empty() && !has_cuda {
        tracing::info!("ucx.unused UCX_NET_DEVICES names no RDMA device");
        return Ok(None);
    }
    let library = Library::load(search)?;
    let mut config = Config::new();
    config.pin("TLS", &transports);
    if !devices.is_empty() {
        config.pin("NET_DEVICES", &devices);
    }
    let cannot = |status| Error::Unavailable(format!("UCX cannot start: {status}"));
    Context::new(library, &config).map(Some).map_err(cannot)
}

pub(super) fn describe(context: &Context) -> String {
    let library = context.library();
    let (major, minor, patch) = library.version();
    format!("{major}.{minor}.{patch} ({})", library.path().display())
}

fn registered(memory: &Memory) -> UcxResult<&Arc<kvpipe_ucx::Memory>> {
    match memory {
        Memory::Ucx(memory) => Ok(memory),
        Memory::Host(_) | Memory::Twin(_) => Err(FOREIGN),
    }
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

pub(super) fn copy(worker: &Worker, endpoint: EndpointId, copy: DeviceCopy<'_>) -> UcxResult<()> {
    let RemoteKey::Ucx(key) = copy.key else {
        return Err(FOREIGN);
    };
    let copy = kvpipe_ucx::DeviceCopy {
        local: registered(copy.local)?,
        pieces: copy.pieces,
        rkey: key,
        report: copy.report,
        token: copy.token,
    };
    worker.copy(endpoint, copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucx_has_the_users_transports_but_for_cma_and_tcp() {
        for (users, expected) in [
            (None, Some("^cma,tcp")),
            (Some("all"), Some("^cma,tcp")),
            (Some("^ud"), Some("^ud,cma,tcp")),
            (Some("rc, tcp,cma"), Some("rc")),
            (Some("posix,tcp,cuda"), Some("posix,cuda")),
            (Some("tcp"), None),
            (Some(""), None),
        ] {
            assert_eq!(transports(users).as_deref(), expected);
        }
    }
}
