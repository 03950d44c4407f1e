//! UCX as what reads memory of devices, and by them: makes its context, and converts operands.

use std::net::{IpAddr, TcpListener};
use std::sync::Arc;

use kvpipe_ucx::{Config, Context, EndpointId, Library, Search, Worker};

use super::devices::devices;
use super::{DeviceCopy, FOREIGN, Get, Memory, RemoteKey, UcxResult};
use crate::error::{Error, Result};

/// UCX's setting for the ports on which it listens.
const PORT_RANGE: &str = "UCX_TCP_PORT_RANGE";

/// UCX's setting for its transports.
const TRANSPORTS: &str = "UCX_TLS";
/// Transports that are not used: kvpipe reads processes of this host itself.
const CMA: &str = "cma";
/// A host that reaches UCX's TCP port reads and writes the memory of this process. Endpoints of `cuda_ipc` need it.
const TCP: &str = "tcp";

/// The transports for UCX, of those that the user allows; none if nothing is left.
fn transports(users: Option<&str>, has_cuda: bool) -> Option<String> {
    let unwanted = if has_cuda { &[CMA][..] } else { &[CMA, TCP] };
    let users = users.map_or("all", str::trim);
    if users == "all" {
        return Some(format!("^{}", unwanted.join(",")));
    }
    if let Some(excluded) = users.strip_prefix('^') {
        return Some(format!("^{excluded},{}", unwanted.join(",")));
    }
    let names = users.split(',').map(str::trim);
    let left: Vec<_> = names
        .filter(|name| !(name.is_empty() || unwanted.contains(name)))
        .collect();
    (!left.is_empty()).then(|| left.join(","))
}

/// Loads UCX and makes a context with the devices of this local address. None if the user allows no transport for them.
pub(super) fn context(
    search: &Search,
    local: IpAddr,
    has_cuda: bool,
) -> Result<Option<Arc<Context>>> {
    let users = std::env::var(TRANSPORTS).ok();
    let Some(transports) = transports(users.as_deref(), has_cuda) else {
        tracing::info!("ucx.unused {TRANSPORTS} names no transport that kvpipe uses");
        return Ok(None);
    };
    let library = Library::load(search)?;
    let mut config = Config::new();
    config.pin("TLS", &transports);
    if !local.is_unspecified() {
        let devices = devices(local, has_cuda)?;
        if devices.is_empty() {
            tracing::info!("ucx.unused UCX_NET_DEVICES names no RDMA device");
            return Ok(None);
        }
        config.pin("NET_DEVICES", &devices);
        if let Some(ports) = std::env::var(PORT_RANGE).ok().filter(|_| has_cuda) {
            check_ports(&ports, local)?;
        }
    }
    let cannot = |status| Error::Unavailable(format!("UCX cannot start on {local}: {status}"));
    Context::new(library, &config).map(Some).map_err(cannot)
}

/// Refuses a range without a free port: UCX (1.22) would try its ports without end.
fn check_ports(ports: &str, local: IpAddr) -> Result<()> {
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let (Ok(first), Ok(last)) = (first.trim().parse::<u16>(), last.trim().parse::<u16>()) else {
        return Ok(()); // UCX itself complains.
    };
    if first == 0 || (first..=last).any(|port| TcpListener::bind((local, port)).is_ok()) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{PORT_RANGE}={ports}: no port of the range is free at {local}; UCX needs one for each worker of this host"
    )))
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
        token: copy.token,
    };
    worker.copy(endpoint, copy)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn ucx_has_the_users_transports_but_for_cma_and_without_cuda_for_tcp() {
        for (users, has_cuda, expected) in [
            (None, false, Some("^cma,tcp")),
            (Some("all"), true, Some("^cma")),
            (Some("^ud"), false, Some("^ud,cma,tcp")),
            (Some("rc, tcp,cma"), false, Some("rc")),
            (Some("rc,tcp,cuda"), true, Some("rc,tcp,cuda")),
            (Some("tcp"), false, None),
            (Some(""), true, None),
        ] {
            assert_eq!(transports(users, has_cuda).as_deref(), expected);
        }
    }

    #[test]
    fn a_range_of_ports_that_are_all_taken_is_refused_and_any_other_is_left_to_ucx() {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let taken = TcpListener::bind((local, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        for ports in [port.to_string(), format!("{port}-{port}")] {
            let error = check_ports(&ports, local).unwrap_err().to_string();
            assert!(
                error.contains(&format!("UCX_TCP_PORT_RANGE={ports}")),
                "{error}"
            );
        }
        for ports in ["0", "any", "40000-", "1024-65535"] {
            assert_eq!(check_ports(ports, local), Ok(()));
        }
        drop(taken);
        assert_eq!(check_ports(&port.to_string(), local), Ok(()));
    }
}
