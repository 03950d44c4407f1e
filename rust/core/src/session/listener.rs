//! Accepting connections.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::reactor::{FIRST_TOKEN, Token};

pub(super) const LISTENER: Token = FIRST_TOKEN;
/// Connections that may wait to be accepted, as far as the system allows. A peer that finds no place tries again after a
/// second, then after two more.
const BACKLOG: i32 = 4096;
/// Pause after the system has refused to accept, as it does without file descriptors.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// Binds a socket that peers can connect to.
///
/// # Errors
/// `Config`: the address cannot be had.
pub(super) fn bind(address: SocketAddr) -> Result<TcpListener> {
    let cannot = |error| Error::Config(format!("cannot listen on {address}: {error}"));
    let socket = TcpListener::bind(address).map_err(cannot)?;
    socket.set_nonblocking(true).map_err(cannot)?;
    rustix::net::listen(&socket, BACKLOG).map_err(|error| cannot(error.into()))?;
    Ok(socket)
}

/// Accepts a connection, if one waits.
///
/// # Errors
/// The system refuses; it may do so for a while.
pub(super) fn accept(listener: &TcpListener) -> std::io::Result<Option<(TcpStream, SocketAddr)>> {
    loop {
        match listener.accept() {
            Ok(accepted) => return Ok(Some(accepted)),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock => return Ok(None),
                ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                _ => return Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_hundred_peers_may_come_while_the_reactor_is_busy_and_none_has_to_come_again() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        // The kernel tries again after a second.
        let at_once = Duration::from_millis(900);
        let connect = || TcpStream::connect_timeout(&address, at_once);
        let streams: Vec<_> = (0..500).map(|_| connect().unwrap()).collect();
        drop(streams);
    }
}
