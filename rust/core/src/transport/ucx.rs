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
fn devices(local: IpAddr) -> Result<String> {
    if local.is_loopback() {
        return Ok("lo".to_owned());
    }
    let mut devices = vec![interface(local)?];
    let rdma = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .flatten();
    devices.extend(rdma.map(|device| format!("{}:1", device.file_name().to_string_lossy())));
    Ok(devices.join(","))
}

/// The name of the interface that has an address. Without one, UCX would listen on all.
fn interface(local: IpAddr) -> Result<String> {
    let interfaces = if_addrs::get_if_addrs().map_err(|error| {
        Error::Unavailable(format!("cannot tell the interface of {local}: {error}"))
    })?;
    let its = interfaces
        .into_iter()
        .find(|interface| interface.ip() == local);
    its.map(|interface| interface.name).ok_or_else(|| {
        Error::Config(format!(
            "no interface has the address {local}, so that UCX cannot be kept to one: listen on an address of this machine"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_device_is_the_interface_that_has_the_address() {
        let interfaces = if_addrs::get_if_addrs().unwrap();
        for of in &interfaces {
            let devices = devices(of.ip()).unwrap();
            let first = devices.split(',').next().unwrap();
            let has_it = |one: &if_addrs::Interface| one.name == first && one.ip() == of.ip();
            assert!(interfaces.iter().any(has_it), "{} by {devices}", of.ip());
        }
    }

    #[test]
    fn an_address_of_no_interface_is_an_error_and_not_every_interface() {
        let error = devices("203.0.113.1".parse().unwrap()).unwrap_err();
        assert!(
            matches!(&error, Error::Config(text) if text.contains("203.0.113.1")),
            "{error}"
        );
    }
}
