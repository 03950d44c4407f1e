//! Connecting to a peer. Resolving its name blocks, so that each attempt has a thread of its own, which ends with the
//! node (but for a resolver that does not answer; it ends when that does).

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::work::timespec;

/// Tries the addresses of `name` in turn, until one accepts, `timeout` has passed, or `stop` is readable.
pub(super) fn open(name: &str, timeout: Duration, stop: &OwnedFd) -> Result<TcpStream, String> {
    let deadline = Instant::now() + timeout;
    let candidates = name.to_socket_addrs().map_err(|error| error.to_string())?;
    let mut last = "the name has no address".to_owned();
    for candidate in candidates {
        match try_one(candidate, deadline, stop) {
            Ok(stream) => return Ok(stream),
            Err(Errno::TIMEDOUT) => return Err(format!("no answer within {timeout:?}")),
            Err(error) => last = error.to_string(),
        }
    }
    Err(last)
}

fn try_one(address: SocketAddr, deadline: Instant, stop: &OwnedFd) -> Result<TcpStream, Errno> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => return Ok(socket.into()),
        Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error),
    }
    loop {
        let left = timespec(deadline.saturating_duration_since(Instant::now()));
        let mut polled = [
            PollFd::new(&socket, PollFlags::OUT),
            PollFd::new(stop, PollFlags::IN),
        ];
        match rustix::event::poll(&mut polled, Some(&left)) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) if !polled[1].revents().is_empty() => return Err(Errno::CANCELED),
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    sockopt::socket_error(&socket)??;
    Ok(socket.into())
}
