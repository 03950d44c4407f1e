//! Addresses that users write.

use std::net::{SocketAddr, ToSocketAddrs};

use crate::error::{Error, Result};

/// Parses `host:port` for listening. A name is resolved; without a token only loopback is allowed.
pub(crate) fn listen_address(address: &str, token: &[u8]) -> Result<SocketAddr> {
    let cannot = |reason| Error::Config(format!("cannot listen on {address:?}: {reason}"));
    let mut candidates = address
        .to_socket_addrs()
        .map_err(|error| cannot(format!("{error}; expected HOST:PORT")))?;
    let resolved = candidates
        .next()
        .ok_or_else(|| cannot("the name has no address".to_owned()))?;
    if token.is_empty() && !resolved.ip().is_loopback() {
        return Err(Error::Config(format!(
            "listening on {address} needs a token, because others can reach it: set KVPIPE_TOKEN or pass token="
        )));
    }
    Ok(resolved)
}

/// Refuses an address that is not `host:port`, without resolving it.
pub(crate) fn check_address(address: &str) -> Result<()> {
    let parts = address.rsplit_once(':');
    if parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{address:?} is no address; expected HOST:PORT"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_others_reach_needs_a_token() {
        assert!(listen_address("127.0.0.1:0", b"").is_ok());
        assert!(listen_address("0.0.0.0:0", b"token").is_ok());
        let refused = listen_address("0.0.0.0:0", b"").unwrap_err();
        assert!(refused.to_string().contains("KVPIPE_TOKEN"), "{refused}");
    }

    #[test]
    fn an_address_without_host_or_port_is_refused() {
        assert_eq!(check_address("host:1"), Ok(()));
        for address in ["host", ":1", "host:", "host:port", "host:65536"] {
            assert!(matches!(check_address(address), Err(Error::Config(_))));
        }
    }
}
