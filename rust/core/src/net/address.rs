//! Addresses that users write.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use crate::error::{Error, Result};
use crate::net::secret::{MIN_TOKEN_BYTES, Tokens};

/// Address of a listening socket, and the ports to try in this order. Port 0 alone is any free one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListenAddress {
    pub(crate) ip: IpAddr,
    pub(crate) first_port: u16,
    pub(crate) last_port: u16,
}

impl ListenAddress {
    /// The addresses to try, in their order.
    pub(crate) fn candidates(self) -> impl Iterator<Item = SocketAddr> {
        (self.first_port..=self.last_port).map(move |port| SocketAddr::new(self.ip, port))
    }
}

impl From<SocketAddr> for ListenAddress {
    fn from(address: SocketAddr) -> Self {
        Self {
            ip: address.ip(),
            first_port: address.port(),
            last_port: address.port(),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = SocketAddr::new(self.ip, self.first_port);
        if self.first_port == self.last_port {
            return write!(f, "{first}");
        }
        write!(f, "{first}-{}", self.last_port)
    }
}

/// Parses `host:port` or `host:first-last` for listening. A name is resolved; without tokens, or with short ones, only
/// loopback is allowed.
pub(crate) fn listen_address<'a>(
    address: &str,
    tokens: impl Into<Tokens<'a>>,
) -> Result<ListenAddress> {
    let cannot = |reason| Error::Config(format!("cannot listen on {address:?}: {reason}"));
    let (single, last_port) = match port_range(address) {
        Some((host, first, last)) if 0 < first && first <= last => {
            (format!("{host}:{first}"), Some(last))
        }
        Some(_) => {
            let text = "a range of ports is FIRST-LAST, both from 1 to 65535, the first one not above the last";
            return Err(cannot(text.to_owned()));
        }
        None => (address.to_owned(), None),
    };
    let mut candidates = single
        .to_socket_addrs()
        .map_err(|error| cannot(format!("{error}; expected HOST:PORT")))?;
    let resolved = candidates
        .next()
        .ok_or_else(|| cannot("the name has no address".to_owned()))?;
    let min_bytes = tokens.into().min_bytes();
    if !resolved.ip().is_loopback() {
        let what = format_args!("listening on {address}").to_string();
        if min_bytes == 0 {
            return Err(Error::Config(format!(
                "{what} needs a token, because others can reach it: set KVPIPE_TOKEN or pass token="
            )));
        }
        if min_bytes < MIN_TOKEN_BYTES {
            return Err(Error::Config(short_token(what)));
        }
    }
    let mut listen = ListenAddress::from(resolved);
    listen.last_port = last_port.unwrap_or(listen.first_port);
    Ok(listen)
}

/// Text of the error for a token that is short or missing.
pub(crate) fn short_token(what: impl fmt::Display) -> String {
    format!(
        "{what} needs a token of {MIN_TOKEN_BYTES} bytes or more, because a shorter one can be guessed from a recorded handshake: set KVPIPE_TOKEN to the output of `openssl rand -hex 16`, on all sides"
    )
}

/// Host, first and last port of `host:first-last`; ports that are no numbers count as 0.
fn port_range(address: &str) -> Option<(&str, u16, u16)> {
    let (host, ports) = address.rsplit_once(':')?;
    let (first, last) = ports.split_once('-')?;
    let port = |text: &str| text.trim().parse().unwrap_or(0);
    Some((host, port(first), port(last)))
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
        assert!(listen_address("0.0.0.0:0", b"sixteen bytes...").is_ok());
        let refused = listen_address("0.0.0.0:0", b"").unwrap_err();
        assert!(refused.to_string().contains("KVPIPE_TOKEN"), "{refused}");
    }

    #[test]
    fn every_token_of_a_listener_that_others_reach_has_sixteen_bytes() {
        let (long, short) = (&b"sixteen bytes..."[..], &b"fifteen bytes.."[..]);
        let listen = |address, current, next| listen_address(address, Tokens { current, next });
        assert!(listen("0.0.0.0:0", long, Some(long)).is_ok());
        assert!(listen("127.0.0.1:0", short, Some(short)).is_ok());
        for (current, next) in [(short, None), (long, Some(short)), (short, Some(long))] {
            let refused = listen("0.0.0.0:0", current, next).unwrap_err().to_string();
            assert!(refused.contains("openssl rand -hex 16"), "{refused}");
        }
    }

    #[test]
    fn a_range_of_ports_is_tried_in_its_order() {
        let listen = listen_address("[::1]:7200-7202", b"").unwrap();
        let ports: Vec<u16> = listen.candidates().map(|address| address.port()).collect();
        assert_eq!(ports, [7200, 7201, 7202]);
        assert_eq!(listen.to_string(), "[::1]:7200-7202");
        let one = listen_address("127.0.0.1:7200", b"").unwrap();
        assert_eq!(one.candidates().count(), 1);
        assert_eq!(one.to_string(), "127.0.0.1:7200");
        let last = listen_address("127.0.0.1:65534-65535", b"").unwrap();
        assert_eq!(last.candidates().count(), 2);
    }

    #[test]
    fn a_range_that_names_no_ports_is_refused() {
        for ports in ["0-5", "7201-7200", "7200-", "-7200", "a-b", "7200-65536"] {
            let error = listen_address(&format!("127.0.0.1:{ports}"), b"").unwrap_err();
            assert!(error.to_string().contains("FIRST-LAST"), "{error}");
        }
    }

    #[test]
    fn an_address_without_host_or_port_is_refused() {
        assert_eq!(check_address("host:1"), Ok(()));
        for address in ["host", ":1", "host:", "host:port", "host:65536"] {
            assert!(matches!(check_address(address), Err(Error::Config(_))));
        }
    }
}
