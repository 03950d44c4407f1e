//! The listener of a reactor.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use crate::error::{Error, Result};
use crate::reactor::{FIRST_TOKEN, Poller, Token};

pub(super) const LISTENER: Token = FIRST_TOKEN;
/// Connections that may wait to be accepted, as far as the system allows. A peer that finds no place tries again after a
/// second, then after two more.
const BACKLOG: i32 = 4096;
/// Pause after the system has refused to accept, as it does without file descriptors.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Listener {
    socket: TcpListener,
    poller: Arc<Poller>,
    resume_at: Option<Instant>,
}

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

impl Listener {
    pub(super) fn new(socket: TcpListener, poller: Arc<Poller>) -> Result<Self> {
        poller.add(&socket, LISTENER, EventFlags::IN)?;
        Ok(Self {
            socket,
            poller,
            resume_at: None,
        })
    }

    /// Accepts a connection, if one waits.
    ///
    /// # Errors
    /// The system refuses: no more is accepted for a while. The listener would be reported as readable again and again.
    pub(super) fn accept(
        &mut self,
        now: Instant,
    ) -> std::io::Result<Option<(TcpStream, SocketAddr)>> {
        loop {
            match self.socket.accept() {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Ok(None),
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    _ => {
                        self.resume_at = Some(now + PAUSE);
                        self.watch(EventFlags::empty());
                        return Err(error);
                    }
                },
            }
        }
    }

    /// Ends a pause that has lasted long enough; when to call again.
    pub(super) fn resume(&mut self, now: Instant) -> Option<Instant> {
        if self.resume_at.take_if(|at| *at <= now).is_some() {
            self.watch(EventFlags::IN);
        }
        self.resume_at
    }

    fn watch(&self, events: EventFlags) {
        self.poller.modify(&self.socket, LISTENER, events);
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
