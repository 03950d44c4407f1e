//! Addresses that users write: where to listen, whom to connect to, and from where that is reached.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::error::{Error, Result};

/// Parses `host:port` for listening. A name is resolved; without a token only loopback is allowed.
pub(crate) fn listen_address(address: &str, token: &[u8]) -> Result<SocketAddr> {
    let mut candidates = address.to_socket_addrs().map_err(|error| {
        Error::Config(format!(
            "cannot listen on {address:?}: {error}; expected HOST:PORT"
        ))
    })?;
    let resolved = candidates.next().ok_or_else(|| {
        Error::Config(format!(
            "cannot listen on {address:?}: the name has no address"
        ))
    })?;
    if token.is_empty() && !resolved.ip().is_loopback() {
        return Err(Error::Config(format!(
            "listening on {address} needs a token, because others can reach it: set KVPIPE_TOKEN or pass token="
        )));
    }
    Ok(resolved)
}

/// Refuses what is no `host:port`, before anything is resolved.
pub(crate) fn check_address(address: &str) -> Result<()> {
    let parts = address.rsplit_once(':');
    if parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{address:?} is no address; expected HOST:PORT"
    )))
}

/// The first address of a name. A resolver can hang: it has a thread of its own, which ends when it answers.
fn resolve(name: &str, timeout: Duration) -> Result<SocketAddr> {
    if let Ok(address) = name.parse() {
        return Ok(address);
    }
    let (sender, answer) = channel();
    let asked = name.to_owned();
    std::thread::Builder::new()
        .name("kvpipe-resolve".to_owned())
        .spawn(move || sender.send(asked.to_socket_addrs().map(|mut all| all.next())))
        .map_err(|error| Error::Exhausted(format!("no thread: {error}")))?;
    match answer.recv_timeout(timeout) {
        Ok(Ok(Some(resolved))) => Ok(resolved),
        Ok(Ok(None)) => Err(Error::Connect(format!(
            "cannot reach {name}: the name has no address"
        ))),
        Ok(Err(error)) => Err(Error::Connect(format!("cannot reach {name}: {error}"))),
        Err(_) => Err(Error::Connect(format!(
            "{name:?} was not resolved within {timeout:?}; is the name server reachable?"
        ))),
    }
}

/// The local address from which `peer` is reached.
pub(crate) fn local_towards(peer: &str, timeout: Duration) -> Result<IpAddr> {
    let resolved = resolve(peer, timeout)?;
    if resolved.ip().is_loopback() {
        return Ok(resolved.ip());
    }
    let any = match resolved.ip() {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Nothing is sent: connecting a datagram socket only looks the route up.
    let route = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(resolved)?;
        socket.local_addr()
    });
    // Without a route, UCX must not be told of every interface instead.
    route.map_or_else(
        |error| Err(Error::Connect(format!("cannot reach {peer}: {error}"))),
        |address| Ok(address.ip()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every address of this machine is reached from itself; were it every interface, UCX would listen on all.
    #[test]
    fn a_peer_is_reached_from_one_interface() {
        for interface in if_addrs::get_if_addrs().unwrap() {
            let is_link_local =
                matches!(interface.ip(), IpAddr::V6(ip) if ip.is_unicast_link_local());
            if !is_link_local {
                let peer = SocketAddr::new(interface.ip(), 9).to_string();
                let local = local_towards(&peer, Duration::from_secs(20)).unwrap();
                assert_eq!(local, interface.ip(), "{}", interface.name);
            }
        }
    }

    /// No such address is on any network.
    #[test]
    fn without_a_route_no_interface_is_taken_in_its_place() {
        let error = local_towards("[100::1]:9", Duration::from_secs(20));
        assert!(!error.is_ok_and(|local| local.is_unspecified()));
    }
}
